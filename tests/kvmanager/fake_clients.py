"""Processes that behave: frontends and runners as the manager meets them, in a world where the "KV" is the
token history.

Messages from the manager lie in a client's inbox until it takes them; tokens reach frontends at once.
"""

from collections import deque
from typing import TYPE_CHECKING, Any
from zlib import crc32

from kvmanager.protocol import (
    PROTOCOL_VERSION,
    Accepted,
    Cancel,
    Choice,
    Copied,
    Directives,
    Draining,
    Ended,
    Fenced,
    Forked,
    FrontendHello,
    Layout,
    Progress,
    Ready,
    Rejected,
    RunnerHello,
    RunnerLost,
    SamplingParams,
    Start,
    StepReport,
    Submit,
    Taken,
)

if TYPE_CHECKING:
    from tests.kvmanager.world import World

BLOCK_SIZE = 4
CHUNK = 10  # tokens of a sequence that a step computes, at most
LAYOUT = Layout("fingerprint", "float32", BLOCK_SIZE, 1, 1, 2)


def next_token(history: list[int], choice: int, seed: int) -> int:
    """The model: which token follows, for each choice its own; few tokens, so that texts often meet."""
    return crc32(repr((history, choice, seed)).encode()) % 3


def text(prompt: list[int], choice: int, seed: int, length: int) -> list[int]:
    """What an undisturbed run gives."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(next_token(tokens, choice, seed))
    return tokens[len(prompt) :]


class Process:
    """A client. `session` is None before its Hello and after it was fenced; `alive` is its lock."""

    def __init__(self, world: "World", name: str) -> None:
        self.world = world
        self.name = name
        self.alive = True
        self.session: tuple[str, int] | None = None  # (boot id, client id)
        self.inbox: deque[Any] = deque()

    def send(self, message: Any) -> bool:
        """False if the session does not hold: then this process starts over."""
        if not self.world.deliver(self, message):
            self.inbox.append(Fenced("another"))
            return False
        return True

    def hello(self) -> None:
        self.inbox.clear()
        answer = self.world.hello(self)
        self.session = (answer.session.boot_id, answer.session.client_id)


class FakeFrontend(Process):
    """Submits requests, collects their tokens, submits again what was lost."""

    def __init__(self, world: "World", name: str) -> None:
        super().__init__(world, name)
        self.requests: dict[str, Submit] = {}
        self.outputs: dict[str, dict[int, list[int]]] = {}
        self.rejected: dict[str, str] = {}

    def greeting(self) -> FrontendHello:
        return FrontendHello(PROTOCOL_VERSION, self.name, self.name, self.name)

    def submit(self, message: Submit) -> None:
        self.requests[message.request_id] = message
        self.outputs.setdefault(message.request_id, {choice.index: [] for choice in message.choices})
        self.send(message)

    def resubmit(self, request_id: str) -> None:
        """Again, with what has been received so far."""
        old, outputs = self.requests[request_id], self.outputs[request_id]
        length = old.sampling.max_tokens
        choices = tuple(Choice(index, tuple(got)) for index, got in outputs.items() if len(got) < length)
        fields = {name: getattr(old, name) for name in old.__struct_fields__}
        self.submit(Submit(**{**fields, "attempt": old.attempt + 1, "choices": choices}))

    def cancel(self, request_id: str) -> None:
        message = self.requests.pop(request_id)
        self.send(Cancel(request_id, message.attempt))

    def token(self, request_id: str, attempt: int, choice: int, position: int, token: int) -> None:
        """Straight from a runner. A request's text must come without a gap and without a repeat."""
        message = self.requests.get(request_id)
        if message is None or message.attempt != attempt:
            return
        outputs = self.outputs[request_id]
        assert position == len(outputs[choice]), (
            f"{request_id}: position {position} after {len(outputs[choice])}"
        )
        outputs[choice].append(token)
        length, seed = message.sampling.max_tokens, message.sampling.seed
        if all(len(output) == length for output in outputs.values()):
            for index, output in outputs.items():
                assert output == text(list(message.prompt_token_ids), index, seed, length)
            del self.requests[request_id]

    def read(self) -> None:
        """Take everything from the inbox, after a probe."""
        self.send(None)
        while self.inbox:
            message = self.inbox.popleft()
            match message:
                case Fenced():
                    self.hello()
                    for request_id in list(self.requests):
                        self.resubmit(request_id)
                case Rejected():
                    known = self.requests.get(message.request_id)
                    if known is not None and known.attempt == message.attempt:
                        self.rejected[message.request_id] = message.code
                        del self.requests[message.request_id]
                case RunnerLost():
                    for request_id, attempt in message.requests:
                        known = self.requests.get(request_id)
                        if known is not None and known.attempt == attempt:
                            self.resubmit(request_id)
                case _:
                    assert isinstance(message, Accepted), message


