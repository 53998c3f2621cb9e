"""A model whose positions are rotations, and the same without a cache, given what chunks of a text hold."""

import math

import jax.numpy as jnp
import numpy as np

import kvcache_jax as kv
from tests.support.tiny_model import DIM, HEADS, WIDTH, make_params

PARAMS = make_params()
FREQUENCIES = np.array([1.0, 0.3])
ROTATE = kv.chunks.key_rotation(FREQUENCIES, max_distance=48)
DEEP = PARAMS | {"layers": [*PARAMS["layers"], make_params(seed=7)["layers"][0]]}


def rotated(x, positions, library):
    """Rotates queries or keys `[..., heads, DIM]` to `positions` [...]."""
    angle = library.stack([positions * frequency for frequency in FREQUENCIES.tolist()], axis=-1)
    angle = angle[..., None, :]
    a, b = library.split(x, 2, axis=-1)
    cos, sin = library.cos(angle), library.sin(angle)
    return library.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def heads_of(x, weights, library):
    parts = library.split(x @ weights, [2 * WIDTH, 3 * WIDTH], axis=-1)
    nums = 2 * HEADS, HEADS, HEADS
    return [part.reshape(*x.shape[:-1], num, DIM) for part, num in zip(parts, nums, strict=True)]


def forward(params, tokens, cache, step):
    """As the tiny model, but that positions are rotations of queries and keys."""
    x, positions = 0.7 * params["embedding"][tokens], step.positions.astype(jnp.float32)
    for layer, weights in enumerate(params["layers"]):
        q, k, v = heads_of(x, weights, jnp)
        q, k = rotated(q, positions, jnp), rotated(k, positions, jnp)
        cache, out = kv.attention(cache, layer, q, k, v, step)
        out = out.reshape(*x.shape[:-1], -1)
        x = x + 2 * jnp.tanh(out[..., :WIDTH] - out[..., WIDTH:])
    return x @ params["head"], cache


def dense(tokens, given=None, is_given=None, params=PARAMS, first_given=0, windows=None):
    """The model of one text in float64; at places `is_given` keys, before rotation, and values are `given`.

    They are in layers from `first_given` on. `windows` are how many of the last tokens and of the first ones
    each layer sees, a pair; None for all.

    Returns:
      Logits [tokens, VOCAB]; of each layer keys and values, and weights [heads, tokens, tokens].
    """
    x = 0.7 * np.asarray(params["embedding"], float)[np.asarray(tokens)]
    places, found = np.arange(len(tokens)), []
    for layer, weights in enumerate(params["layers"]):
        q, k, v = heads_of(x, np.asarray(weights, float), np)
        if given is not None and layer >= first_given:
            pairs = zip(given[layer], (k, v), strict=True)
            k, v = (np.where(is_given[:, None, None], old, new) for old, new in pairs)
        found.append((k, v))
        q, k = rotated(q, places.astype(float), np), rotated(k, places.astype(float), np)
        k, v = np.repeat(k, 2, axis=1), np.repeat(v, 2, axis=1)
        is_seen = places[:, None] >= places
        if windows is not None and windows[layer] is not None:
            window, num_sinks = windows[layer]
            is_seen &= (places[:, None] < places + window) | (places < num_sinks)
        shares = np.einsum("thd,shd->hts", q, k) / np.sqrt(DIM)
        shares = np.exp(np.where(is_seen, shares, -np.inf))
        shares /= shares.sum(-1, keepdims=True)
        found[layer] += (shares,)
        out = np.einsum("hts,shd->thd", shares, v).reshape(len(x), -1)
        x = x + 2 * np.tanh(out[..., :WIDTH] - out[..., WIDTH:])
    return x @ np.asarray(params["head"], float), found


def composed(prompt, spans, again, params=PARAMS, windows=None):
    """What the chunks of a prompt give: keys and values by layer, and the places that keep them."""
    given = [tuple(np.zeros((len(prompt), HEADS, DIM)) for _ in "kv") for _ in params["layers"]]
    is_given = np.zeros(len(prompt), bool)
    for start, end in spans:
        for (k, v), alone in zip(
            given, dense(prompt[start:end], params=params, windows=windows)[1], strict=True
        ):
            k[start:end], v[start:end] = alone[:2]
        is_given[start:end] = True
    is_given[again] = False
    is_given[-1] = False
    return given, is_given


def first_of(share):
    """The places that `selector="first"` computes again."""

    def again(spans):
        return [
            place
            for start, end in spans
            for place in range(start, start + math.ceil(round(share * (end - start), 9)))
            if start
        ]

    return again


def greedy(prompt, spans, again, num_new=5, params=PARAMS, first_given=0, windows=None):
    given, is_given = composed(prompt, spans, again(spans), params, windows)
    text, scores = list(prompt), []
    for _ in range(num_new):
        num_more = len(text) - len(prompt)
        wide = [tuple(np.pad(x, [(0, num_more), (0, 0), (0, 0)]) for x in layer) for layer in given]
        logits = dense(text, wide, np.pad(is_given, (0, num_more)), params, first_given, windows)[0][-1]
        scores.append(logits.max() - logits.max() - np.log(np.exp(logits - logits.max()).sum()))
        text.append(int(logits.argmax()))
    return text[len(prompt) :], scores


def first_two(params, tokens, cache, step):
    """The first two layers of `forward`, and the queries of the second."""
    positions = step.positions.astype(jnp.float32)
    x = 0.7 * params["embedding"][tokens]
    for layer, weights in enumerate(params["layers"][:2]):
        q, k, v = heads_of(x, weights, jnp)
        q, k = rotated(q, positions, jnp), rotated(k, positions, jnp)
        cache, out = kv.attention(cache, layer, q, k, v, step)
        out = out.reshape(*x.shape[:-1], -1)
        x = x + 2 * jnp.tanh(out[..., :WIDTH] - out[..., WIDTH:])
    return q, cache
