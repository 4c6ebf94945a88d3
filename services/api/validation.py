"""From a body's bytes to checked values: every error names the field, the value and what is allowed."""

import asyncio
import re
import secrets
from collections.abc import Sequence
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from kvmanager.protocol import MAX_CHOICES, BeamParams, SamplingParams
from services.api.openai_types import (
    MAX_STOP_CHARS,
    MAX_STOPS,
    NEUTRAL,
    REFUSED,
    GenerationRequest,
)
from services.config import FrontendConfig
from services.errors import ApiError, invalid

Body = TypeVar("Body", bound=msgspec.Struct)

MAX_LOGPROBS: Final = 20
MAX_STOP_TOKENS: Final = 256
MAX_LOGIT_BIAS: Final = 1024
MAX_SALT_CHARS: Final = 256
MAX_SHOWN_CHARS: Final = 200  # of what a client wrote, in an error
_SEED_MASK: Final = (1 << 63) - 1
_SEED_LIMIT: Final = 1 << 63

_PATH = re.compile(r" - at `\$\.?(.*)`$")
_UNKNOWN = re.compile(r"^Object contains unknown field `(.*)`")
_MISSING = re.compile(r"^Object missing required field `(.*?)`")

RANGES: Final[tuple[tuple[str, float, float], ...]] = (
    ("temperature", 0.0, 2.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 1e-6, 10.0),
    ("n", 1, MAX_CHOICES),
    ("top_k", -1, 1 << 30),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
    ("min_tokens", 0, 1 << 30),
    ("priority", -(1 << 31), (1 << 31) - 1),
    ("seed", -_SEED_LIMIT, _SEED_LIMIT - 1),
    ("top_logprobs", 0, MAX_LOGPROBS),
    ("best_of", 1, MAX_CHOICES),
)


async def read_body(request: Request, limit: int) -> bytes:
    """The body, at most `limit` bytes, however it is sent. Raises ApiError 413, or ClientDisconnect."""
    declared = request.headers.get("content-length", "0")
    size = int(declared) if declared.isdecimal() else 0
    parts: list[bytes] = []
    if size <= limit:
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > limit:
                break
            parts.append(part)
    if size > limit:
        message = f"the body has more than the {limit} bytes that are allowed"
        raise ApiError(413, message, code="request_too_large", headers={"connection": "close"})
    return b"".join(parts)


async def decode_request(
    request: Request, decoder: "msgspec.json.Decoder[Body]", config: FrontendConfig
) -> Body:
    """Read and decode the body. Raises ApiError 400, 408 or 413."""
    try:
        async with asyncio.timeout(config.client_timeout_seconds):
            data = await read_body(request, config.max_body_bytes)
    except ClientDisconnect:
        raise ApiError(
            400, "the client went away while it sent the body", code="client_disconnected"
        ) from None
    except TimeoutError:
        message = f"the body did not arrive within {config.client_timeout_seconds:g} s"
        raise ApiError(408, message, code="timeout", headers={"connection": "close"}) from None
    return decode(decoder, data)


def decode(decoder: "msgspec.json.Decoder[Body]", data: bytes) -> Body:
    """JSON of the given type. Raises ApiError 400 that names the field's path."""
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None


def _wrong_field(text: str) -> ApiError:
    path = _PATH.search(text)
    where = path.group(1) if path else ""
    text = text[: path.start()] if path else text
    for pattern, code, words in (
        (_UNKNOWN, "unknown_parameter", "unknown field `{}`: it is not supported; remove it"),
        (_MISSING, "missing_required_parameter", "the field `{}` is missing"),
    ):
        if found := pattern.match(text):
            name = (f"{where}.{found.group(1)}" if where else found.group(1))[:MAX_SHOWN_CHARS]
            return invalid(name, words.format(name), code)
    if not where:
        return ApiError(400, f"wrong body: {text}", code="invalid_type")
    return invalid(where, f"`{where}`: {text[:1].lower()}{text[1:]}", "invalid_type")


