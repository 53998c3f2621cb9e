"""DeepSeek-V2 and V3."""

import functools
from typing import Any

from models.config import DecoderConfig, Experts, Latents
from models.families.aspects import Aspect
from models.families.family import NUMBER, ONLY, Family, only, read_sizes, write_fields, write_sizes
from models.families.rope_entries import read_rope, write_rope
from models.json_object import ENTRIES, JsonObject
from models.rope import Rope, YarnScaling
from models.tensor_names import Names

_LATENTS = {
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.kv": "self_attn.kv_b_proj",
}
_RANKED_QUERIES = {
    "attention.q_down": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.q": "self_attn.q_b_proj",
}
_SIZES = {field: ENTRIES[field] for field in ("latent_dim", "rope_dim", "nope_dim", "value_dim")}
_EXPERT_SIZES = {field: ENTRIES[field] for field in ("num_experts", "num_used", "expert_size")}
_GREEDY, _GROUPED = "greedy", "group_limited_greedy"
_DENSE, _SPARSE = "dense", "sparse"


def latent_names(config: DecoderConfig) -> Names:
    """Names the tensors of latent attention."""
    has_rank = config.latents is not None and config.latents.q_rank is not None
    return _LATENTS | _RANKED_QUERIES if has_rank else _LATENTS


def _read_latents(values: JsonObject) -> dict[str, Any]:
    latents = values.read(Latents, _SIZES, q_rank=values.get("q_lora_rank", int, None))
    num_kv_heads = values.get("num_key_value_heads", int, values.get_field("num_q_heads", int))
    return dict(num_kv_heads=num_kv_heads, head_dim=latents.nope_dim + latents.rope_dim, latents=latents)


def _write_latents(config: DecoderConfig) -> dict[str, Any] | None:
    latents = config.latents
    return None if latents is None else write_fields(latents, _SIZES) | {"q_lora_rank": latents.q_rank}


LATENTS = Aspect(_read_latents, _write_latents)


def _read(values: JsonObject, interleaves: bool) -> dict[str, Any]:
    options, rope = LATENTS.read(values), read_rope(values, is_interleaved=interleaves)
    scale = _attention_scale(options["head_dim"], rope)
    return read_sizes(values) | options | dict(attention_scale=scale, rope=rope)


def _attention_scale(head_dim: int, rope: Rope) -> float | None:
    """The whole head is longer for a stretched context, not only what is rotated: queries and keys both."""
    scaling = rope.scaling
    if not isinstance(scaling, YarnScaling) or scaling.mscale_all_dim is None:
        return None
    return head_dim**-0.5 * scaling.length(scaling.mscale_all_dim) ** 2


def _write(config: DecoderConfig) -> dict[str, Any] | None:
    latents = LATENTS.write(config)
    if latents is None or config.rope is None:
        return None
    return {
        **write_sizes(config),
        **write_rope(config.rope),
        "hidden_act": ONLY["hidden_act"],
        **latents,
        **_written_experts(config.experts, config.num_layers),
    }


def _read_v2(values: JsonObject) -> dict[str, Any]:
    method = values.get("topk_method", str)
    if method not in (_GREEDY, _GROUPED):
        raise values.error("topk_method", f"{_GREEDY} or {_GROUPED}: nothing else is implemented")
    first_layer = values.get("first_k_dense_replace", int)
    experts = _experts(values, first_layer, has_groups=method == _GROUPED)
    return _read(values, interleaves=True) | {"experts": experts}


def _read_v3(values: JsonObject) -> dict[str, Any]:
    return _read_corrected(values, values.get("first_k_dense_replace", int))


def _read_lite(values: JsonObject) -> dict[str, Any]:
    return _read_corrected(values, read_first_layer(values))


def _read_corrected(values: JsonObject, first_layer: int) -> dict[str, Any]:
    """Reads a model whose routers have corrections."""
    normalizes = values.get("norm_topk_prob", bool)
    options = _read(values, interleaves=values.get("rope_interleave", bool, True))
    experts = _experts(values, first_layer, has_groups=True, is_sigmoid=True, normalizes=normalizes)
    return options | {"experts": experts}


