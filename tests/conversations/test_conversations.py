"""Eviction by what turns of conversations leave, against a model that keeps prefixes in a dict."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv

NUM_BLOCKS, BLOCK_SIZE, WIDTH, ROWS, SPARE = 14, 2, 20, 3, 4


def config_of(policy, **options):
    sizes = dict(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, max_seqs=ROWS, max_seq_len=WIDTH)
    extras = [kv.policies.Conversations(spare_len=SPARE)]
    layers = [kv.FullAttention(1, 4)]
    return kv.CacheConfig(
        layers, **sizes, enable_prefix_caching=True, extras=extras, eviction_policy=policy, **options
    )


@dataclasses.dataclass
class Block:
    """A published block: who holds it, and what was said of it."""

    holders: set
    until: int
    owner: int = 0
    is_spare: bool = False
    released: int = -1


@dataclasses.dataclass
class Row:
    tokens: tuple
    num_blocks: int
    conversation: int
    retain: int


class Model:
    """Prefixes by their tokens, and a policy that looks at each of them."""

    def __init__(self, policy):
        self.blocks, self.rows, self.now, self.order, self.policy = {}, {}, 0, 0, policy

    def find(self, tokens):
        num = 0
        while num < (len(tokens) - 1) // BLOCK_SIZE and tokens[: (num + 1) * BLOCK_SIZE] in self.blocks:
            num += 1
        return num

    def start(self, row_id, tokens, conversation, retain):
        """Starts a row, evicts what it needs, and publishes its blocks; False if there is no room."""
        num, need = self.find(tokens), -(-len(tokens) // BLOCK_SIZE)
        prefixes = [tokens[: (i + 1) * BLOCK_SIZE] for i in range(len(tokens) // BLOCK_SIZE)]
        held = {prefix for row in self.rows.values() for prefix in self.of(row)} | {*prefixes[:num]}
        private = sum(row.num_blocks - len(self.of(row)) for row in self.rows.values())
        if need - num > NUM_BLOCKS - len(held) - private:
            return None
        for prefix in prefixes[:num]:
            self.blocks[prefix].holders.add(row_id)
        while len(self.blocks) + private + need - num > NUM_BLOCKS:
            leaves = [
                prefix
                for prefix, block in self.blocks.items()
                if not block.holders and not any(self.is_child(other, prefix) for other in self.blocks)
            ]
            del self.blocks[min(leaves, key=self.key)]
        for prefix in prefixes[num:]:
            self.blocks[prefix] = Block({row_id}, self.now)
        self.rows[row_id] = Row(tokens, need, conversation, retain)
        return num * BLOCK_SIZE

    def of(self, row):
        return [row.tokens[: (i + 1) * BLOCK_SIZE] for i in range(len(row.tokens) // BLOCK_SIZE)]

    def is_child(self, other, prefix):
        return len(other) == len(prefix) + BLOCK_SIZE and other[: len(prefix)] == prefix

    def key(self, prefix):
        block = self.blocks[prefix]
        value = block.until if self.policy == "retention" else not block.is_spare
        return value, block.released

    def end(self, row_ids):
        """Ends rows together: each says until when its blocks are retained."""
        said = {}
        for row_id in row_ids:
            row = self.rows[row_id]
            for i, prefix in enumerate(self.of(row)):
                spare = len(row.tokens) - i * BLOCK_SIZE <= SPARE
                said.setdefault(prefix, []).append((self.now + row.retain, row.conversation, spare))
        for prefix, all_said in said.items():
            block = self.blocks[prefix]
            others = [] if block.owner and block.owner in [c for _, c, _ in all_said] else [block.until]
            block.until = max([*others, *(until for until, *_ in all_said)])
            named = [conversation for until, conversation, _ in all_said if until == block.until]
            block.owner = max(named) if named else block.owner
            block.is_spare = all(spare for *_, spare in all_said)
        for row_id in row_ids:
            for prefix in reversed(self.of(self.rows.pop(row_id))):
                self.blocks[prefix].holders.discard(row_id)
                if not self.blocks[prefix].holders:
                    self.order += 1
                    self.blocks[prefix].released = self.order


def padded(tokens):
    return np.array([[*tokens, *[0] * (WIDTH - len(tokens))]], np.int32)


def start(cache, row, tokens, conversation=0, retain=0.0):
    """Computes a row of these tokens and publishes it; the tokens that were cached."""
    cache, admission = kv.allocate(cache, [row], [len(tokens)], tokens=padded(tokens))
    if admission.status[0]:
        return cache, None
    num = int(admission.num_cached[0])
    cache, _ = kv.extend(
        cache, [len(tokens) - num], max_new=WIDTH, seq_ids=[row], tokens=padded(tokens[num:])
    )
    cache, _ = kv.policies.set_turns(cache, [row], [conversation], retain)
    cache, _ = kv.commit(cache, [row])
    return cache, num


@pytest.mark.quick_cases("retention")
@pytest.mark.parametrize("policy", ["retention", "tail lru"])
def test_what_is_evicted_is_what_the_model_evicts(policy):
    """Turns of four conversations, sub-agents that fork from them, and requests of none, in a small pool."""
    rng, num_hits, num_full = np.random.default_rng(5), 0, 0
    cache, model = kv.init(config_of(policy), storage=False), Model(policy)
    conversations: dict[int, tuple[int, ...]] = {number: (1, 2, number) for number in (1, 2, 3, 4)}
    for step in range(160):
        idle = [row for row in range(ROWS) if row not in model.rows]
        if idle and rng.random() < 0.6:
            number = int(rng.choice([*conversations]))
            turn, said = conversations[number], number
            kind = rng.random()
            added = tuple(int(x) for x in rng.integers(10, 99, rng.integers(1, 5)))
            if kind < 0.15:
                turn, said = (1, 2, 5, 5, 5, 5), 0
            elif kind < 0.25:
                turn, said = (1, 2, *added, *added), 0
            elif kind < 0.4:
                turn, said = (*turn, *added), 10 + number  # a sub-agent has a name of its own
            elif len(turn) + len(added) > WIDTH:
                conversations[number] = (1, 2, number, step)
                continue
            else:
                turn = conversations[number] = (*turn, *added)
            turn = turn[:WIDTH]
            retain = int(rng.choice([0, 0, 20, 90])) if said else int(rng.choice([0, 60]))
            cache, num = start(cache, idle[0], turn, said, retain / 16)
            assert num == model.start(idle[0], turn, said, retain), step
            num_hits += bool(num)
            num_full += num is None
        elif model.rows:
            rows = [int(row) for row in model.rows][: int(rng.integers(1, 3))]
            cache, _ = kv.free(cache, [*rows, *[ROWS] * (2 - len(rows))])
            model.end(rows)
        if rng.random() < 0.5:
            model.now += int(rng.integers(0, 6))
            cache = kv.policies.set_time(cache, model.now / 16)
        num_cached = sum(not block.holders for block in model.blocks.values())
        cached = cache.control.block_pools[0].cached
        assert cached is not None and int(cached.num_cached) == num_cached, step
        if step % 20 == 0:
            kv.check_invariants(cache)
            for prefix in model.blocks:
                assert int(kv.lookup(cache, padded(prefix), [len(prefix)], None)[0]) == model.find(prefix) * 2
    assert num_hits > 30 and num_full > 3


def test_a_fork_is_a_turn_of_its_parents_conversation():
    cache, _ = start(kv.init(config_of("retention"), storage=False), 0, (1, 2, 3, 4, 5), 7, 2.0)
    cache, _ = kv.fork(cache, [0], [1])
    turns = cache.control.extras["conversations"]
    assert turns.conversation.tolist() == [7, 7, 0] and turns.retain.tolist() == [32, 32, 0]
    cache, _ = kv.free(cache, [0, 1])
    kv.check_invariants(cache)
    turns = cache.control.extras["conversations"]
    assert not turns.conversation.any() and not turns.retain.any()
    assert sorted(turns.until.tolist())[-3:] == [0, 32, 32]


def test_time_never_runs_back_and_ends_of_its_range_are_ends():
    cache = kv.init(config_of("retention"), storage=False)
    for seconds, ticks in ((3, 48), (1.5, 48), (4.01, 65), (1e30, 2**30 - 1), (0, 2**30 - 1)):
        cache = kv.policies.set_time(cache, seconds)
        assert int(cache.control.extras["conversations"].now) == ticks
    cache, _ = start(cache, 0, (1, 2, 3), 7, 1e30)
    cache, _ = kv.free(cache, [0])
    kv.check_invariants(cache)
    assert max(cache.control.extras["conversations"].until.tolist()) == 2**31 - 2
    traced = jax.jit(lambda cache, now: kv.policies.set_time(cache, now))
    fresh = traced(kv.init(config_of("retention"), storage=False), jnp.float32(2.5))
    assert int(fresh.control.extras["conversations"].now) == 40
    for seconds, ticks in ((20_000_001, 320_000_016), (2**31 - 1, 2**30 - 1)):
        for number in (seconds, np.int64(seconds), jnp.int32(seconds)):
            late = kv.policies.set_time(kv.init(config_of("retention"), storage=False), number)
            assert int(late.control.extras["conversations"].now) == ticks
    late = kv.policies.set_time(fresh, jnp.bfloat16(4))
    assert int(late.control.extras["conversations"].now) == 64


def test_what_cannot_be_told_is_refused():
    cache, plain = kv.init(config_of("retention")), kv.init(kv.CacheConfig([kv.FullAttention(1, 4)], 8))
    for call in (lambda: kv.policies.set_time(plain, 1), lambda: kv.policies.set_turns(plain, [0], [1])):
        with pytest.raises(ValueError, match="does not learn of conversations, expected one built with"):
            call()
    with pytest.raises(ValueError, match="seconds is nan, expected finite numbers"):
        kv.policies.set_time(cache, float("nan"))
    with pytest.raises(TypeError, match=r"retain is float64\[2\], expected numbers \[\] or \[1\]"):
        kv.policies.set_turns(cache, [0], [1], np.array([1.0, 2.0]))
    for spare_len in (-1, 2**31):
        with pytest.raises(
            ValueError, match=rf"spare_len is {spare_len}, expected 0 <= spare_len <= 2\*\*30"
        ):
            kv.policies.Conversations(spare_len=spare_len)
    for number in (-1, 2**31 - 1, 2**40):
        with pytest.raises(ValueError, match=f"conversations has {number}, expected 0 to 2147483646"):
            kv.policies.set_turns(cache, [0], [number])
    cache, _ = start(cache, 0, (1, 2, 3))
    tell = jax.jit(kv.policies.set_turns)
    for number, told in ((7, 7), (-1, 0), (2**31 + 5, 0), (2**31 - 2, 2**31 - 2)):
        numbers = np.array([number], np.uint32 if number > 0 else np.int32)
        assert tell(cache, np.array([0]), numbers)[0].control.extras["conversations"].conversation[0] == told
    _, status = kv.policies.set_turns(cache, [1], [1])
    assert kv.Status(int(status[0])) == kv.Status.SEQ_NOT_ACTIVE


@pytest.mark.parametrize(("conversation", "until"), [(0, [160, 160]), (7, [16, 16])])
def test_only_a_conversation_takes_back_what_it_said(conversation, until):
    cache = kv.init(config_of("retention"), storage=False)
    for seconds, retain in ((0.0, 10.0), (1.0, 0.0)):
        cache, _ = start(kv.policies.set_time(cache, seconds), 0, (1, 2, 3, 4, 5), conversation, retain)
        cache, _ = kv.free(cache, [0])
    assert sorted(cache.control.extras["conversations"].until.tolist())[-2:] == until


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_rows_that_end_together_spare_what_all_of_them_can(order):
    cache, _ = start(kv.init(config_of("tail lru"), storage=False), 0, (1, 2, 3, 4, 5))
    cache, _ = start(cache, 1, (1, 2, 3, 4, 6, 6, 7, 7, 8))
    shared, *_ = cache.control.block_pools[0].block_table[:, 1].tolist()
    cache, _ = kv.free(cache, order)
    assert not cache.control.extras["conversations"].is_spare[shared]
    assert int(cache.control.extras["conversations"].is_spare.sum()) == 1


@pytest.mark.parametrize(
    ("seconds", "why"),
    [
        (10.0, "It would be retained for 20 s more: the pool was needed."),
        (52.5, "Its retention, if it had any, lapsed 22.5 s ago."),
    ],
)
def test_a_miss_is_explained_by_the_retention(seconds, why):
    cache, _ = start(kv.init(config_of("retention"), storage=False), 0, (1, 2, 3, 4, 5), 7, 30.0)
    cache, _ = kv.free(cache, [0])
    cache = kv.policies.set_time(cache, seconds)
    cache, _ = kv.allocate(cache, [0, 1], [20, 8], tokens=[[9] * WIDTH] * 2)
    said = kv.inspect.explain(cache, [1, 2, 3, 4, 5])
    assert said == (
        f"0 of 5 tokens are cached. The block from position 0 on was cached, and evicted since. {why}"
    )
