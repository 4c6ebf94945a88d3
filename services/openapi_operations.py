"""Every route as OpenAPI knows it: what it takes and what it answers. A test compares it with the app."""

from dataclasses import dataclass
from typing import Any, Final

import msgspec

from services.api.openai_responses import (
    ChatCompletion,
    Completion,
    DeletedStream,
    ModelCard,
    ModelList,
    Text,
    Tokens,
)
from services.api.openai_types import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from services.errors import ErrorEnvelope
from services.kv import answers, state_answers, types
from services.kv.pages import MAX_BLOCK_ID, MAX_CURSOR_CHARS, MAX_LEVELS, MAX_MAP, MAX_NODES, MAX_QUERY_CHARS
from services.kv.state import MAX_REQUEST_CURSOR, REQUEST_STATES
from services.kv.tree import SORTS

Schema = dict[str, Any]

STREAM: Final = "text/event-stream"


@dataclass(frozen=True)
class Parameter:
    name: str
    schema: Schema
    what: str
    place: str = "query"
    required: bool = False


@dataclass(frozen=True)
class Operation:
    """`answer` is the body of status 200; `others` those of other statuses; `media` more content types."""

    method: str
    path: str
    tag: str
    what: str
    body: type[msgspec.Struct] | None = None
    answer: type[msgspec.Struct] | None = None
    parameters: tuple[Parameter, ...] = ()
    media: tuple[str, ...] = ()
    others: tuple[tuple[str, type[msgspec.Struct] | None, str], ...] = ()


def _text(longest: int) -> Schema:
    return {"type": "string", "maxLength": longest}


def _number(low: int, high: int, default: int | None = None) -> Schema:
    schema: Schema = {"type": "integer", "minimum": low, "maximum": high}
    return schema if default is None else {**schema, "default": default}


def _choice(*values: str) -> Schema:
    return {"type": "string", "enum": list(values), "default": values[0]}


DIGEST: Final[Schema] = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
LAST_EVENT: Final = Parameter("Last-Event-ID", {"type": "string"}, "where to go on", "header")
NAME: Final = Parameter("name", {"type": "string", "minLength": 1}, "the pin's", required=True)

API: Final = (
    Operation("GET", "/v1/models", "api", "The one model that is served.", answer=ModelList),
    Operation(
        "GET",
        "/v1/models/{model}",
        "api",
        "That model.",
        answer=ModelCard,
        parameters=(Parameter("model", {"type": "string"}, "its name", "path", True),),
    ),
    Operation(
        "POST",
        "/v1/completions",
        "api",
        "Text completion; with `stream` as server-sent events.",
        CompletionRequest,
        Completion,
        media=(STREAM,),
    ),
    Operation(
        "POST",
        "/v1/chat/completions",
        "api",
        "Chat; with `stream` as server-sent events.",
        ChatRequest,
        ChatCompletion,
        media=(STREAM,),
    ),
    Operation(
        "GET",
        "/v1/streams/{id}",
        "api",
        "Go on with a resumable stream.",
        parameters=(
            Parameter("id", {"type": "string"}, "the answer's id", "path", True),
            LAST_EVENT,
        ),
        media=(STREAM,),
        others=(("204", None, "Nothing is left to say."),),
    ),
    Operation(
        "DELETE",
        "/v1/streams/{id}",
        "api",
        "End a resumable stream.",
        answer=DeletedStream,
        parameters=(Parameter("id", {"type": "string"}, "the answer's id", "path", True),),
    ),
    Operation("POST", "/tokenize", "api", "Text or messages to token ids.", TokenizeRequest, Tokens),
    Operation("POST", "/detokenize", "api", "Token ids to text.", DetokenizeRequest, Text),
)

