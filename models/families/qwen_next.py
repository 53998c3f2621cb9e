"""Qwen3-Next and the text models of Qwen 3.5: Gated DeltaNet, and attention with a gate."""

import functools
from typing import Any

import numpy as np

import kvcache_jax as kv
from models.config import DecoderConfig
from models.families.family import FULL, LINEAR, ONLY, Family, only, read_sizes, write_sizes
from models.families.hybrid import Hybrid
from models.families.qwen_moe import SHARED_NAMES, mixtures
from models.families.rope_entries import read_rope, write_rope
from models.json_object import JsonObject
from models.tensor_names import Names, Stored

_HYBRID = Hybrid(
    kind=kv.GatedDeltaNet,
    sizes={
        "num_kv_heads": "linear_num_value_heads",
        "head_dim": "linear_value_head_dim",
        "num_key_heads": "linear_num_key_heads",
        "key_dim": "linear_key_head_dim",
        "kernel": "linear_conv_kernel_dim",
    },
)
_MIXTURES = mixtures(has_shared=True)


def _read(values: JsonObject) -> dict[str, Any]:
    sizes, interval = read_sizes(values), values.get("full_attention_interval", int, 4)
    if interval < 1:
        raise values.error("full_attention_interval", "a positive number of layers")
    implied = [LINEAR if (layer + 1) % interval else FULL for layer in range(sizes["num_layers"])]
    return sizes | dict(
        num_kv_heads=values.get("num_key_value_heads", int),
        head_dim=values.get("head_dim", int),
        **_HYBRID.read(values, implied),
        rope=read_rope(values, share=0.25),
        norm_offset=1.0,
        use_qk_norm=True,
        use_attention_gate=True,
    )


def _write(config: DecoderConfig) -> dict[str, Any] | None:
    mixers = _HYBRID.write(config)
    if mixers is None or config.rope is None:
        return None
    values = write_sizes(config) | write_rope(config.rope) | mixers
    values |= {"head_dim": config.head_dim, "hidden_act": ONLY["hidden_act"]}
    return values | {"partial_rotary_factor": config.rope.share}


def _write_next(config: DecoderConfig) -> dict[str, Any] | None:
    values, experts = _write(config), _MIXTURES.write(config)
    return None if values is None or experts is None else values | experts


def _names(config: DecoderConfig) -> Names:
    rows = np.arange(2 * config.num_q_heads * config.head_dim).reshape(-1, 2, config.head_dim)
    return {
        "attention.q": Stored(("self_attn.q_proj",), rows[:, 0].ravel()),  # each head's query, then its gate
        "attention.gate": Stored(("self_attn.q_proj",), rows[:, 1].ravel()),
        "recurrence.inputs": "linear_attn.in_proj_qkv",
        "recurrence.gate": "linear_attn.in_proj_z",
        "recurrence.beta": "linear_attn.in_proj_b",
        "recurrence.decay": "linear_attn.in_proj_a",
        "recurrence.decay_rate": "linear_attn.A_log",
        "recurrence.decay_bias": "linear_attn.dt_bias",
        "recurrence.convolution.kernel": Stored(("linear_attn.conv1d.weight",), unit_axes=(1,)),
        "recurrence.norm": "linear_attn.norm",
        "recurrence.out": "linear_attn.out_proj",
        **SHARED_NAMES,
    }


def _names_next(config: DecoderConfig) -> Names:
    """Names two tensors that hold each key head's parts side by side."""
    kind = config.recurrence
    if not isinstance(kind, kv.GatedDeltaNet):
        return _names(config)
    heads = kind.num_key_heads or kind.num_kv_heads
    width = kind.num_kv_heads // heads * kind.head_dim
    rows = np.arange(2 * heads * (kind.key_dim + width)).reshape(heads, -1)
    q, k, v, z = np.split(rows, np.cumsum([kind.key_dim, kind.key_dim, width]), axis=1)
    gates = np.arange(2 * kind.num_kv_heads).reshape(heads, 2, -1)
    inputs = np.concatenate([part.ravel() for part in (q, k, v)])
    return {
        **_names(config),
        "recurrence.inputs": Stored(("linear_attn.in_proj_qkvz",), inputs),
        "recurrence.gate": Stored(("linear_attn.in_proj_qkvz",), z.ravel()),
        "recurrence.beta": Stored(("linear_attn.in_proj_ba",), gates[:, 0].ravel()),
        "recurrence.decay": Stored(("linear_attn.in_proj_ba",), gates[:, 1].ravel()),
    }


_family = functools.partial(
    Family,
    only=only("partial_rotary_factor"),
    defaults={"head_dim": 256, "norm_topk_prob": True},
    skipped=lambda values: {r"mtp\..*": "extra prediction layers"},
)
QWEN3_5 = _family(architecture="Qwen3_5ForCausalLM", read=_read, write=_write, names=_names)
QWEN3_NEXT = _family(
    architecture="Qwen3NextForCausalLM",
    read=lambda values: _read(values) | _MIXTURES.read(values),
    write=_write_next,
    only=only("partial_rotary_factor", decoder_sparse_step=1),
    names=_names_next,
)
