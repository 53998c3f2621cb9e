"""A router's view of replicas, and its choice, beside rules that are written out slowly."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.processes import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    IndexFollower,
    Replica,
    ReplicaIndex,
    choose_replica,
    prompt_hashes,
)

POLICIES = ("random", "round robin", "least loaded", "longest prefix", "cost")


def slow_choice(replicas, num_tokens, policy, turn):
    """The rules of four policies by elimination, replica by replica."""
    left = [*range(len(replicas))]

    def keep_fewest(number):
        nonlocal left
        least = min(number(replicas[i]) for i in left)
        left = [i for i in left if number(replicas[i]) == least]

    if policy == "longest prefix":
        keep_fewest(lambda one: -one.num_cached)
    if policy in ("least loaded", "longest prefix"):
        keep_fewest(lambda one: one.num_queued + one.num_running)
    if policy == "cost":
        keep_fewest(lambda one: (num_tokens - one.num_cached) + one.num_queued)
        keep_fewest(lambda one: one.num_running)
    following = [i % len(replicas) for i in range(turn, turn + len(replicas))]
    return next(i for i in following if i in left)


@pytest.mark.parametrize("policy", POLICIES[1:])
def test_the_choice_is_the_rules(policy):
    rng, chosen = np.random.default_rng(3), set()
    for turn in range(300):
        num_tokens = int(rng.integers(0, 9))
        replicas = [
            Replica(int(rng.integers(0, num_tokens + 1)), *rng.integers(0, 6, 2).tolist())
            for _ in range(rng.integers(1, 6))
        ]
        found = choose_replica(replicas, num_tokens, policy, turn=turn)
        assert found == slow_choice(replicas, num_tokens, policy, turn), (replicas, num_tokens, turn)
        assert found == choose_replica(replicas, num_tokens, policy, turn=turn)
        chosen.add(found)
    assert chosen == {*range(5)}


def test_policies_differ_where_they_should():
    """The prefix is where the queue is: worth waiting for while the queue is shorter than the prefix."""
    idle = Replica(0, 0, 0)
    for queued, by_cost in ((40, 0), (120, 1)):
        holds = Replica(80, queued, 500)
        choices = {policy: choose_replica([holds, idle], 100, policy) for policy in POLICIES[2:]}
        assert choices == {"least loaded": 1, "longest prefix": 0, "cost": by_cost}
    # Of equals in what is to be computed, the one whose rows hold less.
    assert choose_replica([Replica(0, 5, 9), Replica(0, 5, 8)], 100) == 1


def test_idle_replicas_take_turns_and_chance_reaches_all_alike():
    idle = [Replica(0, 0, 0)] * 4
    for policy in POLICIES[1:]:
        assert [choose_replica(idle, 10, policy, turn=i) for i in range(6)] == [0, 1, 2, 3, 0, 1]
    by_chance = [choose_replica(idle, 10, "random", turn=i) for i in range(400)]
    counts = np.bincount(by_chance)
    assert len(counts) == 4 and counts.min() > 70
    assert by_chance != [i % 4 for i in range(400)]
    loaded = [Replica(9, i, i) for i in range(4)]
    assert by_chance == [choose_replica(loaded, 10, "random", turn=i) for i in range(400)]


@jax.jit
def serve(cache, tokens):
    cache, admission = kv.allocate(cache, [0], [tokens.size], tokens=tokens[None])
    new = jnp.roll(tokens, -admission.num_cached[0])[None]
    cache, _ = kv.extend(
        cache, tokens.size - admission.num_cached, max_new=tokens.size, seq_ids=[0], tokens=new
    )
    return kv.free(kv.commit(cache)[0], [0])[0]


def test_an_index_knows_of_a_prompt_what_lookup_finds():
    config = kv.CacheConfig(
        [kv.FullAttention(1, 5)],
        num_blocks=12,
        block_size=2,
        max_seqs=1,
        max_seq_len=10,
        enable_prefix_caching=True,
    )
    rng, cache, follower, index = np.random.default_rng(0), kv.init(config), IndexFollower(), ReplicaIndex()
    # Texts that begin alike; the last token of a prompt is never found.
    texts = np.append(rng.integers(0, 2, (9, 8)), np.full((9, 1), 7), axis=1).astype(np.int32)
    found = []
    for nth in range(40):
        cache = serve(cache, texts[rng.integers(len(texts))])
        index.apply(follower.update(cache))
        found.append([2 * index.num_blocks(prompt_hashes(text, 2)) for text in texts])
        assert found[-1] == np.asarray(kv.lookup(cache, texts, [9] * 9)).tolist(), nth
    assert {*np.ravel(found)} == {0, 2, 4, 6, 8} and int(kv.stats(cache).num_evictions) > 10
    index.apply(follower.update(kv.reset_prefix_cache(cache)[0]))
    assert not any(index.num_blocks(prompt_hashes(text, 2)) for text in texts)


def test_a_block_is_held_while_one_place_has_it_and_all_before_it():
    hashes, index = prompt_hashes([5, 6, 7, 8, 9, 10], 2), ReplicaIndex()

    def stored(some, medium):
        return BlockStored(some, None, (0, 0) * len(some), 2, medium, "")

    for events, expected in (
        ([stored(hashes, "GPU")], 3),
        ([stored(hashes[1:2], "CPU"), BlockRemoved(hashes[1:2], "GPU")], 3),
        ([BlockRemoved(hashes[1:2], "CPU")], 1),
        ([stored(hashes[1:2], "CPU"), BlockRemoved(hashes[:1], "GPU")], 0),
        ([AllBlocksCleared(), stored(hashes[:2], "CPU")], 2),
    ):
        index.apply(events)
        assert index.num_blocks(hashes) == expected
    assert index.hashes == {*hashes[:2]}


def test_what_is_no_event_changes_no_index():
    """An event is a tuple, of fields that are none; a message that was not decoded is a list of lists."""
    event, index = BlockStored(prompt_hashes([5, 6], 2), None, (5, 6), 2, "GPU", ""), ReplicaIndex()
    index.apply(event for event in [event])
    for events, match in (
        (event, "events is BlockStored.*, expected a list of events"),
        (AllBlocksCleared(), "events is AllBlocksCleared.*, expected a list of events"),
        (None, "events is None, expected a list of events"),
        (
            [AllBlocksCleared(), ["AllBlocksCleared"]],
            r"events\[1\] is \['AllBlocksCleared'\], expected one of",
        ),
        ([AllBlocksCleared], r"events\[0\] is <class .*, expected one of BlockStored, BlockRemoved, AllBlo"),
    ):
        with pytest.raises(TypeError, match=match):
            index.apply(events)  # type: ignore
    assert index.hashes == {*event.block_hashes}


def test_hashes_are_of_full_blocks_and_all_before_them():
    text = [5, 6, 7, 8, 9, 10, 11]
    hashes = prompt_hashes(text, 2)
    # As a process printed them: routers and replicas are other processes.
    assert hashes[:2] == (8667545319388385454, 7250618643434716976) and len(hashes) == 3
    assert prompt_hashes(text, 8) == prompt_hashes([], 2) == ()
    assert prompt_hashes(np.array(text, np.int32), 2) == hashes
    for at in range(6):
        other = prompt_hashes([*text[:at], 99, *text[at + 1 :]], 2)
        assert [a == b for a, b in zip(hashes, other, strict=True)] == [i < at // 2 for i in range(3)]
    assert not {*hashes} & {*prompt_hashes(text, 2, namespace=kv.namespace(tenant="a"))}


def test_bad_input_is_refused_by_name():
    one = Replica(2, 0, 0)
    for call, error, match in (
        (lambda: choose_replica([], 4), ValueError, "got no replicas, expected at least one"),
        (lambda: choose_replica([one], 4, "nearest"), ValueError, "policy is 'nearest', expected one of ran"),
        (lambda: choose_replica([one], 4, ["cost"]), ValueError, r"policy is \['cost'\], expected one of"),
        (lambda: choose_replica([one], 1), ValueError, r"replicas\[0\].num_cached is 2, .* num_tokens = 1"),
        (lambda: choose_replica([one], -1), ValueError, "num_tokens is -1, expected at least 0"),
        (lambda: choose_replica([one], 4, turn=-1), ValueError, "turn is -1, expected at least 0"),
        (lambda: choose_replica([one, (0, 0, 0)], 4), TypeError, r"replicas\[1\] is .*, expected a Replica"),
        (lambda: prompt_hashes([1, 2], 0), ValueError, "block_size is 0, expected at least 1"),
        (lambda: prompt_hashes("ab", 2), TypeError, "tokens is 'ab', expected integer token ids"),
        (lambda: prompt_hashes([1], 2, namespace=[1]), ValueError, "namespace is"),
    ):
        with pytest.raises(error, match=match):
            call()
    for replicas in (None, iter([one]), {0: one}):
        with pytest.raises(TypeError, match="replicas is .*, expected a list of Replica"):
            choose_replica(replicas, 4)  # type: ignore
    with pytest.raises(ValueError, match=r"policy is array\(.*\), expected one of"):
        choose_replica([one], 4, np.array(["cost", "random"]))  # type: ignore
    for field, value in itertools.product(Replica._fields, (-1, 0.5, True)):
        error = ValueError if value == -1 else TypeError
        with pytest.raises(error, match=rf"replicas\[1\].{field} is {value}"):
            choose_replica([one, one._replace(**{field: value})], 4, "random")
