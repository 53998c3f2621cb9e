"""A decoder-only transformer on the cache: Llama, Qwen, Mistral, Gemma and DeepSeek are options of one model.

`forward` serves prefill, whole or in pieces, and decode, padded and packed: what differs between them is the
`Step`. In shape comments `...` stands for the step's tokens, `[n, T]` if padded, `[num_tokens]` if packed.

    decoder = Decoder(config, rngs=nnx.Rngs(0))
    cache = kv.init(cache_config(config, max_seqs=4))
    cache, admission = kv.allocate(cache, seq_ids, prompt_lens)

    @functools.partial(jax.jit, donate_argnums=1)
    def step_fn(decoder, cache, tokens, num_new):
        cache, step = kv.extend(cache, num_new, max_new=tokens.shape[1], tokens=tokens)
        logits, cache = forward(decoder, tokens, cache, step)
        return cache, logits, step.status
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import kvcache_jax as kv
from models.attention import Attention, LatentAttention, Place
from models.config import DecoderConfig, Experts
from models.layer_runs import Run
from models.layers import MLP, RMSNorm, normal, soft_capped
from models.mixture import Mixture
from models.rope import Rotation, rotation

__all__ = [
    "Decoder",
    "DecoderConfig",
    "Layer",
    "cache_config",
    "for_decoding",
    "forward",
    "rotations",
    "single_layers",
    "stacked",
    "unstacked",
]


def cache_config(
    config: DecoderConfig,
    *,
    max_rollback: int = 0,
    quantise: Any = None,
    **sizes: Any,
) -> kv.CacheConfig:
    """What the model keeps per token: layers with equal windows form one group.

    Args:
      config: The model's.
      max_rollback: Tokens that `kv.truncate` may take back in window layers (speculative decoding).
      quantise: Turns each layer's kind into one of fewer bits, `lambda kind: kv.Quantised(kind, "int8")`.
      **sizes: Of `kv.CacheConfig`. Default: `dtype` of the computation, `max_seq_len` of the model and at
        most 8192.
    """
    layers = [_layer_kind(config, window, max_rollback) for window in config.layer_windows]
    if quantise is not None:
        layers = [quantise(layer) for layer in layers]
    sizes = {"dtype": config.dtype, "max_seq_len": min(config.max_seq_len, 8192)} | sizes
    return kv.CacheConfig(layers, **sizes)


def _layer_kind(config: DecoderConfig, window: int | None, max_rollback: int) -> kv.LayerKind:
    if config.latents is not None:
        return kv.LatentAttention(config.latents.latent_dim, config.latents.rope_dim)
    heads = config.num_kv_heads, config.head_dim
    if window is None:
        return kv.FullAttention(*heads)
    return kv.SlidingWindow(*heads, window=window, max_rollback=max_rollback)


def _forward(
    decoder: "Decoder", tokens: jax.Array, cache: kv.Cache, step: kv.Step
) -> tuple[jax.Array, kv.Cache]:
    """Stores the step's tokens in the cache and predicts the token after each of them.

    Args:
      decoder: The parameters, a pytree: pass it through `jax.jit`, differentiate with respect to it.
      tokens: i32[...], shaped like `step.positions`; any id of the vocabulary where there is no token.
      cache: Built from `cache_config(decoder.config)`; updated in place if the caller donates it.
      step: From `kv.extend`.

    Returns:
      Logits f32[..., vocab_size], unspecified where there is no token, and the cache.
    """
    return decoder(tokens, cache, step)


class Decoder(nnx.Module):
    """Embedding, layers, norm, logits.

    Parameters have `param_dtype`; matrices are `[in, out]`, embeddings `[vocab_size, hidden_size]`. The
    layers of a new decoder are stacked: `layers[i]` is one `Layer` that holds all of `config.runs[i]`, each
    parameter `[layers of the run, ...]`. A program holds one period of a run, whatever the model's depth.

    On GPUs XLA copies each matrix out of its stack before it multiplies, at every step. There decoders are
    `unstacked`: `layers[i]` is layer `i`, and a program holds them all.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.is_stacked = True
        self.embedding = normal(config, rngs, (config.vocab_size, config.hidden_size), 0.02)
        self.layers = nnx.List([_new_stack(config, rngs, run) for run in config.runs])
        self.norm = RMSNorm(config, config.hidden_size)
        if not config.tie_embeddings:
            self.unembedding = normal(config, rngs, (config.vocab_size, config.hidden_size), 0.02)

    def __call__(self, tokens: jax.Array, cache: kv.Cache, step: kv.Step) -> tuple[jax.Array, kv.Cache]:
        x = self.embed(tokens)
        turns = rotations(self.config, step.positions)
        if self.is_stacked:
            for run, layers in zip(self.config.runs, self.layers, strict=True):
                x, cache = _compute(run, layers, x, cache, step, turns[run.start :][: run.period])
        else:
            for layer_id, (layer, turn) in enumerate(zip(self.layers, turns, strict=True)):
                x, cache = layer(x, cache, layer_id, step, turn)
        x = self.norm(x)
        unembedding = self.embedding if self.config.tie_embeddings else self.unembedding
        unembedding = unembedding[...].astype(x.dtype)
        logits = jnp.einsum("...h,vh->...v", x, unembedding, preferred_element_type=jnp.float32)
        return soft_capped(logits, self.config.final_soft_cap), cache

    def embed(self, tokens: jax.Array) -> jax.Array:
        """What the first layer gets of tokens, [..., hidden]."""
        # An id outside of the vocabulary must not read another token's row.
        rows = self.embedding[...].at[tokens]
        x = rows.get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        x = x.astype(self.config.dtype)
        if self.config.embedding_scale != 1:
            x *= jnp.asarray(self.config.embedding_scale, x.dtype)
        return x


