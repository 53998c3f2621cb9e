"""A layer's recurrence: what it makes of a token for the cache, and of what the state says for the token."""

import jax
import jax.numpy as jnp
from flax import nnx

import kvcache_jax as kv
from models.attention import Place
from models.config import DecoderConfig
from models.layers import Linear, RMSNorm, residual_gain
from models.rope import Rotation


def new_recurrence(config: DecoderConfig, rngs: nnx.Rngs) -> "GatedDelta | Mamba | Convolution":
    """Makes the recurrence that the model has."""
    match config.recurrence:
        case kv.GatedDeltaNet() as kind:
            return GatedDelta(config, rngs, kind)
        case kv.Mamba2() as kind:
            return Mamba(config, rngs, kind)
        case kv.ShortConvolution() as kind:
            return Convolution(config, rngs, kind)
    raise TypeError(
        f"recurrence is {config.recurrence!r}, expected GatedDeltaNet, Mamba2 or ShortConvolution"
    )


class GatedDelta(nnx.Module):
    """Gated DeltaNet; with a decay per channel Kimi Delta Attention, whose gates are of low rank."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, kind: kv.GatedDeltaNet):
        heads, hidden_size, size = kind.num_kv_heads, config.hidden_size, kind.num_kv_heads * kind.head_dim
        self.has_decay_per_channel = kind.decay == "channel"
        rank = kind.head_dim if self.has_decay_per_channel else None
        num_decays = heads * kind.key_dim if self.has_decay_per_channel else heads
        self.inputs = Linear(config, rngs, hidden_size, kind.num_channels)  # queries, keys, values
        self.convolution = Taps(config, rngs, kind.kernel, kind.num_channels, use_bias=False)
        self.beta = Linear(config, rngs, hidden_size, heads)
        self.decay_down = Linear(config, rngs, hidden_size, rank) if rank else None
        self.decay = Linear(config, rngs, rank or hidden_size, num_decays)
        self.decay_rate = log_rates(rngs, heads)
        self.decay_bias = step_bias(rngs, num_decays)
        self.gate_down = Linear(config, rngs, hidden_size, rank) if rank else None
        self.gate = Linear(config, rngs, rank or hidden_size, size)
        self.norm = RMSNorm(config, kind.head_dim, offset=0.0)
        self.out = Linear(config, rngs, size, hidden_size, gain=residual_gain(config))

    def __call__(
        self, x: jax.Array, cache: kv.Cache, place: Place, step: kv.Step, _: Rotation | None = None
    ) -> tuple[jax.Array, kv.Cache]:
        decay = self.decay(x if self.decay_down is None else self.decay_down(x))
        decay = time_steps(decay, self.decay_bias).reshape(*x.shape[:-1], *self.decay_rate.shape, -1)
        decay *= jax.lax.broadcast_to_rank(-jnp.exp(self.decay_rate[...])[:, None], decay.ndim)
        new = {
            "x": self.inputs(x),
            "g": decay if self.has_decay_per_channel else decay[..., 0],
            "beta": jax.nn.sigmoid(self.beta(x).astype(jnp.float32)),
        }
        cache, out = kv.recurrence(cache, place, new, step, weights=self.convolution.weights())
        gate = self.gate(x if self.gate_down is None else self.gate_down(x)).reshape(out.shape)
        gate = (jax.nn.sigmoid if self.has_decay_per_channel else jax.nn.silu)(gate)
        out = self.norm(out) * gate
        return self.out(out.reshape(*x.shape[:-1], -1)), cache


class Mamba(nnx.Module):
    """Mamba-2: a state space whose input, output and time step are computed of each token."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, kind: kv.Mamba2):
        heads, size = kind.num_kv_heads, kind.num_kv_heads * kind.head_dim
        self.sizes = size, kind.num_channels, heads
        self.inputs = Linear(config, rngs, config.hidden_size, sum(self.sizes))  # gate, channels, time steps
        self.convolution = Taps(config, rngs, kind.kernel, kind.num_channels, use_bias=True)
        self.decay_rate = log_rates(rngs, heads)
        self.step_bias = step_bias(rngs, heads)
        self.skip = nnx.Param(jnp.ones(heads, jnp.float32))
        self.norm = RMSNorm(config, size, num_groups=kind.num_groups)
        self.out = Linear(config, rngs, size, config.hidden_size, gain=residual_gain(config))

    def __call__(
        self, x: jax.Array, cache: kv.Cache, place: Place, step: kv.Step, _: Rotation | None = None
    ) -> tuple[jax.Array, kv.Cache]:
        size, num_channels = self.sizes[:2]
        gate, channels, steps = jnp.split(self.inputs(x), [size, size + num_channels], axis=-1)
        new = {"x": channels, "dt": time_steps(steps, self.step_bias)}
        weights = {**self.convolution.weights(), "A": -jnp.exp(self.decay_rate[...]), "D": self.skip[...]}
        cache, out = kv.recurrence(cache, place, new, step, weights=weights)
        out = out.reshape(gate.shape) * jax.nn.silu(gate)
        return self.out(self.norm(out)), cache


class Convolution(nnx.Module):
    """A short convolution between two gates (LFM2)."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, kind: kv.ShortConvolution):
        size = kind.num_channels
        self.inputs = Linear(config, rngs, config.hidden_size, 3 * size)  # gate before, gate after, values
        self.convolution = Taps(config, rngs, kind.kernel, size, use_bias=False)
        self.out = Linear(config, rngs, size, config.hidden_size, gain=residual_gain(config))

    def __call__(
        self, x: jax.Array, cache: kv.Cache, place: Place, step: kv.Step, _: Rotation | None = None
    ) -> tuple[jax.Array, kv.Cache]:
        before, after, values = jnp.split(self.inputs(x), 3, axis=-1)
        weights = self.convolution.weights()
        cache, out = kv.recurrence(cache, place, {"x": before * values}, step, weights=weights)
        return self.out(after * out), cache


class Taps(nnx.Module):
    """The weights of a causal convolution of each channel, the last one for the token itself."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, num: int, num_channels: int, *, use_bias: bool):
        taps = num**-0.5 * jax.random.normal(rngs.params(), (num, num_channels), config.param_dtype)
        self.kernel = nnx.Param(taps)
        self.bias = nnx.Param(jnp.zeros(num_channels, config.param_dtype)) if use_bias else None

    def weights(self) -> dict[str, jax.Array]:
        """Returns them as `kv.recurrence` takes them."""
        weights = {"conv": self.kernel[...]}
        return weights if self.bias is None else weights | {"bias": self.bias[...]}


def log_rates(rngs: nnx.Rngs, num: int) -> nnx.Param:
    """Draws the logarithms of decays per unit of time; float32 whatever the model's, like all of a decay."""
    return nnx.Param(jnp.log(jax.random.uniform(rngs.params(), (num,), jnp.float32, 1, 16)))


def step_bias(rngs: nnx.Rngs, num: int) -> nnx.Param:
    """Draws what `time_steps` turns into 0.001 to 0.1."""
    steps = 10 ** jax.random.uniform(rngs.params(), (num,), jnp.float32, -3, -1)
    return nnx.Param(jnp.log(jnp.expm1(steps)))


def time_steps(x: jax.Array, bias: nnx.Param) -> jax.Array:
    """Computes positive time steps, f32[..., n]."""
    return jax.nn.softplus(x.astype(jnp.float32) + jax.lax.broadcast_to_rank(bias[...], x.ndim))
