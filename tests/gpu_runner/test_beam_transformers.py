"""Beam search through scheduler and executor, against transformers' on the same weights in float32.

The models are small and random; the prompts are such that no two sums of log-probabilities are near-ties.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gpu_runner.model import Model, load_model
from gpu_runner.scheduler import Limits, Scheduler
from kvmanager.protocol import (
    BeamParams,
    BlockRef,
    Directives,
    SamplingParams,
    SequenceStart,
    Start,
    TokenEvent,
)
from tests.gpu_runner.torch_support import BLOCK_SIZE, TINY, make_executor, make_tiny

EOS = TINY["eos_token_id"]
MAX_TOKENS = 24
PROMPTS = torch.randint(8, 160, (3, 21), generator=torch.Generator().manual_seed(11)).tolist()
NUM_BLOCKS = 1024


class Runner:
    """A scheduler and an executor, with as many blocks as it asks for, none of them used twice."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.executor = make_executor(model, NUM_BLOCKS, "cpu")
        limits = Limits(BLOCK_SIZE, 64, 64, model.config.max_model_len)
        self.scheduler = Scheduler(limits, frozenset(model.eos_token_ids))
        self.num_blocks = self.num_starts = 0

    def blocks(self, count: int) -> tuple[BlockRef, ...]:
        first, self.num_blocks = self.num_blocks, self.num_blocks + count
        assert self.num_blocks <= NUM_BLOCKS
        return tuple((block_id, 1) for block_id in range(first, first + count))

    def start(self, prompt: list[int], sampling: SamplingParams) -> None:
        self.num_starts += 1
        width = 1 if sampling.beam is None else sampling.beam.width
        table = self.blocks(-(-len(prompt) // BLOCK_SIZE))
        given = SequenceStart(0, (), table, 0, tuple(range(1, width)))
        start = Start(self.num_starts, f"{self.num_starts}", 0, "ipc://x", tuple(prompt), sampling, (given,))
        self.scheduler.handle(Directives(starts=(start,)))

    def run(self) -> dict[str, list[TokenEvent]]:
        """All events by request, but those that only say where a search stands."""
        events: dict[str, list[TokenEvent]] = {}
        while (plan := self.scheduler.schedule()) is not None:
            report = self.scheduler.report()
            for new in self.scheduler.update(plan, self.executor.execute(plan)).values():
                for event in new:
                    if event.search is None:
                        events.setdefault(event.request_id, []).append(event)
            if report is not None:
                missing = report.credits_wanted - self.scheduler.statistics().credits
                self.scheduler.handle(Directives(credits=self.blocks(missing)))
        return events


def beam_sampling(beam: BeamParams, **changes: Any) -> SamplingParams:
    return SamplingParams(MAX_TOKENS, seed=0, temperature=0.0, beam=beam, **changes)


def theirs_found(
    model: Any, prompt: list[int], beam: BeamParams, **given: Any
) -> tuple[list[list[int]], list[float]]:
    """transformers' outputs, without what comes after the end, and their scores; best first."""
    stops = given.pop("eos_token_id", EOS)
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([prompt]),
            num_beams=beam.width,
            num_return_sequences=beam.width,
            length_penalty=beam.length_penalty,
            early_stopping=beam.early_stopping,
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            eos_token_id=stops,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **given,
        )
    ends = {stops} if isinstance(stops, int) else set(stops)
    rows = found.sequences[:, len(prompt) :].tolist()
    return [_cut(row, ends) for row in rows], found.sequences_scores.tolist()


def _cut(row: list[int], ends: set[int]) -> list[int]:
    stop = next((place for place, token in enumerate(row) if token in ends), None)
    if stop is not None:
        return row[: stop + 1]
    return row[: next((place for place, token in enumerate(row) if token == 0), len(row))]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small gain nothing from more, and lose much where the machine is busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["llama", "mistral_window", "qwen3"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Any]:
    """The end token is made likely enough that some beams end by themselves and others do not."""
    folder = tmp_path_factory.mktemp(request.param)
    theirs = make_tiny(request.param, folder)
    with torch.no_grad():
        theirs.lm_head.weight[EOS] *= 2.0
        theirs.lm_head.weight[0] = 0.0
    theirs.save_pretrained(folder)
    return load_model(folder, "float32"), theirs


def check(events: list[TokenEvent], tokens: list[list[int]], scores: list[float]) -> None:
    assert [list(event.token_ids) for event in events] == tokens
    found = [event.beam.score for event in events if event.beam]
    assert found == pytest.approx(scores, rel=1e-5, abs=1e-5)
    assert [event.choice for event in events] == list(range(len(tokens)))


@pytest.mark.parametrize("width", [2, 4, 6])
@pytest.mark.parametrize(
    ("early_stopping", "length_penalty"),
    [(False, 1.0), (True, 1.0), ("never", 1.5), ("never", -0.5), (False, 0)],
)
def test_tokens_and_scores_are_those_of_transformers(
    pair: tuple[Model, Any], width: int, early_stopping: Any, length_penalty: float
) -> None:
    ours, theirs = pair
    beam = BeamParams(width, float(length_penalty), early_stopping)
    runner = Runner(ours)
    for prompt in PROMPTS:
        runner.start(prompt, beam_sampling(beam))
    events = runner.run()
    for number, prompt in enumerate(PROMPTS, 1):
        check(events[str(number)], *theirs_found(theirs, prompt, beam))


def test_some_ends_are_stops_and_some_are_not(pair: tuple[Model, Any]) -> None:
    """Of the cases above: so the end of text has been tested."""
    runner = Runner(pair[0])
    for prompt in PROMPTS:
        runner.start(prompt, beam_sampling(BeamParams(6)))
    reasons = {event.finish_reason for events in runner.run().values() for event in events}
    assert reasons == {"stop", "length"}


def test_several_stop_tokens_and_a_least_length(pair: tuple[Model, Any]) -> None:
    ours, theirs = pair
    beam = BeamParams(3)
    stops = [EOS, *range(20, 40)]
    runner = Runner(ours)
    runner.start(PROMPTS[0], beam_sampling(beam, stop_token_ids=tuple(stops), min_tokens=5))
    wanted = theirs_found(theirs, PROMPTS[0], beam, eos_token_id=stops, min_new_tokens=5)
    check(runner.run()["1"], *wanted)


@pytest.mark.parametrize(
    ("ours_given", "theirs_given"),
    [
        ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
        ({"logit_bias": {33: 2.5, 41: -4.0}}, {"sequence_bias": [[[33], 2.5], [[41], -4.0]]}),
    ],
    ids=["repetition", "bias"],
)
def test_what_changes_log_probabilities(
    pair: tuple[Model, Any], ours_given: dict[str, Any], theirs_given: dict[str, Any]
) -> None:
    ours, theirs = pair
    beam = BeamParams(3)
    runner = Runner(ours)
    runner.start(PROMPTS[1], beam_sampling(beam, **ours_given))
    check(runner.run()["1"], *theirs_found(theirs, PROMPTS[1], beam, **theirs_given))


def test_ignoring_the_end_of_text(pair: tuple[Model, Any]) -> None:
    ours, theirs = pair
    beam = BeamParams(4)
    runner = Runner(ours)
    runner.start(PROMPTS[2], beam_sampling(beam, ignore_eos=True))
    check(runner.run()["1"], *theirs_found(theirs, PROMPTS[2], beam, eos_token_id=-1))


def test_log_probabilities_of_tokens_add_up(pair: tuple[Model, Any]) -> None:
    runner = Runner(pair[0])
    runner.start(PROMPTS[0], beam_sampling(BeamParams(3), logprobs=2))
    for event in runner.run()["1"]:
        assert event.logprobs is not None
        assert event.beam is not None
        assert len(event.logprobs) == len(event.token_ids)
        assert sum(entry.logprob for entry in event.logprobs) == pytest.approx(
            event.beam.cumulative_logprob, abs=1e-4
        )
        assert all(len(entry.top) == 2 for entry in event.logprobs)


def test_greedy_sampled_and_beam_requests_in_one_batch(pair: tuple[Model, Any]) -> None:
    """Each gives what it gives alone."""
    plain = SamplingParams(MAX_TOKENS, seed=1, temperature=0.0, ignore_eos=True)
    sampled = SamplingParams(MAX_TOKENS, seed=1, temperature=1.0, ignore_eos=True)
    requests = [
        (PROMPTS[0], plain),
        (PROMPTS[1], beam_sampling(BeamParams(4))),
        (PROMPTS[2], sampled),
        (PROMPTS[0], beam_sampling(BeamParams(2, 0.0, True))),
    ]
    together = Runner(pair[0])
    for prompt, sampling in requests:
        together.start(prompt, sampling)
    found = together.run()
    for number, (prompt, sampling) in enumerate(requests, 1):
        alone = Runner(pair[0])
        alone.start(prompt, sampling)
        tokens = [event.token_ids for event in found[str(number)]]
        assert tokens == [event.token_ids for event in alone.run()["1"]]
