"""A decoder-only model on the cache: the families in `models.families` are options of one.

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

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import kvcache_jax as kv
from models.attention import Place, new_attention
from models.config import ATTENTION, RECURRENCE, DecoderConfig, Parts
from models.layer_runs import Run
from models.layers import RMSNorm, normal, normed, soft_capped
from models.mixture import new_mlp
from models.recurrence import new_recurrence
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
      max_rollback: Tokens that `kv.truncate` may take back in recurrent layers and windows (drafts).
      quantise: Turns the kind of each layer with attention into one of fewer bits,
        `lambda kind: kv.Quantised(kind, "int8")`.
      **sizes: Of `kv.CacheConfig`. Default: `dtype` of the computation, `max_seq_len` of the model and at
        most 8192.
    """
    layers = [
        _layer_kind(config, mixer, window, max_rollback, quantise)
        for mixer, window in zip(config.layer_mixers, config.layer_windows, strict=True)
        if mixer is not None
    ]
    sizes = {"dtype": config.dtype, "max_seq_len": min(config.max_seq_len, 8192)} | sizes
    return kv.CacheConfig(layers, **sizes)


def _layer_kind(
    config: DecoderConfig, mixer: str, window: int | None, max_rollback: int, quantise: Any
) -> kv.LayerKind:
    if mixer == RECURRENCE:
        assert config.recurrence is not None
        return dataclasses.replace(config.recurrence, max_rollback=max_rollback)
    heads = config.num_kv_heads, config.head_dim
    if config.latents is not None:
        kind = kv.LatentAttention(config.latents.latent_dim, config.latents.rope_dim)
    elif window is None:
        kind = kv.FullAttention(*heads)
    else:
        kind = kv.SlidingWindow(*heads, window=window, max_rollback=max_rollback)
    return kind if quantise is None else quantise(kind)


def _forward(
    decoder: "Decoder",
    tokens: jax.Array,
    cache: kv.Cache,
    step: kv.Step,
    logits_at: jax.Array | None = None,
) -> tuple[jax.Array, kv.Cache]:
    """Stores the step's tokens in the cache and predicts the token after each of them.

    Args:
      decoder: The parameters, a pytree: pass it through `jax.jit`, differentiate with respect to it.
      tokens: i32[...], shaped like `step.positions`; any id of the vocabulary where there is no token.
      cache: Built from `cache_config(decoder.config)`; updated in place if the caller donates it.
      step: From `kv.extend`.
      logits_at: i32[m], the tokens whose logits are wanted; None for all.

    Returns:
      Logits f32[..., vocab_size] or `[m, 1, vocab_size]`, unspecified where there is no token; the cache.
    """
    return decoder(tokens, cache, step, logits_at)


class Decoder(nnx.Module):
    """Embedding, layers, norm, logits.

    Parameters have `param_dtype`; matrices are `[in, out]`, embeddings `[vocab_size, hidden_size]`. The
    layers of a new decoder are stacked: `layers[i]` is one `Layer` that holds all of `config.stacks[i]`, each
    parameter `[layers of the stack, ...]`. A program holds one period of a run, whatever the model's depth.

    On GPUs XLA copies each matrix out of its stack before it multiplies, at every step. There decoders are
    `unstacked`: `layers[i]` is layer `i`, and a program holds them all.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.is_stacked = True
        self.embedding = normal(config, rngs, (config.vocab_size, config.hidden_size), 0.02)
        self.layers = nnx.List([_new_stack(config, rngs, layer_ids) for layer_ids in config.stacks])
        self.norm = RMSNorm(config, config.hidden_size)
        if not config.tie_embeddings:
            self.unembedding = normal(config, rngs, (config.vocab_size, config.hidden_size), 0.02)

    def __call__(
        self, tokens: jax.Array, cache: kv.Cache, step: kv.Step, logits_at: jax.Array | None = None
    ) -> tuple[jax.Array, kv.Cache]:
        x = self.embed(tokens)
        turns = rotations(self.config, step.positions)
        if self.is_stacked:
            for run in self.config.runs:
                x, cache = _compute(self, run, x, cache, step, turns[run.start :][: run.period])
        else:
            for layer, place, turn in zip(self.layers, self.config.cache_layers, turns, strict=True):
                x, cache = layer(x, cache, place, step, turn)
        x = self.norm(kv.decoding.for_logits(x, logits_at))
        unembedding = self.embedding if self.config.tie_embeddings else self.unembedding
        unembedding = unembedding[...].astype(x.dtype)
        logits = jnp.einsum("...h,vh->...v", x, unembedding, preferred_element_type=jnp.float32)
        if self.config.logits_divisor != 1:
            logits /= self.config.logits_divisor
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


def rotations(config: DecoderConfig, positions: jax.Array) -> list[Rotation | None]:
    """Computes the angles of each layer, of equal rotations once; None where none is rotated."""
    of_rope = {rope: rotation(rope, config.rope_dim, positions) for rope in dict.fromkeys(config.layer_ropes)}
    return [of_rope[rope] for rope in config.layer_ropes]


def single_layers(decoder: Decoder) -> list["Layer"]:
    """Lists the model's layers, each by itself."""
    if not decoder.is_stacked:
        return list(decoder.layers)
    return [_single(decoder.layers[stack], i) for stack, i in _stacked_at(decoder.config)]


