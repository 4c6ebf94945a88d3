"""One HTTP call that generates: its prompts' generations, and what it asked for."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from kvmanager.errors import PagekeeperError
from kvmanager.protocol import SamplingParams
from services.api.generation import ChoiceStream, Generation, Signal
from services.api.openai_responses import PromptTokensDetails, Usage
from services.api.openai_types import GenerationRequest
from services.api.validation import stop_strings
from services.context import Context, ServedModel
from services.errors import invalid
from services.text.detokenizer import Detokenizer
from services.text.stop_strings import StopStrings
from services.tracker import Output, Request


@dataclass(slots=True)
class Call:
    """`generations[i]` is prompt i; `signal` wakes for any of them. `hidden_tokens` per choice are not
    shown or counted (a run that only scores its prompt must still generate one).
    """

    id: str
    route: str
    model: str
    stream: bool
    generations: list[Generation]
    signal: Signal
    created: int  # Unix time
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    hidden_tokens: int = 0

    @property
    def done(self) -> bool:
        """All text is there, or an error is."""
        return all(generation.done for generation in self.generations)

    @property
    def error(self) -> PagekeeperError | None:
        """The first one of any prompt."""
        return next((g.request.error for g in self.generations if g.request.error is not None), None)

    @property
    def seed(self) -> int:
        return self.generations[0].request.sampling.seed

    @property
    def prompt_tokens(self) -> int:
        return sum(len(generation.request.prompt_token_ids) for generation in self.generations)

    @property
    def cached_tokens(self) -> int:
        return sum(generation.request.num_cached_tokens for generation in self.generations)

    @property
    def output_tokens(self) -> int:
        return sum(
            generation.num_output_tokens - self.hidden_tokens * len(generation.choices)
            for generation in self.generations
        )

    def usage(self) -> Usage:
        prompt, output = self.prompt_tokens, max(0, self.output_tokens)
        return Usage(prompt, output, prompt + output, PromptTokensDetails(self.cached_tokens))


@dataclass(frozen=True)
class Identity:
    """What makes a call this one, and is kept when another frontend goes on with it. `tenant`: see
    services.auth.
    """

    id: str
    created: float  # Unix time
    tenant: str

    @classmethod
    def new(cls, prefix: str, tenant: str) -> "Identity":
        return cls(f"{prefix}-{uuid.uuid4().hex}", time.time(), tenant)


def new_call(
    context: Context,
    body: GenerationRequest,
    identity: Identity,
    *,
    route: str,
    prompts: Sequence[tuple[int, ...]],
    sampling: SamplingParams,
    num_choices: int,
    continues_prompt: bool,
) -> Call:
    """A call that is not submitted yet. With `continues_prompt` the text goes on where the prompt's ends."""
    signal = Signal()
    arrival = time.monotonic() - max(0.0, time.time() - identity.created)
    stops = stop_strings(body)
    generations = []
    for number, prompt in enumerate(prompts):
        request = Request(
            request_id=f"{identity.id}-{number}",
            prompt_token_ids=prompt,
            sampling=sampling,
            outputs=[Output(index) for index in range(num_choices)],
            arrival=arrival,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            read_cache=sampling.prompt_logprobs is None,
            tenant=identity.tenant,
        )
        tail = prompt if continues_prompt else ()
        choices = [_choice(context.model, body, output, stops, tail) for output in request.outputs]
        generations.append(Generation(request, choices, signal))
    options = body.stream_options
    return Call(
        id=identity.id,
        route=route,
        model=context.model.name,
        stream=bool(body.stream),
        generations=generations,
        signal=signal,
        created=int(identity.created),
        include_usage=options is not None and bool(options.include_usage),
        continuous_usage=options is not None and bool(options.continuous_usage_stats),
        return_token_ids=bool(body.return_token_ids),
    )


def _choice(
    model: ServedModel, body: GenerationRequest, output: Output, stops: list[str], prompt: Sequence[int]
) -> ChoiceStream:
    include = bool(body.include_stop_str_in_output)
    skip = body.skip_special_tokens is not False
    return ChoiceStream(
        output,
        Detokenizer(model.tokenizer, skip, prompt),
        StopStrings(stops, include),
        {*model.eos_token_ids, *(body.stop_token_ids or ())},
        show_end=include,
        min_tokens=body.min_tokens or 0,
    )


def fit(
    model: ServedModel, prompt_tokens: int, max_tokens: int | None, default: int, prompt_field: str
) -> int:
    """How many tokens may be generated after a prompt. Raises ApiError 400 with the numbers if they do not
    fit.

    `default` applies where `max_tokens` is None, and shrinks to what is left.
    """
    limit, code = model.max_model_len, "context_length_exceeded"
    if prompt_tokens == 0:
        raise invalid(prompt_field, f"`{prompt_field}` is empty: at least one token is needed")
    if prompt_tokens >= limit:
        message = f"the prompt has {prompt_tokens} tokens; the model takes {limit}, one of them to generate"
        raise invalid(prompt_field, message, code)
    if max_tokens is None:
        return min(default, limit - prompt_tokens)
    if prompt_tokens + max_tokens > limit:
        message = (
            f"{prompt_tokens} prompt tokens and {max_tokens} to generate make {prompt_tokens + max_tokens}; "
            f"the model takes {limit}: ask for at most {limit - prompt_tokens}"
        )
        raise invalid("max_tokens", message, code)
    return max_tokens
