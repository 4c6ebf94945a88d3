"""The daemon: a ROUTER socket, the clock, the locks and the pool's files around the core.

One loop, in one thread (the disk tier copies in another). Each turn takes what has come (at most `MAX_BATCH`
messages, and copies that have ended), and every `TICK` asks which processes still live. For every event the
core's effects are carried out before the next one: records, messages, copies.
"""

import logging
import time
import uuid
from pathlib import Path
from typing import Any, Final

import msgspec
import zmq

from kvmanager import pin_file, pool_directory, restore
from kvmanager.asking.event_log import EventLog
from kvmanager.config import ManagerConfig
from kvmanager.core import Core
from kvmanager.errors import PagekeeperError
from kvmanager.event_publisher import EventPublisher
from kvmanager.liveness import HeldLock, WatchedLock, WatchedLocks
from kvmanager.paths import (
    check_socket,
    events_endpoint,
    lock_path,
    manager_endpoint,
    prepare,
    replay_endpoint,
)
from kvmanager.pool.block_pool import BlockPool, BlockRecord
from kvmanager.protocol import (
    MAX_FRAME_BYTES,
    Fenced,
    Hello,
    Layout,
    Refused,
    RunnerHello,
    Welcome,
    decode_to_manager,
    encode,
)
from kvmanager.records import RecordFile
from kvmanager.state import Effects, Policy
from kvmanager.tier.disk_tier import DiskTier
from kvmanager.tier.tiers import Tier

TICK: Final = 0.05  # seconds between two looks at who lives, however many messages wait
LAST_WORDS: Final = 0.025  # seconds in which the last messages of the dead are read
SOON: Final = 0.005  # seconds; the same while somebody waits for what ticks do
MAX_BATCH: Final = 256  # messages between two looks at the copies and the followers of events
HIGH_WATER_MARK: Final = 10_000  # messages per client, each direction
LOCK_NAME: Final = "manager"

log = logging.getLogger("kvmanager")


class Peer:
    """Where a session's messages go."""

    __slots__ = ("client_id", "frame", "identity")

    def __init__(self, client_id: int, frame: bytes, identity: bytes) -> None:
        self.client_id = client_id
        self.frame = frame  # the session, as it is on the wire
        self.identity = identity  # of the connection by which its Hello came


