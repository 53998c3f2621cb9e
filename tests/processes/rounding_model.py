"""A model whose sums round, with heads over two devices, and what an engine says of it, bit by bit."""

import jax
import jax.numpy as jnp
import numpy as np

import kvcache_jax as kv
from tests.engine.exact_engine import serve
from tests.engine.exact_model import DIM, VOCAB, random_request

WIDTH = 3 * DIM
_RNG = np.random.default_rng(11)
REQUESTS = [random_request(_RNG, i, num_samples=1) for i in range(24)]


def make_params():
    rng, shapes = np.random.default_rng(3), {"q": (2, WIDTH, DIM), "k": (2, WIDTH, DIM), "v": (2, WIDTH, DIM)}
    shapes |= {"o": (2, DIM, WIDTH), "embedding": (VOCAB, WIDTH)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def forward(params, tokens, cache, step, logits_at=None):
    """One layer; each device has one of the heads, and the places are in the values."""
    mine = jax.lax.axis_index("heads")
    q, k, v, out = (params[name][mine] for name in "qkvo")
    x = params["embedding"][tokens] + jnp.sin(step.positions[..., None].astype(jnp.float32))
    cache, seen = kv.attention(cache, 0, *((x @ each)[..., None, :] for each in (q, k, v)), step)
    x = x + jax.lax.psum(seen[..., 0, :] @ out, "heads") / WIDTH
    return kv.decoding.for_logits(x @ params["embedding"].T, logits_at), cache


def bits_of(engine, requests):
    """Tokens, log-probabilities as integers of 32 bits, and why it ends, by request."""
    said = serve(engine, requests)
    return [
        (tokens, np.float32(logprobs).view(np.int32).tolist(), reason)
        for tokens, logprobs, reason in (said[request.id, 0] for request in requests)
    ]
