"""The manager's process in the simulator: the real core and records, in a shell like its server's."""

from collections.abc import Callable, Set
from typing import Any

import msgspec

from kvmanager.core import Core
from kvmanager.pool.block_pool import BlockPool
from kvmanager.protocol import (
    Fenced,
    Hello,
    Refused,
    RunnerHello,
    Welcome,
    decode_to_manager,
    encode,
)
from kvmanager.records import pack, unpack
from kvmanager.restore import restore_pool
from kvmanager.scheduling.pins import PinKey, SavedPin
from kvmanager.state import Effects, Policy
from kvmanager.tier.tiers import Tier
from tests.sim.model import BLOCK_SIZE
from tests.sim.network import Connection, Frames
from tests.sim.tier import Copier, TierFile


class ManagerKilledError(Exception):
    """The process ends here, in the middle of what it does."""


class LockFile:
    """One inode in `locks/`. One that exits unlinks its own, and the manager those of the killed."""

    def __init__(self) -> None:
        self.held = True


class Disk:
    """What outlives all processes: the records (None before there is a pool), the disk tier's file and the
    lock files.
    """

    def __init__(self, num_blocks: int, num_slots: int) -> None:
        self.num_blocks = num_blocks
        self.tier = TierFile(num_slots)
        self.records: list[bytes] = []
        self.pins: dict[PinKey, SavedPin] = {}
        self.locks: dict[str, LockFile] = {}

    def acquire(self, name: str) -> LockFile:
        """As `HeldLock`: the file that is there, or a new one."""
        lock = self.locks.get(name)
        if lock is None:
            lock = self.locks[name] = LockFile()
        lock.held = True
        return lock


class Peer:
    def __init__(self, client_id: int, frame: bytes, connection: Connection, identity: int) -> None:
        self.client_id = client_id
        self.frame = frame
        self.connection = connection
        self.identity = identity


