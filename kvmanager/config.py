"""Settings of the KV manager's process."""

from dataclasses import dataclass

from kvmanager.asking.event_log import DEFAULT_RING
from kvmanager.paths import default_pool_directory
from kvmanager.settings import parse_bytes, setting
from kvmanager.tier.tiering import RESUME_CHOICES


@dataclass(frozen=True)
class ManagerConfig:
    """The KV manager: owns the block pool, the reference counts and the prefix index."""

    pool_directory: str = setting(default_pool_directory(), "where the pool, its locks and its sockets lie")
    manager: str = setting("", "ZeroMQ endpoint of the manager; none: a socket in the pool directory")
    pool_bytes: int = setting(
        1 << 30, "size of a new pool's block data", unit="bytes", parse=parse_bytes, minimum=1
    )
    reset_pool: bool = setting(False, "start with an empty pool, whatever the directory holds")
    max_waiting: int = setting(1024, "requests that may wait; more are refused", unit="requests", minimum=1)
    watermark: float = setting(
        0.01, "share of the pool left free when a request starts while others run", minimum=0.0, maximum=0.5
    )
    runner_wait: float = setting(
        30.0, "how long requests wait while no runner is there or makes progress", unit="seconds", minimum=0.0
    )
    prefix_wait: float = setting(
        10.0,
        "how long requests wait for a prefix whose computing makes no progress; 0: not at all",
        unit="seconds",
        minimum=0.0,
    )
    pin_budget: float = setting(
        0.25, "share of the pool that pins may hold together", minimum=0.0, maximum=0.9
    )
    tenant_pin_budget: float = setting(
        0.05,
        "share of the pool that the pins of one tenant may hold; at most pin_budget by the number of tenants "
        "so that none takes another's",
        minimum=0.0,
        maximum=0.9,
    )
    event_ring: int = setting(
        DEFAULT_RING, "changes of the cache that are remembered", unit="events", minimum=1024, maximum=1 << 24
    )
    kv_events_endpoint: str = setting(
        "",
        "ZeroMQ endpoint of the events that routers follow; none: a socket in the pool directory; "
        "off: no events",
    )
    kv_events_replay_endpoint: str = setting(
        "", "ZeroMQ endpoint where they ask for events that they missed; none: a socket in the pool directory"
    )
    kv_events_topic: str = setting("kv-events", "topic of the events")
    kv_events_form: str = setting(
        "array",
        "form of each event: array, which routers know best, or map, as vLLM's are since 0.24",
        choices=("array", "map"),
    )
    disk_tier: str = setting("", "file that keeps evicted blocks, also over restarts; none: no disk tier")
    disk_bytes: int = setting(
        10 << 30, "what the disk tier's file may take at most", unit="bytes", parse=parse_bytes, minimum=1
    )
    resume: str = setting(
        "auto",
        "how blocks come back from the disk tier: where copying is cheaper than computing by measured rates, "
        "always, or as auto but never for preempted requests",
        choices=RESUME_CHOICES,
    )
