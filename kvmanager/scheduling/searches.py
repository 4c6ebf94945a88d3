"""Where beam searches stand: what comes from others is checked here, before anybody goes on from it."""

import math

from kvmanager.protocol import MAX_VOCABULARY, SearchState


def find_state_fault(search: SearchState, width: int, max_tokens: int) -> str:
    """Why no search of that width can stand there, or an empty string."""
    outputs = [path.token_ids for path in search.beams]
    if not len(set(outputs)) == len(outputs) == width or len({len(output) for output in outputs}) != 1:
        return f"a search has {len(outputs)} beams, want {width}, all different and of one length"
    if len(outputs[0]) >= max_tokens:
        return f"the beams of a search have {len(outputs[0])} tokens, want fewer than max_tokens {max_tokens}"
    if len(search.ends) > width or not all(end.finish_reason for end in search.ends):
        return f"a search has {len(search.ends)} ends, want at most {width}, each with its reason"
    for path in (*search.beams, *search.ends):
        if not path.token_ids or not math.isfinite(path.cumulative_logprob):
            return "a path of a search has no tokens, or its cumulative_logprob is not a finite number"
        if path.logprobs is not None and len(path.logprobs) != len(path.token_ids):
            return "a path of a search has not as many log-probabilities as tokens"
        if not 0 <= min(path.token_ids) <= max(path.token_ids) < MAX_VOCABULARY:
            return f"a path of a search has a token id outside 0 to {MAX_VOCABULARY - 1}"
    return ""
