"""Starts that no engine can compute: they get an error for an end, and nobody else notices.

What comes by HTTP is checked there, against the same vocabulary. This is for all that does not.
"""

from typing import Final

from kvmanager.protocol import Start, TokenEvent, find_sampling_fault

MAX_LENGTH_PENALTY: Final = 10.0  # either way; a length to the power of much more is no float


def find_fault(start: Start, vocab_size: int, max_model_len: int) -> str:
    """What is wrong with the tokens or the sampling, or an empty string."""
    texts = [start.prompt_token_ids, *(given.output_token_ids for given in start.sequences)]
    for ids in texts:
        if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
            return f"a token id is outside the model's vocabulary, which is 0 to {vocab_size - 1}"
    longest = len(texts[0]) + max(map(len, texts[1:]))
    if longest >= max_model_len:
        return f"there are {longest} tokens, and the model takes {max_model_len}, the next one included"
    beam = start.sampling.beam
    if beam is not None and not abs(beam.length_penalty) <= MAX_LENGTH_PENALTY:
        wanted = f"{-MAX_LENGTH_PENALTY:g} to {MAX_LENGTH_PENALTY:g}"
        return f"length_penalty is {beam.length_penalty}, want a number from {wanted}"
    return find_sampling_fault(start.sampling, vocab_size)


def refusal(start: Start, fault: str) -> TokenEvent:
    """The event that ends the whole request; it comes after all that the frontend has of its choice."""
    given = start.sequences[0]
    return TokenEvent(
        start.request_id,
        start.attempt,
        given.choice,
        len(given.output_token_ids),
        (),
        0,
        finish_reason="error",
        error=f"the runner cannot compute this request: {fault}",
    )