def rotations(config: DecoderConfig, positions: jax.Array) -> list[Rotation]:
    """Computes the angles of each layer, those of equal rotations once."""
    of_rope = {rope: rotation(rope, config.rope_dim, positions) for rope in dict.fromkeys(config.layer_ropes)}
    return [of_rope[rope] for rope in config.layer_ropes]


def single_layers(decoder: Decoder) -> list["Layer"]:
    """Lists the model's layers, each by itself."""
    if not decoder.is_stacked:
        return list(decoder.layers)
    runs = zip(decoder.config.runs, decoder.layers, strict=True)
    return [
        jax.tree.map(lambda x, i=i: x[i], layers) for run, layers in runs for i in range(len(run.layer_ids))
    ]


def stacked(decoder: Decoder) -> Decoder:
    """Stacks the layers of each run, as for training and for programs that are to be short."""
    if decoder.is_stacked:
        return decoder
    runs = [[decoder.layers[i] for i in run.layer_ids] for run in decoder.config.runs]
    return _with_layers(decoder, _stacks(runs), is_stacked=True)


def unstacked(decoder: Decoder) -> Decoder:
    """Takes the layers out of their stacks: a copy of their parameters, made once."""
    return _with_layers(decoder, _singles(decoder), is_stacked=False) if decoder.is_stacked else decoder


def for_decoding(decoder: Decoder) -> Decoder:
    """Lays the layers out as the decoder's device reads them best: on GPUs unstacked, on others as they are.

    A stack and its copy take twice the memory as long as the caller holds the stack; `checkpoint.load` reads
    layers as its device wants them.
    """
    return unstacked(decoder) if is_on_gpu(decoder.embedding[...]) else decoder


def is_on_gpu(x: jax.typing.ArrayLike) -> bool:
    """Tests whether an array is on GPUs."""
    return isinstance(x, jax.Array) and any(device.platform == "gpu" for device in x.devices())


forward = kv.decoding.PreparedForward(_forward, for_decoding)
"""`_forward`, whose decoders loops of decoding lay out `for_decoding` before they begin."""

_singles = jax.jit(single_layers)
_stacks = jax.jit(lambda runs: [jax.tree.map(lambda *xs: jnp.stack(xs), *layers) for layers in runs])


def _with_layers(decoder: Decoder, layers: list["Layer"], *, is_stacked: bool) -> Decoder:
    decoder = jax.tree.map(lambda x: x, decoder)  # another object, of the same arrays
    decoder.layers, decoder.is_stacked = nnx.List(layers), is_stacked
    return decoder


def _new_stack(config: DecoderConfig, rngs: nnx.Rngs, run: Run) -> "Layer":
    """The new layers of a run in one: every parameter `[layers, ...]`."""
    experts = config.layer_experts[run.start]
    return jax.vmap(lambda key: Layer(config, nnx.Rngs(params=key), experts))(
        jax.random.split(rngs.params(), len(run.layer_ids))
    )


def _compute(
    run: Run, layers: "Layer", x: jax.Array, cache: kv.Cache, step: kv.Step, turns: list[Rotation]
) -> tuple[jax.Array, kv.Cache]:
    """Puts `x` through the stacked layers of a run, a period at a time; `turns` are those of a period."""
    places = [cache.config.locate(layer_id) for layer_id in run.layer_ids]  # (group, index in it)
    group_ids = [group_id for group_id, _ in places[: run.period]]
    if [group_id for group_id, _ in places] != group_ids * run.num_repeats:
        raise ValueError(
            f"the cache's layers from {run.start} on are {cache.config.layers[run.start :]}, expected kinds "
            f"that repeat every {run.period} like the model's windows; use cache_config(decoder.config)"
        )

    def in_periods(stacked: Any) -> Any:  # [layers of the run, ...] -> [num_repeats, period, ...]
        return stacked.reshape(run.num_repeats, run.period, *stacked.shape[1:])

    def compute_period(carry: tuple, inputs: tuple) -> tuple[tuple, None]:
        (x, cache), (layers, indices) = carry, inputs
        for i, group_id in enumerate(group_ids):
            layer = jax.tree.map(lambda stacked, i=i: stacked[i], layers)
            x, cache = layer(x, cache, (group_id, indices[i]), step, turns[i])
        return (x, cache), None

    # The pools are carried whole: slices of them, as inputs of the scan, would be copied.
    indices = in_periods(np.array([index for _, index in places], np.int32))
    (x, cache), _ = jax.lax.scan(compute_period, (x, cache), (jax.tree.map(in_periods, layers), indices))
    return x, cache


class Layer(nnx.Module):
    """Attention and MLP or experts, each behind a norm and added to the residual stream."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, experts: Experts | None):
        self.attention_norm = RMSNorm(config, config.hidden_size)
        latents = config.latents
        self.attention = LatentAttention(config, rngs, latents) if latents else Attention(config, rngs)
        self.attention_post_norm = RMSNorm(config, config.hidden_size) if config.use_post_norms else None
        self.mlp_norm = RMSNorm(config, config.hidden_size)
        self.mlp = Mixture(config, rngs, experts) if experts else MLP(config, rngs, config.mlp_size)
        self.mlp_post_norm = RMSNorm(config, config.hidden_size) if config.use_post_norms else None

    def __call__(
        self, x: jax.Array, cache: kv.Cache, place: Place, step: kv.Step, rotation: Rotation
    ) -> tuple[jax.Array, kv.Cache]:
        out, cache = self.attention(self.attention_norm(x), cache, place, step, rotation)
        x = x + (out if self.attention_post_norm is None else self.attention_post_norm(out))
        out = self.mlp(self.mlp_norm(x))
        return x + (out if self.mlp_post_norm is None else self.mlp_post_norm(out)), cache
