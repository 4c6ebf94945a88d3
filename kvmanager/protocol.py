"""Every message between frontends, the KV manager and runners: declared once, as frozen tagged Structs (their
parts that say how to choose tokens in `sampling_params`, figures in `stats`, questions about the cache in
`introspection_messages` and so on).

Transport and framing
    Clients (frontends, runners) hold a DEALER socket to the manager's ROUTER. A message is two frames:
    `[session][body]`. `session` is an encoded `Session` (empty only for a Hello); the manager compares it as
    bytes, so fencing costs one dictionary lookup. `body` is a MessagePack array whose first item is the
    type's name. Runners push `TokenBatch` straight to the frontend's PULL socket in one frame: the manager
    is not on the token path.

Sessions
    A Hello is answered with `Welcome` (or `Refused`). Everything sent later carries that session; a stale
    one is answered `Fenced`, and its sender starts over with a Hello. A client drops what arrives under
    another session.

Blocks
    A block is always named together with its generation (`BlockRef`), so that a late message cannot touch
    its next life.
"""

from typing import Literal

import msgspec

from kvmanager.messages.commands import MAX_COUNTED as MAX_COUNTED
from kvmanager.messages.commands import Clear as Clear
from kvmanager.messages.commands import Cleared as Cleared
from kvmanager.messages.commands import Evict as Evict
from kvmanager.messages.events import CacheEvent as CacheEvent
from kvmanager.messages.events import EventsPage as EventsPage
from kvmanager.messages.events import EventsQuery as EventsQuery
from kvmanager.messages.introspection import FLAG_IN_TIER as FLAG_IN_TIER
from kvmanager.messages.introspection import FLAG_OTHER as FLAG_OTHER
from kvmanager.messages.introspection import FLAG_PARTIAL as FLAG_PARTIAL
from kvmanager.messages.introspection import FLAG_PINNED as FLAG_PINNED
from kvmanager.messages.introspection import MAX_PAGE as MAX_PAGE
from kvmanager.messages.introspection import MAX_PART as MAX_PART
from kvmanager.messages.introspection import At as At
from kvmanager.messages.introspection import AuditPage as AuditPage
from kvmanager.messages.introspection import AuditQuery as AuditQuery
from kvmanager.messages.introspection import BlockDetail as BlockDetail
from kvmanager.messages.introspection import BlockQuery as BlockQuery
from kvmanager.messages.introspection import BlocksPage as BlocksPage
from kvmanager.messages.introspection import BlocksQuery as BlocksQuery
from kvmanager.messages.introspection import Cause as Cause
from kvmanager.messages.introspection import Eviction as Eviction
from kvmanager.messages.introspection import ExplainQuery as ExplainQuery
from kvmanager.messages.introspection import Explanation as Explanation
from kvmanager.messages.introspection import HolderInfo as HolderInfo
from kvmanager.messages.introspection import HoldersAnswer as HoldersAnswer
from kvmanager.messages.introspection import HoldersQuery as HoldersQuery
from kvmanager.messages.introspection import Lookup as Lookup
from kvmanager.messages.introspection import Outcome as Outcome
from kvmanager.messages.introspection import PlanAnswer as PlanAnswer
from kvmanager.messages.introspection import PlanQuery as PlanQuery
from kvmanager.messages.introspection import ProcessInfo as ProcessInfo
from kvmanager.messages.introspection import RequestInfo as RequestInfo
from kvmanager.messages.introspection import RequestKind as RequestKind
from kvmanager.messages.introspection import RequestsPage as RequestsPage
from kvmanager.messages.introspection import RequestsQuery as RequestsQuery
from kvmanager.messages.introspection import SequenceInfo as SequenceInfo
from kvmanager.messages.introspection import Sibling as Sibling
from kvmanager.messages.introspection import TextPart as TextPart
from kvmanager.messages.introspection import own_number as own_number
from kvmanager.messages.introspection import own_numbers as own_numbers
from kvmanager.messages.pins import Pin as Pin
from kvmanager.messages.pins import Pinned as Pinned
from kvmanager.messages.pins import PinsAnswer as PinsAnswer
from kvmanager.messages.pins import PinsQuery as PinsQuery
from kvmanager.messages.pins import Unpin as Unpin
from kvmanager.messages.sampling_params import MAX_VOCABULARY as MAX_VOCABULARY
from kvmanager.messages.sampling_params import BeamParams as BeamParams
from kvmanager.messages.sampling_params import Message as Message
from kvmanager.messages.sampling_params import SamplingParams as SamplingParams
from kvmanager.messages.sampling_params import find_sampling_fault as find_sampling_fault
from kvmanager.messages.stats import PoolStats as PoolStats
from kvmanager.messages.stats import RunnerStats as RunnerStats
from kvmanager.messages.stats import TierStats as TierStats
from kvmanager.messages.steps import BlockRef as BlockRef
from kvmanager.messages.steps import Copied as Copied
from kvmanager.messages.steps import Ended as Ended
from kvmanager.messages.steps import Forked as Forked
from kvmanager.messages.steps import HeldSequence as HeldSequence
from kvmanager.messages.steps import HeldStart as HeldStart
from kvmanager.messages.steps import Holdings as Holdings
from kvmanager.messages.steps import Progress as Progress
from kvmanager.messages.steps import StepReport as StepReport
from kvmanager.messages.steps import Taken as Taken
from kvmanager.messages.tokens import BeamPath as BeamPath
from kvmanager.messages.tokens import BeamScore as BeamScore
from kvmanager.messages.tokens import SearchState as SearchState
from kvmanager.messages.tokens import TokenBatch as TokenBatch
from kvmanager.messages.tokens import TokenEvent as TokenEvent
from kvmanager.messages.tokens import TokenLogprobs as TokenLogprobs

