"""Commands on what is cached: part of `kvmanager.protocol`, from where it is to be imported."""

from kvmanager.messages.introspection import At, HolderInfo
from kvmanager.messages.sampling_params import Message


class Evict(Message, frozen=True, tag=True):
    """Evict what is cached of a prefix (its last full block and all that follow; no tokens: all) under a
    salt. What is in use stays. It is done in parts: say it again while `more`.
    """

    query_id: int
    token_ids: tuple[int, ...] = ()
    cache_salt: str = ""
    all_salts: bool = False  # with no tokens and no salt: of every salt (of the tenant, if one is given)
    tenant: str = ""


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
    in_use: int = 0  # blocks that stay because someone holds them, of all messages of this command so far
    blockers: tuple[HolderInfo, ...] = ()
    more: bool = False
    code: str = ""
    message: str = ""
