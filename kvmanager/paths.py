"""Where things lie in a pool directory, and how it is made: private to its owner, by whoever comes first."""

import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvmanager.errors import PagekeeperError

MAX_SOCKET_PATH = 107  # bytes; the kernel's limit for the path of a UNIX socket

FOLDERS: Final = {
    "locks": re.compile(".+"),
    "sockets": re.compile(r".+\.sock"),
    "metrics": re.compile(r".+\.counters"),
    "streams": re.compile(r"(chat)?cmpl-[0-9a-f]{32}(\.lock|\.new)?"),
}
"""What processes leave beside the pool: folder → names of the files there. Locks and sockets are empty."""


def default_pool_directory() -> str:
    """`/dev/shm/pagekeeper-<uid>/default`."""
    return f"/dev/shm/pagekeeper-{os.getuid()}/default"


def named(pool_directory: str) -> Path:
    """Its path. Raises PagekeeperError for an empty one, which would be whatever directory one is in."""
    if not pool_directory:
        raise PagekeeperError("internal", "pool_directory is empty; name a directory, or leave it out")
    return Path(pool_directory)


def prepare(pool_directory: str) -> Path:
    """Make the directory, its `locks/` and `sockets/` (mode 0700) where absent; check that they are ours.

    Raises PagekeeperError ("internal") that names the directory and what to do.
    """
    root = named(pool_directory)
    for directory in (root.parent, root, root / "locks", root / "sockets"):
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise PagekeeperError(
                "internal", f"cannot create the pool directory {directory}: {error}"
            ) from error
    ours = [root, root / "locks", root / "sockets"]
    if root.parent.name == Path(default_pool_directory()).parent.name:
        ours.append(root.parent)  # whoever owns it can put another directory in place of ours
    for directory in ours:
        status = directory.stat()
        if status.st_uid != os.geteuid():
            raise PagekeeperError(
                "internal",
                f"pool directory {directory} belongs to user {status.st_uid}, not to {os.geteuid()}; "
                "run as its owner, or choose another with pool_directory",
            )
        if status.st_mode & 0o077:
            raise PagekeeperError(
                "internal",
                f"pool directory {directory} is open to other users (mode {status.st_mode & 0o777:o}); "
                f"run: chmod 700 {directory}",
            )
    return root


def leftovers(root: Path, folders: tuple[str, ...] = tuple(FOLDERS)) -> Iterator[Path]:
    """What processes have left in these folders of a pool directory: files that by name and kind can be
    nothing else. So whoever deletes them spares what lies in a directory that was named by mistake, and what
    is behind a link.
    """
    for folder in (root / name for name in folders):
        if folder.is_symlink() or not folder.is_dir():
            continue
        for path in sorted(folder.iterdir()):
            try:
                status = path.lstat()
            except FileNotFoundError:
                continue
            empty = status.st_size == 0 or folder.name not in ("locks", "sockets")
            if FOLDERS[folder.name].fullmatch(path.name) and empty and not _is_other(status.st_mode):
                yield path


def _is_other(mode: int) -> bool:
    """A folder, a link, a pipe: nothing that a process of ours makes."""
    return not (stat.S_ISREG(mode) or stat.S_ISSOCK(mode))


def lock_path(pool_directory: str, name: str) -> Path:
    """The lock file of process `name`. Raises PagekeeperError ("invalid_request") if that is a path."""
    if not name.isprintable() or not name or "/" in name or name.startswith(".") or len(name) > 128:
        raise PagekeeperError(
            "invalid_request", f"lock name {name!r} is not a plain file name of at most 128 characters"
        )
    return Path(pool_directory) / "locks" / name


def socket_endpoint(pool_directory: str, name: str) -> str:
    """ZeroMQ's name of the socket file `sockets/<name>.sock`. Raises PagekeeperError if it is too long."""
    path = os.path.join(pool_directory, "sockets", f"{name}.sock")
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise PagekeeperError(
            "internal",
            f"the socket path {path} has {len(os.fsencode(path))} bytes of {MAX_SOCKET_PATH}; "
            "choose a shorter pool_directory",
        )
    return f"ipc://{path}"


def check_socket(endpoint: str) -> None:
    """Raises PagekeeperError ("internal") if the file of a socket that this process listens on was removed:
    nobody could connect any more. Endpoints of other kinds have none.
    """
    path = endpoint.removeprefix("ipc://")
    if path != endpoint and not os.path.exists(path):
        raise PagekeeperError(
            "internal",
            f"the socket {path} was removed: nobody can connect to this process any more, so it ends; "
            "start it again",
        )


def events_endpoint(pool_directory: str) -> str:
    """Where events are published if the setting `kv_events_endpoint` does not name another place."""
    return socket_endpoint(pool_directory, "events")


def replay_endpoint(pool_directory: str) -> str:
    """Where missed events are asked for if `kv_events_replay_endpoint` does not name another place."""
    return socket_endpoint(pool_directory, "replay")


def manager_endpoint(pool_directory: str) -> str:
    """The manager's own endpoint where the setting `manager` does not name another one."""
    return socket_endpoint(pool_directory, "manager")
