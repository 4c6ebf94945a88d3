"""What simulated frontends and runners share: a lock, a connection, and the real rules of a session."""

from typing import TYPE_CHECKING, Any, Final

from kvmanager.client import ClientSession
from kvmanager.protocol import Hello, Holdings, Refused
from tests.sim.network import Connection

if TYPE_CHECKING:
    from tests.sim.world import World

HELLO_INTERVAL: Final = 0.4  # seconds after which an unanswered Hello is sent again


class Process:
    """One process from its start to its death. It does nothing before `stalled_until` (seconds)."""

    def __init__(self, world: "World", name: str, hello: Hello) -> None:
        self.world = world
        self.name = name
        self.alive = True
        self.stalled_until = 0.0
        self.lock = world.disk.acquire(name)
        self.connection = Connection()
        world.connections.append(self.connection)
        self.session = ClientSession(hello)
        self._hello_at = -1.0  # when the last Hello was sent
        self.say_hello()

    def turn(self) -> None:
        """Do one thing."""
        raise NotImplementedError

    def say_hello(self, holdings: Holdings | None = None) -> None:
        self._hello_at = self.world.now
        self.world.trace(self.name, "says Hello", holdings or "")
        self.connection.up.append(self.session.hello_frames(self.world.now, holdings))

    def repeat_hello(self, holdings: Holdings | None = None) -> None:
        """While there is no answer."""
        if self.world.now - self._hello_at > HELLO_INTERVAL:
            self.say_hello(holdings)

    def send(self, message: Any) -> None:
        self.connection.up.append(self.session.frames(self.world.now, message))

    def probe(self) -> None:
        if (frames := self.session.probe(self.world.now)) is not None:
            self.connection.up.append(frames)

    def receive(self) -> Any:
        """The next message from the manager; None if it was none for this session."""
        frames = self.connection.down.popleft()
        self.world.count(bool(frames[1]))
        message = self.session.received(frames)
        assert not isinstance(message, Refused), message
        self.world.trace(self.name, "gets", message)
        return message

    def killed(self) -> None:
        """SIGKILL."""
        self.alive = False
        self.lock.held = False
        self.connection.client_killed(self.world.random, self.world.manager is not None)

    def exited(self) -> None:
        """As `close` does: what waits for the manager is dropped, the lock file is removed."""
        self.alive = False
        self.connection.client_lives = False
        self.connection.up.clear()
        self.connection.down.clear()
        self.lock.held = False
        del self.world.disk.locks[self.name]
