"""Nemotron-H: layers that are Mamba-2, attention, or an MLP or experts alone."""

from typing import Any

import kvcache_jax as kv
from models.config import ATTENTION, RECURRENCE, DecoderConfig, Experts
from models.families.family import (
    FULL,
    LINEAR,
    NUMBER,
    ONLY,
    UNSCALED,
    Family,
    read_sizes,
    write_fields,
    write_sizes,
)
from models.families.hybrid import LAYER_TYPES, Hybrid, mamba_names, refuse_time_step_limit
from models.json_object import JsonObject
from models.tensor_names import Names

_DENSE, _SPARSE = "mlp", "moe"
_LAYERS, _PATTERN = "layers_block_type", "hybrid_override_pattern"
_OF_PATTERN = {"M": LINEAR, "*": FULL, "-": _DENSE, "E": _SPARSE}
_HYBRID = Hybrid(
    kind=kv.Mamba2,
    sizes={
        "num_kv_heads": "mamba_num_heads",
        "head_dim": "mamba_head_dim",
        "state_dim": "ssm_state_size",
        "num_groups": "n_groups",
        "kernel": "conv_kernel",
    },
    types=LAYER_TYPES | {_DENSE: None, _SPARSE: None, "mamba": RECURRENCE, "attention": ATTENTION},
    entry=_LAYERS,
)
_EXPERTS = {
    "num_experts": "n_routed_experts",
    "num_used": "num_experts_per_tok",
    "expert_size": "moe_intermediate_size",
    "shared_size": "moe_shared_expert_intermediate_size",
    "num_groups": "n_group",
    "num_used_groups": "topk_group",
}
_ENTRIES = {"norm_eps": "layer_norm_epsilon", "mixers": _LAYERS} | _EXPERTS


def _read(values: JsonObject) -> dict[str, Any]:
    refuse_time_step_limit(values)
    pattern = values.get(_PATTERN, str, "")
    if not _OF_PATTERN.keys() >= {*pattern}:
        raise values.error(_PATTERN, f"of {' '.join(_OF_PATTERN)}, one for each layer")
    values = values.with_defaults({_LAYERS: [_OF_PATTERN[layer] for layer in pattern] or None})
    mixers, types = _HYBRID.read(values), values.get(_LAYERS, list)
    if _DENSE in types and _SPARSE in types:
        raise values.error(_LAYERS, f"{_DENSE} or {_SPARSE}: both in one model are not implemented")
    return read_sizes(values.with_defaults({"num_hidden_layers": len(types)})) | dict(
        num_kv_heads=values.get("num_key_value_heads", int),
        head_dim=values.get("head_dim", int),
        **mixers,
        has_split_layers=True,
        rope=None,
        mlp_activation="relu2",
        experts=_read_experts(values) if _SPARSE in types else None,
    )


def _read_experts(values: JsonObject) -> Experts:
    return values.read(
        Experts,
        _EXPERTS,
        first_layer=0,
        is_sigmoid=True,
        normalizes=values.get("norm_topk_prob", bool),
        weight_scale=values.get("routed_scaling_factor", NUMBER),
    )


def _write(config: DecoderConfig) -> dict[str, Any] | None:
    mixers, experts = _HYBRID.write(config), config.experts
    if mixers is None:
        return None
    values = write_sizes(config, _ENTRIES) | mixers
    values |= {"head_dim": config.head_dim, "mlp_hidden_act": _ONLY["mlp_hidden_act"]}
    if experts is None:
        return values
    values[_LAYERS] = [_SPARSE if kind == _DENSE else kind for kind in values[_LAYERS]]
    values |= {"norm_topk_prob": experts.normalizes, "routed_scaling_factor": experts.weight_scale}
    return values | write_fields(experts, _EXPERTS)


def _names(config: DecoderConfig) -> Names:
    return {
        "embedding": "backbone.embeddings.weight",
        "norm": "backbone.norm_f",
        "layers": "backbone.layers",
        "attention_norm": "norm",
        "attention.q": "mixer.q_proj",
        "attention.k": "mixer.k_proj",
        "attention.v": "mixer.v_proj",
        "attention.out": "mixer.o_proj",
        **mamba_names("mixer"),
        "mlp_norm": "norm",
        "mlp.up": "mixer.up_proj",
        "mlp.down": "mixer.down_proj",
        "mlp.router": "mixer.gate",
        "mlp.router.bias": "mixer.gate.e_score_correction_bias",
        "mlp.expert_up": "mixer.experts.{expert}.up_proj",
        "mlp.expert_down": "mixer.experts.{expert}.down_proj",
        "mlp.shared.up": "mixer.shared_experts.up_proj",
        "mlp.shared.down": "mixer.shared_experts.down_proj",
    }


_ONLY = UNSCALED | {
    **{name: ONLY[name] for name in ("attention_bias", "mlp_bias", "quantization_config")},
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "use_conv_bias": True,
    "use_bias": False,
    "moe_latent_size": None,
    "sliding_window": None,
}
NEMOTRON_H = Family(
    architecture="NemotronHForCausalLM",
    read=_read,
    write=_write,
    only=_ONLY,
    defaults={"conv_kernel": 4, "n_group": 1, "topk_group": 1, "norm_topk_prob": True},
    entries=_ENTRIES,
    names=_names,
)
