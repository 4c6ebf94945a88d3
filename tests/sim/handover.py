"""What the sequences of a killed runner compute again: at most one block of tokens each.

A step that was computed and not reported comes on top where it was longer than a token (a prompt's). Checked
where all that the runner had sent was read, and unless the block that is missed was evicted meanwhile. Beams
are other sequences afterwards, but all of a search are equally long; one that was dropped after the frontend
was told held its blocks no longer, so theirs may have been evicted while the runner lived.

A search goes on from the newest state that its frontend was told. What its runner had computed it has told,
and if that is newer, it is lost or on its way. Only where its beams might not fit the pool it begins anew.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Final, NamedTuple

from kvmanager.core import Core
from kvmanager.pool.hashing import block_hash, salt_digest, token_array
from kvmanager.protocol import Directives, SequenceStart, Start, TokenEvent
from kvmanager.state import Effects
from tests.sim.model import BLOCK_SIZE
from tests.sim.process import Process
from tests.sim.runner import Runner
from tests.sim.sharing import may_read

PRESSURE: Final = ("capacity", "damaged")  # its room was needed, or its copy in the tier could not be read


class Left(NamedTuple):
    """One sequence at its runner's death. `unreported`: tokens of a step that no report tells of."""

    attempt: int
    computed: int
    unreported: int
    told: int | None = None  # of a beam search: output tokens of its beams, as its frontend was told last
    last_event: int = 0  # of the manager, when it knew
    boot_id: str = ""


