"""Requests on a hybrid's cache: what each finds, and which blocks carry snapshots after them.

Blocks, hits and snapshots depend on tokens alone, so that a cache without storage finds them without a model.
With one, each computed token's prediction is returned too.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import kvcache_jax as kv

RECURRENT = kv.GatedDeltaNet(2, 8, key_dim=8)
FULL = kv.FullAttention(2, 8)
WIDTH, VOCAB_SIZE = 32, 1000
NUM_LAYERS = 6
Params = dict[str, Any]
BLOCK_SIZE = 16
MAX_LEN = 2304
PIECE_LEN = 128  # tokens of a step; a snapshot at every block is published after each
SAVED = "junctions and ends, by tokens saved"


def random_params(seed: int = 0) -> Params:
    """Draws the weights: each layer has the weights of a recurrent and of a full one, and uses its own."""
    channels, heads = RECURRENT.num_channels, RECURRENT.num_kv_heads
    shapes = {
        "x": (WIDTH, channels),
        "gates": (WIDTH, 2 * heads),
        "conv": (RECURRENT.kernel, channels),
        "qkv": (WIDTH, 3 * FULL.num_kv_heads * FULL.head_dim),
        "out": (heads * RECURRENT.head_dim, WIDTH),
    }
    keys = iter(jax.random.split(jax.random.key(seed), len(shapes) + 1))
    params = {
        name: jax.random.normal(next(keys), (NUM_LAYERS, *shape)) / shape[0] ** 0.5
        for name, shape in shapes.items()
    }
    return params | {"embedding": jax.random.normal(next(keys), (VOCAB_SIZE, WIDTH))}


def forward(params: Params, tokens: jax.Array, cache: kv.Cache, step: kv.Step) -> tuple[kv.Cache, jax.Array]:
    x = params["embedding"][tokens]
    for layer, kind in enumerate(cache.config.layers):
        weights = {name: value[layer] for name, value in params.items() if name != "embedding"}
        mixed = _recurrent if isinstance(kind, kv.Recurrent) else _full
        cache, out = mixed(weights, _normalised(x), cache, layer, step)
        x = x + out.reshape(*tokens.shape, -1) @ weights["out"]
    return cache, _normalised(x) @ params["embedding"].T


def _recurrent(
    weights: Params, x: jax.Array, cache: kv.Cache, layer: int, step: kv.Step
) -> tuple[kv.Cache, jax.Array]:
    decay, beta = jnp.split(x @ weights["gates"], 2, axis=-1)
    new = {"x": x @ weights["x"], "g": jax.nn.log_sigmoid(decay + 3), "beta": jax.nn.sigmoid(beta)}
    return kv.recurrence(cache, layer, new, step, weights={"conv": weights["conv"]})


def _full(
    weights: Params, x: jax.Array, cache: kv.Cache, layer: int, step: kv.Step
) -> tuple[kv.Cache, jax.Array]:
    qkv = (x @ weights["qkv"]).reshape(*x.shape[:2], 3, FULL.num_kv_heads, FULL.head_dim)
    cache, out = kv.attention(cache, layer, qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], step)
    assert isinstance(out, jax.Array)
    return cache, out


def _normalised(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


class Request(NamedTuple):
    """The tokens of a prompt, and the answer that its row goes on with."""

    prompt: list[int]
    answer: list[int]


class Writer:
    """Texts of random tokens from a seed; 0 is none of them."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)

    def text(self, shortest: int, longest: int | None = None) -> list[int]:
        length = int(self.rng.integers(shortest, (longest or shortest) + 1))
        return self.rng.integers(1, VOCAB_SIZE, size=length).tolist()


def few_shot(writer: Writer, num_prompts: int = 64, prefix_len: int = 1003) -> list[Request]:
    """One prefix, questions of 40 to 160 tokens, and answers of 8."""
    prefix = writer.text(prefix_len)
    return [Request(prefix + writer.text(40, 160), writer.text(8)) for _ in range(num_prompts)]


def chats(
    writer: Writer,
    num_chats: int = 6,
    num_turns: int = 6,
    system_len: int = 213,
    lengths: tuple[int, int] = (30, 130),
) -> list[Request]:
    """Chats of one system prompt, one after the other; a turn repeats all before it, its answer included."""
    system, requests = writer.text(system_len), []
    for _ in range(num_chats):
        text = list(system)
        for _ in range(num_turns):
            text = text + writer.text(*lengths)
            answer = writer.text(*lengths)
            requests.append(Request(text, answer))
            text = text + answer
    return requests


def two_levels(writer: Writer, num_subjects: int = 8, num_questions: int = 8) -> list[Request]:
    """A system prompt of 213 tokens, subjects of 300 to 900, questions to each, in random order."""
    system = writer.text(213)
    subjects = [writer.text(300, 900) for _ in range(num_subjects)]
    order = writer.rng.permutation(num_subjects * num_questions)
    return [Request(system + subjects[i % num_subjects] + writer.text(40, 160), []) for i in order]


def repeated_prefix(writer: Writer, prefix_len: int, num_prompts: int = 4) -> list[Request]:
    prefix = writer.text(prefix_len)
    return [Request(prefix + writer.text(50), []) for _ in range(num_prompts)]