def check_common(body: GenerationRequest) -> None:
    """Everything that can be said without the model: unsupported fields, ranges. Raises ApiError 400."""
    for name in REFUSED:
        refuse(name, getattr(body, name, None))
    for name, low, high in RANGES:
        value = getattr(body, name, None)
        if value is not None and not isinstance(value, bool) and not low <= value <= high:
            raise invalid(name, f"`{name}` is {value}; want {_number(low)} to {_number(high)}")
    if body.top_p is not None and not 0 < body.top_p <= 1:
        raise invalid("top_p", f"`top_p` is {body.top_p}; want more than 0, at most 1")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "`stream_options` is only allowed with `stream`: true")
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs", "`prompt_logprobs` cannot be streamed; set `stream` to false")
    if body.cache_salt is not None and not 1 <= len(body.cache_salt) <= MAX_SALT_CHARS:
        raise invalid(
            "cache_salt", f"`cache_salt` has {len(body.cache_salt)} characters; want 1 to {MAX_SALT_CHARS}"
        )


def _number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def refuse(name: str, value: Any) -> None:
    """Raises ApiError 400 unless `value` asks for nothing."""
    if value is None or value is False or value in ([], {}) or value in NEUTRAL.get(name, ()):
        return
    raise invalid(name, f"`{name}` is not supported by this server; remove it", "unsupported_parameter")


def stop_strings(body: GenerationRequest) -> list[str]:
    """The stop strings. Raises ApiError 400 for too many, empty or very long ones."""
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if len(stops) > MAX_STOPS:
        raise invalid("stop", f"`stop` has {len(stops)} strings; at most {MAX_STOPS} are allowed")
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            raise invalid("stop", f"a `stop` string has {len(stop)} characters; want 1 to {MAX_STOP_CHARS}")
    return stops


def token_ids(name: str, ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    """Ids that are all in the vocabulary. Raises ApiError 400."""
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        wrong = next(token for token in ids if not 0 <= token < vocab_size)
        raise invalid(name, f"`{name}` holds {wrong}; want token ids from 0 to {vocab_size - 1}")
    return tuple(ids)


def sampling(
    body: GenerationRequest,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    vocab_size: int,
    beam: BeamParams | None = None,
) -> SamplingParams:
    """The sampling parameters, all filled in; the seed is drawn here if none is given. Raises ApiError."""
    stop_ids = body.stop_token_ids or []
    if len(stop_ids) > MAX_STOP_TOKENS:
        raise invalid(
            "stop_token_ids", f"`stop_token_ids` has {len(stop_ids)} ids; at most {MAX_STOP_TOKENS}"
        )
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise invalid(
            "min_tokens", f"`min_tokens` is {min_tokens}, more than the {max_tokens} tokens of `max_tokens`"
        )
    return SamplingParams(
        max_tokens=max_tokens,
        seed=secrets.randbits(63) if body.seed is None else body.seed & _SEED_MASK,
        temperature=_temperature(body, beam),
        top_k=max(0, body.top_k or 0),
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_logit_bias(body.logit_bias or {}, vocab_size),
        min_tokens=min_tokens,
        stop_token_ids=token_ids("stop_token_ids", stop_ids, vocab_size),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        beam=beam,
    )


def _temperature(body: GenerationRequest, beam: BeamParams | None) -> float:
    if beam is not None:
        return 0.0
    return 1.0 if body.temperature is None else body.temperature


def _logit_bias(given: dict[str, float], vocab_size: int) -> dict[int, float]:
    if len(given) > MAX_LOGIT_BIAS:
        raise invalid(
            "logit_bias", f"`logit_bias` has {len(given)} entries; at most {MAX_LOGIT_BIAS} are allowed"
        )
    bias = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < vocab_size):
            raise invalid(
                "logit_bias",
                f"`logit_bias` has the key {key[:40]!r}; want token ids from 0 to {vocab_size - 1}",
            )
        if not -100 <= value <= 100:
            raise invalid("logit_bias", f"`logit_bias` of token {key} is {value}; want -100 to 100")
        bias[int(key)] = float(value)
    return bias
