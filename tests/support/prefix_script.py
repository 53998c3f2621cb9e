"""Random scripts with prefix caching: tokens from a small alphabet, so that prefixes meet again."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import kvcache_jax as kv
from tests.oracle.blocks import EVICTION_KEYS
from tests.oracle.oracle import Oracle
from tests.support.random_script import ENTRIES, ROWS, Driver, padded, random_operation, row_ids
from tests.support.script_configs import prefix_config

PROMPT_WIDTH = 23
NAMESPACES = [tuple(kv.namespace(tenant=name).tolist()) for name in ("", "a", "b")]


@kv.policies.eviction_policy(
    "test: used, not deep, not idle", needs=["num_hits", "depth", "idle", "age", "priority"]
)
def mixed_policy(blocks):
    """Every field of the metadata matters."""
    used = jnp.minimum(blocks.num_hits, 3) * 8 - blocks.depth * 4 + blocks.priority
    return used - blocks.idle // 4 - blocks.age // 16


def mixed_key(block, clock):
    used = min(block.num_hits, 3) * 8 - block.depth * 4 + block.priority
    return used - (clock - block.last_used_at) // 4 - (clock - block.published_at) // 16


@kv.policies.eviction_policy("test: all alike")
def all_alike(blocks):
    return jnp.zeros_like(blocks.recency)


MIXED, ALIKE = "test: used, not deep, not idle", "test: all alike"
KEYS = {**EVICTION_KEYS, MIXED: mixed_key, ALIKE: EVICTION_KEYS["lru"]}


def policy_config(policy, batch):
    return prefix_config(num_blocks=19, eviction_policy=kv.policies.InBatches(policy, batch))


SCRIPT_CONFIG = prefix_config(num_blocks=15)  # of all scripts that need no other
allocate, lookup, commit = jax.jit(kv.allocate), jax.jit(kv.lookup), jax.jit(kv.commit)


@dataclasses.dataclass
class PrefixDriver(Driver):
    """A `Driver` whose tokens are often those of another row, with the operations of the prefix cache."""

    eviction_key: Callable | None = None
    left_out: tuple[str, ...] = ("allocate",)  # operations of `random_script`; `admit` stands for it

    def __post_init__(self):
        super().__post_init__()
        self.token_rng = np.random.default_rng(11)

    def next_operation(self):
        return random_prefix_operation(self.rng, self)

    def new_oracle(self):
        return Oracle(self.config, self.eviction_key)

    def new_tokens(self, length):
        return [int(token) for token in self.token_rng.choice([1, 2], length, p=[0.96, 0.04])]

    def admit(self, seq_ids, num_tokens, prompts, namespace_ids, priority):
        namespaces = [NAMESPACES[i] for i in namespace_ids]
        tokens, words = padded(prompts, PROMPT_WIDTH), np.array(namespaces, np.uint32)
        lengths = np.array(num_tokens)
        found = np.asarray(lookup(self.cache, tokens, lengths, words)).tolist()
        self.cache, admission = allocate(
            self.cache,
            np.array(seq_ids),
            lengths,
            tokens=tokens,
            namespace=words,
            priority=np.array(priority),
        )
        expected = self.oracle.allocate(seq_ids, num_tokens, prompts, namespaces, priority)
        got_cached = np.asarray(admission.num_cached).tolist()
        for i, (seq_id, status) in enumerate(zip(seq_ids, expected, strict=True)):
            want = len(self.oracle.rows[seq_id].tokens) if status == kv.Status.OK else 0
            assert got_cached[i] == want, f"row {i} found {got_cached[i]} tokens cached, expected {want}"
            assert not want or got_cached[i] == found[i], "the lookup before the call found something else"
        tables = [
            {*self.oracle.rows[row].tables[0].values()}
            for row, status in zip(seq_ids, expected, strict=True)
            if status == kv.Status.OK
        ]
        num_held = sum(map(len, tables))
        self.counts["entries that hit the same blocks"] += len(set().union(*tables)) < num_held
        self.counts["hits"] += sum(got_cached) // 4
        return admission.status, expected

    def commit(self, seq_ids, final_len):
        if seq_ids is not None:
            seq_ids = np.array(seq_ids)
        self.cache, status = commit(self.cache, seq_ids, final_len=np.array(final_len))
        return status, self.oracle.commit(seq_ids, final_len)

    def evict(self, num_blocks):
        self.cache, num_evicted = kv.evict(self.cache, num_blocks)
        assert int(num_evicted) == self.oracle.evict(num_blocks)
        return [], []

    def touch(self, seq_ids):
        self.cache, status = kv.touch(self.cache, seq_ids)
        return status, self.oracle.touch(seq_ids)

    def set_priority(self, seq_ids, priority):
        self.cache, status = kv.set_priority(self.cache, seq_ids, priority)
        return status, self.oracle.set_priority(seq_ids, priority)

    def reset_prefix_cache(self):
        self.cache, num_dropped = kv.reset_prefix_cache(self.cache)
        assert int(num_dropped) == self.oracle.reset_prefix_cache()
        return [], []


def random_prefix_operation(rng: np.random.Generator, driver: PrefixDriver) -> tuple:
    names = ["admit", "commit", "other", "evict", "reset", "edit"]
    name = rng.choice(names, p=[0.2, 0.27, 0.48, 0.025, 0.005, 0.02])
    if name == "evict":
        return "evict", int(rng.integers(0, 4))
    if name == "reset":
        return ("reset_prefix_cache",)
    active = sorted(driver.oracle.rows)
    if name == "admit" and len(active) > ROWS - 2 and rng.random() < 0.5:
        return "free", row_ids(rng, active, most=3)  # there is nothing to start
    if name == "admit":
        rows = row_ids(rng, sorted({*range(ROWS)} - {*active}), most=3)
        prompts = [driver.new_tokens(PROMPT_WIDTH) for _ in rows]
        num_tokens = [
            int(n) for n in rng.integers(-1 if rng.random() < 0.05 else 0, PROMPT_WIDTH + 2, ENTRIES)
        ]
        namespace_ids = [int(i) for i in rng.choice(3, ENTRIES, p=[0.8, 0.1, 0.1])]
        priorities = [int(p) for p in rng.integers(-2, 3, ENTRIES)]
        return "admit", rows, num_tokens, prompts, namespace_ids, priorities
    rows = row_ids(rng, active)
    if name == "edit":
        if rng.random() < 0.5:
            return "touch", rows
        return "set_priority", rows, [int(p) for p in rng.integers(-2, 3, ENTRIES)]
    if name == "commit":
        all_rows = rng.random() < 0.2
        num_rows = ROWS if all_rows else len(rows)
        any_len = rng.choice([-1, 5, 9, 31, 2**31 - 1], num_rows, p=[0.02, 0.08, 0.1, 0.4, 0.4])
        return "commit", None if all_rows else rows, [int(n) for n in any_len]
    while (operation := random_operation(rng, driver))[0] in driver.left_out:
        pass
    return operation
