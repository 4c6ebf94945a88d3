"""The network between the simulated processes: a queue per connection and direction, first in, first out.

What a break loses depends on where a message is at that moment, which only chance knows: a process that was
killed may have got some of its last messages out, and a peer may already have some of what was sent to it.
"""

from collections import deque
from random import Random
from typing import Final

Frames = list[bytes]

TOKEN_HIGH_WATER_MARK: Final = 3  # batches on the way from one runner to one frontend


class Connection:
    """Between one client and one manager. `up` is towards the manager."""

    def __init__(self) -> None:
        self.up: deque[Frames] = deque()
        self.down: deque[Frames] = deque()
        self.identity = 0  # as the manager's socket sees it; another after each break
        self.client_lives = True

    def client_killed(self, random: Random, manager_lives: bool) -> None:
        """The last messages may not have left (without a manager none has); nobody reads what comes back."""
        self.client_lives = False
        self.down.clear()
        if manager_lives:
            _keep_first(self.up, random)
        else:
            self.up.clear()

    def manager_killed(self, random: Random) -> None:
        """Some messages had arrived there and are lost; those that had not wait for the next manager."""
        _lose_first(self.up, random)
        _keep_first(self.down, random)
        self.identity += 1

    def broken(self, random: Random) -> None:
        """Both ends live; the client's end reconnects by itself."""
        _lose_first(self.up, random)
        _keep_first(self.down, random)
        self.identity += 1


class TokenPipe:
    """From one runner to one frontend."""

    def __init__(self) -> None:
        self.batches: deque[bytes] = deque()
        self.runner_lives = True

    @property
    def has_room(self) -> bool:
        return len(self.batches) < TOKEN_HIGH_WATER_MARK

    def runner_killed(self, random: Random) -> None:
        self.runner_lives = False
        _keep_first(self.batches, random)


def _keep_first(queue: "deque[Frames] | deque[bytes]", random: Random) -> None:
    for _ in range(random.randint(0, len(queue))):
        queue.pop()


def _lose_first(queue: deque[Frames], random: Random) -> None:
    for _ in range(random.randint(0, len(queue))):
        queue.popleft()
