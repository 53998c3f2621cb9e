"""Granite 4: Mamba-2 and attention, with multipliers and mixtures of experts."""

from typing import Any

import numpy as np

import kvcache_jax as kv
from models.config import ATTENTION, RECURRENCE, DecoderConfig, Experts
from models.families import llama
from models.families.family import NUMBER, Family, read_head_dim, read_sizes, write_fields, write_sizes
from models.families.hybrid import LAYER_TYPES, Hybrid, mamba_names, refuse_time_step_limit
from models.families.rope_entries import read_rope, write_rope
from models.json_object import JsonObject
from models.tensor_names import Names, Stored

_HYBRID = Hybrid(
    kind=kv.Mamba2,
    sizes={
        "num_kv_heads": "mamba_n_heads",
        "head_dim": "mamba_d_head",
        "state_dim": "mamba_d_state",
        "num_groups": "mamba_n_groups",
        "kernel": "mamba_d_conv",
    },
    types=LAYER_TYPES | {"mamba": RECURRENCE, "attention": ATTENTION},
)
_EXPERTS = {
    "num_experts": "num_local_experts",
    "num_used": "num_experts_per_tok",
    "expert_size": "intermediate_size",
    "shared_size": "shared_intermediate_size",
}
_MULTIPLIERS = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention_scale": "attention_multiplier",
    "logits_divisor": "logits_scaling",
}
_ENTRIES = {"mlp_size": "shared_intermediate_size"} | _EXPERTS | _MULTIPLIERS
_POSITIONS, _NONE, _ROPE = "position_embedding_type", "nope", "rope"


def _read(values: JsonObject) -> dict[str, Any]:
    refuse_time_step_limit(values)
    positions, num_experts = values.get(_POSITIONS, str, _NONE), values.get("num_local_experts", int)
    if positions not in (_NONE, _ROPE):
        raise values.error(_POSITIONS, f"{_NONE} or {_ROPE}: nothing else is implemented")
    return read_sizes(values) | dict(
        num_kv_heads=values.get("num_key_value_heads", int),
        head_dim=read_head_dim(values),
        **_HYBRID.read(values),
        rope=read_rope(values) if positions == _ROPE else None,
        experts=values.read(Experts, _EXPERTS, first_layer=0, normalizes=True) if num_experts else None,
        **{field: values.get(entry, NUMBER) for field, entry in _MULTIPLIERS.items()},
    )


def _write(config: DecoderConfig) -> dict[str, Any] | None:
    mixers, experts = _HYBRID.write(config), config.experts
    if mixers is None:
        return None
    values = write_sizes(config, _ENTRIES) | write_rope(config.rope) | write_fields(config, _MULTIPLIERS)
    values |= {"head_dim": config.head_dim, "hidden_act": llama.ONLY["hidden_act"]}
    values[_POSITIONS] = _NONE if config.rope is None else _ROPE
    return (
        values | mixers | ({"num_local_experts": 0} if experts is None else write_fields(experts, _EXPERTS))
    )


def _names(config: DecoderConfig) -> Names:
    experts = config.experts
    shared = "mlp." if experts is None else "mlp.shared."
    names = {
        **_halves(shared, "shared_mlp.input_linear", config.mlp_size),
        f"{shared}down": "shared_mlp.output_linear",
        **mamba_names("mamba"),
    }
    if experts is None:
        return names
    return {
        **names,
        **_halves("mlp.expert_", "block_sparse_moe.input_linear", experts.expert_size),
        "mlp.expert_down": "block_sparse_moe.output_linear",
        "mlp.router": "block_sparse_moe.router.layer",
    }


def _halves(module: str, tensor: str, size: int) -> Names:
    gate, up = np.arange(2 * size).reshape(2, size)
    return {f"{module}gate": Stored((tensor,), gate), f"{module}up": Stored((tensor,), up)}


GRANITE_4 = Family(
    architecture="GraniteMoeHybridForCausalLM",
    read=_read,
    write=_write,
    only=llama.ONLY | {"mamba_conv_bias": True, "mamba_proj_bias": False},
    entries=_ENTRIES,
    names=_names,
)
