"""DeepSeek-V2 and V3, as far as their MLPs are dense."""

import functools
from typing import Any

from models.config import DecoderConfig, Latents
from models.families import llama
from models.families.family import Family, read_sizes, write_sizes
from models.families.rope_entries import read_rope, write_rope
from models.json_object import JsonObject
from models.rope import Rope, YarnScaling


def _read(values: JsonObject, interleaves: bool) -> dict[str, Any]:
    sizes = read_sizes(values)
    num_dense = values.get("first_k_dense_replace", int)
    if num_dense < sizes["num_layers"]:
        raise values.error(
            "first_k_dense_replace",
            f"at least num_hidden_layers = {sizes['num_layers']}: the layers from there on are mixtures of "
            "experts, which are not implemented; load a model whose MLPs are all dense",
        )
    latents = values.make(
        Latents,
        latent_dim=values.get("kv_lora_rank", int),
        rope_dim=values.get("qk_rope_head_dim", int),
        nope_dim=values.get("qk_nope_head_dim", int),
        value_dim=values.get("v_head_dim", int),
        q_rank=values.get("q_lora_rank", int, None),
    )
    head_dim = latents.nope_dim + latents.rope_dim
    rope = read_rope(values, is_interleaved=interleaves)
    return sizes | dict(
        num_kv_heads=values.get("num_key_value_heads", int, sizes["num_q_heads"]),
        head_dim=head_dim,
        latents=latents,
        attention_scale=_attention_scale(head_dim, rope),
        rope=rope,
    )


def _attention_scale(head_dim: int, rope: Rope) -> float | None:
    """The whole head is longer for a stretched context, not only what is rotated: queries and keys both."""
    scaling = rope.scaling
    if not isinstance(scaling, YarnScaling) or scaling.mscale_all_dim is None:
        return None
    return head_dim**-0.5 * scaling.length(scaling.mscale_all_dim) ** 2


def _write(config: DecoderConfig) -> dict[str, Any] | None:
    latents = config.latents
    if latents is None:
        return None
    return {
        **write_sizes(config),
        **write_rope(config.rope),
        "hidden_act": llama.ONLY["hidden_act"],
        "kv_lora_rank": latents.latent_dim,
        "qk_rope_head_dim": latents.rope_dim,
        "qk_nope_head_dim": latents.nope_dim,
        "v_head_dim": latents.value_dim,
        "q_lora_rank": latents.q_rank,
        "first_k_dense_replace": config.num_layers,
    }


def _read_v3(values: JsonObject) -> dict[str, Any]:
    return _read(values, interleaves=values.get("rope_interleave", bool, True))


def _write_v3(config: DecoderConfig) -> dict[str, Any] | None:
    values = _write(config)
    return None if values is None else values | {"rope_interleave": config.rope.is_interleaved}


_family = functools.partial(Family, only=llama.ONLY)
DEEPSEEK_V2 = _family(
    architecture="DeepseekV2ForCausalLM",
    read=functools.partial(_read, interleaves=True),
    write=_write,
    defaults={"first_k_dense_replace": 0},
)
DEEPSEEK_V3 = _family(
    architecture="DeepseekV3ForCausalLM",
    read=_read_v3,
    write=_write_v3,
    defaults={"first_k_dense_replace": 3},
)
