"""What a runner sends a frontend: part of `kvmanager.protocol`, from where it is to be imported."""

from typing import Literal

from kvmanager.messages.sampling_params import Message


class TokenLogprobs(Message, frozen=True):
    """Log-probability of one token and of the likeliest others, before penalties and temperature."""

    logprob: float
    rank: int  # 1 is the likeliest
    top: tuple[tuple[int, float], ...]


class BeamScore(Message, frozen=True):
    """What a beam search's choice is worth."""

    cumulative_logprob: float  # sum over its tokens, the stop token included
    score: float  # that sum / (number of tokens) ** length_penalty; choices come in its order


class BeamPath(Message, frozen=True):
    """Tokens that a beam search has chosen after the prompt."""

    token_ids: tuple[int, ...]
    cumulative_logprob: float  # sum over its tokens
    logprobs: tuple[TokenLogprobs, ...] | None = None  # of each, where the request wants them
    finish_reason: Literal["stop", "length"] | None = None  # of an end
    stop_reason: int | None = None


class SearchState(Message, frozen=True):
    """Where a beam search stands: with the prompt, all that another runner needs to go on with it."""

    beams: tuple[BeamPath, ...]  # as many as its width, best first; of one length, and all different
    ends: tuple[BeamPath, ...]  # found so far, best first; at most as many


class TokenEvent(Message, frozen=True):
    """New tokens of one choice. `position` is the index of the first one in the choice's output.

    The finish reason "error" ends the whole request: the runner cannot compute it, and `error` says why.
    """

    request_id: str
    attempt: int
    choice: int
    position: int
    token_ids: tuple[int, ...]
    num_cached_tokens: int  # of the prompt, at this start
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None  # once, with the first token
    finish_reason: Literal["stop", "length", "error"] | None = None
    stop_reason: int | None = None  # the stop token's id, where it was one of stop_token_ids
    beam: BeamScore | None = None  # beam searches only, whose choices come whole
    error: str = ""
    search: SearchState | None = None  # of a beam search that is not over, with no tokens; for a resubmission


class TokenBatch(Message, frozen=True, tag=True):
    """All new tokens for one frontend from one step."""

    events: tuple[TokenEvent, ...]
