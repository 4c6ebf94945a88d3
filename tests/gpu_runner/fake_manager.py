"""The manager as the scheduler sees it, naive: every block's holders in a set, every table in a list.

It applies reports as the protocol says, and fails on any that breaks a rule.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from kvmanager.protocol import (
    BlockRef,
    Copied,
    Directives,
    Ended,
    Forked,
    Progress,
    SamplingParams,
    SearchState,
    SequenceStart,
    Start,
    StepReport,
    Taken,
)

Key = tuple[int, int]
CREDIT: Key = (-1, -1)


@dataclass
class Job:
    """A request: what it asked for and what is known of it."""

    number: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    num_choices: int
    open: dict[int, list[int]] = field(default_factory=dict)  # unfinished choices → output known
    start_id: int | None = None  # while it runs
    search: SearchState | None = None  # where its beams go on
    told: list[SearchState] = field(default_factory=list)  # where its search stood when it was preempted

    def __post_init__(self) -> None:
        self.go_on(None)

    def go_on(self, search: SearchState | None) -> None:
        """A beam search begins, or goes on from there."""
        self.search = search
        outputs: list[tuple[int, ...]] = [()] * self.num_choices
        if search is not None:
            outputs = [beam.token_ids for beam in search.beams]
        self.open = {choice: list(output) for choice, output in enumerate(outputs)}


@dataclass
class FakeManager:
    """Blocks, jobs and credits. `blocks` is the engine's KV: what is freed is taken out of it."""

    num_blocks: int
    block_size: int
    blocks: dict[int, list[int | None]]
    free: list[int] = field(default_factory=list)
    generations: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    holders: dict[int, set[Key]] = field(default_factory=lambda: defaultdict(set))
    sealed: dict[int, tuple[int, ...]] = field(default_factory=dict)  # block → all tokens up to its end
    tables: dict[Key, list[BlockRef]] = field(default_factory=dict)
    tokens: dict[Key, list[int]] = field(default_factory=dict)
    jobs: dict[int, Job] = field(default_factory=dict)  # by start id
    credits_wanted: int = 0
    credits_held: set[BlockRef] = field(default_factory=set)
    last_start_id: int = 0

    def __post_init__(self) -> None:
        self.free = list(range(self.num_blocks))

    # --- decisions ------------------------------------------------------------------------------------------

    def start(self, job: Job, use_cache: bool) -> Start | None:
        """A start for the open choices, or None without the blocks for it."""
        fresh = tuple(choice for choice, output in job.open.items() if not output)
        groups = [(choice,) for choice, output in job.open.items() if output] + ([fresh] if fresh else [])
        given = [[*job.prompt, *job.open[group[0]]] for group in groups]
        hits = [self._hits(tokens) if use_cache else [] for tokens in given]
        wanted = sum(
            self._num_blocks(len(tokens)) - len(hit) for tokens, hit in zip(given, hits, strict=True)
        )
        if wanted > len(self.free):
            return None
        self.last_start_id += 1
        job.start_id = self.last_start_id
        self.jobs[job.start_id] = job
        sequences = tuple(
            self._sequence(job.start_id, group, tokens, hit, tuple(job.open[group[0]]))
            for group, tokens, hit in zip(groups, given, hits, strict=True)
        )
        return Start(
            job.start_id,
            f"job-{job.number}",
            0,
            f"ipc://{job.number % 2}",
            job.prompt,
            job.sampling,
            sequences,
            job.search,
        )

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _hits(self, tokens: list[int]) -> list[int]:
        """Sealed blocks of a prefix, which leaves at least the last token."""
        found = {prefix: block_id for block_id, prefix in self.sealed.items()}
        hits = []
        for end in range(self.block_size, len(tokens), self.block_size):
            if tuple(tokens[:end]) not in found:
                break
            hits.append(found[tuple(tokens[:end])])
        return hits

    def _sequence(
        self,
        start_id: int,
        group: tuple[int, ...],
        tokens: list[int],
        hits: list[int],
        output: tuple[int, ...],
    ) -> SequenceStart:
        key = (start_id, group[0])
        own = [self._allocate(key) for _ in range(self._num_blocks(len(tokens)) - len(hits))]
        for block_id in hits:
            self.holders[block_id].add(key)
        self.tables[key] = [(block_id, self.generations[block_id]) for block_id in hits] + own
        self.tokens[key] = list(tokens)
        num_cached = len(hits) * self.block_size
        return SequenceStart(group[0], output, tuple(self.tables[key]), num_cached, group[1:])

    def _allocate(self, key: Key) -> BlockRef:
        block_id = self.free.pop(0)
        self.generations[block_id] += 1
        self.holders[block_id] = {key}
        return block_id, self.generations[block_id]

    def grant(self, at_most: int) -> tuple[BlockRef, ...]:
        """Credits up to what is wanted, what is free, and `at_most`."""
        count = min(self.credits_wanted - len(self.credits_held), len(self.free), at_most)
        credits = tuple(self._allocate(CREDIT) for _ in range(count))
        self.credits_held.update(credits)
        return credits

    def directives(self, at_most: int) -> Directives:
        return Directives(credits=self.grant(at_most))

    # --- reports --------------------------------------------------------------------------------------------

    def apply(self, report: StepReport) -> None:
        for progress in report.progress:
            self._progress(progress)
        for forked in report.forked:
            self._forked(forked)
        for ended in report.ended:
            self._ended(ended)
        for copied in report.copied:
            self._copied(copied)
        for taken in report.taken:
            self._taken(taken)
        for block in report.returned:
            self._use_credit(block)
            self._release(block[0], CREDIT)
        self.credits_wanted = report.credits_wanted

    def _progress(self, progress: Progress) -> None:
        key = (progress.start_id, progress.choice)
        self.tokens[key].extend(progress.new_token_ids)
        tokens = self.tokens[key]
        assert progress.num_computed_tokens <= len(tokens)
        num_full = progress.num_computed_tokens // self.block_size
        news = [block_id for block_id, _ in self.tables[key][:num_full] if block_id not in self.sealed]
        assert news, "progress without a block that has become full"
        for index, (block_id, _) in enumerate(self.tables[key][:num_full]):
            end = (index + 1) * self.block_size
            assert self.blocks[block_id] == tokens[end - self.block_size : end]
            self.sealed[block_id] = tuple(tokens[:end])

    def _forked(self, forked: Forked) -> None:
        parent = (forked.start_id, forked.choice)
        for choice in forked.children:
            child = (forked.start_id, choice)
            assert child not in self.tables
            self.tables[child] = list(self.tables[parent])
            self.tokens[child] = list(self.tokens[parent])
            for block_id, _ in self.tables[child]:
                self.holders[block_id].add(child)

    def _ended(self, ended: Ended) -> None:
        key = (ended.start_id, ended.choice)
        tokens = self.tokens.pop(key)
        tokens.extend(ended.new_token_ids)
        assert ended.num_computed_tokens <= len(tokens)
        for block_id, _ in self.tables.pop(key):
            self._release(block_id, key)
        job = self.jobs[ended.start_id]
        if job.sampling.beam is not None:
            self._beam_ended(job, ended)
        elif ended.reason == "preempted":
            job.open[ended.choice] = tokens[len(job.prompt) :]
        else:
            del job.open[ended.choice]
        if not any(start_id == ended.start_id for start_id, _ in self.tables):
            if ended.reason == "cancelled":
                job.open.clear()
            job.start_id = None
            del self.jobs[ended.start_id]

    def _beam_ended(self, job: Job, ended: Ended) -> None:
        """What beams have found is not kept: a search has its end at once, or starts from a state."""
        if ended.search is not None:
            assert ended.reason == "preempted"
            job.told.append(ended.search)
        last = not any(start_id == ended.start_id for start_id, _ in self.tables)
        assert not last or ended.reason != "dropped", "the last beam is dropped"
        if last and ended.reason == "finished":
            job.open.clear()

    def _copied(self, copied: Copied) -> None:
        key = (copied.start_id, copied.choice)
        old = self.tables[key][copied.index][0]
        assert len(self.holders[old]) > 1, "the last owner writes in place"
        assert old not in self.sealed
        self._release(old, key)
        self._use_credit(copied.block)
        self.holders[copied.block[0]] = {key}
        self.tables[key][copied.index] = copied.block

    def _taken(self, taken: Taken) -> None:
        key = (taken.start_id, taken.choice)
        for block in taken.blocks:
            self._use_credit(block)
            self.holders[block[0]] = {key}
            self.tables[key].append(block)

    def _use_credit(self, block: BlockRef) -> None:
        assert block in self.credits_held, f"{block} is not a credit"
        self.credits_held.remove(block)

    def _release(self, block_id: int, key: Key) -> None:
        self.holders[block_id].remove(key)
        if not self.holders[block_id]:
            self.sealed.pop(block_id, None)
            self.blocks.pop(block_id, None)
            self.free.append(block_id)

    # --- checks ---------------------------------------------------------------------------------------------

    def may_write(self, block_id: int, key: Key) -> None:
        assert self.holders[block_id] == {key}, f"{key} writes block {block_id} of {self.holders[block_id]}"
        assert block_id not in self.sealed, f"{key} writes sealed block {block_id}"
