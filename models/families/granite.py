"""Granite 3, Llama with multipliers; Granite 4, Mamba-2 and attention, with mixtures of experts too."""

from typing import Any

import kvcache_jax as kv
from models.config import ATTENTION, RECURRENCE, DecoderConfig, Experts
from models.families.aspects import BIASES, NO_WINDOWS, ROPE, Aspect, compose, fields, heads
from models.families.family import NUMBER, only, write_fields
from models.families.hybrid import LAYER_TYPES, Hybrid, mamba_names, refuse_time_step_limit
from models.families.rope_entries import read_rope, write_rope
from models.json_object import JsonObject
from models.tensor_names import Names, fused

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
_SCALED = fields(_MULTIPLIERS, NUMBER)
_ENTRIES = {"mlp_size": "shared_intermediate_size"} | _EXPERTS
_POSITIONS, _NONE, _ROPE = "position_embedding_type", "nope", "rope"


def _read_rope(values: JsonObject) -> dict[str, Any]:
    positions = values.get(_POSITIONS, str, _NONE)
    if positions not in (_NONE, _ROPE):
        raise values.error(_POSITIONS, f"{_NONE} or {_ROPE}: nothing else is implemented")
    return {"rope": read_rope(values) if positions == _ROPE else None}


def _write_rope(config: DecoderConfig) -> dict[str, Any]:
    return write_rope(config.rope) | {_POSITIONS: _NONE if config.rope is None else _ROPE}


def _read_mixers(values: JsonObject) -> dict[str, Any]:
    refuse_time_step_limit(values)
    return _HYBRID.read(values)


def _read_experts(values: JsonObject) -> dict[str, Any]:
    if not values.get("num_local_experts", int):
        return {"experts": None}
    return {"experts": values.read(Experts, _EXPERTS, first_layer=0, normalizes=True)}


def _write_experts(config: DecoderConfig) -> dict[str, Any]:
    return {"num_local_experts": 0} if config.experts is None else write_fields(config.experts, _EXPERTS)


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
    return fused(tensor, {f"{module}gate": size, f"{module}up": size})


GRANITE_3 = compose(
    "GraniteForCausalLM",
    heads(kv_heads_follow=True),
    NO_WINDOWS,
    ROPE,
    BIASES,
    _SCALED,
    only=only("attention_bias", "mlp_bias", *_MULTIPLIERS.values()),
    entries=_MULTIPLIERS,
    defaults={entry: 1.0 for entry in _MULTIPLIERS.values()},
)
GRANITE_4 = compose(
    "GraniteMoeHybridForCausalLM",
    heads(),
    Aspect(_read_mixers, _HYBRID.write),
    Aspect(_read_rope, _write_rope),
    Aspect(_read_experts, _write_experts),
    _SCALED,
    only=only(*_MULTIPLIERS.values(), mamba_conv_bias=True, mamba_proj_bias=False),
    entries=_ENTRIES | _MULTIPLIERS,
    names=_names,
)
