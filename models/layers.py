"""The parts of a layer that look at one token at a time: matrices, norms, MLPs."""

import jax
import jax.numpy as jnp
from flax import nnx

from models.config import DecoderConfig
from models.matmul import matmul

GATE_LIMIT, GATE_SLOPE = 7.0, 1.702
"""Of "clamped_silu": the bound of gates and values, and what multiplies a gate inside the sigmoid."""


def normal(config: DecoderConfig, rngs: nnx.Rngs, shape: tuple[int, int], std: float) -> nnx.Param:
    """Draws a new matrix."""
    return nnx.Param(std * jax.random.normal(rngs.params(), shape, config.param_dtype))


def residual_gain(config: DecoderConfig) -> float:
    """Keeps the residual stream's size the same at any depth (GPT-2): each layer adds to it twice."""
    return (2 * config.num_layers) ** -0.5


class Linear(nnx.Module):
    """A matrix, and a bias if asked for; the result has the dtype of what comes in."""

    # nnx.Linear keeps its initialisers in the pytree's static part: two models of one config would then be of
    # two types to jit and optax.
    def __init__(
        self, config: DecoderConfig, rngs: nnx.Rngs, in_size: int, out_size: int, gain=1.0, use_bias=False
    ):
        self.dtype = config.dtype if config.matmul_dtype is None else config.matmul_dtype
        self.kernel = normal(config, rngs, (in_size, out_size), gain * in_size**-0.5)
        self.bias = nnx.Param(jnp.zeros(out_size, config.param_dtype)) if use_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = matmul(x, self.kernel[...], self.dtype)
        return y if self.bias is None else y + _on_last_axis(self.bias[...].astype(x.dtype), y)


class RMSNorm(nnx.Module):
    """Scales the last axis, or groups of it, to a mean square of 1, then each place by what was learned."""

    def __init__(
        self,
        config: DecoderConfig,
        size: int,
        *,
        eps: float | None = None,
        offset: float | None = None,
        num_groups: int = 1,
    ):
        self.eps = config.norm_eps if eps is None else eps
        self.offset = config.norm_offset if offset is None else offset
        self.num_groups = num_groups
        self.scale = nnx.Param(jnp.full(size, 1 - self.offset, config.param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32).reshape(*x.shape[:-1], self.num_groups, -1)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        wide = wide.reshape(x.shape)
        if not self.offset:
            return wide.astype(x.dtype) * _on_last_axis(self.scale[...].astype(x.dtype), x)
        # Around 1 bfloat16 has fewer places than around 0, where what was learned is stored.
        scale = self.offset + self.scale[...].astype(jnp.float32)
        return (wide * _on_last_axis(scale, x)).astype(x.dtype)


def normed(norm: RMSNorm | None, x: jax.Array) -> jax.Array:
    """Applies a norm; None leaves `x` as it is."""
    return x if norm is None else norm(x)


class MLP(nnx.Module):
    """A gated one, SwiGLU or GeGLU, or squared ReLU without a gate."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, size: int):
        self.activation = config.mlp_activation
        hidden_size, use_bias = config.hidden_size, config.use_mlp_bias
        self.gate = Linear(config, rngs, hidden_size, size, use_bias=use_bias) if is_gated(config) else None
        self.up = Linear(config, rngs, hidden_size, size, use_bias=use_bias)
        self.down = Linear(config, rngs, size, hidden_size, gain=residual_gain(config), use_bias=use_bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate = None if self.gate is None else self.gate(x)
        return self.down(activated(self.activation, self.up(x), gate))


def is_gated(config: DecoderConfig) -> bool:
    """Tests whether MLPs and experts have gates."""
    return config.mlp_activation != "relu2"


def activated(activation: str, up: jax.Array, gate: jax.Array | None) -> jax.Array:
    """Computes what is inside an MLP; `gate` is None where it has none."""
    if gate is None:
        return jnp.square(jax.nn.relu(up))
    if activation == "clamped_silu":
        gate, up = jnp.minimum(gate, GATE_LIMIT), jnp.clip(up, -GATE_LIMIT, GATE_LIMIT)
        return (up + 1) * gate * jax.nn.sigmoid(GATE_SLOPE * gate)
    return up * (jax.nn.silu(gate) if activation == "silu" else jax.nn.gelu(gate, approximate=True))


def soft_capped(x: jax.Array, cap: float | None) -> jax.Array:
    """Bounds by `cap * tanh(x / cap)`; None bounds nothing."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def _on_last_axis(values: jax.Array, like: jax.Array) -> jax.Array:
    """[n] with as many axes as `like`."""
    return jax.lax.broadcast_to_rank(values, like.ndim)