PROTOCOL_VERSION = 1

# Limits: what a single message may hold. The manager drops and counts what goes beyond them.
MAX_FRAME_BYTES = 64 * 1024 * 1024
MAX_PROMPT_TOKENS = 1 << 20
MAX_CHOICES = 128
MAX_BEAMS = MAX_CHOICES // 2  # those forked off need numbers beside those that they replace
MAX_ID_CHARS = 128
MAX_TEXT_CHARS = 4096


# --- parts --------------------------------------------------------------------------------------------------


class Session(Message, frozen=True):
    """One registration of one process with one start of the manager."""

    boot_id: str
    client_id: int
    incarnation: int


class Layout(Message, frozen=True):
    """What a pool's bytes mean; two processes share a pool only if their layouts are equal in every field."""

    model: str  # fingerprint: hex SHA-256 over the weights and the config
    dtype: Literal["float32", "float16", "bfloat16"]
    block_size: int  # tokens
    num_layers: int
    num_kv_heads: int
    head_dim: int

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: all layers, K and V."""
        width = 4 if self.dtype == "float32" else 2
        return self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim * width


class Choice(Message, frozen=True):
    """One of a request's `n` token streams, with what it has produced so far (empty unless it is resumed)."""

    index: int
    output_token_ids: tuple[int, ...] = ()


# --- hello --------------------------------------------------------------------------------------------------


class FrontendHello(Message, frozen=True, tag=True):
    """A frontend registers. `lock` names its file in the pool directory's `locks/`, held while it lives."""

    version: int
    name: str
    lock: str
    token_endpoint: str  # where runners push TokenBatch


class RunnerHello(Message, frozen=True, tag=True):
    """A runner registers, before it maps the pool. The first one to do so gives a new pool its layout."""

    version: int
    name: str
    lock: str
    layout: Layout
    max_num_seqs: int
    max_model_len: int  # tokens
    shared_pool: bool = True  # false: its blocks are in its device's memory, and `kv.bin` does not hold them
    holdings: Holdings | None = None  # what runs here since an earlier start of the manager, and goes on


class Welcome(Message, frozen=True, tag=True):
    """The answer to a Hello. For runners the pool exists when this arrives.

    To one with holdings it comes when all who lived through the manager's restart have spoken, or after a
    time.
    """

    session: Session
    pool_directory: str
    num_blocks: int  # 0 for a frontend that comes before the first runner
    kept: tuple[int, ...] = ()  # start_ids of the holdings that go on; if there are any, credits are kept too


class Refused(Message, frozen=True, tag=True):
    """A Hello that cannot be served (version, layout); the process should exit with this message."""

    code: str
    message: str


class Fenced(Message, frozen=True, tag=True):
    """The sender's session is not (or no longer) known: start over with a Hello."""

    boot_id: str


# --- frontend → manager -------------------------------------------------------------------------------------


class Submit(Message, frozen=True, tag=True):
    """Run a request. Idempotent by (client, request_id, attempt); a higher attempt replaces a lower one.

    As a `claim` it says what this very attempt is, which an earlier start of the manager may have started: it
    is answered Accepted if a runner has it, and NotHeld if none has.
    """

    request_id: str
    attempt: int
    arrival: float  # seconds, CLOCK_MONOTONIC of the host; kept over resubmits, so that order is kept too
    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    sampling: SamplingParams
    priority: int = 0  # lower runs earlier
    cache_salt: str = ""
    read_cache: bool = True  # false: compute every token (prompt_logprobs need all logits)
    tenant: str = ""  # whose cache it uses: see `hashing.salt_digest`; empty: that of all who have none
    search: SearchState | None = None  # of a beam search that goes on; its beams are the choices' outputs
    claim: bool = False


class Claimed(Message, frozen=True, tag=True):
    """All claims of this session have been sent."""


class Cancel(Message, frozen=True, tag=True):
    """Drop a request, whatever its state (disconnect, stop string found). Unknown ones are ignored."""

    request_id: str
    attempt: int


class StatsQuery(Message, frozen=True, tag=True):
    query_id: int