class FakeSequence:
    """A runner's own view of a sequence."""

    def __init__(self, start: Start, choice: int, tokens: list[int], table: list[int], computed: int) -> None:
        self.start = start
        self.choice = choice
        self.tokens = tokens
        self.table = table
        self.computed = computed
        self.told = len(tokens)
        self.forks: tuple[int, ...] = ()
        self.source: int | None = None  # to copy from before anything is computed

    @property
    def key(self) -> tuple[int, int]:
        return (self.start.start_id, self.choice)

    def untold(self, upto: int) -> tuple[int, ...]:
        new = tuple(self.tokens[self.told : upto])
        self.told = max(self.told, upto)
        return new


class FakeRunner(Process):
    """Computes; a step is: take directives, plan (use credits), report, compute."""

    def __init__(self, world: "World", name: str, max_num_seqs: int = 6) -> None:
        super().__init__(world, name)
        self.max_num_seqs = max_num_seqs
        self.draining = False
        self.reset()

    @property
    def idle(self) -> bool:
        """Nothing runs, nothing is in hand, nothing is left to tell or to read."""
        return not (self.sequences or self.credits or self.inbox or any(self.facts.values()))

    def reset(self) -> None:
        self.sequences: dict[tuple[int, int], FakeSequence] = {}
        self.credits: deque[tuple[int, int]] = deque()
        self.facts: dict[str, list[Any]] = {
            "progress": [],
            "forked": [],
            "ended": [],
            "copied": [],
            "taken": [],
            "sources_read": [],
        }
        self.last_wanted = 0

    def greeting(self) -> RunnerHello:
        return RunnerHello(PROTOCOL_VERSION, self.name, self.name, LAYOUT, self.max_num_seqs, 1000)

    def hello(self) -> None:
        self.reset()
        super().hello()
        self.send(Ready())

    def drain(self) -> None:
        self.draining = True
        self.send(Draining())

    def step(self, ahead: int = 1) -> None:
        """`ahead`: credits wanted beyond what sequences need now."""
        while self.inbox:
            message = self.inbox.popleft()
            if isinstance(message, Fenced):
                self.hello()
                return
            self.obey(message)
        ready = [sequence for sequence in self.sequences.values() if self.make_room(sequence)]
        if self.report(len(self.sequences) - len(ready) + (ahead if self.sequences else 0)):
            for sequence in ready:
                self.compute(sequence)

    def obey(self, directives: Directives) -> None:
        self.credits.extend(directives.credits)
        for start in directives.starts:
            for given in start.sequences:
                tokens = [*start.prompt_token_ids, *given.output_token_ids]
                table = [block for block, _ in given.block_table]
                sequence = FakeSequence(start, given.choice, tokens, table, given.num_cached_tokens)
                sequence.forks = given.forks
                sequence.source = None if given.copy_from is None else given.copy_from[0]
                self.sequences[sequence.key] = sequence
        for reason, start_ids in (("cancelled", directives.cancels), ("preempted", directives.preempts)):
            for sequence in list(self.sequences.values()):
                if sequence.start.start_id in start_ids:
                    self.end(sequence, reason)

    def end(self, sequence: FakeSequence, reason: Any) -> None:
        new = sequence.untold(len(sequence.tokens))
        shared = any(
            sequence.table[-1] in other.table for other in self.sequences.values() if other is not sequence
        )
        self.world.sealed(self, sequence, tail=sequence.source is None and not shared)
        self.facts["ended"].append(Ended(*sequence.key, new, sequence.computed, reason))
        del self.sequences[sequence.key]

    def make_room(self, sequence: FakeSequence) -> bool:
        """A block of its own for the next token; False for want of a credit."""
        index = sequence.computed // BLOCK_SIZE
        if index < len(sequence.table):
            block = sequence.table[index]
            if sum(block in other.table for other in self.sequences.values()) == 1:
                return True
            if not self.credits:
                return False
            fresh = self.credits.popleft()
            self.world.cells[fresh[0]][:] = self.world.cells[block]
            sequence.table[index] = fresh[0]
            self.facts["copied"].append(Copied(*sequence.key, index, fresh))
            return True
        if not self.credits:
            return False
        fresh = self.credits.popleft()
        sequence.table.append(fresh[0])
        self.facts["taken"].append(Taken(*sequence.key, (fresh,)))
        return True

    def report(self, wanted: int) -> bool:
        surplus = tuple(self.credits.pop() for _ in range(len(self.credits) - wanted))
        if surplus or wanted != self.last_wanted or any(self.facts.values()):
            parts = {name: tuple(items) for name, items in self.facts.items()}
            for items in self.facts.values():
                items.clear()
            self.last_wanted = wanted
            return self.send(StepReport(**parts, returned=surplus, credits_wanted=wanted))
        return self.send(None)

    def compute(self, sequence: FakeSequence) -> None:
        """Write the KV of all known tokens, then draw the next one for the sequence and for each fork."""
        if sequence.source is not None:
            tail = sequence.table[sequence.computed // BLOCK_SIZE]
            self.world.cells[tail][:] = self.world.cells[sequence.source]
            sequence.source = None
            self.facts["sources_read"].append(sequence.key)
        before = sequence.computed // BLOCK_SIZE
        end = min(sequence.computed + CHUNK, len(sequence.tokens))
        for position in range(sequence.computed, end):
            block = sequence.table[position // BLOCK_SIZE]
            self.world.cells[block][position % BLOCK_SIZE] = tuple(sequence.tokens[: position + 1])
        sequence.computed = end
        if sequence.computed // BLOCK_SIZE > before:
            new = sequence.untold(sequence.computed)
            self.facts["progress"].append(Progress(*sequence.key, new, sequence.computed))
            self.world.sealed(self, sequence)
        if end < len(sequence.tokens):
            return
        owners = [sequence]
        if sequence.forks:
            self.facts["forked"].append(Forked(*sequence.key, sequence.forks))
            for choice in sequence.forks:
                child = FakeSequence(
                    sequence.start, choice, sequence.tokens[:], sequence.table[:], sequence.computed
                )
                child.told = sequence.told
                self.sequences[child.key] = child
                owners.append(child)
            sequence.forks = ()
        for owner in owners:
            self.append(owner)

    def append(self, sequence: FakeSequence) -> None:
        start = sequence.start
        sampling = start.sampling
        token = next_token(sequence.tokens, sequence.choice, sampling.seed)
        position = len(sequence.tokens) - len(start.prompt_token_ids)
        sequence.tokens.append(token)
        self.world.frontend(start.token_endpoint).token(
            start.request_id, start.attempt, sequence.choice, position, token
        )
        if position + 1 == sampling.max_tokens:
            self.end(sequence, "finished")


def submission(
    request_id: str,
    prompt: list[int],
    *,
    max_tokens: int = 4,
    n: int = 1,
    arrival: float = 0.0,
    salt: str = "",
    priority: int = 0,
    read_cache: bool = True,
    seed: int = 1,
) -> Submit:
    """A fresh request in few words."""
    return Submit(
        request_id,
        0,
        arrival,
        tuple(prompt),
        tuple(Choice(index) for index in range(n)),
        SamplingParams(max_tokens, seed),
        priority,
        salt,
        read_cache,
    )
