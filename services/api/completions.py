"""POST /v1/completions."""

import asyncio
import math
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request

from kvmanager.protocol import MAX_CHOICES
from services.api.beam_search import beam_params
from services.api.call import Call, Identity, fit, new_call
from services.api.chunks import PLACEHOLDER, TextTemplate, encode
from services.api.generation import ChoiceStream, Generation
from services.api.logprobs import legacy_entries, prompt_logprobs
from services.api.openai_responses import Completion, CompletionChoice, CompletionLogprobs, Usage
from services.api.openai_types import MAX_PROMPTS, CompletionRequest
from services.api.sse import Answer, CallResponse, Renderer, event
from services.api.validation import MAX_LOGPROBS, check_common, decode, decode_request, sampling, token_ids
from services.auth import tenant
from services.context import Context, ServedModel
from services.errors import invalid
from services.streams.journal import StreamSpec
from services.streams.registry import Streams, resumable
from services.text.detokenizer import Detokenizer

ROUTE: Final = "/v1/completions"
DEFAULT_MAX_TOKENS: Final = 16
LONG_TEXT: Final = 1 << 16  # characters; longer texts are tokenised beside the event loop

_decoder = msgspec.json.Decoder(CompletionRequest)


class CompletionsRoute:
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
        _check(body)
        prompts = await read_prompts(context.model, body)
        identity = Identity.new("cmpl", tenant(request))
        call, renderer = self._build(body, identity, prompts)
        if not resumable(body):
            return CallResponse(context, call, renderer)
        kept = msgspec.structs.replace(body, prompt="", seed=call.seed)
        return await self._streams.answer(request, call, renderer, identity, msgspec.json.encode(kept))

    def rebuild(self, spec: StreamSpec) -> tuple[Call, Renderer]:
        """The call of a journal, as it was before its first token. Raises ApiError."""
        body = decode(_decoder, spec.body)
        return self._build(body, Identity(spec.id, spec.created, spec.tenant), list(spec.prompts))

    def _build(
        self, body: CompletionRequest, identity: Identity, prompts: list[tuple[int, ...]]
    ) -> tuple[Call, Renderer]:
        context = self._context
        n, best_of = _check(body)
        if len(prompts) * best_of > MAX_CHOICES * 2:
            raise invalid(
                "prompt",
                f"{len(prompts)} prompts with {best_of} choices each; at most {MAX_CHOICES * 2} in all",
            )
        max_tokens = max(1, _max_tokens(context.model, body, prompts))
        tokenizer, eos = context.model.tokenizer, len(context.model.eos_token_ids)
        beam = beam_params(body, n, best_of, tokenizer.vocab_size, eos)
        wants_ranks = best_of > n and beam is None
        params = sampling(
            body,
            max_tokens=max_tokens,
            logprobs=0 if wants_ranks and body.logprobs is None else body.logprobs,
            prompt_logprobs=_prompt_logprobs(body),
            vocab_size=tokenizer.vocab_size,
            beam=beam,
        )
        call = new_call(
            context,
            body,
            identity,
            route=ROUTE,
            prompts=prompts,
            sampling=params,
            num_choices=best_of,
            continues_prompt=True,
        )
        call.hidden_tokens = 1 if body.max_tokens == 0 else 0
        form = CompletionForm(n, bool(body.echo), body.logprobs, body.prompt_logprobs is not None)
        return call, CompletionRenderer(context.model, call, form)


def _check(body: CompletionRequest) -> tuple[int, int]:
    """n and best_of. Raises ApiError 400."""
    n = body.n or 1
    best_of = n if body.best_of is None else body.best_of
    if best_of < n:
        raise invalid("best_of", f"`best_of` is {best_of}, less than `n`, which is {n}")
    if best_of > n and body.stream:
        raise invalid("best_of", "`best_of` greater than `n` cannot be streamed; set `stream` to false")
    if body.logprobs is not None and not 0 <= body.logprobs <= MAX_LOGPROBS:
        raise invalid("logprobs", f"`logprobs` is {body.logprobs}; want 0 to {MAX_LOGPROBS}")
    least = 0 if body.echo else 1
    if body.max_tokens is not None and body.max_tokens < least:
        raise invalid(
            "max_tokens", f"`max_tokens` is {body.max_tokens}; want at least 1 (0 only with `echo`)"
        )
    return n, best_of


