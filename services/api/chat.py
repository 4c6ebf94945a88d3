"""POST /v1/chat/completions."""

import asyncio
from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request

from services.api.beam_search import beam_params
from services.api.call import Call, Identity, fit, new_call
from services.api.chunks import PLACEHOLDER, TextTemplate, encode
from services.api.completions import LONG_TEXT, encode_text
from services.api.generation import ChoiceStream
from services.api.logprobs import chat_logprobs, prompt_logprobs
from services.api.openai_responses import (
    AssistantMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Delta,
)
from services.api.openai_types import (
    REFUSED_IN_MESSAGE,
    REFUSED_IN_PART,
    ChatMessage,
    ChatRequest,
    ContentPart,
    TokenizeRequest,
)
from services.api.sse import Answer, CallResponse, Renderer, event
from services.api.validation import check_common, decode, decode_request, refuse, sampling
from services.auth import tenant
from services.context import Context, ServedModel
from services.errors import invalid
from services.streams.journal import StreamSpec
from services.streams.registry import Streams, resumable

ROUTE: Final = "/v1/chat/completions"
ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""Role in the request → role in the template."""

MAX_MESSAGES: Final = 4096
RESERVED: Final = {
    "messages",
    "tools",
    "documents",
    "range",
    "self",
    "add_generation_prompt",
    "continue_final_message",
    "bos_token",
    "eos_token",
}
"""Names that `chat_template_kwargs` may not give to the template."""

_decoder = msgspec.json.Decoder(ChatRequest)


class ChatRoute:
    """The endpoint."""

    def __init__(self, context: Context, streams: Streams) -> None:
        self._context = context
        self._streams = streams
        streams.rebuilders[ROUTE] = self.rebuild

    async def answer(self, request: Request) -> Answer:
        context = self._context
        body = await decode_request(request, _decoder, context.config)
        context.model.check_name(body.model)
        check_common(body)
        _max_tokens(body)
        if body.top_logprobs and not body.logprobs:
            raise invalid("top_logprobs", "`top_logprobs` is only allowed with `logprobs`: true")
        prompt = await render_prompt(context.model, body)
        identity = Identity.new("chatcmpl", tenant(request))
        call, renderer = self._build(body, identity, prompt)
        if not resumable(body):
            return CallResponse(context, call, renderer)
        kept = msgspec.structs.replace(body, messages=[], seed=call.seed)
        return await self._streams.answer(request, call, renderer, identity, msgspec.json.encode(kept))

    def rebuild(self, spec: StreamSpec) -> tuple[Call, Renderer]:
        """The call of a journal, as it was before its first token. Raises ApiError."""
        body = decode(_decoder, spec.body)
        return self._build(body, Identity(spec.id, spec.created, spec.tenant), spec.prompts[0])

    def _build(self, body: ChatRequest, identity: Identity, prompt: Sequence[int]) -> tuple[Call, Renderer]:
        context = self._context
        room = context.model.max_model_len
        n, best_of = _choices(body)
        tokenizer, eos = context.model.tokenizer, len(context.model.eos_token_ids)
        params = sampling(
            body,
            max_tokens=fit(context.model, len(prompt), _max_tokens(body), room, "messages"),
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            prompt_logprobs=body.prompt_logprobs,
            vocab_size=tokenizer.vocab_size,
            beam=beam_params(body, n, best_of, tokenizer.vocab_size, eos),
        )
        call = new_call(
            context,
            body,
            identity,
            route=ROUTE,
            prompts=[tuple(prompt)],
            sampling=params,
            num_choices=best_of,
            continues_prompt=bool(body.continue_final_message),
        )
        return call, ChatRenderer(context.model, call, params.logprobs, n)


def _choices(body: ChatRequest) -> tuple[int, int]:
    """n and best_of. Raises ApiError 400."""
    n = body.n or 1
    best_of = n if body.best_of is None else body.best_of
    if best_of != n and not body.use_beam_search:
        raise invalid("best_of", "`best_of` is only allowed with `use_beam_search`: true")
    if best_of < n:
        raise invalid("best_of", f"`best_of` is {best_of}, less than `n`, which is {n}")
    return n, best_of


def _max_tokens(body: ChatRequest) -> int | None:
    """The limit under either of its names; None: the rest of the context. Raises ApiError 400."""
    for name in ("max_tokens", "max_completion_tokens"):
        value = getattr(body, name)
        if value is not None and value < 1:
            raise invalid(name, f"`{name}` is {value}; want at least 1")
    if body.max_tokens is None or body.max_completion_tokens is None:
        return body.max_completion_tokens if body.max_tokens is None else body.max_tokens
    if body.max_tokens != body.max_completion_tokens:
        limits = f"`max_tokens` is {body.max_tokens}, `max_completion_tokens` {body.max_completion_tokens}"
        raise invalid("max_completion_tokens", f"{limits}; give one of them")
    return body.max_tokens


async def render_prompt(model: ServedModel, body: ChatRequest | TokenizeRequest) -> list[int]:
    """The messages through the model's chat template, as token ids. Raises ApiError 400, or
    PagekeeperError.
    """
    messages = body.messages or []
    if model.chat_template is None:
        raise invalid(
            "messages", "this model has no chat template; use /v1/completions", "unsupported_parameter"
        )
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise invalid("messages", f"`messages` holds {len(messages)} messages; want 1 to {MAX_MESSAGES}")
    variables = body.chat_template_kwargs or {}
    if taken := sorted(RESERVED & variables.keys()):
        raise invalid("chat_template_kwargs", f"`chat_template_kwargs` may not set {', '.join(taken)}")
    if not all(name.isidentifier() for name in variables):
        raise invalid("chat_template_kwargs", "`chat_template_kwargs` has a key that is not a name")
    plain = [_plain_message(index, message) for index, message in enumerate(messages)]
    goes_on = bool(body.continue_final_message)
    generation = not goes_on if body.add_generation_prompt is None else body.add_generation_prompt
    if sum(len(message["content"]) for message in plain) < LONG_TEXT:
        text = model.chat_template.render(plain, generation, goes_on, **variables)
    else:
        text = await asyncio.to_thread(model.chat_template.render, plain, generation, goes_on, **variables)
    return await encode_text(model, text, add_special_tokens=bool(body.add_special_tokens))


def _plain_message(index: int, message: ChatMessage) -> dict[str, str]:
    where = f"messages[{index}]"
    for name in REFUSED_IN_MESSAGE:
        value = getattr(message, name)
        if value is not None:
            refuse(f"{where}.{name}", value)
    role = ROLES.get(message.role)
    if role is None:
        shown = message.role[:40]
        raise invalid(f"{where}.role", f"`{where}.role` is {shown!r}; want one of {', '.join(ROLES)}")
    plain = {"role": role, "content": _content(where, message)}
    if message.name is not None:
        plain["name"] = message.name
    return plain


def _content(where: str, message: ChatMessage) -> str:
    if message.content is None:
        if message.role == "assistant":
            return ""
        raise invalid(f"{where}.content", f"`{where}.content` is missing; want text")
    if isinstance(message.content, str):
        return message.content
    return "\n".join(_part(f"{where}.content[{index}]", part) for index, part in enumerate(message.content))


def _part(where: str, part: ContentPart) -> str:
    for name in REFUSED_IN_PART:
        refuse(f"{where}.{name}", getattr(part, name))
    if part.type not in ("text", "input_text"):
        raise invalid(
            f"{where}.type", f"`{where}.type` is {part.type[:40]!r}; want 'text'", "unsupported_parameter"
        )
    if part.text is None:
        raise invalid(f"{where}.text", f"`{where}.text` is missing")
    return part.text


class ChatRenderer:
    """Chat completions as chunks and as a whole. `logprobs`: alternatives per token, None: no
    log-probabilities. The first `n` choices are shown.
    """

    def __init__(self, model: ServedModel, call: Call, logprobs: int | None, n: int) -> None:
        self._model = model
        self._call = call
        self._top = logprobs
        self._n = n
        self._no_usage: UnsetType | None = None if call.include_usage else UNSET
        self._plain = logprobs is None and not call.return_token_ids and not call.continuous_usage
        self._templates: dict[int, TextTemplate] = {}

    def first(self) -> bytes:
        """The role, for each choice."""
        events = []
        for choice in self._call.generations[0].choices:
            entry = ChatChunkChoice(choice.output.index, Delta("assistant", ""), None, None, None)
            chunk = self._chunk(entry)
            if self._call.return_token_ids:
                chunk.prompt_token_ids = list(self._call.generations[0].request.prompt_token_ids)
            events.append(event(encode(chunk)))
        return b"".join(events)

    def text(self, number: int, choice: ChoiceStream) -> bytes:
        if not self._plain:
            return self._detailed(choice, Delta(content=""))
        index = choice.output.index
        if (template := self._templates.get(index)) is None:
            entry = ChatChunkChoice(index, Delta(content=PLACEHOLDER), None, None, None)
            template = self._templates[index] = TextTemplate(self._chunk(entry))
        return template.fill(choice.take())

    def finish(self, number: int, choice: ChoiceStream) -> bytes:
        return self._detailed(choice, Delta(), choice.output.finish_reason, choice.output.stop_reason)

    def usage(self) -> bytes:
        chunk = self._chunk(None)
        chunk.usage = self._call.usage()
        return event(encode(chunk))

    def whole(self) -> bytes:
        call, request = self._call, self._call.generations[0].request
        choices = [self._choice(choice) for choice in call.generations[0].choices[: self._n]]
        answer = ChatCompletion(call.id, "chat.completion", call.created, call.model, choices, call.usage())
        if request.sampling.prompt_logprobs is not None and request.prompt_logprobs is not None:
            entries = prompt_logprobs(
                self._model.tokenizer, request.prompt_token_ids, request.prompt_logprobs
            )
            answer.prompt_logprobs = entries
        if call.return_token_ids:
            answer.prompt_token_ids = list(request.prompt_token_ids)
        return encode(answer)

    def _choice(self, choice: ChoiceStream) -> ChatChoice:
        output = choice.output
        logprobs = self._logprobs(choice, 0)
        message = AssistantMessage("assistant", choice.take())
        entry = ChatChoice(output.index, message, logprobs, output.finish_reason, output.stop_reason)
        if output.beam is not None:
            entry.cumulative_logprob, entry.beam_score = output.beam.cumulative_logprob, output.beam.score
        if self._call.return_token_ids:
            entry.token_ids = list(output.token_ids)
        return entry

    def _detailed(
        self, choice: ChoiceStream, delta: Delta, finish: str | None = None, stop: int | str | None = None
    ) -> bytes:
        start = choice.taken
        logprobs = self._logprobs(choice, start)
        text = choice.take()
        if text or delta.content is not UNSET:
            delta.content = text
        entry = ChatChunkChoice(choice.output.index, delta, logprobs, finish, stop)
        if finish is not None and (beam := choice.output.beam) is not None:
            entry.cumulative_logprob, entry.beam_score = beam.cumulative_logprob, beam.score
        if self._call.return_token_ids:
            entry.token_ids = choice.output.token_ids[start : choice.taken]
        chunk = self._chunk(entry)
        if self._call.continuous_usage:
            chunk.usage = self._call.usage()
        return event(encode(chunk))

    def _logprobs(self, choice: ChoiceStream, start: int) -> ChatLogprobs | None:
        if self._top is None:
            return None
        return chat_logprobs(self._model.tokenizer, choice, start, choice.seen, self._top)

    def _chunk(self, choice: ChatChunkChoice | None) -> ChatChunk:
        call = self._call
        choices = [] if choice is None else [choice]
        return ChatChunk(call.id, "chat.completion.chunk", call.created, call.model, choices, self._no_usage)
