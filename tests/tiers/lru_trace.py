"""A trace of conversations, served one prompt after the other in one compiled loop."""

import jax.numpy as jnp
import numpy as np
from jax import lax

import kvcache_jax as kv
from tests.experiments.trace_maker import make_requests

NUM_REQUESTS = 500


def trace(seed):
    """Prompts i32[requests, longest] of ids from 1 on, and their lengths."""
    chains, numbers = [request["hash_ids"] for request in make_requests(seed, NUM_REQUESTS)], {}
    num_ids = np.array([len(chain) for chain in chains], np.int32)
    ids = np.zeros((len(chains), num_ids.max()), np.int32)
    for i, chain in enumerate(chains):
        ids[i, : len(chain)] = [numbers.setdefault(block, len(numbers) + 1) for block in chain]
    return ids, num_ids


@kv.donate
def serve_all(cache, ids, num_ids, num_more):
    """One prompt after the other, with `num_more` tokens after its ids, which are never published."""
    width = ids.shape[1] + 1

    def serve(cache, request):
        ids, num_ids = request
        tokens = jnp.zeros(2 * width, jnp.int32).at[: ids.shape[0]].set(ids)
        length = num_ids[None] + num_more
        cache, admission = kv.allocate(cache, [0], length, tokens=tokens[None, :width])
        new = lax.dynamic_slice(tokens, admission.num_cached, (width,))
        cache, step = kv.extend(cache, length - admission.num_cached, max_new=width, tokens=new[None])
        cache, committed = kv.commit(cache, final_len=num_ids[None])
        cache, freed = kv.free(cache, [0])
        status = jnp.concatenate([admission.status, step.status, committed, freed])
        return cache, (admission.num_cached[0], status.max())

    cache, (hits, status) = lax.scan(serve, cache, (ids, num_ids))
    return cache, hits, status.max()
