"""How a request's tokens are chosen: parts of `kvmanager.protocol`, from where they are to be imported."""

import math
import sys
from typing import Final, Literal

import msgspec

MAX_SEED = (1 << 63) - 1
MAX_VOCABULARY = 1 << 32  # token ids are kept in 32 bits
MAX_ALTERNATIVES = 1 << 10  # tokens beside the sampled one that log-probabilities may be asked for
MIN_REPETITION_PENALTY = 1e-6


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all wire types: frozen, positional on the wire (compact, and quick to decode)."""


class BeamParams(Message, frozen=True):
    """Beam search instead of sampling: the request's choices are its `width` best ends, best first.

    Over a preemption what it has found since its start is kept only where its runner drains.
    """

    width: int  # as many as the request has choices, 1 to MAX_BEAMS
    length_penalty: float = 1.0  # score = sum of log-probabilities / length ** length_penalty
    early_stopping: bool | Literal["never"] = False  # as transformers has it


class SamplingParams(Message, frozen=True):
    """How to choose tokens. The frontend fills in everything; the manager reads `max_tokens` and `beam`."""

    max_tokens: int  # output tokens per choice, at least 1
    seed: int  # 0 .. 2**63-1; always set (drawn by the frontend if the user gave none): a resume is exact
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 is all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # number of alternatives beside the sampled token's own; None is off
    prompt_logprobs: int | None = None
    beam: BeamParams | None = None


RANGES: Final[tuple[tuple[str, float, float], ...]] = (
    ("seed", 0, MAX_SEED),
    ("temperature", 0.0, math.inf),
    ("top_k", 0, math.inf),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", MIN_REPETITION_PENALTY, math.inf),
    ("presence_penalty", -math.inf, math.inf),
    ("frequency_penalty", -math.inf, math.inf),
    ("min_tokens", 0, math.inf),
)
MOST: Final = sys.float_info.max


def _in_ranges(params: SamplingParams) -> bool:
    """Whether all are within RANGES: spelled out, as every request comes through here."""
    return (
        0 <= params.seed <= MAX_SEED
        and 0.0 <= params.temperature <= MOST
        and 0 <= params.top_k <= MOST
        and 0.0 <= params.top_p <= 1.0
        and 0.0 <= params.min_p <= 1.0
        and MIN_REPETITION_PENALTY <= params.repetition_penalty <= MOST
        and -MOST <= params.presence_penalty <= MOST
        and -MOST <= params.frequency_penalty <= MOST
        and 0 <= params.min_tokens <= MOST
    )


def _out_of_range(params: SamplingParams) -> str:
    """What is wrong with the first that is not within its range."""
    for name, low, high in RANGES:
        value = getattr(params, name)
        if not max(low, -MOST) <= value <= min(high, MOST):
            return f"{name} is {value}, want a number from {low} to {high}"
    raise AssertionError("all are within their ranges")


def find_sampling_fault(params: SamplingParams, vocab_size: int = MAX_VOCABULARY) -> str:
    """What no sampler can work with, or an empty string; token ids must be below `vocab_size`."""
    if not _in_ranges(params):
        return _out_of_range(params)
    if params.logprobs is not None or params.prompt_logprobs is not None:
        most = min(MAX_ALTERNATIVES, vocab_size)
        for name, number in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if number is not None and not 0 <= number <= most:
                return f"{name} is {number}, want a number from 0 to {most}"
    if params.beam is not None and not math.isfinite(params.beam.length_penalty):
        return f"length_penalty is {params.beam.length_penalty}, want a finite number"
    if params.logit_bias or params.stop_token_ids:
        if not all(map(math.isfinite, params.logit_bias.values())):
            return "a logit_bias is not a finite number"
        for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
                return f"{name} has a token id outside 0 to {vocab_size - 1}"
    return ""
