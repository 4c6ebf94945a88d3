"""When a sequence is finished."""

import pytest

from gpu_runner.stop_conditions import RUNNING, Finish, finish
from kvmanager.protocol import SamplingParams

EOS = 2


@pytest.mark.parametrize(
    ("token", "num_output", "num_tokens", "sampling", "wanted"),
    [
        (9, 1, 5, {}, RUNNING),
        (EOS, 1, 5, {}, Finish("stop")),
        (EOS, 1, 5, {"ignore_eos": True}, RUNNING),
        (EOS, 2, 5, {"min_tokens": 3}, RUNNING),
        (EOS, 3, 5, {"min_tokens": 3}, Finish("stop")),
        (7, 1, 5, {"stop_token_ids": (7,)}, Finish("stop", 7)),
        (EOS, 1, 5, {"stop_token_ids": (EOS,)}, Finish("stop")),
        (EOS, 1, 5, {"stop_token_ids": (EOS,), "ignore_eos": True}, Finish("stop", EOS)),
        (9, 10, 15, {}, Finish("length")),
        (EOS, 10, 15, {}, Finish("stop")),
        (9, 3, 50, {}, Finish("length")),
        (7, 2, 50, {"min_tokens": 3, "stop_token_ids": (7,)}, Finish("length")),
    ],
)
def test_finish(
    token: int, num_output: int, num_tokens: int, sampling: dict[str, object], wanted: Finish
) -> None:
    params = SamplingParams(max_tokens=10, seed=0, **sampling)
    assert finish(token, num_output, num_tokens, params, frozenset({EOS}), 50) == wanted
