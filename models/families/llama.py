"""Llama 3.x, and its near relations Mistral, Qwen2, Qwen2.5 and Qwen3."""

import functools
from typing import Any, NamedTuple

from models.config import DecoderConfig
from models.families.family import (
    FULL,
    SLIDING,
    Family,
    read_head_dim,
    read_sizes,
    read_windows,
    write_sizes,
    write_windows,
)
from models.families.rope_entries import read_rope, write_rope
from models.json_object import JsonObject

ONLY = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "quantization_config": None,
    "use_mrope": False,
    "is_causal": True,
}
_WINDOWS = {"sliding_window": 4096, "max_window_layers": 28}


class _Traits(NamedTuple):
    """What the code of one of them does without being asked."""

    architecture: str
    use_qkv_bias: bool = False
    use_qk_norm: bool = False
    windowed_layers: str = "none"  # "none", "all" or "some"
    head_dim: int | None = None  # where config.json is silent; None: hidden_size / num_attention_heads
    kv_heads_follow: bool = False  # where it is silent there are as many of them as of query heads


def _read(traits: _Traits, values: JsonObject) -> dict[str, Any]:
    head_dim = read_head_dim(values, traits.head_dim)
    sizes = read_sizes(values)
    return sizes | dict(
        num_kv_heads=_num_kv_heads(values, traits, sizes["num_q_heads"]),
        head_dim=head_dim,
        windows=_windows(values, traits, sizes["num_layers"]),
        use_qkv_bias=traits.use_qkv_bias,
        use_qk_norm=traits.use_qk_norm,
        rope=read_rope(values),
    )


def _num_kv_heads(values: JsonObject, traits: _Traits, num_q_heads: int) -> int:
    """Null means one for each query head; what a missing entry means differs, and mostly fits no model."""
    is_told = "num_key_value_heads" in values.values or traits.kv_heads_follow
    return values.get("num_key_value_heads", int, num_q_heads if is_told else ...)


def _windows(values: JsonObject, traits: _Traits, num_layers: int) -> tuple[int | None, ...]:
    window = values.get("sliding_window", int, None)
    first = num_layers  # layer with a window
    if traits.windowed_layers == "none" and window is not None:
        raise values.error("sliding_window", f"null: {traits.architecture} has no windows")
    if traits.windowed_layers == "all":
        first = num_layers if window is None else 0
    if traits.windowed_layers == "some":
        if not values.get("use_sliding_window", bool, False):
            window = None
        elif window is not None and values.values.get("layer_types") is None:
            first = values.get("max_window_layers", int)
    implied = [FULL if layer < first else SLIDING for layer in range(num_layers)]
    if traits.windowed_layers != "some" and values.get("layer_types", list, implied) != implied:
        raise values.error("layer_types", f"{implied}, or none: {traits.architecture} does not read it")
    return read_windows(values, window, implied, ", with use_sliding_window")


def _write(traits: _Traits, config: DecoderConfig) -> dict[str, Any]:
    values = write_sizes(config) | write_rope(config.rope)
    values |= {"head_dim": config.head_dim, "hidden_act": ONLY["hidden_act"]}
    windows = write_windows(config)
    if traits.windowed_layers != "none":
        values["sliding_window"] = windows["sliding_window"]
    if traits.windowed_layers == "some":
        values["use_sliding_window"] = bool(config.windows)
        values["layer_types"] = windows["layer_types"]
    return values


def _family(*args: Any, **options: Any) -> Family:
    traits = _Traits(*args, **options)
    return Family(
        architecture=traits.architecture,
        read=functools.partial(_read, traits),
        write=functools.partial(_write, traits),
        only=ONLY,
        defaults={} if traits.windowed_layers == "none" else _WINDOWS,
    )


LLAMA = _family("LlamaForCausalLM", kv_heads_follow=True)
MISTRAL = _family("MistralForCausalLM", windowed_layers="all")
QWEN2 = _family("Qwen2ForCausalLM", use_qkv_bias=True, windowed_layers="some")
QWEN3 = _family("Qwen3ForCausalLM", use_qk_norm=True, windowed_layers="some", head_dim=128)
