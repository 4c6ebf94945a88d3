"""What changes in the cache, one numbered event each: part of `kvmanager.protocol`, from where it is to be
imported.
"""

from typing import Literal

from kvmanager.messages.introspection import At, Cause
from kvmanager.messages.sampling_params import Message


class CacheEvent(Message, frozen=True):
    """Content became findable ("stored"), or no longer is ("removed"), in the pool or the tier; or all of it
    is gone ("cleared").
    """

    sequence: int
    time: float  # seconds, Unix time
    kind: Literal["stored", "removed", "cleared"]
    tier: Literal["pool", "disk"] = "pool"
    block_hash: bytes = b""
    parent_hash: bytes = b""
    tokens: bytes = b""  # packed; of "stored" only
    salt: bytes = b""
    block: int = -1
    cause: Cause | Literal[""] = ""  # of "removed"
    request_id: str = ""


class EventsQuery(Message, frozen=True, tag=True):
    """Events after `after` of the start `boot_id` (empty: only where the sequence stands)."""

    query_id: int
    boot_id: str = ""
    after: int = 0
    limit: int = 1024
    tenant: str = ""


class EventsPage(Message, frozen=True, tag=True):
    """Answer to EventsQuery. `gap`: they do not follow on `after`; take a snapshot (BlocksQuery) and go on
    from there. `at.sequence` is that of the last one of this page.
    """

    query_id: int
    at: At
    events: tuple[CacheEvent, ...]
    gap: bool = False
    more: bool = False
