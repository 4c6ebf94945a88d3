"""The decoder against transformers, on small random models of every family, in float32.

Tolerance: logits differ by at most 2e-4 of their spread (sums in another order); greedy tokens are equal.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_runner.model import Model, load_model
from kernels.backends import load
from tests.gpu_runner.torch_support import (
    FAMILIES,
    all_logits,
    generate,
    make_executor,
    make_sequences,
    make_tiny,
    step,
)

TOLERANCE = 2e-4
PROMPT = [int(token) for token in torch.randint(0, 160, (37,), generator=torch.Generator().manual_seed(3))]


@pytest.fixture(scope="module", params=list(FAMILIES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    theirs = make_tiny(request.param, folder)
    return load_model(folder, "float32"), theirs


def logits_of(theirs: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return theirs(torch.tensor([tokens])).logits[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("parts", [[37], [16, 21], [5, 1, 1, 9, 20, 1]], ids=["whole", "prefix", "chunks"])
def test_logits_are_those_of_transformers(pair: tuple[Model, Any], parts: list[int]) -> None:
    ours, theirs = pair
    wanted = logits_of(theirs, PROMPT)
    found = all_logits(ours, PROMPT, parts, load("reference"))
    assert (found - wanted).abs().max() <= TOLERANCE * wanted.std()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_greedy_tokens_are_those_of_transformers(pair: tuple[Model, Any], backend: str) -> None:
    ours, theirs = pair
    prompts = [PROMPT, PROMPT[:1], PROMPT[5:13]]
    found = generate(make_executor(ours, backend=backend), prompts, 20, chunk=7)
    for prompt, output in zip(prompts, found, strict=True):
        tokens = torch.tensor([prompt])
        wanted = theirs.generate(
            tokens, do_sample=False, max_new_tokens=20, min_new_tokens=20, eos_token_id=None
        )
        assert output == wanted[0, len(prompt) :].tolist()


def test_bfloat16_stays_close(tmp_path: Path) -> None:
    """A coarse bound (bfloat16 has 8 bits): it finds a wrong formula, not a wrong rounding."""
    theirs = make_tiny("qwen3", tmp_path)
    ours = load_model(tmp_path, "bfloat16")
    wanted = logits_of(theirs, PROMPT)
    found = all_logits(ours, PROMPT, [20, 17], load("cpu")).float()
    assert (found - wanted).pow(2).mean().sqrt() <= 0.05 * wanted.std()


def test_decoding_beside_prefill_changes_nothing(pair: tuple[Model, Any]) -> None:
    """Sequences that come and go in other steps' batches get the tokens that they get alone."""
    ours, _ = pair
    prompts = [PROMPT, PROMPT[3:20], PROMPT[10:12]]
    alone = [generate(make_executor(ours), [prompt], 12)[0] for prompt in prompts]
    sequences = make_sequences(prompts, 20)
    executor = make_executor(ours)
    for running in (sequences[:1], sequences[:1], sequences[:2], sequences):
        step(executor, running, chunk=13)
    while min(len(item.token_ids) - item.num_prompt_tokens for item in sequences) < 12:
        step(executor, sequences, chunk=13)
    together = [item.token_ids[item.num_prompt_tokens :][:12] for item in sequences]
    assert together == alone
