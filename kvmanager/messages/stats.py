"""The figures that the manager answers a StatsQuery with, by what they are about."""

from kvmanager.messages.sampling_params import Message


class PoolStats(Message, frozen=True):
    """Blocks by state; they add up to `num_blocks`."""

    num_blocks: int
    block_size: int  # tokens
    free: int
    reserved: int
    sealed: int
    cached: int
    quarantined: int


class RunnerStats(Message, frozen=True):
    """One runner, as the manager sees it. Counters only rise within one incarnation."""

    name: str
    client_id: int
    ready: bool
    draining: bool
    running: int  # sequences
    credits: int  # blocks
    last_report_age: float  # seconds


class TierStats(Message, frozen=True):
    """The tier below the pool; all zeros while there is none. Counters only rise within one boot."""

    num_slots: int = 0  # blocks that it may hold
    blocks: int = 0
    bytes: int = 0
    demotions: int = 0
    promotions: int = 0
    failures: int = 0  # copies that failed, either way
