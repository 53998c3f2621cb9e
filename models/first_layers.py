"""A decoder's first layers, by which `generate` chooses the tokens of chunks that are computed again."""

import math

import jax
import jax.numpy as jnp

import kvcache_jax as kv
from models.config import ATTENTION
from models.decoder import Decoder, rotations, single_layers
from models.layers import normed


def first_layers(
    decoder: Decoder, tokens: jax.Array, cache: kv.Cache, step: kv.Step, *, num_layers: int = 2
) -> tuple[jax.Array, kv.Cache]:
    """Stores what the first layers store of a step's tokens, for `kv.chunks.Reuse(observe=first_layers)`.

    The last of them attends to nothing: its keys and values follow from the layers below.

    Args:
      decoder: The parameters of all layers.
      tokens: As in `forward`, like the next two.
      cache: Likewise.
      step: Likewise, padded.
      num_layers: One more than `observed_layer`.

    Returns:
      Queries of the last layer `[n, T, num_q_heads, key_dim]`, as `kv.attention` takes them by default, and
      the cache. A soft cap and logits of sinks are left out.
    """
    mixers = list(decoder.config.layer_mixers[:num_layers])
    if {*mixers} != {ATTENTION}:
        raise ValueError(
            f"layers 0 to {num_layers - 1} are {mixers}, expected attention: a recurrence has no queries"
        )
    x = decoder.embed(tokens)
    turns = rotations(decoder.config, step.positions)
    layers = single_layers(decoder)[:num_layers]
    places = [cache.config.locate(layer_id) for layer_id in range(num_layers)]
    for layer, (group_id, index), turn in zip(layers[:-1], places, turns, strict=False):
        x, cache = layer(x, cache, (group_id, jnp.int32(index)), step, turn)
    attention, (group_id, index) = layers[-1].attention, places[-1]
    assert attention is not None
    q, k, v = attention.project(normed(layers[-1].attention_norm, x), turns[num_layers - 1])
    cache = kv.write(cache, (group_id, jnp.int32(index)), k, v, step)
    if attention.scale is not None:
        q = q * jnp.asarray(attention.scale * math.sqrt(q.shape[-1]), q.dtype)
    return q, cache
