"""OLMo 2 and 3: norms after attention and MLP instead of before, and of all heads' queries and keys."""

from typing import Any

from models.config import DecoderConfig
from models.families.aspects import NO_WINDOWS, ROPE, Aspect, compose, fields, heads, listed_windows
from models.families.family import NUMBER, only
from models.families.rope_entries import read_ropes, write_rope
from models.json_object import JsonObject

_NORMS = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_BIASES = fields({"use_qkv_bias": "attention_bias", "use_out_bias": "attention_bias"}, bool, False)
_OPTIONS = dict(use_pre_norms=False, use_post_norms=True, use_qk_norm=True, qk_norm_spans_heads=True)
_ONLY = only("attention_bias")


def _read_ropes(values: JsonObject) -> dict[str, Any]:
    """Only layers that see all tokens have rotations that are scaled."""
    theta = values.get("rope_theta", NUMBER, 500_000.0)
    full, window = read_ropes(values, theta, theta)
    return {"rope": full, "window_rope": window}


def _write_ropes(config: DecoderConfig) -> dict[str, Any] | None:
    return None if config.rope is None else write_rope(config.rope)


OLMO_2 = compose(
    "Olmo2ForCausalLM",
    heads(kv_heads_follow=True),
    NO_WINDOWS,
    ROPE,
    _BIASES,
    options=_OPTIONS,
    only=_ONLY,
    names=lambda config: _NORMS,
)
OLMO_3 = compose(
    "Olmo3ForCausalLM",
    heads(kv_heads_follow=True),
    listed_windows(4),
    Aspect(_read_ropes, _write_ropes),
    _BIASES,
    options=_OPTIONS,
    only=_ONLY,
    defaults={"sliding_window": 4096},
    names=lambda config: _NORMS,
)
