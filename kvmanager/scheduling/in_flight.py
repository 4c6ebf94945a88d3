"""Prefixes in flight: blocks that running sequences are computing now, and the requests that wait for them.

A sequence announces the full blocks of the tokens that it was given; the first to do so is their producer,
and when it has settled a block, another that computes the same one succeeds it. A request whose next block
is among them waits until the deepest such block of its own is sealed, or until its producer gives up: ends,
is cancelled or preempted, dies, or makes no progress for too long.
"""

from kvmanager.pool.block_table import Sequence
from kvmanager.pool.hashing import Held
from kvmanager.scheduling.requests import Request, WaitingQueue


class InFlight:
    """By block hash. Requests that wait here stay in the waiting queue, but out of its order."""

    __slots__ = ("_queue", "_successors", "_waiters", "producers")

    def __init__(self, queue: WaitingQueue) -> None:
        self._queue = queue
        self.producers: dict[bytes, Sequence] = {}
        self._successors: dict[bytes, list[Sequence]] = {}
        self._waiters: dict[bytes, list[Request]] = {}

    def announce(self, sequence: Sequence, contents: list[Held]) -> None:
        """`sequence` will compute these blocks, from its first that is not sealed."""
        sequence.announced = contents
        sequence.num_settled = sequence.num_sealed
        producers = self.producers
        for digest, _, _, _ in contents[sequence.num_sealed :]:
            if producers.setdefault(digest, sequence) is not sequence:
                self._successors.setdefault(digest, []).append(sequence)

    def settle(self, sequence: Sequence) -> bool:
        """Those of its blocks that are sealed by now need no waiting for. True if that wakes anyone."""
        return self._settle(sequence, min(sequence.num_sealed, len(sequence.announced)))

    def withdraw(self, sequence: Sequence) -> bool:
        """It will not compute the rest of what it announced. True if that wakes anyone."""
        return self._settle(sequence, len(sequence.announced))

    def await_block(self, request: Request, digest: bytes) -> None:
        """Take the request out of the queue's order until that block is settled."""
        request.awaited = digest
        self._waiters.setdefault(digest, []).append(request)
        self._queue.set_aside(request)

    def leave(self, request: Request) -> None:
        """It no longer waits for a block, whatever becomes of that."""
        assert request.awaited is not None
        waiters = self._waiters[request.awaited]
        waiters.remove(request)
        if not waiters:
            del self._waiters[request.awaited]
        self._resume(request)

    def awaited_producers(self) -> set[Sequence]:
        """Sequences that someone waits for."""
        return {self.producers[digest] for digest in self._waiters}

    def waiters(self) -> dict[bytes, list[Request]]:
        """A copy, for audits."""
        return {digest: list(requests) for digest, requests in self._waiters.items()}

    def _settle(self, sequence: Sequence, end: int) -> bool:
        producers, successors, waiters, woken = self.producers, self._successors, self._waiters, False
        for digest, _, _, _ in sequence.announced[sequence.num_settled : end]:
            if producers.get(digest) is not sequence:
                self._drop_successor(digest, sequence)
                continue
            del producers[digest]
            if digest in successors:
                successor = successors[digest][0]
                self._drop_successor(digest, successor)
                producers[digest] = successor
            if digest in waiters:
                for request in waiters.pop(digest):
                    self._resume(request)
                woken = True
        sequence.num_settled = max(sequence.num_settled, end)
        return woken

    def _drop_successor(self, digest: bytes, sequence: Sequence) -> None:
        successors = self._successors.get(digest, [])
        if sequence in successors:
            successors.remove(sequence)
            if not successors:
                del self._successors[digest]

    def _resume(self, request: Request) -> None:
        request.awaited = None
        self._queue.put_back(request)