class Handovers:
    """Follows sequences from the death of their runner to their next start."""

    def __init__(self, statistics: Counter[str]) -> None:
        self._statistics = statistics
        self._killed: dict[str, dict[tuple[str, int], Left]] = {}  # by lock, then request and choice
        self._handed: dict[tuple[str, int], Left] = {}
        self._started: dict[str, int] = {}  # the manager's last event when a search was started
        self._told: Counter[str] = (
            Counter()
        )  # newest states that runners had for frontends: tokens of each beam
        self._heard: Counter[str] = Counter()  # those that came in time for the next submission

    def killed(self, runner: Process, sent_all: bool) -> None:
        """`sent_all`: whether nothing of what it had sent was lost with it. Frontends have no sequences."""
        if not isinstance(runner, Runner):
            return
        left = self._killed[runner.name] = {}
        told_all = sent_all and runner.held is None  # else a manager that has restarted knows less
        for request in runner.scheduler._requests.values() if told_all else ():
            start, sequences = request.start, request.sequences.items()
            each = {
                choice: Left(
                    start.attempt,
                    running.sequence.num_computed_tokens,
                    runner.unreported.get(running.key, 0),
                )
                for choice, running in sequences
            }
            if start.sampling.beam is not None:
                step = [left for key, left in runner.unreported.items() if key[0] == start.start_id]
                each = searched(start, start.sampling.beam.width, each, max(step, default=0))
            left.update(((start.request_id, choice), known) for choice, known in each.items())

    def told(self, events: Iterable[TokenEvent]) -> None:
        """A runner has these for their frontends."""
        _note(self._told, events)

    def heard(self, events: Iterable[TokenEvent]) -> None:
        """A frontend has got these, of attempts that are still its own."""
        _note(self._heard, events)

    def died(self, core: Core, lock: str, heard_all: bool) -> None:
        """The manager is about to learn of it. `heard_all`: whether it has read what the runner had sent."""
        left, client = self._killed.pop(lock, {}), core.state.by_lock.get(lock)
        if client is None or not heard_all or core.state.pool is None:
            return
        for active in core.state.actives():
            submit = active.request.submit
            beam = submit.sampling.beam
            choices = active.sequences if beam is None else range(beam.width)
            for choice in choices if active.runner is client else ():
                known = left.get((submit.request_id, choice))
                if known is not None and known.attempt == submit.attempt:
                    last_event = (
                        core.state.pool.log.last if beam is None else self._started[submit.request_id]
                    )
                    self._handed[submit.request_id, choice] = known._replace(
                        last_event=last_event, boot_id=core.state.boot_id
                    )

    def event(self, core: Core, effects: Effects, salts: dict[str, str]) -> None:
        """Look at the starts among an event's effects."""
        for _, message in effects.messages:
            for start in message.starts if isinstance(message, Directives) else ():
                if start.sampling.beam is not None and core.state.pool is not None:
                    self._started[start.request_id] = core.state.pool.log.last
                for sequence in start.sequences:
                    left = self._handed.pop((start.request_id, sequence.choice), None)
                    if left is not None and left.boot_id == core.state.boot_id and may_read(core, start):
                        self._check(core, start, sequence, left, salt_digest(salts[start.request_id]))
                if (
                    start.sampling.beam is not None
                ):  # all of it has started, of one that begins as one sequence
                    for choice in range(start.sampling.beam.width):
                        self._handed.pop((start.request_id, choice), None)

    def _check(self, core: Core, start: Start, sequence: SequenceStart, left: Left, salt: bytes) -> None:
        tokens = (*start.prompt_token_ids, *sequence.output_token_ids)
        cached = sequence.num_cached_tokens
        again = min(left.computed, len(tokens) - 1) - cached
        if left.told is not None:
            if self._goes_on(core, start, left.told) != left.told:
                return
            again = left.computed - cached
            self._statistics["searches handed on"] += bool(left.told)
        self._statistics["handed on"] += 1
        # a beam that has filled its block may wait for others, which sat out, until its frontend is told
        most = BLOCK_SIZE if left.told is not None else BLOCK_SIZE - 1
        if again > most + left.unreported:
            missed = first_missed(core, tokens, cached // BLOCK_SIZE, salt)
            pool = core.state.pool
            assert pool is not None
            removal = pool.log.removal(missed)
            evicted = bool(self._statistics["commands"])  # of what they unfind, what follows is never found
            evicted |= (
                removal is not None and removal.sequence > left.last_event and removal.cause in PRESSURE
            )
            assert evicted, f"{start} computes {again} tokens again of {left}, and nothing was evicted"
            self._statistics["handed on after an eviction"] += 1

    def _goes_on(self, core: Core, start: Start, told: int) -> int:
        """From how many tokens of each beam; `told` is the newest state that the former runner computed."""
        given = len(start.sequences[0].output_token_ids)
        heard = self._heard[start.request_id]
        assert told <= self._told[start.request_id], f"{start}: nobody was told of a state of {told} tokens"
        if given != heard:
            assert not given, f"{start} goes on from {given} tokens, and its frontend knew {heard}"
            assert start.sampling.beam is not None
            assert core.state.pool is not None
            length = len(start.prompt_token_ids) + start.sampling.max_tokens
            needed = start.sampling.beam.width * -(-(length - 1) // BLOCK_SIZE)
            assert needed > core.state.pins.usable(core.state.pool), f"{start} begins anew, and has room"
            self._statistics["searches begun anew"] += 1
        elif given != told:
            self._statistics["searches handed on from an earlier state"] += 1  # the newest was on its way
        return given


def _note(known: Counter[str], events: Iterable[TokenEvent]) -> None:
    for event in events:
        if event.search is not None:
            known[event.request_id] = max(known[event.request_id], len(event.search.beams[0].token_ids))


def searched(start: Start, width: int, beams: dict[int, Left], unreported: int) -> dict[int, Left]:
    """All beams of a search as one, unless they have yet to compute what they were given: then each is what
    it was at the start. A frontend is told of a search whenever all have filled a block. `unreported`: of a
    step of any of them, which may not be there any more.
    """
    num_prompt, num_given = len(start.prompt_token_ids), len(start.sequences[0].output_token_ids)
    least = min(beam.computed for beam in beams.values())
    known = max(least, num_prompt + num_given - 1 if num_given else 0)
    told = max(known - known % BLOCK_SIZE + 1 - num_prompt, 0)
    if least < num_prompt + num_given:
        return {choice: beam._replace(told=told) for choice, beam in beams.items()}
    furthest = max(beam.computed for beam in beams.values())
    return dict.fromkeys(range(width), Left(start.attempt, furthest, unreported, told))


def first_missed(core: Core, tokens: tuple[int, ...], num_found: int, salt: bytes) -> bytes:
    """Hash of the first full block that a lookup did not find."""
    pool = core.state.pool
    assert pool is not None
    digest, packed = pool.root, token_array(tokens).tobytes()
    for index in range(num_found + 1):
        digest = block_hash(digest, packed[index * pool.block_bytes : (index + 1) * pool.block_bytes], salt)
    return digest
