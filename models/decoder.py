"""A decoder-only transformer on the cache: Llama 3.x, Qwen2/2.5, Qwen3 and Mistral are options of one model.

`forward` serves prefill, chunked prefill and decode, padded and packed: what differs between them is the
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
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import kvcache_jax as kv
from models.layer_runs import Run, layer_runs
from models.matmul import matmul


def float_dtype(name: str, value: Any) -> jnp.dtype:
    """The dtype that `value` stands for.

    Raises:
      ValueError: it is neither float32 nor bfloat16; says that `name` is it.
    """
    try:
        dtype = jnp.dtype(value)
    except (TypeError, ValueError):
        dtype = None
    if dtype is None or dtype not in (jnp.float32, jnp.bfloat16):
        raise ValueError(f"{name} is {value if dtype is None else dtype}, expected float32 or bfloat16")
    return dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Slows the rotations whose wave is longer than the original context (Llama 3.1's `rope_scaling`).

    Waves shorter than `original_max_seq_len / high_freq_factor` stay, those longer than
    `original_max_seq_len / low_freq_factor` are slowed by `factor`, and between the two it is blended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq_len: int

    def __post_init__(self):
        _check_positive(self, "factor", "low_freq_factor", "high_freq_factor", "original_max_seq_len")
        low, high = self.low_freq_factor, self.high_freq_factor
        if not high > low:
            raise ValueError(f"high_freq_factor is {high}, expected above low_freq_factor = {low}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and options; hashable, the static part of a `Decoder`.

    Attributes:
      vocab_size: Token ids are below it; another id turns its row's logits into NaN.
      hidden_size: Width of the residual stream.
      mlp_size: Width inside an MLP.
      num_layers: Layers.
      num_q_heads: Query heads, a multiple of `num_kv_heads`.
      num_kv_heads: Key and value heads.
      head_dim: Width of a head, even; need not be `hidden_size / num_q_heads`.
      max_seq_len: Longest sequence that the model is meant for.
      windows: Per layer the tokens in reach, None for all of them; empty if it is None everywhere.
      rope_theta: Base of the rotations' wavelengths.
      rope_scaling: Llama 3.1's; None for plain rotations.
      norm_eps: Added to the mean square in every norm.
      use_qkv_bias: Qwen2's biases on queries, keys and values.
      use_qk_norm: Qwen3's norms of each head's query and key.
      tie_embeddings: Logits come from the token embedding, not from a matrix of their own.
      dtype: Of the computation, float32 or bfloat16. Norms, rotations and logits are float32 inside.
      param_dtype: Of the parameters, float32 or bfloat16.
      matmul_dtype: Of the products in `Linear`, float32 or bfloat16; None for `dtype`.
    """

    vocab_size: int
    hidden_size: int
    mlp_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_seq_len: int = 8192
    windows: tuple[int | None, ...] = ()
    rope_theta: float = 10_000.0
    rope_scaling: Llama3Scaling | None = None
    norm_eps: float = 1e-6
    use_qkv_bias: bool = False
    use_qk_norm: bool = False
    tie_embeddings: bool = False
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    matmul_dtype: Any = None

    def __post_init__(self):
        is_windowed = any(window is not None for window in self.windows)
        object.__setattr__(self, "windows", tuple(self.windows) if is_windowed else ())
        for name in ("dtype", "param_dtype", "matmul_dtype"):
            if name == "matmul_dtype" and self.matmul_dtype is None:
                continue
            object.__setattr__(self, name, float_dtype(name, getattr(self, name)))
        _check_positive(self, "vocab_size", "hidden_size", "mlp_size", "num_layers", "num_q_heads")
        _check_positive(self, "num_kv_heads", "head_dim", "max_seq_len", "rope_theta", "norm_eps")
        heads = self.num_q_heads, self.num_kv_heads
        if heads[0] % heads[1]:
            raise ValueError(f"num_q_heads is {heads[0]}, expected a multiple of num_kv_heads = {heads[1]}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}, expected an even number: halves are rotated")
        if len(self.windows) not in (0, self.num_layers):
            raise ValueError(f"windows has {len(self.windows)} entries, expected {self.num_layers} or none")

    @property
    def runs(self) -> tuple[Run, ...]:
        """The layers whose windows repeat."""
        return layer_runs(self.windows or (None,) * self.num_layers)


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
    layers = [
        kv.FullAttention(config.num_kv_heads, config.head_dim)
        if window is None
        else kv.SlidingWindow(config.num_kv_heads, config.head_dim, window=window, max_rollback=max_rollback)
        for window in config.windows or (None,) * config.num_layers
    ]
    if quantise is not None:
        layers = [quantise(layer) for layer in layers]
    sizes = {"dtype": config.dtype, "max_seq_len": min(config.max_seq_len, 8192)} | sizes
    return kv.CacheConfig(layers, **sizes)


