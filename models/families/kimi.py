"""Kimi-Linear: Kimi Delta Attention, and latent attention without rotations."""

from typing import Any

import kvcache_jax as kv
from models.config import DecoderConfig, Experts
from models.families import deepseek, mixtral
from models.families.aspects import Aspect, compose
from models.families.family import FULL, LINEAR, NUMBER, only, write_fields
from models.families.hybrid import Hybrid
from models.json_object import JsonObject
from models.tensor_names import Names, Stored

_HYBRID = Hybrid(
    kind=kv.GatedDeltaNet,
    sizes={
        "num_kv_heads": "linear_num_heads",
        "head_dim": "linear_head_dim",
        "key_dim": "linear_head_dim",
        "kernel": "linear_conv_kernel_dim",
    },
    options={"decay": "channel"},
)
_EXPERTS = {
    "num_experts": "num_experts",
    "num_used": "num_experts_per_token",
    "expert_size": "moe_intermediate_size",
    "num_groups": "num_expert_group",
    "num_used_groups": "topk_group",
}
_ENTRIES = {"max_seq_len": "model_max_length"} | _EXPERTS


def _read_mixers(values: JsonObject) -> dict[str, Any]:
    num_layers = values.get_field("num_layers", int)
    published = values.part("linear_attn_config")  # counts layers from 1
    full = published.get("full_attn_layers", list, range(5, num_layers + 1, 4))
    implied = [FULL if layer in full else LINEAR for layer in range(1, num_layers + 1)]
    spelled = {
        "linear_num_heads": published.get("num_heads", int, 32),
        "linear_head_dim": published.get("head_dim", int, 128),
        "linear_conv_kernel_dim": published.get("short_conv_kernel_size", int, 4),
    }
    return _HYBRID.read(values.with_defaults(spelled), implied)


def _read_experts(values: JsonObject) -> dict[str, Any]:
    first = deepseek.read_first_layer(values)
    if first >= values.get_field("num_layers", int):
        return {"experts": None}
    experts = values.read(
        Experts,
        _EXPERTS,
        first_layer=first,
        shared_size=deepseek.read_shared_size(values, "num_shared_experts"),
        weight_scale=values.get("routed_scaling_factor", NUMBER),
        normalizes=values.get("moe_renormalize", bool),
        is_sigmoid=True,
    )
    return {"experts": experts}


def _write_experts(config: DecoderConfig) -> dict[str, Any]:
    experts, num_layers = config.experts, config.num_layers
    if experts is None:
        return {"mlp_layer_types": deepseek.mlp_types(num_layers, num_layers)}
    return {
        **write_fields(experts, _EXPERTS),
        "mlp_layer_types": deepseek.mlp_types(experts.first_layer, num_layers),
        "num_shared_experts": deepseek.num_shared(experts),
        "routed_scaling_factor": experts.weight_scale,
        "moe_renormalize": experts.normalizes,
    }


def _names(config: DecoderConfig) -> Names:
    taps = tuple(f"self_attn.{x}_conv1d.weight" for x in "qkv")
    return {
        **deepseek.latent_names(config),
        "recurrence.inputs": Stored(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        "recurrence.convolution.kernel": Stored(taps, unit_axes=(1,)),
        "recurrence.beta": "self_attn.b_proj",
        "recurrence.decay_down": "self_attn.f_a_proj",
        "recurrence.decay": "self_attn.f_b_proj",
        "recurrence.decay_rate": Stored(("self_attn.A_log",), unit_axes=(0, 1, 3)),
        "recurrence.decay_bias": "self_attn.dt_bias",
        "recurrence.gate_down": "self_attn.g_a_proj",
        "recurrence.gate": "self_attn.g_b_proj",
        "recurrence.norm": "self_attn.o_norm",
        "recurrence.out": "self_attn.o_proj",
        **mixtral.NAMES,
        "mlp.router.bias": "block_sparse_moe.gate.e_score_correction_bias",
        "mlp.shared.gate": "block_sparse_moe.shared_experts.gate_proj",
        "mlp.shared.up": "block_sparse_moe.shared_experts.up_proj",
        "mlp.shared.down": "block_sparse_moe.shared_experts.down_proj",
    }


KIMI_LINEAR = compose(
    "KimiLinearForCausalLM",
    deepseek.LATENTS,
    Aspect(_read_mixers, _HYBRID.write),
    Aspect(_read_experts, _write_experts),
    options={"rope": None},
    only=only(moe_layer_freq=1, mla_use_nope=True, moe_router_activation_func="sigmoid"),
    defaults={"num_expert_group": 1, "topk_group": 1, "moe_renormalize": True},
    entries=_ENTRIES,
    names=_names,
)
