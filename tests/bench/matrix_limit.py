"""The matrix-product limit: how fast answers could come if matrix products were all there is to compute.

    seconds = uncached prompt tokens · prefill + output tokens · decode
    limit   = output tokens / seconds

`prefill` is the time per row of all layers' products at 512 rows, `decode` that of all layers' and the output
matrix at 32 rows (at one row where only one stream runs). Each layer has its own weights, as in the model, so
that caches help no more than they do there. Three forms are timed: plain `F.linear`, oneDNN's with weights
packed beforehand, and the runner's own; the fastest counts.

`python -m tests.bench.matrix_limit MODEL DTYPE` prints the times as JSON.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_runner.linear import Linear
from gpu_runner.model import resolve_dtype
from gpu_runner.model_config import ModelConfig
from gpu_runner.weights import open_source

PREFILL_ROWS, DECODE_ROWS = 512, 32
SECONDS = 1.5  # for each timing
Product = Callable[[Tensor], Tensor]


def layer_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """(outputs, inputs) of one layer's products: Q K V, O, gate and up, down."""
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return [
        (heads + 2 * kv_heads, config.hidden_size),
        (config.hidden_size, heads),
        (2 * config.intermediate_size, config.hidden_size),
        (config.hidden_size, config.intermediate_size),
    ]


def plain(weight: Tensor) -> Product:
    return lambda x: F.linear(x, weight)


def packed(weight: Tensor) -> Product:
    """oneDNN's product with the weight in its own layout, as torch's compiler would call it."""
    layout = torch.ops.mkldnn._reorder_linear_weight(weight, DECODE_ROWS)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, layout, None, "none", [], "")


def runners(weight: Tensor) -> Product:
    return Linear(weight)


FORMS = {"F.linear": plain, "packed": packed, "runner": runners}


def measure(products: list[Product], widths: list[int], rows: int, dtype: torch.dtype) -> float:
    """Seconds per row of all products, one after the other: the median over SECONDS."""
    inputs = [torch.randn(rows, width).to(dtype) for width in widths]
    times: list[float] = []
    until = time.perf_counter() + SECONDS
    while time.perf_counter() < until or len(times) < 4:
        began = time.perf_counter()
        for product, x in zip(products, inputs, strict=True):
            product(x)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:]) / rows


def timings(config: ModelConfig, dtype: torch.dtype) -> Iterator[tuple[str, dict[str, float]]]:
    """For each form, seconds per row: `prefill`, `decode` (32 rows) and `decode_1` (one row)."""
    shapes = layer_shapes(config) * config.num_layers
    head = (config.vocab_size, config.hidden_size)
    for name, form in FORMS.items():
        products = [form(torch.randn(shape).to(dtype) * 0.02) for shape in [*shapes, head]]
        widths = [shape[1] for shape in [*shapes, head]]
        yield (
            name,
            {
                "prefill": measure(products[:-1], widths[:-1], PREFILL_ROWS, dtype),
                "decode": measure(products, widths, DECODE_ROWS, dtype),
                "decode_1": measure(products, widths, 1, dtype),
            },
        )


def main(path: str, dtype_name: str) -> None:
    dtype = resolve_dtype(dtype_name)
    torch.manual_seed(0)
    with torch.inference_mode():
        result = dict(timings(open_source(path).config, dtype))
    print(json.dumps({"dtype": str(dtype).removeprefix("torch."), "forms": result}))


if __name__ == "__main__":
    main(*sys.argv[1:])
