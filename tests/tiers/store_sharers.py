"""A process that saves and loads at random in a store that others use at the same time."""

import collections
import json
import sys

import tests.conftest  # its jax, and its compiled programs  # noqa: F401 # isort: skip
import numpy as np

import kvcache_jax as kv
from tests.support.prefix_user import CONFIG, PrefixUser

LENGTHS = 5, 9, 13, 17, 21, 25


def text_of(start, end, length):
    """Texts of few beginnings, which part from each other after 8 tokens."""
    begin, rest = (PrefixUser.new_text(None, number, length) for number in (start, 3 + end))  # type: ignore
    return [*begin[:8], *rest[8:]]


def num_whole(text):
    """The tokens of whole blocks before the last token."""
    return (len(text) - 1) // 4 * 4


def open_store(name, folder, limit):
    return getattr(kv.tiers, name)(folder, max_bytes=limit or None)


def share(store, seed, num_rounds):
    """Serves, saves and loads; returns what was saved and loaded, and why blocks were dropped."""
    user, rng, saved, num_loaded = PrefixUser(CONFIG), np.random.default_rng(seed), [], 0
    reasons = collections.Counter()
    for _ in range(num_rounds):
        text = text_of(int(rng.integers(3)), int(rng.integers(6)), int(rng.choice(LENGTHS)))
        what, reports = rng.integers(4), []
        if what == 0:
            user.cache, _ = kv.reset_prefix_cache(user.cache)
            user.cache, report = kv.tiers.load(store, user.cache, weights="w")
            reports.append(report)
        elif what == 1:
            user.cache, report = kv.tiers.load(store, user.cache, weights="w", prompts=[text])
            reports.append(report)
        user.start(0, text)  # its contents are compared, found or not
        user.free(0)
        reports.append(kv.tiers.save(user.cache, store, weights="w"))
        saved.append(text)
        for report in reports:
            num_loaded += report.num_loaded
            reasons.update(report.reasons)
    return {"saved": saved, "num_loaded": num_loaded, "reasons": reasons}


if __name__ == "__main__":
    name, folder, limit, seed, num_rounds = sys.argv[1:]
    store = open_store(name, folder, int(limit))
    share(kv.tiers.MemoryStore(), 0, 2)  # compiles
    print("up", flush=True)
    sys.stdin.readline()
    print(json.dumps(share(store, int(seed), int(num_rounds))))
