"""The bodies of requests to /kv/…, as msgspec Structs: what is not declared here is refused by name."""

from typing import Any

import msgspec

from services.api.openai_types import ChatMessage


class PromptRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A text as a request would have it: `prompt` (text or token ids) or `messages`."""

    prompt: str | list[int] | None = None
    messages: list[ChatMessage] | None = None
    cache_salt: str | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class PinRequest(PromptRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /kv/pins."""

    name: str
    ttl: float | None = None  # seconds


class PlanRequest(PromptRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /kv/plan."""

    max_tokens: int | None = None
    n: int | None = None
    priority: int | None = None


class WarmRequest(PromptRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /kv/warm."""

    priority: int | None = None
    stream: bool | None = None


class EvictRequest(PromptRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /kv/evict: a prefix, all of one `cache_salt`, or with `all` everything of every salt."""

    all: bool | None = None


class ClearRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /kv/clear."""

    force: bool | None = None
