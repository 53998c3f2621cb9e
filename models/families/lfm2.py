"""LFM2: short convolutions between gates, and attention."""

import math
from typing import Any

import kvcache_jax as kv
from models.config import ATTENTION, RECURRENCE, DecoderConfig
from models.families.family import FULL, NUMBER, Family, read_head_dim, read_sizes, write_sizes
from models.families.hybrid import Hybrid
from models.families.rope_entries import read_rope, write_rope
from models.json_object import JsonObject
from models.tensor_names import Names, Stored

_CONV = "conv"
_HYBRID = Hybrid(
    kind=kv.ShortConvolution,
    sizes={"num_channels": "hidden_size", "kernel": "conv_L_cache"},
    types={_CONV: RECURRENCE, FULL: ATTENTION},
)
_ENTRIES = {"norm_eps": "norm_eps"}


def _read(values: JsonObject) -> dict[str, Any]:
    sizes = read_sizes(values)
    layers = range(sizes["num_layers"])
    full = values.get("full_attn_idxs", list, layers)
    return sizes | dict(
        mlp_size=_mlp_size(values),
        num_kv_heads=values.get("num_key_value_heads", int),
        head_dim=read_head_dim(values),
        **_HYBRID.read(values, [FULL if layer in full else _CONV for layer in layers]),
        use_qk_norm=True,
        rope=read_rope(values.with_defaults({"rope_theta": 1_000_000.0})),
        tie_embeddings=values.get("tie_embedding", bool, sizes["tie_embeddings"]),
    )


def _mlp_size(values: JsonObject) -> int:
    size = values.get("block_ff_dim", int, values.get("intermediate_size", int))
    if not values.get("block_auto_adjust_ff_dim", bool):
        return size
    multiple = values.get("block_multiple_of", int)
    if multiple < 1:
        raise values.error("block_multiple_of", "a positive number")
    size = int(values.get("block_ffn_dim_multiplier", NUMBER, 1.0) * int(2 * size / 3))
    return multiple * math.ceil(size / multiple)


def _write(config: DecoderConfig) -> dict[str, Any] | None:
    mixers = _HYBRID.write(config)
    if mixers is None:
        return None
    values = write_sizes(config, _ENTRIES) | write_rope(config.rope) | mixers
    return values | {"head_dim": config.head_dim, "block_auto_adjust_ff_dim": False}


def _names(config: DecoderConfig) -> Names:
    return {
        "norm": "model.embedding_norm",
        "attention_norm": "operator_norm",
        "attention.out": "self_attn.out_proj",
        "attention.q_norm": "self_attn.q_layernorm",
        "attention.k_norm": "self_attn.k_layernorm",
        "recurrence.inputs": "conv.in_proj",
        "recurrence.convolution.kernel": Stored(("conv.conv.weight",), unit_axes=(1,)),
        "recurrence.out": "conv.out_proj",
        "mlp_norm": "ffn_norm",
        "mlp.gate": "feed_forward.w1",
        "mlp.up": "feed_forward.w3",
        "mlp.down": "feed_forward.w2",
    }


LFM2 = Family(
    architecture="Lfm2ForCausalLM",
    read=_read,
    write=_write,
    only={"conv_bias": False, "quantization_config": None},
    defaults={
        "tie_word_embeddings": True,
        "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": True,
        "block_multiple_of": 256,
    },
    entries=_ENTRIES,
    names=_names,
)
