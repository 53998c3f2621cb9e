"""LFM2: short convolutions between gates, and attention."""

import math
from typing import Any

import kvcache_jax as kv
from models.config import ATTENTION, RECURRENCE, DecoderConfig
from models.families.aspects import ROPE, Aspect, compose, heads
from models.families.family import FULL, NUMBER, UNSCALED
from models.families.hybrid import Hybrid
from models.json_object import JsonObject
from models.tensor_names import Names, Stored

_CONV = "conv"
_HYBRID = Hybrid(
    kind=kv.ShortConvolution,
    sizes={"num_channels": "hidden_size", "kernel": "conv_L_cache"},
    types={_CONV: RECURRENCE, FULL: ATTENTION},
)


def _read_mixers(values: JsonObject) -> dict[str, Any]:
    layers = range(values.get_field("num_layers", int))
    full = values.get("full_attn_idxs", list, layers)
    return _HYBRID.read(values, [FULL if layer in full else _CONV for layer in layers])


def _read_embeddings(values: JsonObject) -> dict[str, Any]:
    """Its own name of whether they are tied goes before the name that most use."""
    own = values.get("tie_embedding", bool, None)
    return {} if own is None else {"tie_embeddings": own}


def _mlp_size(values: JsonObject) -> int:
    size = values.get("block_ff_dim", int, values.get("intermediate_size", int))
    if not values.get("block_auto_adjust_ff_dim", bool):
        return size
    multiple = values.get("block_multiple_of", int)
    if multiple < 1:
        raise values.error("block_multiple_of", "a positive number")
    size = int(values.get("block_ffn_dim_multiplier", NUMBER, 1.0) * int(2 * size / 3))
    return multiple * math.ceil(size / multiple)


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


LFM2 = compose(
    "Lfm2ForCausalLM",
    heads(),
    Aspect(_read_mixers, _HYBRID.write),
    ROPE,
    Aspect(_read_embeddings, lambda config: {}),
    Aspect(
        lambda values: {"mlp_size": _mlp_size(values)}, lambda config: {"block_auto_adjust_ff_dim": False}
    ),
    options={"use_qk_norm": True},
    only=UNSCALED | {"conv_bias": False, "quantization_config": None},
    defaults={
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        "conv_L_cache": 3,
        "block_auto_adjust_ff_dim": True,
        "block_multiple_of": 256,
    },
    entries={"norm_eps": "norm_eps"},
    names=_names,
)