CACHE: Final = (
    Operation("GET", "/kv/stats", "cache", "Figures.", answer=state_answers.StatsAnswer),
    Operation(
        "GET",
        "/kv/map",
        "cache",
        "A letter and some figures per block.",
        answer=answers.MapAnswer,
        parameters=(
            Parameter("first", _number(0, MAX_BLOCK_ID, 0), "the first block"),
            Parameter("limit", _number(1, MAX_MAP, 2048), "how many"),
            Parameter("since", _number(0, 1 << 48, 0), "has no effect"),
        ),
    ),
    Operation(
        "GET",
        "/kv/blocks/{id}",
        "cache",
        "One block, with its text and who holds it.",
        answer=answers.BlockAnswer,
        parameters=(Parameter("id", _number(0, (1 << 48) - 1), "its number", "path", True),),
    ),
    Operation(
        "GET",
        "/kv/prefixes",
        "cache",
        "The tree of cached prefixes.",
        answer=answers.PrefixesAnswer,
        parameters=(
            Parameter("parent", DIGEST, "only what is below the node with this block"),
            Parameter("depth", _number(1, MAX_LEVELS), "how many levels"),
            Parameter("limit", _number(1, MAX_NODES, 100), "nodes of one answer"),
            Parameter("sort", _choice(*SORTS), "how those of one parent are sorted, by what they have below"),
            Parameter("order", _choice("desc", "asc"), "in which direction"),
            Parameter("cursor", _text(MAX_CURSOR_CHARS), "`next_cursor` of the page before"),
            Parameter("q", _text(MAX_QUERY_CHARS), "only nodes whose text has it, and those above them"),
        ),
    ),
    Operation(
        "GET",
        "/kv/requests",
        "cache",
        "Requests that are live, or ended lately.",
        answer=state_answers.RequestsAnswer,
        parameters=(
            Parameter("state", _choice(*REQUEST_STATES), "only these"),
            Parameter("cursor", _text(MAX_REQUEST_CURSOR), "`next_cursor` of the page before"),
            Parameter("limit", _number(1, 2048, 256), "how many"),
        ),
    ),
    Operation(
        "GET",
        "/kv/requests/{id}",
        "cache",
        "One of them, with its block tables.",
        answer=state_answers.RequestAnswer,
        parameters=(Parameter("id", {"type": "string"}, "its id, or the answer's", "path", True),),
    ),
    Operation("GET", "/kv/holders", "cache", "Who keeps blocks in use.", answer=state_answers.HoldersAnswer),
    Operation("GET", "/kv/audit", "cache", "Check every invariant.", answer=state_answers.AuditAnswer),
    Operation(
        "GET",
        "/kv/events",
        "cache",
        "What changes, as server-sent events: a snapshot, then the tail.",
        parameters=(Parameter("snapshot", _choice("1", "0"), "0 leaves it out"), LAST_EVENT),
        media=(STREAM,),
    ),
    Operation(
        "POST",
        "/kv/explain",
        "cache",
        "What a request would find, and why not more.",
        types.PromptRequest,
        answers.ExplainAnswer,
    ),
    Operation(
        "POST",
        "/kv/plan",
        "cache",
        "What admission would do with a request now.",
        types.PlanRequest,
        answers.PlanCard,
    ),
    Operation(
        "POST",
        "/kv/warm",
        "cache",
        "Compute a prompt without answering it.",
        types.WarmRequest,
        answers.WarmAnswer,
        media=(STREAM,),
    ),
    Operation("POST", "/kv/evict", "cache", "Drop what is cached.", types.EvictRequest, answers.EvictAnswer),
    Operation(
        "POST",
        "/kv/clear",
        "cache",
        "Forget all that is cached.",
        types.ClearRequest,
        answers.EvictAnswer,
        others=(("409", answers.ClearRefused, "Some of it is in use."),),
    ),
    Operation("GET", "/kv/pins", "cache", "Every pin.", answer=answers.PinList),
    Operation("POST", "/kv/pins", "cache", "Pin a prefix.", types.PinRequest, answers.PinCard),
    Operation("DELETE", "/kv/pins", "cache", "End a pin.", answer=answers.Nothing, parameters=(NAME,)),
    Operation("GET", "/kv/ui", "cache", "The page that shows all this.", media=("text/html",)),
    Operation(
        "GET",
        "/kv/ui/{file}",
        "cache",
        "Its files.",
        parameters=(Parameter("file", {"type": "string"}, "the file's name", "path", True),),
        media=("text/html", "text/css", "text/javascript", "image/svg+xml"),
    ),
)

SERVER: Final = (
    Operation("GET", "/health", "server", "The process lives.", answer=answers.Nothing),
    Operation("GET", "/ready", "server", "A request would run.", answer=answers.Ready),
    Operation("GET", "/metrics", "server", "Prometheus' text format.", media=("text/plain",)),
    Operation("GET", "/openapi.json", "server", "This document.", media=("application/json",)),
)

OPERATIONS: Final = (*API, *CACHE, *SERVER)
ERROR: Final = ErrorEnvelope
