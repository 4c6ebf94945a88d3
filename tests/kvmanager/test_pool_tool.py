"""`pagekeeper pool`, and what damage does to a pool: a clear word, and a miss at the next start."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvmanager import pool_directory, pool_tool
from kvmanager.paths import lock_path, prepare
from kvmanager.pool.block_pool import CACHED
from kvmanager.records import record_bytes
from kvmanager.restore import restore_pool
from tests.kvmanager.fake_clients import BLOCK_SIZE, LAYOUT, submission
from tests.kvmanager.scene import Scene
from tests.kvmanager.test_client import hold

NUM_BLOCKS = 16
POOL_BYTES = NUM_BLOCKS * LAYOUT.block_bytes


@pytest.fixture
def directory() -> Iterator[str]:
    """A pool directory with a pool in which a request of 14 tokens has ended: 3 full blocks and one more."""
    with tempfile.TemporaryDirectory(prefix="pk-") as folder:
        directory = f"{folder}/pool"
        prepare(directory)
        pool_directory.create(directory, LAYOUT, POOL_BYTES)
        scene = Scene(NUM_BLOCKS)
        scene.run(scene.frontend(), scene.runner(), submission("a", list(range(14))))
        records = pool_directory.open_records(directory, LAYOUT)
        for block in range(NUM_BLOCKS):
            records.write(block, scene.pool.record(block))
        records.close()
        yield directory


def run(capsys: pytest.CaptureFixture[str], directory: str, action: str) -> tuple[int, str]:
    """Exit status and all that was printed."""
    code = pool_tool.main([action, f"--pool-directory={directory}"], {})
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def test_status_says_what_is_there(directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run(capsys, directory, "status")
    assert code == 0
    for part in (
        "in use by    nobody",
        "float32",
        "16 of",
        "12 free, 0 reserved, 4 sealed, 0 damaged",
        "14 tokens",
    ):
        assert part in text


def test_a_good_pool_passes_the_check(directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, directory, "check") == (
        0,
        "16 records, 0 wrong; 0 blocks hang on one that was evicted\n",
    )


def test_no_pool_and_no_directory(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, text = run(capsys, str(tmp_path), "status")
    assert (code, "layout.json is missing" in text) == (1, True)
    code, text = run(capsys, f"{tmp_path}/none", "check")
    assert code == 1
    assert "there is no directory" in text
    code, text = run(capsys, "", "remove")
    assert (code, "pool_directory is empty" in text) == (1, True)
    assert pool_tool.main(["--help"], {}) == 0
    assert pool_tool.main(["empty"], {}) == pool_tool.main([], {}) == 2


def test_remove_refuses_while_a_process_uses_it(directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("runner-1", "manager"):
        process = hold(lock_path(directory, name))
        assert name in run(capsys, directory, "status")[1]
        assert f"in use by {name}: a record" in run(capsys, directory, "check")[1]
        code, text = run(capsys, directory, "remove")
        assert code == 1
        assert name in text
        assert (Path(directory) / "kv.bin").exists()
        process.communicate()
    (Path(directory) / "sockets" / "manager.sock").touch()
    assert run(capsys, directory, "remove") == (0, f"removed the pool in {directory}\n")
    assert not Path(directory).exists()


def test_remove_leaves_what_it_does_not_know(directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    (Path(directory) / "thesis.txt").touch()
    assert run(capsys, directory, "remove")[0] == 0
    assert [path.name for path in Path(directory).iterdir()] == ["thesis.txt"]


def test_remove_spares_what_others_have_put_into_folders_of_the_same_names(
    directory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = [
        "metrics/results.csv",
        "metrics/old/a.counters",
        "streams/essay.txt",
        "locks/keys",
        "locks/old/x",
    ]
    root = Path(directory)
    for name in theirs:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("theirs")
    for name in ("metrics/frontend-0.counters", f"streams/cmpl-{0:032x}.lock", "locks/runner-1"):
        (root / name).touch()
    assert run(capsys, directory, "status")[0] == 0
    assert run(capsys, directory, "remove")[0] == 0
    left = [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]
    assert sorted(left) == sorted(theirs)


def test_remove_does_not_follow_links(directory: str, capsys: pytest.CaptureFixture[str]) -> None:
    root = Path(directory)
    behind = root.parent / "behind"
    behind.mkdir()
    (behind / f"cmpl-{0:032x}").write_text("theirs")
    (root / "streams").symlink_to(behind)
    (root / "metrics").mkdir()
    (root / "metrics" / "a.counters").symlink_to(behind)
    assert run(capsys, directory, "remove")[0] == 0
    assert [path.name for path in behind.iterdir()] == [f"cmpl-{0:032x}"]
    assert (root / "streams").is_symlink()


def cached_after(directory: str) -> int:
    """Blocks that the next start would serve; -1 if it would make a new pool."""
    if pool_directory.why_unusable(directory, POOL_BYTES):
        return -1
    records = pool_directory.open_records(directory, LAYOUT).read_all()
    return restore_pool(LAYOUT, records, ())[0].counts[CACHED]


def test_any_flipped_bit_of_the_records_is_found_and_is_a_miss(
    directory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(directory) / "blocks.meta"
    whole, size = path.read_bytes(), record_bytes(BLOCK_SIZE)
    sealed = next(at for at in range(0, len(whole), size) if whole[at + 4] == 2)
    for byte in range(sealed, sealed + size):
        path.write_bytes(whole[:byte] + bytes((whole[byte] ^ 1 << byte % 8,)) + whole[byte + 1 :])
        assert cached_after(directory) == 3, f"byte {byte - sealed} of the record"
    code, text = run(capsys, directory, "check")
    assert code == 1
    assert f"block {sealed // size}: its record's checksum is wrong" in text
    assert "16 records, 1 wrong" in text


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("blocks.meta", lambda data: data[:-1]),
        ("blocks.meta", lambda data: data + b"\0"),
        ("blocks.meta", lambda data: b""),
        ("kv.bin", lambda data: data[: len(data) // 2]),
        ("kv.bin", lambda data: data + bytes(4096)),
        ("layout.json", lambda data: data.replace(b"float32", b"float16")),
        ("layout.json", lambda data: data[:-2]),
        ("layout.json", lambda data: b"\0" * len(data)),
    ],
)
def test_files_of_another_size_or_sense_are_no_pool(
    directory: str, capsys: pytest.CaptureFixture[str], name: str, damage: object
) -> None:
    path = Path(directory) / name
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    code, text = run(capsys, directory, "check")
    assert (code, "the next start makes a new pool" in text) == (1, True)
    assert run(capsys, directory, "status")[0] == 1
    assert cached_after(directory) == -1


def test_a_record_whose_hash_is_of_other_tokens_is_found(
    directory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    records = pool_directory.open_records(directory, LAYOUT)
    block, record = next((b, r) for b, r in enumerate(records.read_all()) if r is not None and r.tokens)
    records.write(block, record._replace(tokens=bytes(len(record.tokens))))
    code, text = run(capsys, directory, "check")
    assert code == 1
    assert f"block {block}: its hash is not that of its tokens" in text
    assert cached_after(directory) == 3
