"""GLM-4: fused MLPs and pairs of which a part is rotated; of 2025 (`glm4`) with norms on both sides."""

from models.config import DecoderConfig
from models.families.aspects import NO_WINDOWS, compose, fields, heads, rope
from models.families.family import only
from models.tensor_names import Names, fused

_ASPECTS = (
    heads(128),
    NO_WINDOWS,
    rope(share=0.5, is_interleaved=True),
    fields({"use_qkv_bias": "attention_bias"}, bool, True),
)
_ONLY = only("partial_rotary_factor", "attention_bias")


def _names(config: DecoderConfig) -> Names:
    return {
        **fused("mlp.gate_up_proj", {"mlp.gate": config.mlp_size, "mlp.up": config.mlp_size}),
        "attention_post_norm": "post_self_attn_layernorm",
        "mlp_post_norm": "post_mlp_layernorm",
    }


GLM = compose("GlmForCausalLM", *_ASPECTS, only=_ONLY, names=_names)
GLM_4 = compose("Glm4ForCausalLM", *_ASPECTS, options={"use_post_norms": True}, only=_ONLY, names=_names)
