"""What is counted is what is there; and waste stays within its bound."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvmanager.asking.introspection import statistics
from kvmanager.pool.hashing import TOKEN_BYTES
from kvmanager.pool.invariants import audit
from kvmanager.protocol import BeamParams, SamplingParams
from tests.bench.accounting import NUM_BLOCKS, paging, saving
from tests.bench.accounting_host import BLOCK_SIZE, NOW, VOCABULARY, Host
from tests.bench.accounting_reserve import RESERVES, simulate
from tests.bench.workloads import Ask, log_normal

Slots = set[tuple[int, int]]


def filled_slots(host: Host) -> Slots:
    """(block, offset) of every token that a running sequence has, or is about to compute or copy."""
    slots: Slots = set()
    for running in host.scheduler._running.values():
        sequence = running.sequence
        length = sequence.num_computed_tokens + running.planned
        if running.copy_from is not None and running.key in host.scheduler._uncopied and not running.planned:
            length -= length % BLOCK_SIZE
        for position in range(length):
            slots.add((sequence.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE))
    for active in host.core.state.actives():
        for started in active.sequences.values():
            source = () if started.source is None else (started.source,)
            for block in (*started.table[: started.num_sealed], *source):
                slots |= {(block, offset) for offset in range(len(host.pool.tokens[block]) // TOKEN_BYTES)}
    return slots


class Checked(Host):
    """Compares what the manager says with the naive count, at every step that has told it anything."""

    def __init__(self, num_blocks: int, max_num_seqs: int) -> None:
        super().__init__(num_blocks, max_num_seqs)
        self.told = self.silent = 0

    def _measure(self) -> None:
        super()._measure()
        counted = statistics(self.core.state, 0, NOW)
        held = (counted.pool.reserved + counted.pool.sealed) * BLOCK_SIZE
        want = len(filled_slots(self))
        fresh = self.core.state.runners[0].num_tail_tokens == self.scheduler.num_tail_tokens
        self.told += fresh
        self.silent += not fresh
        assert counted.used_tokens == want if fresh else 0 <= counted.used_tokens < want
        assert want <= held
        assert audit(self.core.state) == []


@settings(max_examples=40, deadline=None)
@given(
    asks=st.lists(
        st.tuples(
            st.integers(0, 2), st.integers(1, 90), st.integers(1, 60), st.sampled_from([1, 1, 2, 3, -2, -3])
        ),
        min_size=1,
        max_size=8,
    )
)
def test_the_managers_count_is_that_of_every_slot(asks: list[tuple[int, int, int, int]]) -> None:
    """With prompts that share their beginnings, forks, beams, partly cached blocks and preemptions."""
    host = Checked(num_blocks=40, max_num_seqs=8)
    for number, (stem, length, output, width) in enumerate(asks):
        prompt = (*range(1000 * stem, 1000 * stem + length), number)
        beam = BeamParams(-width) if width < 0 else None
        host.submit(number, prompt, abs(width), SamplingParams(output, number, ignore_eos=True, beam=beam))
        host.step()
    for _ in range(5000):
        if host.idle:
            break
        host.step()
    assert host.idle
    host.step()  # tells of the last end
    counted = statistics(host.core.state, 0, NOW)
    assert (counted.used_tokens, counted.pool.reserved, counted.pool.sealed) == (0, 0, 0)


def test_steps_that_only_fill_slots_stay_silent() -> None:
    host = Checked(num_blocks=40, max_num_seqs=8)
    host.submit(0, tuple(range(40)), 1, SamplingParams(100, 0, ignore_eos=True))
    while not host.idle:
        host.step()
    assert host.told + host.silent == 100
    assert host.silent > 80


def test_waste_on_the_mix_is_below_4_percent() -> None:
    rows = dict(paging(log_normal(VOCABULARY, 512).asks))
    *reserved, paged = rows.values()
    assert paged.waste < 0.04
    assert [usage.waste > 0.25 for usage in reserved] == [True] * len(RESERVES)
    assert paged.at_once > 1.3 * max(usage.at_once for usage in reserved)
    assert paged.held <= paged.steps * NUM_BLOCKS * BLOCK_SIZE


def test_reserving_is_counted_by_example() -> None:
    """Two fit: 10 and 8 slots of 20. At each step that counts, one has ended and one waits."""
    asks = [Ask((1,) * 4, 7), Ask((1,) * 4, 5), Ask((1,) * 4, 9), Ask((1,) * 4, 9)]
    usage = simulate(asks, 22, RESERVES["the exact final length"])
    assert usage.steps > 0
    one_by_one = simulate(asks, 12, RESERVES["the exact final length"])
    assert one_by_one.at_once == 1
    assert one_by_one.steps == 5 + 9  # the second's and the third's; the first's are before the first end
    assert one_by_one.filled == sum(range(4, 9)) + sum(range(4, 13))
    assert one_by_one.held == 5 * 8 + 9 * 12


def test_sharing_saves_more_with_more_choices_and_beams_more_than_samples() -> None:
    asks = log_normal(VOCABULARY, 48).asks
    sampled = [saving(asks, width, beam=False) for width in (2, 4)]
    beams = [saving(asks, width, beam=True) for width in (2, 4)]
    assert 0 < sampled[0] < sampled[1] < 0.75
    assert [beam > sample for beam, sample in zip(beams, sampled, strict=True)] == [True, True]
