"""Pins on cached prefixes: part of `kvmanager.protocol`, from where it is to be imported."""

from kvmanager.messages.sampling_params import Message


class Pin(Message, frozen=True, tag=True):
    """Keep what is cached of these tokens from being evicted. One of the same name is replaced. A large pin
    takes its blocks in parts, and the answer comes when it has them all, or none.
    """

    query_id: int
    name: str  # 1 to MAX_ID_CHARS characters
    token_ids: tuple[int, ...]
    cache_salt: str
    ttl: float  # seconds
    tenant: str = ""  # whose pin it is: names are per tenant, and so is what is cached
    start: int = 0  # as of TextPart


class Unpin(Message, frozen=True, tag=True):
    query_id: int
    name: str
    tenant: str = ""


class PinsQuery(Message, frozen=True, tag=True):
    query_id: int
    tenant: str = ""  # empty: every pin


class Pinned(Message, frozen=True):
    """One pin."""

    name: str
    blocks: int
    tokens: int  # how many of those asked for were cached, and so are held
    expires_in: float  # seconds
    tenant: str = ""  # whose it is, in an answer to a query for every pin


class PinsAnswer(Message, frozen=True, tag=True):
    """Answer to Pin, Unpin and PinsQuery: every pin of the tenant by name, as it is now. A block of two pins
    counts once.

    `code` is empty, or the wire code for which a Pin or Unpin was refused, and then nothing has changed.
    """

    query_id: int
    pins: tuple[Pinned, ...]
    pinned_blocks: int
    budget_blocks: int
    code: str = ""
    message: str = ""
