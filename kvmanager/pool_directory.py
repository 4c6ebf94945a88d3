"""The pool's files: `kv.bin` (block data), `blocks.meta` (records) and `layout.json`, which is written last.

A directory without a good `layout.json` holds no pool, whatever else lies there: so one that was half made
when its maker died is not trusted. Files are replaced, never cut: a process that still maps an old one keeps
it.
"""

import errno
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvmanager import memory
from kvmanager.errors import PagekeeperError
from kvmanager.protocol import Layout
from kvmanager.records import RecordFile, record_bytes, write_empty

FORMAT = 1
ALLOCATED_AT_ONCE = 1 << 30  # bytes


class PoolFile(msgspec.Struct, frozen=True):
    """What `layout.json` says."""

    format: int
    num_blocks: int
    layout: dict[str, str | int]


def read_layout(pool_directory: str) -> tuple[Layout, int] | None:
    """The pool's layout and its number of blocks; None if there is no (readable) pool. Raises PagekeeperError
    if what has its name is no file that we may read.
    """
    path = Path(pool_directory) / "layout.json"
    try:
        data = path.read_bytes()
        pool_file = msgspec.json.decode(data, type=PoolFile)
        layout = Layout(**pool_file.layout)  # type: ignore[arg-type]
        msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=Layout)  # checks the types of the fields
    except (FileNotFoundError, msgspec.DecodeError, TypeError):
        return None
    except OSError as error:
        raise not_ours(path, error) from None
    good = pool_file.format == FORMAT and pool_file.num_blocks > 0 and has_size(layout)
    return (layout, pool_file.num_blocks) if good else None


def not_ours(path: Path, error: OSError) -> PagekeeperError:
    """Something has the name of a file of the pool, and is none."""
    text = f"{path} is no file of a pool ({error.strerror}); move it away, or choose another pool_directory"
    return PagekeeperError("internal", text)


def has_size(layout: Layout) -> bool:
    """Whether a block of this layout has bytes."""
    return min(layout.block_size, layout.num_layers, layout.num_kv_heads, layout.head_dim) > 0


def why_unusable(pool_directory: str, pool_bytes: int) -> str:
    """Why what lies in the directory cannot be used as a pool of this size, or an empty string."""
    root = Path(pool_directory)
    found = read_layout(pool_directory)
    if found is None:
        return "layout.json is missing, damaged or of another format"
    layout, num_blocks = found
    if num_blocks != pool_bytes // layout.block_bytes:
        wanted = pool_bytes // layout.block_bytes
        return f"it has {num_blocks} blocks and pool_bytes={pool_bytes} asks for {wanted}"
    sizes = {
        "kv.bin": num_blocks * layout.block_bytes,
        "blocks.meta": num_blocks * record_bytes(layout.block_size),
    }
    for name, size in sizes.items():
        actual = (root / name).stat().st_size if (root / name).exists() else 0
        if actual != size:
            return f"{name} has {actual} bytes instead of {size}"
    return ""


def open_records(pool_directory: str, layout: Layout) -> RecordFile:
    """The records of a pool for which `why_unusable` had nothing to say."""
    return RecordFile(Path(pool_directory) / "blocks.meta", layout.block_size)


def remove(pool_directory: str) -> bool:
    """Remove the pool's files; True if there were any. Raises PagekeeperError where one is something else."""
    root = Path(pool_directory)
    paths = [root / "layout.json", *root.glob("pinned/*"), root / "blocks.meta", root / "kv.bin"]
    existed = any(path.exists() for path in paths)
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise not_ours(path, error) from None
    return existed


def create(
    pool_directory: str, layout: Layout, pool_bytes: int, progress: Callable[[], None] = lambda: None
) -> int:
    """Make an empty pool, in place of any that is there. Returns its number of blocks. `progress` is called
    now and then: a large pool takes a while.

    Raises PagekeeperError ("invalid_request") with the bytes wanted, those free and the setting to change.
    A pool in memory has to fit the memory that is left, too, as its file system may allow more than that.
    """
    root = Path(pool_directory)
    if not has_size(layout):
        raise PagekeeperError(
            "invalid_request", f"a block of {layout} has no bytes: all sizes must be positive"
        )
    num_blocks = pool_bytes // layout.block_bytes
    if num_blocks < 1:
        raise PagekeeperError(
            "invalid_request",
            f"pool_bytes={pool_bytes} is less than one block of this model ({layout.block_bytes} bytes)",
        )
    remove(pool_directory)
    wanted = num_blocks * (layout.block_bytes + record_bytes(layout.block_size))
    left = memory.available_for(root)
    if left is not None and wanted > left:
        raise PagekeeperError(
            "invalid_request",
            f"cannot make a pool of {wanted} bytes in {root}, which is memory: {max(left, 0)} bytes "
            f"of it are left; lower pool_bytes (now {pool_bytes})",
        )
    try:
        if wanted > _free_bytes(root):  # before any of it is taken: in shared memory that is everybody's
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        allocate(root / "kv.bin", num_blocks * layout.block_bytes, progress)
        write_empty(root / "blocks.meta", num_blocks, layout.block_size)
        data = msgspec.json.encode(PoolFile(FORMAT, num_blocks, msgspec.structs.asdict(layout)))
        write_whole(root / "layout.json", data)
    except OSError as error:
        remove(pool_directory)
        raise PagekeeperError(
            "invalid_request",
            f"cannot make a pool of {wanted} bytes in {root} ({error.strerror}): "
            f"{_free_bytes(root)} bytes are free; lower pool_bytes (now {pool_bytes})",
        ) from error
    return num_blocks


def _free_bytes(root: Path) -> int:
    space = os.statvfs(root)
    return space.f_bavail * space.f_frsize


def allocate(path: Path, size: int, progress: Callable[[], None]) -> None:
    """A new file with all its bytes allocated, so that writing to its mapping cannot fail later."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        for start in range(0, size, ALLOCATED_AT_ONCE):
            os.posix_fallocate(fd, start, min(ALLOCATED_AT_ONCE, size - start))
            progress()
    finally:
        os.close(fd)


def write_whole(path: Path, data: bytes) -> None:
    """The file appears with all its content or not at all."""
    draft = path.with_suffix(".new")
    draft.unlink(missing_ok=True)
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)


def map_blocks(pool_directory: str, layout: Layout, num_blocks: int) -> mmap.mmap:
    """The block data, shared and writable, for a runner after its Welcome.

    Shape: `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]` of `layout.dtype`. Raises
    PagekeeperError ("internal") if the directory holds something else.
    """
    if read_layout(pool_directory) != (layout, num_blocks):
        raise PagekeeperError(
            "internal", f"{pool_directory} does not hold the pool that the manager announced"
        )
    with open(Path(pool_directory) / "kv.bin", "r+b") as file:
        return mmap.mmap(file.fileno(), num_blocks * layout.block_bytes)
