"""Commands on what is cached: part of `kvmanager.protocol`, from where it is to be imported."""

from kvmanager.messages.introspection import At, HolderInfo
from kvmanager.messages.sampling_params import Message

MAX_COUNTED = 8192  # blocks in use


class Evict(Message, frozen=True, tag=True):
    """Evict what is cached of a prefix (its last full block and all that follow; no tokens: all) under a
    salt. What is in use stays. It is done in parts: say it again while `more`; instead of the tokens, with
    the `prefix` of the answer, if it has one.
    """

    query_id: int
    token_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    all_salts: bool = False  # with no tokens and no salt: of every salt (of the tenant, if one is given)
    tenant: str = ""
    start: int = 0  # as of TextPart
    prefix: bytes = b""  # hash of that last full block, instead of the tokens


class Clear(Message, frozen=True, tag=True):
    """Forget all that is cached, of a tenant or of all, the tier's too. Refused while any of it is in use,
    unless `force`: then that is no longer found, but stays with those who hold it until they release it; pins
    end. It is done in parts: say it again while `more`.
    """

    query_id: int
    force: bool = False
    tenant: str = ""


class Cleared(Message, frozen=True, tag=True):
    """Answer to Evict and Clear. `code` is empty, or why nothing was done."""

    query_id: int
    at: At
    evicted: int = 0  # blocks that this message has forgotten, in the pool and the tier
    in_use: int = 0
    """Blocks that stay because someone holds them, of all messages of this command so far. If it was refused,
    no more than MAX_COUNTED are counted.
    """
    blockers: tuple[HolderInfo, ...] = ()
    more: bool = False
    code: str = ""
    message: str = ""
    prefix: bytes = b""  # of an Evict: what stands for its tokens when it is said again
