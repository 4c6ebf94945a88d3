"""What a request says about beam search: checked, and with the fields that have no meaning in it refused."""

from typing import Any, Final

from kvmanager.protocol import MAX_BEAMS, BeamParams
from services.api.openai_types import GenerationRequest
from services.errors import invalid

MAX_LENGTH_PENALTY: Final = 10.0

_NEUTRAL: Final[tuple[tuple[str, tuple[Any, ...], str], ...]] = (
    ("temperature", (None, 0), "0"),
    ("top_p", (None, 1), "1"),
    ("top_k", (None, -1, 0), "-1 or 0"),
    ("min_p", (None, 0), "0"),
    ("stop", (None, [], ""), "nothing: beams are chosen by tokens; use `stop_token_ids`"),
)
"""(field, values that a beam search takes, how the error names them)."""


def beam_params(
    body: GenerationRequest, n: int, best_of: int, vocab_size: int, eos: int
) -> BeamParams | None:
    """The search of width `best_of`, or None if none is asked for. `eos` is the number of end tokens.

    Raises ApiError 400 for what does not fit a search, or only fits one.
    """
    if not body.use_beam_search:
        _refuse_without_search(body)
        return None
    for name, allowed, wanted in _NEUTRAL:
        value = getattr(body, name)
        if value not in allowed:
            raise invalid(name, f"`{name}` is {value!r:.80}; with `use_beam_search` want {wanted}")
    if best_of > MAX_BEAMS:
        name = "n" if body.best_of is None else "best_of"
        raise invalid(name, f"`{name}` is {best_of}; with `use_beam_search` want 1 to {MAX_BEAMS}")
    if body.max_tokens == 0:
        raise invalid("max_tokens", "`max_tokens` is 0; with `use_beam_search` want at least 1")
    if best_of > n and body.stream:
        raise invalid("best_of", "`best_of` greater than `n` cannot be streamed; set `stream` to false")
    if vocab_size < best_of + eos + len(body.stop_token_ids or ()):
        raise invalid(
            "use_beam_search", f"{best_of} beams are too many for a model of {vocab_size} different tokens"
        )
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    if not abs(penalty) <= MAX_LENGTH_PENALTY:
        low, high = -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY
        raise invalid("length_penalty", f"`length_penalty` is {penalty}; want {low:g} to {high:g}")
    return BeamParams(best_of, penalty, body.early_stopping or False)


def _refuse_without_search(body: GenerationRequest) -> None:
    for name, neutral in (("length_penalty", (None, 1)), ("early_stopping", (None, False))):
        if getattr(body, name) not in neutral:
            raise invalid(name, f"`{name}` is only allowed with `use_beam_search`: true")
