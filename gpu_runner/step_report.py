"""Collects what the manager must be told of a step, in the order in which it applies it."""

from collections.abc import Collection, Iterable, Iterator

from msgspec import structs

from gpu_runner.request import EndReason, RunningSequence
from kvmanager.protocol import BlockRef, Copied, Ended, Forked, Progress, SearchState, StepReport, Taken


class ReportBuilder:
    """What has changed since the last report. Facts of one kind stay in the order in which they happened."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.credits_wanted = 0  # as last told
        self._begin()

    def _begin(self) -> None:
        self._progress: list[Progress] = []
        self._forked: list[Forked] = []
        self._ended: list[Ended] = []
        self._copied: list[Copied] = []
        self._taken: list[Taken] = []
        self._sources_read: list[tuple[int, int]] = []

    def advanced(self, running: RunningSequence) -> None:
        """More of its KV is computed; worth telling once a block is full.

        Only computed tokens are told: a fork's children then inherit exactly what is theirs too.
        """
        num_computed = running.sequence.num_computed_tokens
        num_full_blocks = num_computed // self._block_size
        if num_full_blocks > running.num_told_blocks:
            running.num_told_blocks = num_full_blocks
            new_token_ids = running.untold_tokens(num_computed)
            self._progress.append(Progress(*running.key, new_token_ids, num_computed))

    def forked(self, running: RunningSequence, children: tuple[int, ...]) -> None:
        self._forked.append(Forked(*running.key, children))

    def ended(self, running: RunningSequence, reason: EndReason, search: SearchState | None = None) -> None:
        sequence = running.sequence
        new_token_ids = running.untold_tokens(len(sequence.token_ids))
        self._ended.append(Ended(*running.key, new_token_ids, sequence.num_computed_tokens, reason, search))

    def copied(self, running: RunningSequence, index: int, block: BlockRef) -> None:
        self._copied.append(Copied(*running.key, index, block))

    def source_read(self, running: RunningSequence) -> None:
        """Its first step has copied what the manager said."""
        self._sources_read.append(running.key)

    def taken(self, running: RunningSequence, block: BlockRef) -> None:
        self._taken.append(Taken(*running.key, (block,)))

    def build(
        self, returned: tuple[BlockRef, ...], credits_wanted: int, num_tail_tokens: int
    ) -> StepReport | None:
        """The report, or None if there is nothing to tell; the tail tokens alone are no reason to."""
        report = StepReport(
            tuple(self._progress),
            tuple(self._forked),
            tuple(self._ended),
            tuple(self._copied),
            tuple(self._taken),
            returned,
            credits_wanted,
            tuple(self._sources_read),
            num_tail_tokens,
        )
        if report == StepReport(credits_wanted=self.credits_wanted, num_tail_tokens=num_tail_tokens):
            return None
        self.credits_wanted = credits_wanted
        self._begin()
        return report


def without_others(reports: Iterable[StepReport], start_ids: Collection[int]) -> list[StepReport]:
    """What they tell of these starts, and of credits."""
    return [
        structs.replace(
            report,
            progress=tuple(each for each in report.progress if each.start_id in start_ids),
            forked=tuple(each for each in report.forked if each.start_id in start_ids),
            ended=tuple(each for each in report.ended if each.start_id in start_ids),
            copied=tuple(each for each in report.copied if each.start_id in start_ids),
            taken=tuple(each for each in report.taken if each.start_id in start_ids),
            sources_read=tuple(key for key in report.sources_read if key[0] in start_ids),
        )
        for report in reports
    ]


def taken_by_others(reports: Iterable[StepReport], start_ids: Collection[int]) -> Iterator[BlockRef]:
    """Credits that others than these starts have used."""
    for report in reports:
        for taken in report.taken:
            yield from taken.blocks if taken.start_id not in start_ids else ()
        yield from (copied.block for copied in report.copied if copied.start_id not in start_ids)
