"""How a request's tokens are chosen: parts of `kvmanager.protocol`, from where they are to be imported."""

from typing import Literal

import msgspec


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all wire types: frozen, positional on the wire (compact, and quick to decode)."""


class BeamParams(Message, frozen=True):
    """Beam search instead of sampling: the request's choices are its `width` best ends, best first.

    Such a request always starts with its prompt: what it had found is not kept over a preemption or a death.
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