# --- manager → frontend -------------------------------------------------------------------------------------


class Accepted(Message, frozen=True, tag=True):
    request_id: str
    attempt: int


class Rejected(Message, frozen=True, tag=True):
    """The request will not run. `code` is a wire code of `kvmanager.errors`; frontends make it HTTP."""

    request_id: str
    attempt: int
    code: str
    message: str
    retry_after: float = 0.0  # seconds; 0 when trying again cannot help


class RunnerLost(Message, frozen=True, tag=True):
    """The runner of these (request_id, attempt) died: submit again with what was already received."""

    requests: tuple[tuple[str, int], ...]


class NotHeld(Message, frozen=True, tag=True):
    """No runner has anything of these claims, (request_id, attempt): submit again, as after RunnerLost."""

    requests: tuple[tuple[str, int], ...]


class Stats(Message, frozen=True, tag=True):
    """Answer to StatsQuery. Counters only rise within one boot."""

    query_id: int
    pool: PoolStats
    runners: tuple[RunnerStats, ...]
    waiting: int  # requests
    running: int  # requests
    prefix_cache_queries: int  # tokens looked up, once per admitted request
    prefix_cache_hits: int  # tokens found
    preemptions: int
    evictions: int
    rejected: int
    dropped_messages: int
    prefix_waits: int = 0  # times that a request waited for a prefix that another one computed
    recomputed_tokens: int = 0  # computed once more after a preemption
    used_tokens: int = 0  # gauge: slots that hold a token, of those in reserved and sealed blocks
    tier: TierStats = TierStats()
    at: At = At("", 0)


# --- runner → manager ---------------------------------------------------------------------------------------


class Ready(Message, frozen=True, tag=True):
    """The runner has mapped the pool and warmed up: starts may come."""


class Draining(Message, frozen=True, tag=True):
    """The process is about to end: no new starts, please, and what runs is to be preempted, for another."""


# --- manager → runner ---------------------------------------------------------------------------------------


class SequenceStart(Message, frozen=True):
    """One sequence to run: prompt + `output_token_ids` are its tokens, of which `num_cached_tokens` are in
    its blocks.

    Of the cached tokens, those beyond the last full block are still to be copied, before anything of the
    sequence is computed: `copy_from` begins with them, and is held until `sources_read` names the sequence.

    The table holds blocks for all tokens given; further ones come from credits. When the last given token
    has been computed, the sequence forks into `forks` (choices with the same output so far, most often none).
    """

    choice: int
    output_token_ids: tuple[int, ...]
    block_table: tuple[BlockRef, ...]
    num_cached_tokens: int
    forks: tuple[int, ...] = ()
    copy_from: BlockRef | None = None


class Start(Message, frozen=True):
    """Run a request. `start_id` is new for every start, so that reports of an earlier one are stale."""

    start_id: int
    request_id: str
    attempt: int
    token_endpoint: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    sequences: tuple[SequenceStart, ...]
    search: SearchState | None = None  # its beams are those of the sequences, in order; None: it begins


class Directives(Message, frozen=True, tag=True):
    """What the runner shall do at its next step. `Ended` per sequence acknowledges cancels and preempts."""

    starts: tuple[Start, ...] = ()
    cancels: tuple[int, ...] = ()  # start_ids
    preempts: tuple[int, ...] = ()  # start_ids
    credits: tuple[BlockRef, ...] = ()
    dismissed: bool = False  # the answer to Draining, once nothing of the runner's is left here: it may end


# --- unions and codecs --------------------------------------------------------------------------------------

Hello = FrontendHello | RunnerHello
Question = (
    ExplainQuery
    | PlanQuery
    | BlocksQuery
    | BlockQuery
    | HoldersQuery
    | RequestsQuery
    | AuditQuery
    | EventsQuery
)
Query = StatsQuery | Pin | Unpin | PinsQuery | TextPart | Question | Evict | Clear
FrontendToManager = FrontendHello | Submit | Claimed | Cancel | Query
RunnerToManager = RunnerHello | Ready | Draining | StepReport
ToManager = FrontendToManager | RunnerToManager
Page = BlocksPage | BlockDetail | HoldersAnswer | RequestsPage | AuditPage | EventsPage
Answer = Stats | PinsAnswer | Explanation | PlanAnswer | Page | Cleared
"""What answers a Query, by its `query_id`."""
ManagerToFrontend = Welcome | Refused | Fenced | Accepted | Rejected | RunnerLost | NotHeld | Answer
ManagerToRunner = Welcome | Refused | Fenced | Directives

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
decode_to_manager = msgspec.msgpack.Decoder(ToManager).decode
decode_to_frontend = msgspec.msgpack.Decoder(ManagerToFrontend).decode
decode_to_runner = msgspec.msgpack.Decoder(ManagerToRunner).decode
decode_token_batch = msgspec.msgpack.Decoder(TokenBatch).decode
decode_session = msgspec.msgpack.Decoder(Session).decode
