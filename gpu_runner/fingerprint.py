"""A model's fingerprint: SHA-256 over the bytes of its weights and config, remembered per unchanged file.

Hashing takes seconds for large files, so each file's digest is kept in the user's cache folder under the
file's path, size, inode and times; where that folder cannot be written, the digest is simply computed
again.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path


def cache_directory() -> Path:
    """`$XDG_CACHE_HOME/pagekeeper/digests`, else `~/.cache/…`."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(root) / "pagekeeper" / "digests"


def fingerprint(files: Iterable[Path], cache: Path | None = None) -> str:
    """Hex SHA-256 over the digests of `files`, in their order; names and places do not matter."""
    cache = cache or cache_directory()
    return hashlib.sha256(b"".join(_digest(file.resolve(), cache) for file in files)).hexdigest()


def _digest(file: Path, cache: Path) -> bytes:
    status = file.stat()
    identity = [str(file), status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]
    entry = cache / hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    known = _read(entry)
    if known is not None:
        return known
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").digest()
    _write(entry, digest)
    return digest


def _read(entry: Path) -> bytes | None:
    try:
        content = entry.read_bytes()
    except OSError:
        return None
    return content if len(content) == hashlib.sha256().digest_size else None


def _write(entry: Path, digest: bytes) -> None:
    """Complete or not at all: a reader never sees half a digest."""
    draft = entry.with_name(f"{entry.name}.{os.getpid()}")
    try:
        entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft.write_bytes(digest)
        draft.replace(entry)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
