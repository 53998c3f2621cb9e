"""Gradients through layers that attend to a cache, to be compiled for what memory they need.

    python -m tests.attention.gradient_program    # the pools of temporary memory on this machine

Rows fill the pool, and the layers are under `lax.scan`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import kvcache_jax as kv
from tests.support.few_kernels import compile_for_users

HEADS, GROUP, DIM = 2, 2, 8


def config_of(num_layers: int, num_blocks: int, max_seqs: int) -> kv.CacheConfig:
    """Rows of at most 64 tokens, 4 blocks."""
    layers = [kv.FullAttention(HEADS, DIM)] * num_layers
    return kv.CacheConfig(layers, num_blocks=num_blocks, max_seqs=max_seqs, max_seq_len=64)


def gradient(is_scanned: bool, returns_cache: bool) -> Callable[..., Any]:
    """Of a loss with respect to keys and values `[layers, rows, 5, HEADS, DIM]` that all layers read.

    Args:
      is_scanned: The layers are under `lax.scan`.
      returns_cache: The loss returns the new cache beside its value.

    Returns:
      A function of these, the queries `[rows, 3, HEADS * GROUP, DIM]` and the cache.
    """

    def loss(prefix, x, cache):
        num_rows, num_layers = cache.max_seqs, cache.config.num_layers
        cache, _ = kv.append(cache, prefix, prefix, [5] * num_rows)
        cache, step = kv.extend(cache, [3] * num_rows, max_new=3)

        def layer_fn(carry, layer):
            cache, x = carry
            kv_new = x[:, :, :HEADS]
            cache, out = kv.attention(cache, layer, x, kv_new, kv_new, step)
            return (cache, jnp.tanh(out)), None

        carry = cache, x
        if is_scanned:
            carry, _ = jax.lax.scan(layer_fn, carry, jnp.arange(num_layers))
        else:
            for layer in range(num_layers):
                carry, _ = layer_fn(carry, layer)
        cache, x = carry
        return (x**2).sum(), cache if returns_cache else None

    return jax.grad(loss, has_aux=True)


def arguments(config: kv.CacheConfig) -> tuple:
    """The shapes of what the gradient takes."""
    prefix = config.num_layers, config.max_seqs, 5, HEADS, DIM
    queries = config.max_seqs, 3, HEADS * GROUP, DIM
    cache = jax.eval_shape(functools.partial(kv.init, config))
    return *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (prefix, queries)), cache


def decoder_gradient(returns_cache: bool) -> Callable[..., Any]:
    """Of a loss with respect to a decoder; a function of it, its tokens `[rows, T]` and the cache."""
    from models.decoder import forward  # needs Flax, which the oldest jax is tested without

    def loss(decoder, tokens, cache):
        num_rows, num_new = tokens.shape
        cache, step = kv.extend(cache, [num_new] * num_rows, max_new=num_new)
        logits, cache = forward(decoder, tokens, cache, step)
        return (logits**2).sum(), cache if returns_cache else None

    return jax.grad(loss, has_aux=True)


def decoder_arguments(config: kv.CacheConfig) -> tuple:
    """The shapes of what the decoder's gradient takes."""
    from flax import nnx

    from models.decoder import Decoder, DecoderConfig

    model = DecoderConfig(
        vocab_size=16,
        hidden_size=16,
        mlp_size=16,
        num_layers=config.num_layers,
        num_q_heads=HEADS * GROUP,
        num_kv_heads=HEADS,
        head_dim=DIM,
    )
    decoder = jax.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0)))
    tokens = jax.ShapeDtypeStruct((config.max_seqs, 1), jnp.int32)  # few activations beside the pools
    return decoder, tokens, jax.eval_shape(functools.partial(kv.init, config))


def pools_needed(
    num_layers: int,
    num_blocks: int = 256,
    max_seqs: int = 64,
    *,
    is_scanned: bool = True,
    is_decoder: bool = False,
    returns_cache: bool = False,
    scheduler: str = "DEFAULT",
) -> float:
    """Temporary memory of the compiled gradient, in pools; `scheduler` is XLA's for CPUs."""
    config = config_of(num_layers, num_blocks, max_seqs)
    if is_decoder:
        function, shapes = decoder_gradient(returns_cache), decoder_arguments(config)
    else:
        function, shapes = gradient(is_scanned, returns_cache), arguments(config)
    lowered = jax.jit(function).lower(*shapes)
    compiled = compile_for_users(lowered, xla_cpu_scheduler_type=f"CPU_SCHEDULER_TYPE_{scheduler}")
    memory = compiled.memory_analysis()
    return memory.temp_size_in_bytes / kv.memory_bytes(config)


if __name__ == "__main__":
    cases: list[tuple[str, dict[str, Any]]] = [
        ("the loss throws the cache away", {}),
        ("scheduled for memory", {"scheduler": "MEMORY_OPTIMIZED"}),
        ("the loss returns the cache", {"returns_cache": True}),
        ("a decoder's, thrown away", {"is_decoder": True}),
        ("a decoder's, returned", {"is_decoder": True, "returns_cache": True}),
    ]
    for what, options in cases:
        print(f"{what:30}", *(f"{pools_needed(n, **options):5.2f} pools at {n} layers" for n in (4, 16)))
