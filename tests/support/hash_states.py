"""Recurrent kinds whose states are running hashes: a wrong state shows in every later output."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import kvcache_jax as kv

_M, _MIX = np.uint32(0x9E3779B1), np.uint32(0x85EBCA6B)
KERNEL = 4


def next_state(state, token):
    """Computes the state after a token, and what the token added."""
    added = (token + np.uint32(1)) * _MIX ^ (state >> np.uint32(7))
    return state * _M + added, added


def inputs_sum(inputs):
    """Computes a convolution over the last axis, of `KERNEL` inputs."""
    return sum(inputs[..., i] * np.uint32(7**i) for i in range(KERNEL))


@dataclasses.dataclass(frozen=True)
class HashState(kv.Recurrent):
    """Points and entries: S <- M S + u, where u depends on all tokens before; and a convolution."""

    width: int = dataclasses.field(
        default=1, kw_only=True
    )  # numbers that repeat a state, so that it is large

    def point(self, dtype):
        return {
            "state": kv.BlockArray((self.width,), jnp.uint32, head_axis=None, token_axis=None),
            "x": kv.BlockArray((KERNEL - 1,), jnp.uint32, head_axis=None, token_axis=None),
        }

    def entry(self, block_size, dtype):
        array = kv.BlockArray((block_size,), jnp.uint32, head_axis=None, token_axis=0)
        return {"u": array, "x": array}

    def advance(self, point, held, count, new, weights):
        state = _replayed(point["state"][0], held["u"], count)
        past = jnp.concatenate([point["x"], held["x"]])
        past = jax.lax.dynamic_slice_in_dim(past, count, KERNEL - 1)
        inputs = jnp.concatenate([past, new["token"] + np.uint32(1)])

        def step(state, token):
            state, added = next_state(state, token)
            return state, (state, added)

        _, (states, added) = jax.lax.scan(step, state, new["token"])
        num = new["token"].shape[0]
        windows = jnp.stack([inputs[i : i + num] for i in range(KERNEL)], axis=-1)
        return jnp.stack([states, inputs_sum(windows)], axis=-1), {"u": added, "x": inputs[KERNEL - 1 :]}

    def fold(self, point, entries):
        state = _replayed(point["state"][0], entries["u"], entries["u"].shape[0])
        inputs = jnp.concatenate([point["x"], entries["x"]])
        return {"state": jnp.full(self.width, state), "x": inputs[-(KERNEL - 1) :]}


def _replayed(state, added, count):
    """Adds the first `count` of `added` in one sum, which compiles in a tenth of the time that steps take."""
    powers = jnp.asarray(np.multiply.accumulate(np.append(np.uint32(1), np.full(len(added), _M))))
    left = count - 1 - jnp.arange(len(added), dtype=jnp.int32)
    weights = jnp.where(left >= 0, powers[jnp.maximum(left, 0)], 0)
    return state * powers[count] + jnp.sum(added * weights, dtype=jnp.uint32)


@dataclasses.dataclass(frozen=True)
class StatePerToken(kv.Recurrent):
    """A state per token, as a recurrence without a replay has."""

    reach = 1

    def entry(self, block_size, dtype):
        return {"state": kv.BlockArray((block_size,), jnp.uint32, head_axis=None, token_axis=0)}

    def advance(self, point, held, count, new, weights):
        def step(state, token):
            state, _ = next_state(state, token)
            return state, state

        _, states = jax.lax.scan(step, held["state"][-1], new["token"])
        return states[:, None], {"state": states}


@dataclasses.dataclass(frozen=True)
class LastInputs(kv.Recurrent):
    """The last inputs of a convolution, as they are."""

    reach = KERNEL - 1

    def entry(self, block_size, dtype):
        return {"x": kv.BlockArray((block_size,), jnp.uint32, head_axis=None, token_axis=0)}

    def advance(self, point, held, count, new, weights):
        inputs = jnp.concatenate([held["x"], new["token"] + np.uint32(1)])
        num = new["token"].shape[0]
        windows = jnp.stack([inputs[i : i + num] for i in range(KERNEL)], axis=-1)
        return inputs_sum(windows)[:, None], {"x": inputs[KERNEL - 1 :]}


def expected(tokens):
    """Computes the outputs of a row's tokens from its beginning, u32[n, 2]."""
    state, outs = np.uint32(0), []
    padded = np.array([0] * (KERNEL - 1) + [t + 1 for t in tokens], np.uint32)
    with np.errstate(over="ignore"):
        for i, token in enumerate(tokens):
            state, _ = next_state(state, np.uint32(token))
            outs.append((state, inputs_sum(padded[i : i + KERNEL])))
    return np.array(outs, np.uint32).reshape(-1, 2)