async def read_prompts(model: ServedModel, body: CompletionRequest) -> list[tuple[int, ...]]:
    """Every prompt as token ids. Raises ApiError 400."""
    given = body.prompt
    prompts: list[str | list[int]]
    if isinstance(given, str):
        prompts = [given]
    elif any(isinstance(item, int) for item in given):
        ids = [item for item in given if isinstance(item, int)]
        if len(ids) < len(given):
            raise invalid(
                "prompt",
                "`prompt` mixes token ids with texts or lists; want one prompt, or a list of prompts",
            )
        prompts = [ids]
    else:
        prompts = [item for item in given if not isinstance(item, int)]
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise invalid("prompt", f"`prompt` holds {len(prompts)} prompts; want 1 to {MAX_PROMPTS}")
    special = body.add_special_tokens is not False
    return [await _tokens(model, prompt, special) for prompt in prompts]


async def _tokens(model: ServedModel, prompt: str | list[int], add_special_tokens: bool) -> tuple[int, ...]:
    if isinstance(prompt, str):
        return tuple(await encode_text(model, prompt, add_special_tokens))
    return token_ids("prompt", prompt, model.tokenizer.vocab_size)


async def encode_text(model: ServedModel, text: str, add_special_tokens: bool) -> list[int]:
    """Tokenise; a long text in a thread, so that streams go on meanwhile."""
    if len(text) < LONG_TEXT:
        return model.tokenizer.encode(text, add_special_tokens)
    return await asyncio.to_thread(model.tokenizer.encode, text, add_special_tokens)


def _max_tokens(model: ServedModel, body: CompletionRequest, prompts: list[tuple[int, ...]]) -> int:
    """One limit for all prompts: what the longest one leaves."""
    longest = max(len(prompt) for prompt in prompts)
    shortest = min(len(prompt) for prompt in prompts)
    fit(model, shortest, None, DEFAULT_MAX_TOKENS, "prompt")  # none may be empty
    return fit(model, longest, body.max_tokens, DEFAULT_MAX_TOKENS, "prompt")


def _prompt_logprobs(body: CompletionRequest) -> int | None:
    """What must be computed over the prompt: what was asked for, and what `echo` with `logprobs` shows."""
    wanted = [body.prompt_logprobs] if body.prompt_logprobs is not None else []
    if body.echo and body.logprobs is not None:
        wanted.append(body.logprobs)
    return max(wanted, default=None)


@dataclass(frozen=True)
class CompletionForm:
    """What the answer shows. `logprobs` is the number of alternatives, None: no log-probabilities."""

    n: int
    echo: bool
    logprobs: int | None
    prompt_logprobs: bool


