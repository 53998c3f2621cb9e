"""Llama 3.x and its near relations: Mistral, Ministral, Qwen2, Qwen2.5, Qwen3 and Seed-OSS."""

from typing import Any

from models.families.aspects import (
    ALL_WINDOWS,
    BIASES,
    NO_WINDOWS,
    ROPE,
    Aspect,
    compose,
    fields,
    heads,
    listed_windows,
)
from models.families.family import FULL, SLIDING, only, read_windows, write_windows
from models.json_object import JsonObject


def _read_windows(values: JsonObject) -> dict[str, Any]:
    """Qwen's layers have a window from `max_window_layers` on, if any has."""
    window, num_layers = values.get("sliding_window", int, None), values.get_field("num_layers", int)
    first = num_layers  # layer with a window
    if not values.get("use_sliding_window", bool, False):
        window = None
    elif window is not None and values.values.get("layer_types") is None:
        first = values.get("max_window_layers", int)
    implied = [FULL if layer < first else SLIDING for layer in range(num_layers)]
    return {"windows": read_windows(values, window, implied, ", with use_sliding_window")}


_SOME_WINDOWS = Aspect(
    _read_windows, lambda config: write_windows(config) | {"use_sliding_window": bool(config.windows)}
)
_QWEN = {"sliding_window": 4096, "max_window_layers": 28}
_MISTRAL = {"sliding_window": 4096}
_BIASED = only("attention_bias", "mlp_bias")

LLAMA = compose("LlamaForCausalLM", heads(kv_heads_follow=True), NO_WINDOWS, ROPE, BIASES, only=_BIASED)
MISTRAL = compose("MistralForCausalLM", heads(), ALL_WINDOWS, ROPE, defaults=_MISTRAL)
MINISTRAL = compose("MinistralForCausalLM", heads(), listed_windows(None), ROPE, defaults=_MISTRAL)
QWEN2 = compose(
    "Qwen2ForCausalLM", heads(), _SOME_WINDOWS, ROPE, options={"use_qkv_bias": True}, defaults=_QWEN
)
QWEN3 = compose(
    "Qwen3ForCausalLM", heads(128), _SOME_WINDOWS, ROPE, options={"use_qk_norm": True}, defaults=_QWEN
)
SEED_OSS = compose(
    "SeedOssForCausalLM",
    heads(128),
    NO_WINDOWS,
    ROPE,
    fields(
        {"use_qkv_bias": "attention_bias", "use_out_bias": "attention_out_bias", "use_mlp_bias": "mlp_bias"},
        bool,
        False,
    ),
    only=_BIASED,
    defaults={"attention_bias": True},
)
