"""The executor: forks, copies, prompt log-probabilities; a batch changes nothing for a sequence in it."""

from pathlib import Path

import pytest
import torch

from gpu_runner.executor import Executor
from gpu_runner.model import Model, load_model
from gpu_runner.step import Scheduled, StepPlan
from kernels.backends import load
from tests.gpu_runner.torch_support import (
    BLOCK_SIZE,
    all_logits,
    generate,
    make_executor,
    make_sequences,
    make_tiny,
    renamed,
    schedule,
    step,
    with_params,
)

PROMPT = [int(token) for token in torch.randint(0, 160, (21,), generator=torch.Generator().manual_seed(5))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("qwen3")
    make_tiny("qwen3", folder)
    return load_model(folder, "float32")


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(model: Model, backend: str) -> None:
    params = with_params(temperature=1.0, seed=77, top_p=0.95, logprobs=1)
    alone = generate(make_executor(model, backend=backend), [PROMPT], 30, params)[0]
    prompts = [PROMPT[:3], PROMPT, PROMPT[5:], PROMPT[1:9]]
    assert generate(make_executor(model, backend=backend), prompts, 30, params, chunk=6)[1] == alone
    assert (
        alone
        != generate(
            make_executor(model, backend=backend), [PROMPT], 30, with_params(temperature=1.0, seed=78)
        )[0]
    )


def test_a_resumed_sequence_goes_on_with_the_same_tokens(model: Model) -> None:
    params = with_params(temperature=1.0, seed=5, repetition_penalty=1.2, frequency_penalty=0.3)
    executor = make_executor(model)
    whole = generate(executor, [PROMPT], 20, params)[0]
    (resumed,) = make_sequences([PROMPT], 20, params)
    resumed.token_ids += whole[:9]
    while len(resumed.token_ids) < len(PROMPT) + 20:
        step(executor, [resumed], chunk=10)
    assert resumed.token_ids[len(PROMPT) :] == whole


def test_forks_draw_from_one_row_with_their_own_numbers(model: Model) -> None:
    """Choice c of a fork gets the token that a sequence of its own with that choice would get."""
    executor = make_executor(model)
    (parent,) = make_sequences([PROMPT], 8, with_params(temperature=2.0, seed=3))
    (output,) = executor.execute(StepPlan((schedule(parent, choices=(0, 1, 2, 3)),))).outputs
    assert [item.choice for item in output.sampled] == [0, 1, 2, 3]
    own = [
        executor.execute(StepPlan((schedule(renamed(parent, choice=choice), choices=(choice,)),)))
        .outputs[0]
        .sampled[0]
        for choice in range(4)
    ]
    assert list(output.sampled) == own
    assert len({item.token_id for item in own}) > 1


def test_copies_come_before_the_step_reads(model: Model) -> None:
    """The prompt's last block is replaced by a copy of it; the sequence decodes on as it would have."""
    executor = make_executor(model)
    wanted = generate(make_executor(model), [PROMPT], 4)[0]
    (sequence,) = make_sequences([PROMPT], 4)
    step(executor, [sequence])
    old, new = sequence.block_table[2], 60
    sequence.block_table[2] = new
    (output,) = executor.execute(StepPlan((schedule(sequence),), copies=((old, new),))).outputs
    assert output.sampled[0].token_id == wanted[1]
    assert torch.equal(
        executor.pool[new, :, :, :, : len(PROMPT) % BLOCK_SIZE],
        executor.pool[old, :, :, :, : len(PROMPT) % BLOCK_SIZE],
    )


def test_a_plan_of_copies_only(model: Model) -> None:
    executor = make_executor(model)
    executor.pool[4] = 1.5
    assert executor.execute(StepPlan((), copies=((4, 9),))).outputs == ()
    assert torch.equal(executor.pool[9], executor.pool[4])


def test_a_chunk_that_does_not_reach_the_end_draws_nothing(model: Model) -> None:
    (sequence,) = make_sequences([PROMPT], 4)
    (output,) = make_executor(model).execute(StepPlan((Scheduled(sequence, 0, 5, ()),))).outputs
    assert output.sampled == ()
    assert output.prompt_logprobs == ()


@pytest.mark.parametrize("chunk", [None, 8, 1])
def test_prompt_logprobs(model: Model, chunk: int | None) -> None:
    logits = all_logits(model, PROMPT, [len(PROMPT)], load("reference"))
    wanted = torch.log_softmax(logits, -1)
    (sequence,) = make_sequences([PROMPT], 30, with_params(prompt_logprobs=3))
    executor = make_executor(model)
    found = [
        item for _ in range(len(PROMPT) + 2) for item in step(executor, [sequence], chunk)[0].prompt_logprobs
    ][:50]
    assert len(found) == len(PROMPT) - 1
    for place, item in enumerate(found):
        row, token = wanted[place], PROMPT[place + 1]
        assert item.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert item.rank == int((row > row[token]).sum()) + 1
        assert [value for _, value in item.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)


def test_prompt_logprobs_longer_than_one_piece(
    tmp_path: Path, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpu_runner.executor.PROMPT_ROWS", 4)
    (sequence,) = make_sequences([PROMPT], 1, with_params(prompt_logprobs=0))
    assert len(step(make_executor(model), [sequence])[0].prompt_logprobs) == len(PROMPT) - 1


def test_all_backends_give_the_same_tokens(model: Model) -> None:
    prompts = [PROMPT, PROMPT[4:5], PROMPT[2:18]]
    tokens = [
        generate(make_executor(model, backend=backend), prompts, 16, chunk=9)
        for backend in ("reference", "cpu", "triton")
    ]
    assert tokens[0] == tokens[1] == tokens[2]


def test_the_cache_may_be_of_another_type_than_the_weights(model: Model) -> None:
    executor = make_executor(model)
    narrow = Executor(model, executor.pool.to(torch.bfloat16), executor.ops)
    assert len(generate(narrow, [PROMPT], 6)[0]) == 6
