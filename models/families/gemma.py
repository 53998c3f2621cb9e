"""Gemma 2 and the text models of Gemma 3, which are published alone or in models that also see."""

import dataclasses
import functools
from typing import Any

from models.config import DecoderConfig
from models.families.family import (
    FULL,
    NUMBER,
    SLIDING,
    Family,
    only,
    read_sizes,
    read_windows,
    write_sizes,
    write_windows,
)
from models.families.rope_entries import read_rope, read_ropes, write_rope
from models.json_object import JsonObject
from models.rope import Rope
from models.tensor_names import within

_ACTIVATION = "gelu_pytorch_tanh"
# `hidden_act` is not read.
_ONLY = only(
    "hidden_act",
    "final_logit_softcapping",
    hidden_activation=_ACTIVATION,
    use_bidirectional_attention=False,
)
_DEFAULTS = {
    "tie_word_embeddings": True,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
# They call by the others' name of the norm before the MLP one that is elsewhere.
_NORMS = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}


def _read(values: JsonObject, period: int) -> dict[str, Any]:
    """Reads what both have; every `period`-th layer sees all tokens."""
    sizes = read_sizes(values)
    scalar = values.get("query_pre_attn_scalar", NUMBER)
    if not scalar > 0:
        raise values.error("query_pre_attn_scalar", "a positive number")
    if period < 1:
        raise values.error("sliding_window_pattern", "a positive number of layers")
    implied = [SLIDING if (layer + 1) % period else FULL for layer in range(sizes["num_layers"])]
    return sizes | dict(
        num_kv_heads=values.get("num_key_value_heads", int),
        head_dim=values.get("head_dim", int),
        windows=read_windows(values, values.get("sliding_window", int, None), implied),
        norm_offset=1.0,
        use_post_norms=True,
        mlp_activation="gelu_tanh",
        embedding_scale=max(sizes["hidden_size"], 1) ** 0.5,
        attention_scale=scalar**-0.5,
        final_soft_cap=values.get("final_logit_softcapping", NUMBER, None),
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    scale = config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale
    return {
        **write_sizes(config),
        **write_windows(config),
        **write_rope(config.rope),
        "head_dim": config.head_dim,
        "hidden_activation": _ACTIVATION,
        "query_pre_attn_scalar": round(scale**-2),
        "final_logit_softcapping": config.final_soft_cap,
    }


def _read_gemma2(values: JsonObject) -> dict[str, Any]:
    soft_cap = values.get("attn_logit_softcapping", NUMBER, None)
    return _read(values, period=2) | dict(attention_soft_cap=soft_cap, rope=read_rope(values))


def _write_gemma2(config: DecoderConfig) -> dict[str, Any]:
    return _write(config) | {"attn_logit_softcapping": config.attention_soft_cap}


def _read_gemma3(values: JsonObject) -> dict[str, Any]:
    theta = values.get("rope_theta", NUMBER, 1_000_000.0)
    rope, window_rope = read_ropes(values, theta, values.get("rope_local_base_freq", NUMBER, 10_000.0))
    options = dict(use_qk_norm=True, rope=rope, window_rope=window_rope)
    return _read(values, period=values.get("sliding_window_pattern", int, 6)) | options


def _write_gemma3(config: DecoderConfig) -> dict[str, Any]:
    return _write(config) | {"rope_local_base_freq": (config.window_rope or config.rope or Rope()).theta}


_family = functools.partial(Family, only=_ONLY, defaults=_DEFAULTS, names=lambda config: _NORMS)
GEMMA2 = _family(
    architecture="Gemma2ForCausalLM",
    read=_read_gemma2,
    write=_write_gemma2,
    only={name: value for name, value in _ONLY.items() if name not in _CAPS},
    defaults=_DEFAULTS | _CAPS,
)
GEMMA3 = _family(
    architecture="Gemma3ForCausalLM",
    read=_read_gemma3,
    write=_write_gemma3,
)
# What files leave out of the entries of a text model within another one.
_WHOLE = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
}
GEMMA3_WHOLE = dataclasses.replace(
    GEMMA3,
    architecture="Gemma3ForConditionalGeneration",
    write=lambda config: None,
    defaults=_DEFAULTS | _WHOLE,
    names=lambda config: {**_NORMS, **within("language_model")},
    part="text_config",
    skipped=lambda values: {r"(vision_tower|multi_modal_projector)\..*": "the part that sees"},
)
