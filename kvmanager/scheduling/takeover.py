"""Taking over what runs since an earlier start of the manager: each start is checked as a whole, then taken.

Its blocks must be what the records say: first those with the very content that its tokens have, then those
that were its runner's to write. A start of which that is not so is not taken over, which costs no more than
computing some of it again.
"""

from array import array
from typing import NamedTuple

from kvmanager.pool.block_pool import QUARANTINED, RESERVED, BlockPool
from kvmanager.pool.block_table import Sequence
from kvmanager.pool.hashing import Held, hash_chain, token_array
from kvmanager.protocol import MAX_CHOICES, Accepted, HeldSequence, HeldStart, Holdings, NotHeld, Submit
from kvmanager.scheduling import sessions
from kvmanager.scheduling.admission import why_it_never_fits
from kvmanager.scheduling.clients import Frontend, Quarantine, Runner
from kvmanager.scheduling.requests import ActiveStart, Request, RequestState
from kvmanager.state import State

MAX_START_ID = 1 << 62  # the number on the wire has 64 bits, and more are to follow


class Taken(NamedTuple):
    """A sequence that can be taken over. `contents`: what the full blocks of its tokens hold."""

    held: HeldSequence
    tokens: "array[int]"
    contents: list[Held]


def end_roll_call(state: State, now: float) -> None:
    """If it is over: take over what is both held and claimed, and tell everybody."""
    roll_call, pool = state.roll_call, state.pool
    if roll_call is None or pool is None or not roll_call.is_over(now):
        return
    state.roll_call = None
    for runner, holdings in roll_call.holdings.items():
        takeover = Takeover(state, pool, runner, holdings)
        for held in holdings.starts:
            key = (held.token_endpoint, held.request_id)
            if (claim := roll_call.claims.get(key)) is not None and takeover.take(held, *claim, now):
                del roll_call.claims[key]
        takeover.end()
    for frontend, submit in roll_call.claims.values():
        state.send(frontend, NotHeld(((submit.request_id, submit.attempt),)))
    state.admission_due = True


