"""Qwen2 and Qwen3 with mixtures of experts, which Qwen3-Next has too."""

import functools
from typing import Any

from models.config import DecoderConfig, Experts
from models.families.aspects import ROPE, UNUSED_WINDOWS, Aspect, compose, fields, heads
from models.families.family import only, write_fields
from models.json_object import JsonObject

_SIZES = {
    "num_experts": "num_experts",
    "num_used": "num_experts_per_tok",
    "expert_size": "moe_intermediate_size",
}
_SHARED = {"shared_size": "shared_expert_intermediate_size"}
SHARED_NAMES = {
    **{f"mlp.shared.{part}": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
    "mlp.shared_gate": "mlp.shared_expert_gate",
}


def mixtures(*, has_shared: bool) -> Aspect:
    """Reads mixtures after the first layers, `has_shared` with an MLP that all tokens use and weigh."""
    entries = _SIZES | (_SHARED if has_shared else {})

    def read(values: JsonObject) -> dict[str, Any]:
        dense = values.get("mlp_only_layers", list, [])
        if dense != list(range(len(dense))):
            raise values.error("mlp_only_layers", "the first layers or none: nothing else is implemented")
        if len(dense) >= values.get_field("num_layers", int):
            return {}
        # As transformers 5 writes it.
        values = values.with_defaults({"num_experts": values.values.get("num_local_experts")})
        options = dict(first_layer=len(dense), normalizes=values.get("norm_topk_prob", bool))
        return {"experts": values.read(Experts, entries, use_shared_gate=has_shared, **options)}

    def write(config: DecoderConfig) -> dict[str, Any] | None:
        experts = config.experts
        if experts is None:
            return None
        dense = {"mlp_only_layers": list(range(experts.first_layer))}
        return write_fields(experts, entries) | dense | {"norm_topk_prob": experts.normalizes}

    return Aspect(read, write)


_family = functools.partial(
    compose,
    only=only(use_sliding_window=False, decoder_sparse_step=1),
    defaults={"norm_topk_prob": False},
)
_SHAPE = heads(), UNUSED_WINDOWS, ROPE
_BIASES, _SHARING = fields({"use_qkv_bias": "qkv_bias"}, bool, True), mixtures(has_shared=True)
QWEN2_MOE = _family("Qwen2MoeForCausalLM", *_SHAPE, _BIASES, _SHARING, names=lambda config: SHARED_NAMES)
QWEN3_MOE = _family("Qwen3MoeForCausalLM", *_SHAPE, mixtures(has_shared=False), options={"use_qk_norm": True})
