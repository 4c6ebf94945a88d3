"""silu_mul: the gate of a Llama-style feed-forward layer.

    out = gate · sigmoid(gate) · up        gate_up = (gate | up)

gate_up  [num_tokens, 2 · intermediate]        out  [num_tokens, intermediate]
"""

from torch import Tensor
from torch.nn.functional import silu


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) · up, computed in float32 and rounded once."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (silu(gate) * up).to(gate_up.dtype)
