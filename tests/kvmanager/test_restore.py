"""Records and warm starts: what is trusted, what is kept out of use, what is evicted first afterwards."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmanager import records
from kvmanager.core import Core
from kvmanager.pool.block_pool import CACHED, FREE, QUARANTINED, RESERVED, SEALED, BlockPool, BlockRecord
from kvmanager.pool.hashing import NO_SALT
from kvmanager.pool.invariants import audit
from kvmanager.protocol import PROTOCOL_VERSION, Progress, RunnerHello, StepReport
from kvmanager.restore import restore_pool
from kvmanager.scheduling.clients import owner_tag
from kvmanager.state import Policy
from tests.kvmanager.fake_clients import BLOCK_SIZE, LAYOUT, submission
from tests.kvmanager.scene import Scene

FREE_RECORD = BlockRecord(FREE, 0, bytes(8), b"", b"", NO_SALT, b"", 0.0)


@given(
    st.sampled_from([FREE, RESERVED, SEALED]),
    st.integers(0, 2**64 - 1),
    st.binary(min_size=32, max_size=32).filter(any),
    st.booleans(),
    st.floats(allow_nan=False),
)
def test_records_survive_packing(
    state: int, generation: int, digest: bytes, full: bool, sealed_at: float
) -> None:
    record = BlockRecord(
        state,
        generation,
        digest[:8],
        digest if full else b"",
        digest[::-1] if full else b"",
        digest if full else b"",
        digest[: BLOCK_SIZE * 4] if full else b"",
        sealed_at,
    )
    packed = records.pack(record, BLOCK_SIZE)
    assert len(packed) == records.record_bytes(BLOCK_SIZE)
    assert records.unpack(packed, BLOCK_SIZE) == record


def test_any_flipped_bit_is_noticed() -> None:
    packed = records.pack(FREE_RECORD, BLOCK_SIZE)
    for bit in range(len(packed) * 8):
        damaged = bytearray(packed)
        damaged[bit // 8] ^= 1 << bit % 8
        assert records.unpack(bytes(damaged), BLOCK_SIZE) is None


@pytest.mark.parametrize("change", [{"state": QUARANTINED}, {"tokens": bytes(4 * BLOCK_SIZE + 4)}])
def test_records_that_cannot_be_are_damaged(change: dict[str, object]) -> None:
    packed = records.pack(FREE_RECORD._replace(**change), BLOCK_SIZE)  # type: ignore[arg-type]
    assert records.unpack(packed, BLOCK_SIZE) is None


def test_record_file_reads_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "blocks.meta"
    records.write_empty(path, 5000, BLOCK_SIZE)
    assert path.stat().st_mode & 0o777 == 0o600
    file = records.RecordFile(path, BLOCK_SIZE)
    reserved = FREE_RECORD._replace(state=RESERVED, generation=7)
    file.write(4999, reserved)
    file.close()
    again = records.RecordFile(path, BLOCK_SIZE).read_all()
    assert (len(again), again[0], again[4999]) == (5000, FREE_RECORD, reserved)


def worked() -> list[BlockRecord | None]:
    """Records of a pool in which runner "r" works on one request and has finished another."""
    scene = Scene(8)
    runner, frontend = scene.runner(), scene.frontend()
    scene.run(frontend, runner, submission("a", [1] * 9, salt="s"))
    start, _ = scene.submit(frontend, runner, submission("b", [2] * 6))
    scene.now = 1.0
    scene.send(runner, StepReport(progress=(Progress(start.start_id, 0, (), 6),), credits_wanted=1))
    return [scene.pool.record(block) for block in range(8)]


def start(found: list[BlockRecord | None], survivors: tuple[str, ...]) -> Core:
    core = Core("again", "/pool", Policy(), 0.0)
    core.attach(*restore_pool(LAYOUT, found, survivors), survivors)
    assert audit(core.state) == []
    return core


def pool_of(core: Core) -> BlockPool:
    assert core.state.pool is not None
    return core.state.pool


def test_a_cold_start_with_everyone_dead_keeps_what_is_sealed() -> None:
    core = start(worked(), ())
    pool = pool_of(core)
    assert (pool.counts[CACHED], pool.counts[FREE], pool.may_evict) == (4, 4, True)
    assert pool.available == 8


def test_blocks_of_a_live_writer_are_quarantined_until_it_uses_a_session() -> None:
    core = start(worked(), ("r", "f"))
    pool = pool_of(core)
    assert (pool.counts[CACHED], pool.counts[QUARANTINED], pool.may_evict) == (4, 2, False)
    assert pool.available == 2
    core.process_died(0.0, "f")
    assert pool.counts[QUARANTINED] == 2
    core.hello(0.0, RunnerHello(PROTOCOL_VERSION, "r", "r", LAYOUT, 8, 100))
    core.handle(0.0, 1, None)
    assert (pool.counts[QUARANTINED], pool.may_evict, audit(core.state)) == (0, True, [])


def test_a_live_writers_death_frees_its_blocks() -> None:
    core = start(worked(), ("r",))
    core.process_died(0.0, "r")
    assert (pool_of(core).counts[QUARANTINED], pool_of(core).available) == (0, 8)


def test_blocks_of_a_dead_writer_are_free_though_others_live() -> None:
    core = start(worked(), ("f",))
    assert (pool_of(core).counts[QUARANTINED], pool_of(core).counts[FREE]) == (0, 4)


def test_damaged_records_wait_for_every_survivor() -> None:
    found = worked()
    sealed = [block for block, record in enumerate(found) if record is not None and record.state == SEALED]
    found[sealed[0]] = None
    wrong = found[sealed[1]]
    assert wrong is not None
    found[sealed[1]] = wrong._replace(tokens=bytes(16))
    core = start(found, ("f", "g"))
    pool = pool_of(core)
    assert (pool.counts[CACHED], pool.counts[QUARANTINED]) == (2, 2)
    core.process_died(0.0, "f")
    assert pool.counts[QUARANTINED] == 2
    core.process_died(0.0, "g")
    assert (pool.counts[QUARANTINED], pool.counts[FREE]) == (0, 6)
    assert audit(core.state) == []


def test_damaged_records_are_free_and_rewritten_when_nobody_lives() -> None:
    found = worked()
    found[7] = None
    core = start(found, ())
    assert pool_of(core).state[7] == FREE
    reserved = {block for block, record in enumerate(found) if record and record.state == RESERVED}
    assert core.tick(0.0).records == {7} | reserved
    newest = max(record.generation for record in found if record is not None)
    assert pool_of(core).generation[7] == newest + 1


def test_generations_go_on() -> None:
    found = worked()
    core = start(found, ())
    assert pool_of(core).generation == [record.generation for record in found if record is not None]


def test_tails_are_evicted_before_heads_and_old_chains_before_new_ones() -> None:
    scene = Scene(12)
    runner, frontend = scene.runner(), scene.frontend()
    scene.now = 1.0
    old = scene.run(frontend, runner, submission("a", [1] * 9))
    scene.now = 2.0
    new = scene.run(frontend, runner, submission("b", [2] * 9))
    scene.now = 3.0
    more = scene.run(frontend, runner, submission("c", [1] * 9 + [3] * 4))
    found = [scene.pool.record(block) for block in range(12)]
    pool, _ = restore_pool(LAYOUT, found, ())
    tables = [[block for block, _ in sequence.block_table] for sequence in (old, new, more)]
    assert tables[2][:2] == tables[0][:2]
    assert list(pool.cached) == [tables[0][2], *tables[1][::-1], *tables[2][::-1]]


def test_two_copies_survive_and_one_is_found() -> None:
    scene = Scene()
    runner, frontend = scene.runner(), scene.frontend()
    first, _ = scene.submit(frontend, runner, submission("a", [1] * 5))
    second, _ = scene.submit(frontend, runner, submission("b", [1] * 5, read_cache=False))
    scene.end(runner, first, 5)
    scene.end(runner, second, 5)
    core = start([scene.pool.record(block) for block in range(16)], ())
    assert (pool_of(core).counts[CACHED], len(pool_of(core).index)) == (4, 2)


def test_owner_tags_tell_processes_apart() -> None:
    assert owner_tag("r") != owner_tag("f")
    assert len(owner_tag("r")) == 8
