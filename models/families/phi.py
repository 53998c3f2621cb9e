"""Phi-3 of 4k tokens and Phi-4 14B: Llama with fused projections, of whose heads a part may be rotated.

Phi-3 of 128k tokens, Phi-3.5-mini and Phi-4-mini have "longrope", which turns all keys of a sequence
otherwise as soon as it is longer than the original context: a cache holds keys that are turned already.
"""

from typing import Any

from models.config import DecoderConfig
from models.families.aspects import ALL_WINDOWS, Aspect, compose, heads, rope
from models.families.family import only
from models.json_object import JsonObject
from models.tensor_names import Names, fused

_ROPE = rope(share=1.0)
_LONG = "longrope", "su", "yarn"  # which are one thing in this family


def _read_rope(values: JsonObject) -> dict[str, Any]:
    name = "rope_scaling" if values.values.get("rope_scaling") else "rope_parameters"
    scaling = values.part(name).values
    if (kind := scaling.get("rope_type") or scaling.get("type")) in _LONG:
        why = "a longer sequence turns all its keys otherwise, and a cache's are turned already"
        raise values.error(name, f"none: {kind} is refused, for {why}")
    found = _ROPE.read(values)
    if found["rope"].scaling is not None:
        raise values.error("rope_scaling", "null: rotations that are scaled are not implemented here")
    return found


def _names(config: DecoderConfig) -> Names:
    q_size, kv_size = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        **fused(
            "self_attn.qkv_proj", {"attention.q": q_size, "attention.k": kv_size, "attention.v": kv_size}
        ),
        **fused("mlp.gate_up_proj", {"mlp.gate": config.mlp_size, "mlp.up": config.mlp_size}),
    }


PHI_3 = compose(
    "Phi3ForCausalLM",
    heads(kv_heads_follow=True),
    ALL_WINDOWS,
    Aspect(_read_rope, _ROPE.write),
    only=only("partial_rotary_factor"),
    names=_names,
)
