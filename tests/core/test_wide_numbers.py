"""With `jax_enable_x64`, as without it, states and results are of 32 bits, and no dtype is promoted."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from tests.core.public_calls import CACHED, CACHED_CALLS, NEW, PLAIN, PLAIN_CALLS, ROWS, SIZES, TOKENS
from tests.support.rotary_model import ROTATE
from tests.support.wide import made

ON_HOST = {"block_map", "draw_block_map", "explain", "copy_prompts"}  # their programs are of other calls
FULL, WINDOW = kv.FullAttention(1, 8), kv.SlidingWindow(1, 8, window=4, max_rollback=2)
STATES = kv.Mamba2(2, 4, state_dim=4, max_rollback=2)


def make(*layers, **options: Any):
    return kv.CacheConfig(layers, **SIZES | dict(enable_prefix_caching=True) | options)


MIXED = make(FULL, WINDOW, kv.Quantised(FULL, "int4"), STATES, eviction_policy="lfu")
HOSTED = make(FULL, extras=[kv.tiers.Host(4)])
TALKING = make(FULL, extras=[kv.policies.Conversations()], eviction_policy="retention")
CHUNKS = make(FULL, extras=[kv.chunks.Store(2, 8)])
MOVING: dict[str, Any] = dict(positions="cache", rotate=ROTATE)
DROPPING = kv.CacheConfig([kv.FullAttention(1, 5)], **SIZES, extras=[kv.compression.Dropping(max_sink_len=2)])


def of_calls(config, calls):
    return {name: (config, *call) for name, call in calls.items() if name not in ON_HOST}


CALLS = (
    of_calls(PLAIN, PLAIN_CALLS)
    | of_calls(CACHED, CACHED_CALLS)
    | {f"{name} of all kinds": (MIXED, *CACHED_CALLS[name]) for name in ("allocate", "commit", "evict")}
    | {
        "allocate with a host": (HOSTED, *CACHED_CALLS["allocate"]),
        "prefetch": (HOSTED, kv.tiers.prefetch, [TOKENS], {}),
        "commit of a conversation": (TALKING, *CACHED_CALLS["commit"]),
        "attention": (PLAIN, lambda cache: attended(cache, kv.attention), [], {}),
        "attention_scores": (PLAIN, lambda cache: attended(cache, kv.attention_scores), [], {}),
        "drop": (
            DROPPING,
            kv.compression.drop,
            [ROWS, [0, 0], [1, 1]],
            dict(positions="cache", rotate=ROTATE),
        ),
        "pyramid_budgets": (PLAIN, lambda _: kv.compression.pyramid_budgets([8, 9], 3, 2, [12, 4]), [], {}),
    }
)


def snapkv(*args):
    return kv.compression.token_scores(*args, "snapkv")


def attended(cache, attend):
    cache, step = kv.extend(cache, [4, 4], max_new=4)
    new = (NEW, NEW, NEW) if attend is kv.attention else (NEW,)
    return attend(cache, 0, *map(jnp.asarray, new), step)


def model(params, tokens, cache, step):
    x = params[tokens][..., None, :]
    for layer in cache.config.own_layers:
        cache, x = kv.attention(cache, layer, x, x, x, step)
    return x[..., 0, :], cache


def leaves(tree):
    return [(jax.tree_util.keystr(path), x.shape, x.dtype) for path, x in jax.tree.leaves_with_path(tree)]


@pytest.mark.parametrize("name", CALLS)
def test_operations_give_the_same_dtypes(name):
    config, call, args, options = CALLS[name]
    cache = kv.init(config)

    def shapes():
        return jax.eval_shape(lambda cache: call(cache, *args, **options), cache)

    assert leaves(made(kv.init, config)) == leaves(cache)
    assert leaves(made(shapes)) == leaves(shapes())


@pytest.mark.parametrize("options", [dict(num_drafts=1), dict(num_top_logprobs=1, policy="priority")])
def test_the_engines_program_is_made(options):
    config = make(FULL, WINDOW, max_query_len=8)
    params = jnp.ones((8, 8), jnp.float32)
    assert made(lambda: kv.Engine(model, params, config, token_budget=12, **options).lower())


@pytest.mark.slow
def test_loops_and_the_engine_say_the_same():
    config = make(FULL, WINDOW, max_query_len=8)
    params = jax.random.normal(jax.random.key(0), (8, 8), jnp.float32)
    prompts, sampling = [[1, 2, 3, 4, 5], [7]], kv.decoding.SamplingParams(0.9, top_p=0.9, seed=3)

    def said():
        sizes: dict[str, Any] = dict(max_new_tokens=6, sampling=sampling)
        found = kv.generate(model, params, prompts, config, **sizes)
        scores = kv.score(model, params, prompts[0], [[6, 5], [0]], config)
        engine = kv.Engine(model, params, config, token_budget=12)
        engine.push([kv.GenerationRequest(prompt, **sizes) for prompt in prompts])
        answers = {number: ([], []) for number in range(len(prompts))}
        for event in engine:  # of as many tokens as the engine found time for
            answers[event.id][0].extend(event.tokens)
            answers[event.id][1].extend(event.logprobs)
        return [(each.tokens, each.logprobs) for each in found.generations], scores.logprobs, answers

    found, expected = made(said), said()
    assert jax.tree.all(jax.tree.map(np.array_equal, found, expected)) and all(map(all, found[2].values()))
