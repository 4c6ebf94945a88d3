"""`pagekeeper pool status|check|remove`: looks at a pool directory without any process of the service.

It reads the files only; `remove` takes the manager's lock first, so that none can start meanwhile. What the
blocks hold (`kv.bin`) has no checksum: a record says what was written there by a process that went on.
"""

import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvmanager import pool_directory
from kvmanager.errors import PagekeeperError
from kvmanager.liveness import HeldLock, held_locks
from kvmanager.paths import FOLDERS, default_pool_directory, leftovers, lock_path, named
from kvmanager.pool.block_pool import SEALED, BlockPool, BlockRecord
from kvmanager.pool.hashing import TOKEN_BYTES
from kvmanager.protocol import Layout
from kvmanager.restore import is_content
from kvmanager.settings import load, setting

ACTIONS = ("status", "check", "remove")
USAGE = """usage: pagekeeper pool ACTION [--pool-directory=PATH]

actions:
  status  the layout, blocks by state, bytes, and which processes hold locks
  check   whether sizes, checksums and hashes are right; exit status 1 if not
  remove  delete the pool, unless a process uses it
"""
STATES = ("free", "reserved", "sealed")


@dataclass(frozen=True)
class PoolConfig:
    """Look at a pool directory offline."""

    pool_directory: str = setting(default_pool_directory(), "where the pool, its locks and its sockets lie")


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """0 if all is well; 1 with what is wrong; 2 for wrong usage."""
    action, *rest = argv or [""]
    if action in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if action not in ACTIONS:
        print(f"pagekeeper pool: an action is wanted, one of {', '.join(ACTIONS)}", file=sys.stderr)
        return 2
    config = load(PoolConfig, f"pagekeeper pool {action}", rest, environ)
    try:
        return {"status": status, "check": check, "remove": remove}[action](config.pool_directory)
    except (PagekeeperError, OSError) as error:
        print(f"pagekeeper pool {action}: {error}", file=sys.stderr)
        return 1


def status(directory: str) -> int:
    """Print what is there."""
    root = opened(directory)
    print(f"pool directory {root}")
    print(f"  in use by    {', '.join(users(root)) or 'nobody'}")
    if (found := pool_directory.read_layout(directory)) is None:
        print("  no pool: layout.json is missing, damaged or of another format")
        return 1
    layout, num_blocks = found
    for name in layout.__struct_fields__:
        print(f"  {name:12} {getattr(layout, name)}")
    print(
        f"  blocks       {num_blocks} of {layout.block_bytes} bytes, {num_blocks * layout.block_bytes} in all"
    )
    if faults := wrong_sizes(directory, layout, num_blocks):
        print(f"  {faults}")
        return 1
    records = read_records(directory, layout)
    counts = Counter("damaged" if record is None else STATES[record.state] for record in records)
    tokens = sum(len(record.tokens) // TOKEN_BYTES for record in records if record and record.state == SEALED)
    print("  by state     " + ", ".join(f"{counts[name]} {name}" for name in (*STATES, "damaged")))
    print(f"  cached       {tokens} tokens")
    return 0


def check(directory: str) -> int:
    """Print every fault; the service would take each for a miss, so that none makes a text wrong."""
    if found_users := users(opened(directory)):
        print(f"in use by {', '.join(found_users)}: a record that is being written now may look wrong")
    if (found := pool_directory.read_layout(directory)) is None:
        print("layout.json is missing, damaged or of another format: the next start makes a new pool")
        return 1
    layout, num_blocks = found
    if faults := wrong_sizes(directory, layout, num_blocks):
        print(f"{faults}: the next start makes a new pool")
        return 1
    records, pool = read_records(directory, layout), BlockPool(1, layout)
    wrong = 0
    for block, record in enumerate(records):
        if fault := find_fault(pool, record):
            wrong += 1
            print(f"block {block}: {fault}")
    sealed = [record for record in records if record is not None and record.state == SEALED]
    known = {pool.root, *(record.block_hash for record in sealed)}
    alone = sum(record.parent_hash not in known for record in sealed)
    print(f"{num_blocks} records, {wrong} wrong; {alone} blocks hang on one that was evicted")
    return 1 if wrong else 0


def find_fault(pool: BlockPool, record: BlockRecord | None) -> str:
    """What is wrong with a block's record, or an empty string."""
    if record is None:
        return "its record's checksum is wrong: it counts as empty"
    if record.state == SEALED and not is_content(pool, record):
        return "its hash is not that of its tokens: it counts as empty"
    return ""


def remove(directory: str) -> int:
    """Delete the pool and what processes have left beside it, and nothing else; raises PagekeeperError while
    one uses it.
    """
    root = opened(directory)
    (root / "locks").mkdir(mode=0o700, exist_ok=True)
    lock = HeldLock(lock_path(directory, "manager"))  # a manager that lives refuses this, and none starts now
    try:
        if found := users(root, but="manager"):
            raise PagekeeperError("internal", f"{directory} is in use by {', '.join(found)}; stop them first")
        existed = pool_directory.remove(directory)
        for path in leftovers(root):
            if path != lock.path:
                path.unlink()
    finally:
        lock.release()
    for folder in (*(root / name for name in FOLDERS), root):
        if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
            folder.rmdir()
    print(f"removed the pool in {directory}" if existed else f"there was no pool in {directory}")
    return 0


def opened(directory: str) -> Path:
    """The directory. Raises PagekeeperError if it is none, or not ours."""
    root = named(directory)
    if not root.is_dir():
        raise PagekeeperError("internal", f"there is no directory {directory}; name it with --pool-directory")
    if (owner := root.stat().st_uid) != os.geteuid():
        text = f"{directory} belongs to user {owner}, not to {os.geteuid()}: run as its owner"
        raise PagekeeperError("internal", text)
    return root


def users(root: Path, but: str = "") -> tuple[str, ...]:
    """Names of the locks that processes hold; `but` is our own."""
    return held_locks(root / "locks", but=but) if (root / "locks").is_dir() else ()


def wrong_sizes(directory: str, layout: Layout, num_blocks: int) -> str:
    return pool_directory.why_unusable(directory, num_blocks * layout.block_bytes)


def read_records(directory: str, layout: Layout) -> list[BlockRecord | None]:
    records = pool_directory.open_records(directory, layout)
    try:
        return records.read_all()
    finally:
        records.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
