"""When a sequence is finished, and why."""

from collections.abc import Container
from typing import Literal, NamedTuple

from kvmanager.protocol import SamplingParams


class Finish(NamedTuple):
    """As in `TokenEvent`: `stop_reason` is the stop token's id where it is one of `stop_token_ids`."""

    reason: Literal["stop", "length"] | None
    stop_reason: int | None = None


RUNNING = Finish(None)


def finish(
    token_id: int,
    num_output_tokens: int,
    num_tokens: int,
    sampling: SamplingParams,
    eos_token_ids: Container[int],
    max_model_len: int,
) -> Finish:
    """Judge a sequence whose newest token is `token_id`; both counts include it, `num_tokens` the prompt too.

    A stop token ends a sequence only from `min_tokens` on; where stop and length coincide, it is a stop.
    """
    if num_output_tokens >= sampling.min_tokens:
        if not sampling.ignore_eos and token_id in eos_token_ids:
            return Finish("stop")
        if token_id in sampling.stop_token_ids:
            return Finish("stop", token_id)
    if num_output_tokens >= sampling.max_tokens or num_tokens >= max_model_len:
        return Finish("length")
    return RUNNING