def _single(layers: "Layer", i: Any) -> "Layer":
    return jax.tree.map(lambda x: x[i], layers)


def _stacked_at(config: DecoderConfig) -> list[tuple[int, int]]:
    """The stack of each layer, and its index in it."""
    places = {layer: (s, i) for s, layer_ids in enumerate(config.stacks) for i, layer in enumerate(layer_ids)}
    return [places[layer] for layer in range(config.num_layers)]


def stacked(decoder: Decoder) -> Decoder:
    """Stacks the layers, as for training and for programs that are to be short."""
    if decoder.is_stacked:
        return decoder
    stacks = [[decoder.layers[i] for i in layer_ids] for layer_ids in decoder.config.stacks]
    return _with_layers(decoder, _stacks(stacks), is_stacked=True)


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
_stacks = jax.jit(lambda stacks: [jax.tree.map(lambda *xs: jnp.stack(xs), *layers) for layers in stacks])


def _with_layers(decoder: Decoder, layers: list["Layer"], *, is_stacked: bool) -> Decoder:
    decoder = jax.tree.map(lambda x: x, decoder)  # another object, of the same arrays
    decoder.layers, decoder.is_stacked = nnx.List(layers), is_stacked
    return decoder


def _new_stack(config: DecoderConfig, rngs: nnx.Rngs, layer_ids: tuple[int, ...]) -> "Layer":
    """The new layers of a stack in one: every parameter `[layers, ...]`."""
    parts = config.layer_parts[layer_ids[0]]
    return jax.vmap(lambda key: Layer(config, nnx.Rngs(params=key), parts))(
        jax.random.split(rngs.params(), len(layer_ids))
    )


def _compute(
    decoder: Decoder, run: Run, x: jax.Array, cache: kv.Cache, step: kv.Step, turns: list[Rotation | None]
) -> tuple[jax.Array, kv.Cache]:
    """Puts `x` through the stacked layers of a run, a period at a time; `turns` are a period's."""
    cache_layers = [decoder.config.cache_layers[layer] for layer in run.layer_ids]
    places = [cache.config.locate(layer) if layer is not None else (None, 0) for layer in cache_layers]
    group_ids = [group_id for group_id, _ in places[: run.period]]  # None of an MLP alone
    if [group_id for group_id, _ in places] != group_ids * run.num_repeats:
        raise ValueError(
            f"the cache's layers are {cache.config.layers}, expected kinds that repeat every {run.period} "
            f"like the model's from layer {run.start} on; use cache_config(decoder.config)"
        )
    stacked_at = _stacked_at(decoder.config)[run.start :][: run.period]

    def in_periods(stacked: Any) -> Any:  # [layers, ...] -> [num_repeats, layers of a period, ...]
        return stacked.reshape(run.num_repeats, -1, *stacked.shape[1:])

    def compute_period(carry: tuple, inputs: tuple) -> tuple[tuple, None]:
        (x, cache), (stacks, indices) = carry, inputs
        for i, (stack, nth) in enumerate(stacked_at):
            group_id = group_ids[i]
            place = None if group_id is None else (group_id, indices[i])
            x, cache = _single(stacks[stack], nth)(x, cache, place, step, turns[i])
        return (x, cache), None

    # The pools are carried whole: slices of them, as inputs of the scan, would be copied.
    indices = in_periods(np.array([index for _, index in places], np.int32))
    stacks = {stack: jax.tree.map(in_periods, decoder.layers[stack]) for stack, _ in stacked_at}
    (x, cache), _ = jax.lax.scan(compute_period, (x, cache), (stacks, indices))
    return x, cache


class Layer(nnx.Module):
    """A mixer of tokens, then an MLP or experts, each between norms and added to the residual stream."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, parts: Parts):
        def norm(is_there: bool) -> RMSNorm | None:
            return RMSNorm(config, config.hidden_size) if is_there else None

        has_mixer, has_mlp = parts.mixer is not None, parts.has_mlp
        has_pre_norms, has_post_norms = config.use_pre_norms, config.use_post_norms
        self.scale = config.residual_scale
        self.attention_norm = norm(has_mixer and has_pre_norms)
        self.attention = new_attention(config, rngs) if parts.mixer == ATTENTION else None
        self.recurrence = new_recurrence(config, rngs) if parts.mixer == RECURRENCE else None
        self.attention_post_norm = norm(has_mixer and has_post_norms)
        self.mlp_norm = norm(has_mlp and has_pre_norms)
        self.mlp = new_mlp(config, rngs, parts.experts) if has_mlp else None
        self.mlp_post_norm = norm(has_mlp and has_post_norms)

    def __call__(
        self, x: jax.Array, cache: kv.Cache, place: Place | None, step: kv.Step, rotation: Rotation | None
    ) -> tuple[jax.Array, kv.Cache]:
        mixer = self.recurrence if self.attention is None else self.attention
        if mixer is not None:
            assert place is not None
            out, cache = mixer(normed(self.attention_norm, x), cache, place, step, rotation)
            x = self._sum(x, normed(self.attention_post_norm, out))
        if self.mlp is not None:
            x = self._sum(x, normed(self.mlp_post_norm, self.mlp(normed(self.mlp_norm, x))))
        return x, cache

    def _sum(self, x: jax.Array, out: jax.Array) -> jax.Array:
        return x + (out if self.scale == 1 else out * jnp.asarray(self.scale, out.dtype))
