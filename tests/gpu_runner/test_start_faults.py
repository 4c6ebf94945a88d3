"""A start that no engine can compute gets an error for an end; what runs beside it goes on."""

import pytest

from kvmanager.protocol import BeamParams, Directives, SamplingParams, SequenceStart, Start
from tests.gpu_runner.fake_engine import VOCABULARY
from tests.gpu_runner.test_scheduler import World

GOOD = SamplingParams(max_tokens=4, seed=0)


def start(
    prompt: tuple[int, ...] = (1, 2), output: tuple[int, ...] = (), sampling: SamplingParams = GOOD
) -> Start:
    num_blocks = -(-(len(prompt) + len(output)) // 4)
    sequence = SequenceStart(0, output, tuple((100 + block, 1) for block in range(num_blocks)), 0, (1,))
    return Start(77, "odd", 3, "ipc://f", prompt, sampling, (sequence,))


@pytest.mark.parametrize(
    ("odd", "why"),
    [
        (start(prompt=(1, VOCABULARY)), "vocabulary, which is 0 to 12"),
        (start(prompt=(-1,)), "vocabulary"),
        (start(output=(VOCABULARY,)), "vocabulary"),
        (start(prompt=(1,) * 100), "100 tokens, and the model takes 100"),
        (start(sampling=SamplingParams(4, 0, logit_bias={VOCABULARY: 1.0})), "logit_bias"),
        (start(sampling=SamplingParams(4, 0, stop_token_ids=(VOCABULARY,))), "stop_token_ids"),
        (start(sampling=SamplingParams(4, 0, temperature=float("nan"))), "temperature is nan"),
        (start(sampling=SamplingParams(4, 0, beam=BeamParams(2, 1e308))), "length_penalty is 1e+308"),
        (start(sampling=SamplingParams(4, 0, beam=BeamParams(2, -11.0))), "want a number from -10 to 10"),
        (start(sampling=SamplingParams(4, 0, logprobs=VOCABULARY + 1)), "logprobs is 14"),
    ],
)
def test_it_ends_with_an_error(odd: Start, why: str) -> None:
    world = World(vocab_size=VOCABULARY)
    world.start((1, 2, 3))
    ((endpoint, (event,)),) = world.scheduler.handle(Directives(starts=(odd,))).items()
    assert (endpoint, event.request_id, event.attempt, event.choice) == ("ipc://f", "odd", 3, 0)
    assert (event.position, event.token_ids) == (len(odd.sequences[0].output_token_ids), ())
    assert event.finish_reason == "error"
    assert why in event.error
    world.scheduler.schedule()
    report = world.scheduler.report()
    assert report is not None
    assert [(ended.start_id, ended.reason) for ended in report.ended] == [(77, "finished")]
    assert world.scheduler.statistics().requests == 1
