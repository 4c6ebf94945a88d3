"""The bodies of requests, as msgspec Structs: what is not declared here is refused by name.

Fields under "refused" are known to OpenAI's API or to vLLM, but not served: any value but a neutral one
(null, false, empty) gets a 400 that names the field. Fields under "accepted, without effect" cannot change
an answer here.
"""

from typing import Any, Final, Literal

import msgspec

MAX_PROMPTS: Final = 256
MAX_STOPS: Final = 16
MAX_STOP_CHARS: Final = 1024


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # accepted, without effect: nothing is padded
    resumable: bool | None = None


class GenerationRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The fields that completions and chat completions share. None is "not given" throughout."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # what vLLM's users expect
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    use_beam_search: bool | None = None
    best_of: int | None = None  # chat: only with use_beam_search
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    # accepted, without effect
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # refused
    logits_processors: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    structured_outputs: Any = None
    truncate_prompt_tokens: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    response_format: Any = None  # {"type": "text"} is neutral


class CompletionRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions."""

    prompt: str | list[int | str | list[int]]
    echo: bool | None = None
    logprobs: int | None = None
    suffix: Any = None  # refused
    prompt_embeds: Any = None  # refused


class ContentPart(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    text: str | None = None
    image_url: Any = None  # refused
    input_audio: Any = None  # refused
    file: Any = None  # refused


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None  # clients send an answer's message back as it was
    annotations: Any = None  # likewise
    reasoning: str | None = None  # likewise; not shown to the model
    reasoning_content: str | None = None  # likewise
    tool_calls: Any = None  # refused
    tool_call_id: Any = None  # refused
    function_call: Any = None  # refused
    audio: Any = None  # refused


class ChatRequest(GenerationRequest, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Any = None  # refused
    documents: Any = None  # refused
    tools: Any = None  # refused
    tool_choice: Any = (
        None  # refused, but for "none" and "auto", which ask for nothing where there are no tools
    )
    parallel_tool_calls: bool | None = None  # accepted, without effect where there are no tools
    functions: Any = None  # refused
    function_call: Any = None  # refused
    audio: Any = None  # refused
    modalities: Any = None  # ["text"] is neutral
    prediction: Any = None  # refused
    reasoning_effort: Any = None  # refused
    verbosity: Any = None  # refused
    web_search_options: Any = None  # refused
    mm_processor_kwargs: Any = None  # refused
    media_io_kwargs: Any = None  # refused


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    tokens: list[int]
    model: str | None = None


REFUSED: Final = (
    "logits_processors",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "truncate_prompt_tokens",
    "bad_words",
    "allowed_token_ids",
    "response_format",
    "suffix",
    "prompt_embeds",
    "chat_template",
    "documents",
    "tools",
    "tool_choice",
    "functions",
    "function_call",
    "audio",
    "modalities",
    "prediction",
    "reasoning_effort",
    "verbosity",
    "web_search_options",
    "mm_processor_kwargs",
    "media_io_kwargs",
)
"""Fields that are known, but not served."""

REFUSED_IN_MESSAGE: Final = ("tool_calls", "tool_call_id", "function_call", "audio")
REFUSED_IN_PART: Final = ("image_url", "input_audio", "file")

NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
}
"""Values of refused fields that ask for nothing."""