class Server:
    """Raises PagekeeperError if the pool directory cannot be used or has a manager."""

    def __init__(self, config: ManagerConfig) -> None:
        self._config = config
        self._root = prepare(config.pool_directory)
        self._lock = HeldLock(lock_path(config.pool_directory, LOCK_NAME))
        self._endpoint = config.manager or manager_endpoint(config.pool_directory)
        self._boot_id = uuid.uuid4().hex
        waits = (config.runner_wait, config.prefix_wait)
        budgets = (config.pin_budget, config.tenant_pin_budget)
        policy = Policy(config.max_waiting, config.watermark, *waits, config.resume, *budgets)
        self._core = Core(self._boot_id, config.pool_directory, policy, time.monotonic())
        self._core.on_fault = log.warning
        self._core.unix_offset = time.time() - time.monotonic()
        self._log = EventLog(config.event_ring)
        self._log.now = time.time()
        self._former: tuple[Layout, list[BlockRecord | None]] | None = None
        self._records: RecordFile | None = None
        self._peers: dict[int, Peer] = {}
        self._by_frame: dict[bytes, Peer] = {}
        self._locks = WatchedLocks(self._root / "locks", but=LOCK_NAME)
        self._disk: DiskTier | None = None
        self._poller = zmq.Poller()
        self._stopping = False
        self._open_pool()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._bind()
        self._poller.register(self._socket, zmq.POLLIN)
        self._publisher = self._open_publisher()

    def run(self) -> None:
        """Serve until `stop`. Raises PagekeeperError if another may have its place, or nobody reaches it."""
        log.info("event=start endpoint=%s boot_id=%s", self._endpoint, self._boot_id)
        next_look = time.monotonic()
        while not self._stopping:
            busy = self._publisher is not None and self._publisher.busy
            wait = 0.0 if busy else max(next_look - time.monotonic(), 0.0)
            ready = {socket for socket, _ in self._poller.poll(int(wait * 1000) + (not busy))}
            if ready:
                self._receive(next_look)
                self._end_copies()
            if (now := time.monotonic()) >= next_look:
                next_look = now + (SOON if self._core.awaited else TICK)
                self._lock.check()
                check_socket(self._endpoint)
                self._lock.touch()
                self._watch(now)
                self._carry_out(self._core.tick(now))
            if self._publisher is not None:
                self._publisher.turn(ready)
        log.info("event=stop")

    def stop(self) -> None:
        """Make `run` return within a tick. From any thread or signal."""
        self._stopping = True

    def close(self) -> None:
        """Remove socket and lock. The pool and the disk tier stay, for the next start."""
        if self._disk is not None:
            self._disk.close()
        self._socket.close()
        if self._publisher is not None:
            self._publisher.close()
        self._context.term()
        if self._endpoint.startswith("ipc://"):
            Path(self._endpoint.removeprefix("ipc://")).unlink(missing_ok=True)
        if self._records is not None:
            self._records.close()
        self._lock.release()

    def _bind(self) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        try:
            socket.bind(self._endpoint)
        except zmq.ZMQError as error:
            raise PagekeeperError("internal", f"cannot listen on {self._endpoint}: {error}") from error
        if self._endpoint.startswith("ipc://"):
            Path(self._endpoint.removeprefix("ipc://")).chmod(0o600)
        return socket

    def _open_publisher(self) -> EventPublisher | None:
        config = self._config
        if config.kv_events_endpoint == "off":
            return None
        publisher = EventPublisher(
            self._context,
            config.kv_events_endpoint or events_endpoint(config.pool_directory),
            config.kv_events_replay_endpoint or replay_endpoint(config.pool_directory),
            config.kv_events_topic,
            int(time.time() * 1e6),
            config.kv_events_form,
        )
        for socket in publisher.sockets:
            self._poller.register(socket, zmq.POLLIN)
        if self._core.state.pool is not None:
            publisher.attach(self._core.state.pool, time.time())
        return publisher

    # --- the pool -------------------------------------------------------------

    def _open_pool(self) -> None:
        """Take over the pool that an earlier start has left, if it is usable."""
        directory, pool_bytes = self._config.pool_directory, self._config.pool_bytes
        reason = (
            "reset_pool" if self._config.reset_pool else pool_directory.why_unusable(directory, pool_bytes)
        )
        found = pool_directory.read_layout(directory)
        if reason or found is None:
            self._former = self._read_former(reason, found)
            if pool_directory.remove(directory):
                log.warning("event=pool_discarded reason=%r", reason)
            return
        self._records = pool_directory.open_records(directory, found[0])
        survivors = tuple(self._locks)
        pool, quarantines = restore.restore_pool(found[0], self._records.read_all(), survivors, self._log)
        self._core.attach(pool, quarantines, survivors, self._open_tier(found[0]))
        self._core.restore_pins(time.monotonic(), pin_file.read(directory))
        self._carry_out(self._core.tick(time.monotonic()))
        log.info("event=pool_opened blocks=%d cached=%d", pool.num_blocks, len(pool.cached))

    def _read_former(
        self, reason: str, found: tuple[Layout, int] | None
    ) -> tuple[Layout, list[BlockRecord | None]] | None:
        """What the pool holds that is about to be emptied by request, as far as that can be read."""
        if reason != "reset_pool" or found is None:
            return None
        if pool_directory.why_unusable(self._config.pool_directory, found[1] * found[0].block_bytes):
            return None
        records = pool_directory.open_records(self._config.pool_directory, found[0])
        try:
            return found[0], records.read_all()
        finally:
            records.close()

    def _create_pool(self, hello: RunnerHello) -> None:
        """The first runner gives the pool its layout. Raises PagekeeperError."""
        config = self._config
        num_blocks = pool_directory.create(
            config.pool_directory, hello.layout, config.pool_bytes, self._lock.touch
        )
        self._records = pool_directory.open_records(self._config.pool_directory, hello.layout)
        pool = BlockPool(num_blocks, hello.layout, self._log)
        if self._former is not None:
            former, self._former = self._former, None
            self._log.other_layout = restore.former_contents(*former, hello.layout, time.time())
        self._core.attach(pool, tier=self._open_tier(hello.layout))
        if self._publisher is not None:
            self._publisher.attach(pool, time.time())
        log.info("event=pool_created blocks=%d block_bytes=%d", num_blocks, hello.layout.block_bytes)

    def _open_tier(self, layout: Layout) -> Tier | None:
        """The disk tier, if there shall be one and its file can be used; else a line in the log says why."""
        path, size = self._config.disk_tier, self._config.disk_bytes
        if not path:
            return None
        try:
            self._disk = DiskTier(path, size, layout, self._root / "kv.bin")
        except PagekeeperError as error:
            log.warning("event=tier_disabled reason=%r", error.message)
            return None
        disk = self._disk
        if disk.note:
            log.warning("event=tier_discarded reason=%r", disk.note)
        log.info("event=tier_opened slots=%d blocks=%d", disk.num_slots, len(disk.kept))
        self._poller.register(disk.fileno, zmq.POLLIN)
        return Tier(disk.num_slots, disk.kept)

    def _end_copies(self) -> None:
        for ended in self._disk.take() if self._disk is not None else ():
            copy, promotion, good, seconds = ended
            self._carry_out(self._core.copied(time.monotonic(), copy, promotion, good, seconds))

    # --- messages -------------------------------------------------------------

    def _receive(self, until: float) -> None:
        """What has come; at least one message, and none that would begin after `until`."""
        for _ in range(MAX_BATCH):
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            self._take(frames)
            if time.monotonic() >= until:
                return

    def _take(self, frames: list[bytes]) -> None:
        """One message: a Hello, one under a session that holds, or one that is fenced or dropped."""
        if len(frames) != 3:
            self._core.count_dropped()
            return
        identity, session, body = frames
        peer = self._by_frame.get(session)
        if session and (peer is None or peer.identity != identity):
            # An unknown session, or one whose connection broke: what was on its way there is lost.
            self._send(identity, session, Fenced(self._boot_id))
            return
        try:
            message = decode_to_manager(body) if body else None
        except (msgspec.DecodeError, RecursionError):
            self._core.count_dropped()
            return
        if peer is None:
            if isinstance(message, Hello):
                self._hello(identity, message)
            else:
                self._core.count_dropped()
            return
        self._carry_out(self._core.handle(time.monotonic(), peer.client_id, message))

    def _hello(self, identity: bytes, hello: Hello) -> None:
        """Register the client, if it may be."""
        if (refused := self._prepare(hello)) is not None:
            log.warning("event=refused name=%r code=%s message=%r", hello.name, refused.code, refused.message)
            self._send(identity, b"", refused)
            return
        answer, effects = self._core.hello(time.monotonic(), hello)
        assert not isinstance(answer, Refused), answer
        session = answer.session if isinstance(answer, Welcome) else answer
        self._forget(session.client_id)
        peer = Peer(session.client_id, encode(session), identity)
        self._peers[session.client_id] = self._by_frame[peer.frame] = peer
        log.info("event=hello name=%r client=%d kind=%s", hello.name, peer.client_id, type(hello).__name__)
        if isinstance(answer, Welcome):
            self._send(identity, b"", answer)
        self._carry_out(effects)

    def _prepare(self, hello: Hello) -> Refused | None:
        """Its lock must be held, and its layout be that of the pool, which is made for the first."""
        if hello.lock == LOCK_NAME:  # not even opened: closing our own lock file again would drop the lock
            return Refused("invalid_request", f"{hello.name}: the lock file {hello.lock!r} is the manager's")
        try:
            watched = WatchedLock(lock_path(self._config.pool_directory, hello.lock))
        except (PagekeeperError, OSError) as error:
            return Refused("invalid_request", f"{hello.name}: its lock file cannot be opened: {error}")
        refused = self._core.refusal(hello) or self._without_tier(hello)
        if refused is None and not watched.held():
            refused = Refused("invalid_request", f"{hello.name} does not hold its lock file {hello.lock!r}")
        if refused is None and isinstance(hello, RunnerHello) and self._core.layout is None:
            try:
                self._create_pool(hello)
            except (PagekeeperError, OSError) as error:
                refused = Refused(getattr(error, "code", "invalid_request"), str(error))
        if refused is not None:
            watched.close()
            return refused
        if (former := self._locks.put(hello.lock, watched)) is not None:
            log.warning("event=displaced lock=%r as=%r", hello.lock, former)
            self._carry_out(self._core.displaced(time.monotonic(), hello.lock, former))
        return None

    def _without_tier(self, hello: Hello) -> Refused | None:
        """A runner whose blocks are not in `kv.bin`: a tier would keep something else."""
        if not (self._config.disk_tier and isinstance(hello, RunnerHello) and not hello.shared_pool):
            return None
        return Refused(
            "invalid_request",
            f"{hello.name} keeps its blocks in the memory of its device, which the disk tier cannot read; "
            "start the manager without disk_tier, or the runner with device=cpu",
        )

    def _carry_out(self, effects: Effects) -> None:
        pool = self._core.state.pool
        if effects.records and pool is not None and self._records is not None:
            for block in effects.records:
                self._records.write(block, pool.record(block))
        if effects.pins:
            pin_file.write(self._config.pool_directory, effects.pins)
        for client_id, message in effects.messages:
            peer = self._peers.get(client_id)
            if peer is not None:
                self._send(peer.identity, b"" if isinstance(message, Welcome) else peer.frame, message)
        if self._disk is not None:
            for slot in effects.erasures:
                self._disk.erase(slot)
            for copy in effects.demotions:
                self._disk.demote(copy)
            for copy in effects.promotions:
                self._disk.promote(copy)
        for client_id in effects.ended:
            self._forget(client_id)

    def _send(self, identity: bytes, session: bytes, message: Any) -> None:
        """Never waits; what a peer that is gone or does not read cannot take is dropped by the socket."""
        self._socket.send_multipart((identity, session, encode(message)), zmq.DONTWAIT)

    # --- who lives ------------------------------------------------------------

    def _watch(self, now: float) -> None:
        if self._locks.all_held():
            return
        self._receive(now + LAST_WORDS)  # of those that have died
        for name in self._locks.take_dead():
            log.info("event=died lock=%r", name)
            self._carry_out(self._core.process_died(now, name))

    def _forget(self, client_id: int) -> None:
        peer = self._peers.pop(client_id, None)
        if peer is not None:
            del self._by_frame[peer.frame]