class Takeover:
    """Of what one runner holds. `own`: blocks that it may write, of no start that was taken over yet."""

    __slots__ = ("credits", "own", "pool", "quarantine", "runner", "state")

    def __init__(self, state: State, pool: BlockPool, runner: Runner, holdings: Holdings) -> None:
        """With credits that cannot be, nothing is its own, and so nothing is taken over."""
        self.state = state
        self.pool = pool
        self.runner = runner
        self.quarantine = state.quarantines.get(runner.hello.lock, Quarantine(runner.hello.lock))
        self.credits = {block for block, _ in holdings.credits}
        own = {*self.quarantine.blocks}
        right = self.credits <= own and {*pool.refs(self.credits)} == {*holdings.credits}
        self.own = own - self.credits if right else set()

    def take(self, held: HeldStart, frontend: Frontend, submit: Submit, now: float) -> bool:
        """The start goes on under this manager; False, and nothing is changed, if it cannot."""
        try:
            request = Request(frontend, submit, self.state.last_serial + 1)
            taken = self._look_at(request, held)
        except OverflowError:  # a token id
            return False
        choices = [choice for each in held.sequences for choice in (each.choice, *each.forks)]
        sound = (
            submit.attempt == held.attempt
            and held.request_id not in frontend.requests
            and held.start_id not in self.runner.active
            and 0 <= held.start_id < MAX_START_ID
            and choices
            and len({*choices}) == len(choices)
            and {*choices} <= {*range(MAX_CHOICES)}
            and not why_it_never_fits(self.state, request)
            and all(self._is_sound(request, each) for each in taken)
            and self._agree(taken)
        )
        if not sound:
            return False
        active = begin(self.state, self.runner, request, held, choices, now)
        for each in taken:
            sequence = active.sequences[each.held.choice] = self._hold(active, each)
            sequence.forked = len(taken) > 1
            self.state.in_flight.announce(sequence, each.contents)
            sequence.seal(self.pool, now)
            self.state.in_flight.settle(sequence)
        self.state.send(frontend, Accepted(submit.request_id, submit.attempt))
        return True

    def end(self) -> None:
        """Tell the runner what it keeps; its credits are kept if anything is."""
        runner, quarantine = self.runner, self.quarantine
        if runner.kept:
            for block in self.credits:
                self.pool.take_out_of_quarantine(block, quarantine, runner)
            runner.credits = self.credits
        quarantine.blocks = [block for block in quarantine.blocks if self.pool.state[block] == QUARANTINED]
        self.state.send(runner, sessions.welcome_to(self.state, runner))

    def _look_at(self, request: Request, held: HeldStart) -> list[Taken]:
        """Raises OverflowError for a token id that is none."""
        width, salt, root = self.pool.block_bytes, request.salt, self.pool.root
        of_prompt = hash_chain(root, request.prompt.tobytes(), width, salt)
        last = of_prompt[-1][0] if of_prompt else root
        taken = []
        for each in held.sequences:
            tokens = request.prompt + token_array(each.output_token_ids)
            rest = hash_chain(last, tokens.tobytes()[len(of_prompt) * width :], width, salt)
            taken.append(Taken(each, tokens, of_prompt + rest))
        return taken

    def _is_sound(self, request: Request, taken: Taken) -> bool:
        """Whether its table is what the records say."""
        table, size, computed = taken.held.block_table, self.pool.block_size, taken.held.num_computed_tokens
        num_sealed = next((index for index, block in enumerate(table) if block in self.own), len(table))
        return (
            0 <= computed <= len(taken.tokens) <= request.max_length
            and computed <= len(table) * size < len(taken.tokens) + size
            and len({*table}) == len(table)
            and num_sealed <= computed // size
            and self.own.issuperset(table[num_sealed:])
            and all(map(self.pool.holds, table[:num_sealed], taken.contents))
        )

    def _agree(self, taken: list[Taken]) -> bool:
        """Whether sequences that share a block that is not sealed have written the same there."""
        size, written = self.pool.block_size, dict[int, tuple[int, bytes, bytes]]()
        for each in taken:
            for index, block in enumerate(each.held.block_table) if len(taken) > 1 else ():
                if block in self.own:
                    before = each.contents[index - 1][0] if index else self.pool.root
                    end = min((index + 1) * size, each.held.num_computed_tokens)
                    here = (index, before, each.tokens[index * size : end].tobytes())
                    if written.setdefault(block, here) != here:
                        return False
        return True

    def _hold(self, active: ActiveStart, taken: Taken) -> Sequence:
        """The sequence with its blocks. Those that are full and not sealed are its next to seal."""
        held, request, pool = taken.held, active.request, self.pool
        tag, salt = active.runner.owner_tag, request.salt
        sequence = Sequence(tag, active.start_id, held.choice, taken.tokens, salt, pool.root, held.forks)
        sequence.request_id, sequence.max_length = request.submit.request_id, request.max_length
        for block in held.block_table:
            if pool.state[block] == QUARANTINED:
                pool.take_out_of_quarantine(block, self.quarantine, sequence)
            else:
                pool.hold(block, sequence)
            sequence.num_sealed += pool.state[block] != RESERVED
        self.own.difference_update(held.block_table)
        sequence.table = list(held.block_table)
        sequence.num_reused = sequence.num_sealed
        if sequence.num_sealed:
            sequence.last_hash = taken.contents[sequence.num_sealed - 1][0]
        sequence.num_computed = sequence.num_cached = held.num_computed_tokens
        return sequence


def begin(
    state: State, runner: Runner, request: Request, held: HeldStart, choices: list[int], now: float
) -> ActiveStart:
    """The start, as it would be had this manager begun it. Choices that it does not run come after it."""
    state.last_serial = request.serial
    state.last_start_id = max(state.last_start_id, held.start_id)
    request.state, request.counted = RequestState.RUNNING, True
    request.frontend.requests[held.request_id] = request
    if request.submit.sampling.beam is None:
        rest = tuple(choice for choice in request.submit.choices if choice.index not in choices)
        request.later = request.group(rest)
        request.groups = [group for group in request.groups if not {*group.choices}.isdisjoint(choices)]
    active = request.active = runner.active[held.start_id] = ActiveStart(held.start_id, request, runner, now)
    active.started_at = None
    runner.seats += len(choices)
    runner.kept += (held.start_id,)
    return active
