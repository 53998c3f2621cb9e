"""Small traces for tests, and the hits of an LRU on them in plain Python."""

import json
from collections import OrderedDict

import numpy as np

TOKENS_PER_ID = 512
LONGEST = 9


def make_requests(seed=0, num_requests=130):
    """Chains through a random tree, the way conversations grow and share a system prompt; ids far apart."""
    rng = np.random.default_rng(seed)
    children, chains, num_nodes = {}, [], 0
    for _ in range(num_requests):
        chain, node = [], 0
        for _ in range(rng.integers(1, LONGEST + 1)):
            known = children.setdefault(node, [])
            if known and rng.random() < 0.75:
                node = known[rng.integers(len(known))]
            else:
                num_nodes += 1
                node = 10**12 + num_nodes * 1_000_003 % 9_999_991
                known.append(node)
            chain.append(node)
        chains.append(chain)
    return [
        {
            "timestamp": i,
            "input_length": TOKENS_PER_ID * len(chain) - int(rng.integers(TOKENS_PER_ID)),
            "output_length": 3,
            "hash_ids": chain,
        }
        for i, chain in enumerate(chains)
    ]


def write(folder, requests):
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return path


def lru_hits(requests, num_blocks):
    """Hits and evictions of a dict in the order of release, ends before beginnings."""
    cached, hits, num_evictions = OrderedDict(), [], 0
    for request in requests:
        chain = request["hash_ids"]
        num_hits = next((i for i, block in enumerate(chain) if block not in cached), len(chain))
        for block in chain[:num_hits]:
            del cached[block]
        while len(cached) + len(chain) > num_blocks:
            cached.popitem(last=False)
            num_evictions += 1
        for block in reversed(chain):
            cached[block] = None
        hits.append(num_hits)
    return hits, num_evictions