POLICIES: dict[str, kv.Snapshots] = {
    "every block": kv.Snapshots(every=BLOCK_SIZE),
    "junctions and ends": kv.Snapshots(),
    "junctions and answers' ends": kv.Snapshots(at_prompt_end=False),
    "junctions": kv.Snapshots(at_prompt_end=False, at_end=False),
    "ends": kv.Snapshots(at_junctions=False),
    "none": kv.Snapshots(at_junctions=False, at_prompt_end=False, at_end=False),
}
DENSE, DEFAULT, ANSWERS, JUNCTIONS, ENDS, NONE = POLICIES
SCARCE = {name: policy for name, policy in POLICIES.items() if name != NONE} | {
    SAVED: kv.Snapshots(eviction="tokens saved")
}
"""Policies for pools that do not hold all snapshots."""


def config_of(snapshots: kv.Snapshots, num_points: int = 4096) -> kv.CacheConfig:
    """Builds the config of four recurrent and two full layers, of one row, with a pool of `num_points`."""
    recurrent = dataclasses.replace(RECURRENT, num_blocks=num_points)
    return kv.CacheConfig(
        [recurrent, recurrent, FULL] * 2,
        num_blocks=4096,
        block_size=BLOCK_SIZE,
        max_seqs=1,
        max_seq_len=MAX_LEN,
        max_query_len=PIECE_LEN,
        enable_prefix_caching=True,
        snapshots=snapshots,
        dtype=jnp.float32,
    )


class Served(NamedTuple):
    """The outcome of a workload.

    Attributes:
      num_tokens: Of all prompts.
      num_cached: Tokens that each request found.
      num_snapshots: Published points at the end.
      block_ids: i32[requests, columns], the blocks of keys that each row held at last.
      has_snapshot: bool[requests, columns], which of them carry a snapshot at the end.
      predicted: i32[requests, MAX_LEN], the model's best token after each computed one; -1 elsewhere.
    """

    num_tokens: int
    num_cached: list[int]
    num_snapshots: int
    block_ids: np.ndarray
    has_snapshot: np.ndarray
    predicted: np.ndarray

    @property
    def num_saved(self) -> int:
        """Tokens of prompts that were found, of all requests."""
        return sum(self.num_cached)


def serve(config: kv.CacheConfig, requests: Sequence[Request], params: Params | None = None) -> Served:
    """Serves requests one after the other, prompt and answer; without a model on tables without storage."""
    cache, found = kv.init(config, storage=params is not None), []
    for prompt, answer in requests:
        tokens = np.zeros((1, MAX_LEN), np.int32)
        tokens[0, : len(prompt) + len(answer)] = prompt + answer
        cache, status, *rest = _serve(cache, params, tokens, len(prompt), len(prompt) + len(answer))
        kv.raise_for_status(status, "a request")
        found.append(rest)
    if broken := kv.check_invariants(cache):
        raise RuntimeError(f"the tables are broken: {broken[0]}")
    num_cached, block_ids, predicted = (
        np.stack(column) for column in zip(*jax.device_get(found), strict=True)
    )
    [points] = config.snapshot_groups
    index, cached = cache.control.prefix_index, cache.control.block_pools[points].cached
    links = index and index.group_links[points]
    assert links is not None and cached is not None
    carries = np.append(np.asarray(links.block_ids[:, 0]) < config.groups[points].num_blocks, False)
    return Served(
        sum(len(request.prompt) for request in requests),
        num_cached[:, 0].tolist(),
        int(cached.is_published.sum()),
        block_ids,
        carries[block_ids],
        predicted,
    )


@functools.partial(jax.jit, donate_argnames="cache")
def _serve(
    cache: kv.Cache, params: Params | None, tokens: jax.Array, num_prompt: jax.Array, num_text: jax.Array
) -> tuple[kv.Cache, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Serves tokens i32[1, MAX_LEN], prompt and answer, in row 0; commits and frees it.

    Returns the cache, status i32[1], the tokens found i32[1], the row's blocks i32[columns], and the best
    token after each computed one, i32[MAX_LEN].
    """
    cache, admission = kv.allocate(cache, [0], jnp.asarray(num_prompt)[None], tokens=tokens)
    padded = jnp.pad(tokens, ((0, 0), (0, PIECE_LEN)))

    def grow(state):
        cache, status, predicted = state
        [start] = cache.context_len
        num_new = jnp.minimum(jnp.where(start < num_prompt, num_prompt, num_text) - start, PIECE_LEN)
        new = lax.dynamic_slice_in_dim(padded, start, PIECE_LEN, axis=1)
        cache, step = kv.extend(cache, num_new[None], max_new=PIECE_LEN, tokens=new)
        if params is not None:
            cache, logits = forward(params, new, cache, step)
            order = jnp.arange(PIECE_LEN)
            places = jnp.where(order < num_new, start + order, MAX_LEN)
            predicted = predicted.at[places].set(logits[0].argmax(axis=-1).astype(jnp.int32), mode="drop")
        cache, _ = kv.commit(cache, [0], is_end=False)
        return cache, step.status, predicted

    def is_left(state):
        cache, status, _ = state
        return (status[0] == kv.Status.OK) & (cache.context_len[0] < num_text)

    state = cache, admission.status, jnp.full(MAX_LEN, -1, jnp.int32)
    cache, status, predicted = lax.while_loop(is_left, grow, state)
    cache, _ = kv.commit(cache, [0])
    block_ids = cache.control.block_pools[cache.config.indexed_group].block_table[0]
    cache, _ = kv.free(cache, [0])
    return cache, status, admission.num_cached, block_ids, predicted