def forward(
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


Place = tuple[int, jax.Array]
"""Of a layer in the cache: its group, and i32[], the index in it."""


class Decoder(nnx.Module):
    """Embedding, layers, norm, logits.

    Parameters have `param_dtype`; matrices are `[in, out]`, embeddings `[vocab_size, hidden_size]`. Those of
    the layers are stacked: `layers[i]` is one `Layer` that holds all of `config.runs[i]`, each
    parameter `[layers of the run, ...]`. A program holds one period of a run, whatever the model's depth.
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = _normal(config, rngs, (config.vocab_size, config.hidden_size), 0.02)
        self.layers = nnx.List([_stacked(config, rngs, len(run.layer_ids)) for run in config.runs])
        self.norm = RMSNorm(config, config.hidden_size)
        if not config.tie_embeddings:
            self.unembedding = _normal(config, rngs, (config.vocab_size, config.hidden_size), 0.02)

    def __call__(self, tokens: jax.Array, cache: kv.Cache, step: kv.Step) -> tuple[jax.Array, kv.Cache]:
        # An id outside of the vocabulary must not read another token's row.
        rows = self.embedding[...].at[tokens]
        x = rows.get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)  # [..., hidden]
        x = x.astype(self.config.dtype)
        rotation = rotations(self.config, step.positions)
        for run, layers in zip(self.config.runs, self.layers, strict=True):
            x, cache = _compute(run, layers, x, cache, step, rotation)
        x = self.norm(x)
        unembedding = self.embedding if self.config.tie_embeddings else self.unembedding
        unembedding = unembedding[...].astype(x.dtype)
        logits = jnp.einsum("...h,vh->...v", x, unembedding, preferred_element_type=jnp.float32)
        return logits, cache


def single_layers(decoder: Decoder) -> list["Layer"]:
    """Takes the model's layers out of their stacks, each by itself."""
    runs = zip(decoder.config.runs, decoder.layers, strict=True)
    return [
        jax.tree.map(lambda x, i=i: x[i], layers) for run, layers in runs for i in range(len(run.layer_ids))
    ]


def _stacked(config: DecoderConfig, rngs: nnx.Rngs, num_layers: int) -> "Layer":
    """As many new layers in one: every parameter `[num_layers, ...]`."""
    return jax.vmap(lambda key: Layer(config, nnx.Rngs(params=key)))(
        jax.random.split(rngs.params(), num_layers)
    )


def _compute(
    run: Run, layers: "Layer", x: jax.Array, cache: kv.Cache, step: kv.Step, rotation: "Rotation"
) -> tuple[jax.Array, kv.Cache]:
    """Puts `x` through the layers of a run, a period at a time.

    XLA copies a matrix out of its stack before it multiplies. On GPUs cuBLAS reads it where it is: with
    `XLA_FLAGS="--xla_gpu_enable_triton_gemm=false --xla_gpu_dot_merger_threshold_mb=0"`.
    """
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
            x, cache = layer(x, cache, (group_id, indices[i]), step, rotation)
        return (x, cache), None

    # The pools are carried whole: slices of them, as inputs of the scan, would be copied.
    indices = in_periods(np.array([index for _, index in places], np.int32))
    (x, cache), _ = jax.lax.scan(compute_period, (x, cache), (jax.tree.map(in_periods, layers), indices))
    return x, cache


class Layer(nnx.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config, config.hidden_size)
        self.attention = Attention(config, rngs)
        self.mlp_norm = RMSNorm(config, config.hidden_size)
        self.mlp = MLP(config, rngs)

    def __call__(
        self, x: jax.Array, cache: kv.Cache, place: Place, step: kv.Step, rotation: "Rotation"
    ) -> tuple[jax.Array, kv.Cache]:
        out, cache = self.attention(self.attention_norm(x), cache, place, step, rotation)
        x = x + out
        return x + self.mlp(self.mlp_norm(x)), cache


class Attention(nnx.Module):
    """Grouped-query attention; all it knows of the past is in the cache."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.head_dim = config.head_dim
        q_size, kv_size = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q = Linear(config, rngs, config.hidden_size, q_size, use_bias=config.use_qkv_bias)
        self.k = Linear(config, rngs, config.hidden_size, kv_size, use_bias=config.use_qkv_bias)
        self.v = Linear(config, rngs, config.hidden_size, kv_size, use_bias=config.use_qkv_bias)
        self.out = Linear(config, rngs, q_size, config.hidden_size, gain=_residual_gain(config))
        self.q_norm = RMSNorm(config, config.head_dim) if config.use_qk_norm else None
        self.k_norm = RMSNorm(config, config.head_dim) if config.use_qk_norm else None

    def __call__(
        self, x: jax.Array, cache: kv.Cache, place: Place, step: kv.Step, rotation: "Rotation"
    ) -> tuple[jax.Array, kv.Cache]:
        heads = (*x.shape[:-1], -1, self.head_dim)
        q = self.q(x).reshape(heads)  # [..., num_q_heads, head_dim]
        k = self.k(x).reshape(heads)  # [..., num_kv_heads, head_dim]
        v = self.v(x).reshape(heads)  # [..., num_kv_heads, head_dim]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        cache, out = kv.attention(cache, place, rotate(q, rotation), rotate(k, rotation), v, step)
        assert isinstance(out, jax.Array)  # no log-sum-exp was asked for
        return self.out(out.reshape(*x.shape[:-1], -1)), cache


class MLP(nnx.Module):
    """SwiGLU."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.gate = Linear(config, rngs, config.hidden_size, config.mlp_size)
        self.up = Linear(config, rngs, config.hidden_size, config.mlp_size)
        self.down = Linear(config, rngs, config.mlp_size, config.hidden_size, gain=_residual_gain(config))

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Linear(nnx.Module):
    """A matrix, and a bias if asked for; the result has the dtype of what comes in."""

    # nnx.Linear keeps its initialisers in the pytree's static part: two models of one config would then be of
    # two types to jit and optax.
    def __init__(
        self, config: DecoderConfig, rngs: nnx.Rngs, in_size: int, out_size: int, gain=1.0, use_bias=False
    ):
        self.dtype = config.dtype if config.matmul_dtype is None else config.matmul_dtype
        self.kernel = _normal(config, rngs, (in_size, out_size), gain * in_size**-0.5)
        self.bias = nnx.Param(jnp.zeros(out_size, config.param_dtype)) if use_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = matmul(x, self.kernel[...], self.dtype)
        return y if self.bias is None else y + _on_last_axis(self.bias[...].astype(x.dtype), y)


class RMSNorm(nnx.Module):
    """Scales the last axis to a mean square of 1, then each place by what was learned."""

    def __init__(self, config: DecoderConfig, size: int):
        self.eps = config.norm_eps
        self.scale = nnx.Param(jnp.ones(size, config.param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return wide.astype(x.dtype) * _on_last_axis(self.scale[...].astype(x.dtype), x)


def _on_last_axis(values: jax.Array, like: jax.Array) -> jax.Array:
    """[n] with as many axes as `like`."""
    return jax.lax.broadcast_to_rank(values, like.ndim)


Rotation = tuple[jax.Array, jax.Array]
"""Cosine and sine of each token's angles, f32[..., 1, head_dim / 2]: the same for all heads and layers."""


def rotations(config: DecoderConfig, positions: jax.Array) -> Rotation:
    """The angles of rotary embeddings; positions come from the step, so padding and chunks do not matter."""
    angles = positions[..., None, None].astype(jnp.float32)
    angles = angles * _on_last_axis(jnp.asarray(rope_frequencies(config)), angles)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, rotation: Rotation) -> jax.Array:
    """Turns the pairs (i, i + head_dim / 2) of every head `[..., heads, head_dim]`."""
    cos, sin = rotation
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def rope_frequencies(config: DecoderConfig) -> np.ndarray:
    """Radians per token of each pair, f32[head_dim / 2]."""
    frequencies = config.rope_theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    scaling = config.rope_scaling
    if scaling is not None:
        num_waves = scaling.original_max_seq_len * frequencies / (2 * np.pi)  # within the original context
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        share_kept = np.clip((num_waves - low) / (high - low), 0, 1)
        frequencies = frequencies * (share_kept + (1 - share_kept) / scaling.factor)
    return frequencies.astype(np.float32)


def _check_positive(owner: Any, *names: str) -> None:
    for name in names:
        if not 0 < getattr(owner, name) <= sys.float_info.max:
            raise ValueError(f"{name} is {getattr(owner, name)}, expected a positive, finite number")


def _normal(config: DecoderConfig, rngs: nnx.Rngs, shape: tuple[int, int], std: float) -> nnx.Param:
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, config.param_dtype))


def _residual_gain(config: DecoderConfig) -> float:
    """Keeps the residual stream's size the same at any depth (GPT-2): each layer adds to it twice."""
    return (2 * config.num_layers) ** -0.5
