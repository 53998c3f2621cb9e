"""Mixtures of experts: MLPs of which each token uses a few."""

import jax
import jax.numpy as jnp
from flax import nnx

from models.config import DecoderConfig, Experts
from models.layers import MLP, Linear, activated, is_gated, residual_gain


def new_mlp(config: DecoderConfig, rngs: nnx.Rngs, experts: Experts | None) -> "MLP | Mixture":
    """Makes an MLP, or the mixture of experts in its place."""
    return MLP(config, rngs, config.mlp_size) if experts is None else Mixture(config, rngs, experts)


class Mixture(nnx.Module):
    """Experts of which each token uses those that its router scores best, and an MLP that all tokens use."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, experts: Experts):
        self.experts, self.activation, hidden_size = experts, config.mlp_activation, config.hidden_size
        num_experts, size, use_biases = experts.num_experts, experts.expert_size, experts.use_biases
        has_bias = experts.is_sigmoid or use_biases
        self.router = Linear(config, rngs, hidden_size, num_experts, use_bias=has_bias)
        if experts.is_sigmoid:
            # It moves the choice and not the weights, see `_routed`: by less than what bfloat16 tells apart.
            self.router.bias = nnx.Param(jnp.zeros(num_experts, jnp.float32))

        def matrices(in_size: int, out_size: int, gain: float = 1.0) -> Matrices:
            return Matrices(config, rngs, (num_experts, in_size, out_size), gain, use_bias=use_biases)

        self.expert_gate = matrices(hidden_size, size) if is_gated(config) else None
        self.expert_up = matrices(hidden_size, size)
        self.expert_down = matrices(size, hidden_size, residual_gain(config))
        self.shared = MLP(config, rngs, experts.shared_size) if experts.shared_size is not None else None
        self.shared_gate = Linear(config, rngs, hidden_size, 1) if experts.use_shared_gate else None

    def __call__(self, x: jax.Array) -> jax.Array:
        tokens, num_used = x.reshape(-1, x.shape[-1]), self.experts.num_used
        expert_ids, weights = self._routed(tokens)
        order = jnp.argsort(expert_ids.reshape(-1))  # the tokens of one expert side by side
        lengths = jnp.zeros(self.experts.num_experts, jnp.int32).at[expert_ids.reshape(-1)].add(1)
        rows, row_experts = tokens[order // num_used], expert_ids.reshape(-1)[order]
        gate = None if self.expert_gate is None else self.expert_gate(rows, lengths, row_experts)
        inner = activated(self.activation, self.expert_up(rows, lengths, row_experts), gate)
        rows = self.expert_down(inner, lengths, row_experts).astype(jnp.float32)
        outs = jnp.zeros_like(rows).at[order].set(rows).reshape(*expert_ids.shape, -1)
        mixed = (outs * weights[..., None]).sum(axis=1).astype(x.dtype).reshape(x.shape)
        if self.shared is None:
            return mixed
        shared = self.shared(x)
        if self.shared_gate is not None:
            shared *= jax.nn.sigmoid(self.shared_gate(x))
        return mixed + shared

    def _routed(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The experts of tokens `[t, hidden_size]`, i32[t, num_used], and their weights f32[t, num_used]."""
        sizes = self.experts
        logits = tokens.astype(jnp.float32) @ self.router.kernel[...].astype(jnp.float32)
        bias = jnp.float32(0) if self.router.bias is None else self.router.bias[...].astype(jnp.float32)[None]
        if sizes.is_sigmoid:
            scores = jax.nn.sigmoid(logits)
            ranks = scores + bias
        else:
            ranks = scores = jax.nn.softmax(logits + bias)
        if sizes.num_groups > 1:
            groups = ranks.reshape(len(tokens), sizes.num_groups, -1)
            best = jax.lax.top_k(groups, 2 if sizes.is_sigmoid else 1)[0].sum(axis=-1)
            group_ids = jax.lax.top_k(best, sizes.num_used_groups)[1]
            is_used = (
                group_ids[..., None] == jnp.arange(sizes.num_groups, dtype=group_ids.dtype)[None, None]
            ).any(axis=1)
            ranks = jnp.where(is_used[..., None], groups, -jnp.inf).reshape(ranks.shape)
        expert_ids = jax.lax.top_k(ranks, sizes.num_used)[1]
        weights = jnp.take_along_axis(scores, expert_ids, axis=1)
        if sizes.normalizes:
            weights /= weights.sum(axis=1, keepdims=True) + 1e-20
        return expert_ids, sizes.weight_scale * weights


class Matrices(nnx.Module):
    """A matrix per expert, `kernel [experts, in, out]`, and a bias each if asked for."""

    def __init__(
        self,
        config: DecoderConfig,
        rngs: nnx.Rngs,
        shape: tuple[int, int, int],
        gain: float,
        *,
        use_bias: bool,
    ):
        self.dtype = config.dtype if config.matmul_dtype is None else config.matmul_dtype
        num_experts, in_size, out_size = shape
        std = gain * in_size**-0.5
        self.kernel = nnx.Param(std * jax.random.normal(rngs.params(), shape, config.param_dtype))
        self.bias = nnx.Param(jnp.zeros((num_experts, out_size), config.param_dtype)) if use_bias else None

    def __call__(self, rows: jax.Array, lengths: jax.Array, expert_ids: jax.Array) -> jax.Array:
        """Multiplies the first `lengths[0]` rows by the first matrix, and so on; `expert_ids` of the rows."""
        kernel = self.kernel[...].astype(self.dtype)
        out = jax.lax.ragged_dot(rows.astype(self.dtype), kernel, lengths).astype(rows.dtype)
        return out if self.bias is None else out + self.bias[...].astype(rows.dtype)[expert_ids]