class CompletionRenderer:
    """Completions as chunks and as a whole."""

    def __init__(self, model: ServedModel, call: Call, form: CompletionForm) -> None:
        self._model = model
        self._call = call
        self._form = form
        self._no_usage: UnsetType | None = None if call.include_usage else UNSET
        self._plain = form.logprobs is None and not call.return_token_ids and not call.continuous_usage
        self._templates: dict[tuple[int, int], TextTemplate] = {}
        self._echoes = [
            _echo(model, g.request.prompt_token_ids) if form.echo else "" for g in call.generations
        ]
        self._echoed: set[tuple[int, int]] = set()

    def first(self) -> bytes:
        return b""

    def text(self, number: int, choice: ChoiceStream) -> bytes:
        key = (number, choice.output.index)
        if self._form.echo and key not in self._echoed:
            return self._chunk(number, choice, ended=False)
        if self._plain:
            if (template := self._templates.get(key)) is None:
                entry = CompletionChoice(self._index(number, choice), PLACEHOLDER, None, None, None)
                template = self._templates[key] = TextTemplate(self._completion([entry], self._no_usage))
            return template.fill(choice.take())
        return self._chunk(number, choice, ended=False)

    def finish(self, number: int, choice: ChoiceStream) -> bytes:
        return self._chunk(number, choice, ended=True)

    def usage(self) -> bytes:
        return event(encode(self._completion([], self._call.usage())))

    def whole(self) -> bytes:
        entries = [
            self._entry(number, choice, self._form.n * number + rank, ended=True)
            for number, generation in enumerate(self._call.generations)
            for rank, choice in enumerate(best(generation, self._form.n))
        ]
        return encode(self._completion(entries, self._call.usage()))

    def _index(self, number: int, choice: ChoiceStream) -> int:
        return self._form.n * number + choice.output.index

    def _completion(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        call = self._call
        return Completion(call.id, "text_completion", call.created, call.model, choices, usage)

    def _chunk(self, number: int, choice: ChoiceStream, *, ended: bool) -> bytes:
        entry = self._entry(number, choice, self._index(number, choice), ended=ended)
        usage = self._call.usage() if self._call.continuous_usage else self._no_usage
        return event(encode(self._completion([entry], usage)))

    def _entry(self, number: int, choice: ChoiceStream, index: int, *, ended: bool) -> CompletionChoice:
        """What was not yet taken from `choice`; `ended` adds why it ended."""
        start = choice.taken
        key = (number, choice.output.index)
        echo = self._form.echo and key not in self._echoed
        first = key not in self._echoed
        self._echoed.add(key)
        text = choice.take()
        ids: list[int] = choice.output.token_ids[start : choice.taken]
        if self._call.hidden_tokens:
            text, ids = "", []
        prompt = self._call.generations[number].request
        entry = CompletionChoice(
            index=index,
            text=self._echoes[number] + text if echo else text,
            logprobs=self._logprobs(number, choice, start, ids, echo),
            finish_reason=None,
            stop_reason=None,
        )
        if ended:
            hidden = self._call.hidden_tokens
            entry.finish_reason = "length" if hidden else choice.output.finish_reason
            entry.stop_reason = None if hidden else choice.output.stop_reason
            if (beam := choice.output.beam) is not None:
                entry.cumulative_logprob, entry.beam_score = beam.cumulative_logprob, beam.score
        if self._call.return_token_ids:
            entry.token_ids = ids
            if first:
                entry.prompt_token_ids = list(prompt.prompt_token_ids)
        if self._form.prompt_logprobs and prompt.prompt_logprobs is not None:
            entries = prompt_logprobs(self._model.tokenizer, prompt.prompt_token_ids, prompt.prompt_logprobs)
            entry.prompt_logprobs = entries
        return entry

    def _logprobs(
        self, number: int, choice: ChoiceStream, start: int, ids: list[int], echo: bool
    ) -> CompletionLogprobs | None:
        if self._form.logprobs is None:
            return None
        tokenizer, top = self._model.tokenizer, self._form.logprobs
        shift = len(self._echoes[number])
        offsets = [shift + choice.offset(index) for index in range(start, start + len(ids))]
        entries = choice.output.logprobs[start : start + len(ids)]
        own = legacy_entries(tokenizer, ids, entries, offsets, top)
        request = self._call.generations[number].request
        if not echo or request.prompt_logprobs is None:
            return own
        prompt = request.prompt_token_ids
        before = legacy_entries(
            tokenizer, prompt, request.prompt_logprobs, _offsets(self._model, prompt), top
        )
        return CompletionLogprobs(
            before.tokens + own.tokens,
            before.token_logprobs + own.token_logprobs,
            before.top_logprobs + own.top_logprobs,
            before.text_offset + own.text_offset,
        )


def best(generation: Generation, n: int) -> list[ChoiceStream]:
    """The n choices with the greatest mean log-probability, best first; all of them in order if there are
    only n. A beam search's come in order.
    """
    choices = generation.choices
    if len(choices) == n or generation.request.sampling.beam is not None:
        return choices[:n]
    return sorted(choices, key=_mean_logprob, reverse=True)[:n]


def _mean_logprob(choice: ChoiceStream) -> float:
    logprobs = choice.output.logprobs
    return sum(entry.logprob for entry in logprobs) / len(logprobs) if logprobs else -math.inf


def _echo(model: ServedModel, prompt: tuple[int, ...]) -> str:
    """The prompt's text up to its last complete character; the rest comes with the first token."""
    return Detokenizer(model.tokenizer).push(prompt)


def _offsets(model: ServedModel, prompt: tuple[int, ...]) -> list[int]:
    detokenizer = Detokenizer(model.tokenizer)
    detokenizer.push(prompt)
    return detokenizer.text_offsets
