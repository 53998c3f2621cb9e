"""Names that tensors of published checkpoints have, and what `Decoder` calls them."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np


class Stored(NamedTuple):
    """Where the files have a parameter of the model, or of each layer.

    Attributes:
      names: Tensors, each with an equal share of the parameter's outputs; {expert} is each expert.
      rows: Which outputs of the tensor the parameter has, i64[n], where it shares the tensor with others.
      unit_axes: Axes of length 1 that the tensors have and the parameter has not.
      is_in_out: Whether a matrix is stored `[in, out]`, as here; else transposed.
    """

    names: tuple[str, ...]
    rows: np.ndarray | None = None
    unit_axes: tuple[int, ...] = ()
    is_in_out: bool = False


Names = Mapping[str, str | Stored]
"""Tensors by parameter, or, their last part `.weight` or `.bias` left out, by module."""

NAMES: Names = {
    "embedding": "model.embed_tokens.weight",
    "unembedding": "lm_head.weight",
    "norm": "model.norm",
    "layers": "model.layers",
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.out": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "mlp.router": "mlp.gate",
    "mlp.router.bias": "mlp.gate.e_score_correction_bias",
    "mlp.expert_gate": "mlp.experts.{expert}.gate_proj",
    "mlp.expert_up": "mlp.experts.{expert}.up_proj",
    "mlp.expert_down": "mlp.experts.{expert}.down_proj",
    "mlp.shared.gate": "mlp.shared_experts.gate_proj",
    "mlp.shared.up": "mlp.shared_experts.up_proj",
    "mlp.shared.down": "mlp.shared_experts.down_proj",
}
"""Names that most families use."""


def fused(tensor: str, sizes: Mapping[str, int]) -> Names:
    """Names a tensor that holds the outputs of several modules, one after another; `sizes` by module."""
    ends = np.cumsum([*sizes.values()])
    return {
        module: Stored((tensor,), np.arange(end - size, end))
        for (module, size), end in zip(sizes.items(), ends, strict=True)
    }


def within(prefix: str) -> Names:
    """Names a model that is a part of another one."""
    return {module: f"{prefix}.{NAMES[module]}" for module in ("embedding", "unembedding", "norm", "layers")}


def find_stored(names: Names, parameter: str) -> Stored:
    """Returns where the files have a parameter, such as `attention.q.kernel`."""
    module, _, last = parameter.rpartition(".")
    whole, part = names.get(parameter), names.get(module)
    stored = whole or part
    if stored is None:
        raise KeyError(parameter)
    stored = Stored((stored,)) if isinstance(stored, str) else stored
    end = "" if whole else ".bias" if last == "bias" else ".weight"
    return stored._replace(names=tuple(name + end for name in stored.names))