class Manager:
    """`fuse`: after how many record writes and messages more it is killed; None: not at all."""

    def __init__(self, disk: Disk, boot_id: str, policy: Policy, copier: Copier, now: float) -> None:
        self.disk = disk
        self.copier = copier
        self.core = Core(boot_id, "/pool", policy, now)
        self.faults: list[str] = []
        self.core.on_fault = self._fenced
        self.fuse: int | None = None
        self.tear = False  # whether the record at the fuse's end is half written
        self.touched: set[int] = set()  # blocks whose record has changed since the last look at it
        self._peers: dict[int, Peer] = {}
        self._by_frame: dict[bytes, Peer] = {}
        self._watched: dict[str, LockFile] = {}

    def open(self, now: float) -> None:
        """Take over the pool that an earlier start has left."""
        self._watched = {name: lock for name, lock in sorted(self.disk.locks.items()) if lock.held}
        if self.disk.records:
            read = [unpack(record, BLOCK_SIZE) for record in self.disk.records]
            survivors = tuple(self._watched)
            self.core.attach(*restore_pool(self.core_layout, read, survivors), survivors, self._tier())
            self.core.restore_pins(now, [*self.disk.pins.values()])
            self._carry_out(self.core.tick(now))

    core_layout: Any = None
    """The layout of the pool's file."""

    watch: Callable[[Core, Effects], None] = staticmethod(lambda core, effects: None)
    """Told of each event's effects before they are carried out."""

    about_to_lose: Callable[[Core, str, bool], None] = staticmethod(lambda core, lock, heard_all: None)
    """Told before the core that a process has died, and whether all that it had sent was read."""

    trace: Callable[[str, str, Any], None] = staticmethod(lambda who, what, detail: None)

    def take(self, now: float, connection: Connection, frames: Frames) -> None:
        """One message: a Hello, one under a session that holds, or one that is fenced or dropped."""
        session, body = frames
        peer = self._by_frame.get(session)
        if session and (
            peer is None or (peer.connection, peer.identity) != (connection, connection.identity)
        ):
            self._send(connection, connection.identity, session, Fenced(self.core.state.boot_id))
            return
        try:
            message = decode_to_manager(body) if body else None
        except msgspec.DecodeError:
            self.core.count_dropped()
            return
        if peer is None:
            if isinstance(message, Hello):
                self._hello(now, connection, message)
            else:
                self.core.count_dropped()
            return
        self.trace("manager", "gets", (peer.client_id, message))
        self._carry_out(self.core.handle(now, peer.client_id, message))

    def _fenced(self, reason: str) -> None:
        self.faults.append(reason)
        assert any(repr(name) in reason for name in self.misbehaving), reason

    misbehaving: Set[str] = frozenset()
    """Runners that are to be fenced; no others."""

    def tick(self, now: float) -> None:
        """Who lives, and the passing of time."""
        for name in [name for name, lock in self._watched.items() if not lock.held]:
            if self.disk.locks.get(name) is self._watched.pop(name):
                del self.disk.locks[name]
            self.about_to_lose(self.core, name, not self._unread(name))
            self._carry_out(self.core.process_died(now, name))
        for copy, promotion, good in self.copier.step():
            if promotion and good:
                self.touched.add(copy.block)
            self._carry_out(self.core.copied(now, copy, promotion, good, 0.001))
        self._carry_out(self.core.tick(now))

    def _unread(self, lock: str) -> bool:
        """Whether something that the process with this lock has sent waits, or was lost."""
        client = self.core.state.by_lock.get(lock)
        peer = self._peers.get(client.client_id) if client is not None else None
        return peer is None or bool(peer.connection.up) or peer.identity != peer.connection.identity

    def _tier(self) -> Tier | None:
        """Some worlds have none."""
        file = self.disk.tier
        return Tier(file.num_slots, file.kept()) if file.num_slots else None

    def _hello(self, now: float, connection: Connection, hello: Hello) -> None:
        self.trace("manager", "gets", hello)
        if (refused := self._prepare(hello)) is not None:
            self._send(connection, connection.identity, b"", refused)
            return
        answer, effects = self.core.hello(now, hello)
        assert not isinstance(answer, Refused)
        session = answer.session if isinstance(answer, Welcome) else answer
        self._forget(session.client_id)
        peer = Peer(session.client_id, encode(session), connection, connection.identity)
        self._peers[session.client_id] = self._by_frame[peer.frame] = peer
        if isinstance(answer, Welcome):
            self._send(connection, connection.identity, b"", answer)
        self._carry_out(effects)

    def _prepare(self, hello: Hello) -> Refused | None:
        lock = self.disk.locks.get(hello.lock)
        if lock is None or not lock.held:
            return Refused("invalid_request", f"{hello.name} does not hold its lock file {hello.lock!r}")
        refused = self.core.refusal(hello)
        if refused is not None:
            return refused
        if isinstance(hello, RunnerHello) and self.core.layout is None:
            pool = BlockPool(self.disk.num_blocks, hello.layout)
            self.disk.records = [
                pack(pool.record(block), BLOCK_SIZE) for block in range(self.disk.num_blocks)
            ]
            self.core.attach(pool, tier=self._tier())
        self._watched[hello.lock] = lock
        return None

    def _carry_out(self, effects: Effects) -> None:
        pool = self.core.state.pool
        self.watch(self.core, effects)
        self.touched |= effects.records
        for block in effects.records:
            assert pool is not None
            record = pack(pool.record(block), BLOCK_SIZE)
            if self.fuse == 0 and self.tear:
                self.disk.records[block] = record[:20] + self.disk.records[block][20:]
            self._burn()
            self.disk.records[block] = record
        for key, pin in effects.pins.items():
            self._burn()
            if pin is None:
                self.disk.pins.pop(key, None)
            else:
                self.disk.pins[key] = pin
        for client_id, message in effects.messages:
            peer = self._peers.get(client_id)
            if peer is not None:
                frame = b"" if isinstance(message, Welcome) else peer.frame
                self._send(peer.connection, peer.identity, frame, message)
        self.copier.begin(effects)
        for client_id in effects.ended:
            self._forget(client_id)

    def _send(self, connection: Connection, identity: int, session: bytes, message: Any) -> None:
        """To a connection that is gone, nothing is sent."""
        self._burn()
        if connection.client_lives and connection.identity == identity:
            connection.down.append([session, encode(message)])

    def _burn(self) -> None:
        if self.fuse is not None:
            if self.fuse == 0:
                raise ManagerKilledError
            self.fuse -= 1

    def _forget(self, client_id: int) -> None:
        peer = self._peers.pop(client_id, None)
        if peer is not None:
            del self._by_frame[peer.frame]
