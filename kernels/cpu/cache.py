"""Where compiled CPU kernels are kept between runs.

numba notices a change of a function's own file, but not of the functions it calls. So the directory is named
after a hash of these sources and the compilers' versions: a new kernel is never mixed with an old one.
"""

import hashlib
import os
import tempfile
from pathlib import Path

import llvmlite
import numba


def cache_directory() -> Path:
    """The first of $NUMBA_CACHE_DIR, the user's cache and the temporary directory that is ours to write in.

    Raises OSError where there is none.
    """
    digest = hashlib.sha256(f"numba {numba.__version__} llvmlite {llvmlite.__version__}".encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    cache_home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    places = [
        os.environ.get("NUMBA_CACHE_DIR"),
        Path(cache_home) / "pagekeeper",
        Path(tempfile.gettempdir()) / f"pagekeeper-{os.getuid()}",
    ]
    for place in places:
        if place and is_ours(Path(place)):
            return Path(place) / f"kernels-{digest.hexdigest()[:16]}"
    tried = ", ".join(str(place) for place in places if place)
    raise OSError(
        f"no directory for compiled kernels: none of {tried} is writable by this user and by nobody else; "
        "set NUMBA_CACHE_DIR to one that is"
    )


def is_ours(place: Path) -> bool:
    """Can be written, and by nobody else (compiled code is read back from it)."""
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = place.stat()
    except OSError:
        return False
    return status.st_uid == os.getuid() and not status.st_mode & 0o022 and os.access(place, os.W_OK)