def read_first_layer(values: JsonObject) -> int:
    """Reads the first layer that has experts."""
    types, num_layers = values.get("mlp_layer_types", list, None), values.get_field("num_layers", int)
    first = values.get("first_k_dense_replace", int, 1) if types is None else types.count(_DENSE)
    if types is not None and types != mlp_types(first, num_layers):
        raise values.error("mlp_layer_types", f"{_DENSE}, then {_SPARSE}, for {num_layers} layers in all")
    return first


def mlp_types(first_layer: int, num_layers: int) -> list[str]:
    """Names what layers have of which `first_layer` is the first with experts."""
    return [_DENSE if layer < first_layer else _SPARSE for layer in range(num_layers)]


def _experts(values: JsonObject, first_layer: int, has_groups: bool, **options: Any) -> Experts | None:
    """Reads the mixtures of experts of a model that has any."""
    if first_layer >= values.get("num_hidden_layers", int):
        return None
    if has_groups:
        options |= dict(num_groups=values.get("n_group", int), num_used_groups=values.get("topk_group", int))
    return values.read(
        Experts,
        _EXPERT_SIZES,
        first_layer=first_layer,
        shared_size=read_shared_size(values, "n_shared_experts"),
        weight_scale=values.get("routed_scaling_factor", NUMBER),
        **options,
    )


def read_shared_size(values: JsonObject, entry: str) -> int:
    """Reads the width of the MLP for all tokens, which is said as a number of experts."""
    num_shared = values.get(entry, int)
    if num_shared < 1:
        raise values.error(entry, "a positive, finite number")
    return num_shared * values.get("moe_intermediate_size", int)


def num_shared(experts: Experts) -> int:
    """Computes the inverse of `read_shared_size`."""
    return (experts.shared_size or 0) // experts.expert_size


def _write_v2(config: DecoderConfig) -> dict[str, Any] | None:
    values, experts = _write(config), config.experts
    if values is None or experts is None:
        return values
    return values | {"topk_method": _GROUPED if experts.num_groups > 1 else _GREEDY}


def _write_v3(config: DecoderConfig) -> dict[str, Any] | None:
    values, experts = _write(config), config.experts
    if values is None or config.rope is None:
        return None
    values["rope_interleave"] = config.rope.is_interleaved
    return values if experts is None else values | {"norm_topk_prob": experts.normalizes}


def _written_experts(experts: Experts | None, num_layers: int) -> dict[str, Any]:
    if experts is None:
        return {"first_k_dense_replace": num_layers}
    return {
        "first_k_dense_replace": experts.first_layer,
        **write_fields(experts, _EXPERT_SIZES),
        "n_shared_experts": num_shared(experts),
        "routed_scaling_factor": experts.weight_scale,
        "n_group": experts.num_groups,
        "topk_group": experts.num_used_groups,
    }


def _skipped(values: JsonObject) -> dict[str, str]:
    """The layers after the last, which predict tokens after the next."""
    num_layers, num_more = (
        values.get("num_hidden_layers", int),
        values.get("num_nextn_predict_layers", int, 0),
    )
    layers = "|".join(str(num_layers + i) for i in range(num_more))
    return {rf"model\.layers\.({layers})\..*": "extra prediction layers"} if layers else {}


_family = functools.partial(Family, only=only(moe_layer_freq=1), names=latent_names, skipped=_skipped)
DEEPSEEK_V2 = _family(
    architecture="DeepseekV2ForCausalLM",
    read=_read_v2,
    write=_write_v2,
    defaults={"first_k_dense_replace": 0, "topk_method": _GREEDY, "routed_scaling_factor": 1.0},
)
DEEPSEEK_V3 = _family(
    architecture="DeepseekV3ForCausalLM",
    read=_read_v3,
    write=_write_v3,
    defaults={"first_k_dense_replace": 3, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
)
GLM_4_LITE = _family(
    architecture="Glm4MoeLiteForCausalLM",
    read=_read_lite,
    write=lambda config: None,  # V3 has all its options
    defaults={"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.8},
)
"""GLM-4.7-Flash."""
