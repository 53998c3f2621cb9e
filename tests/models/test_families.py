"""Families by aspects, Gemma and DeepSeek: prompts of 1 to 300 tokens, and what else is theirs."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import kvcache_jax as kv
from models import checkpoint
from models.decoder import cache_config, forward
from models.layers import is_gated
from models.mixture import Mixture
from tests.models import driver
from tests.models.checkpoint_files import FIXTURES, LONG
from tests.models.driver import (
    ROW,
    WIDTH,
    Driver,
    all_tokens,
    assert_close,
    check_generation,
    expected,
    load,
)

NARROW = 128  # tokens of a row, for which latents are not expanded
# With windows and with latents: what else tells families apart does not depend on the length of a prompt.
FAMILIES = "gemma3", "deepseek_v2"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_prompt_in_one_call(family):
    """For which latents are expanded; then the model's own choices, for which they are not."""
    driver = Driver(load(family), {0: 140, ROW: 300})
    tokens, want = all_tokens(family, "_300"), expected(family)["logits_300"]
    num_new = len(expected(family)["greedy_300"])
    logits = driver.feed({ROW: tokens[:-num_new], 0: tokens[::-1][:140]}, 300)[ROW]
    assert_close(logits[num_new - len(want) :], want[:-num_new])
    for i in range(-num_new, 0):
        assert_close(driver.feed({ROW: tokens[i:][:1]}, NARROW)[ROW], want[i:][:1])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_prompt_in_pieces(family):
    """For whose width latents are read as they are."""
    check_generation(Driver(load(family), {ROW: 300}), family, 300, NARROW, 121)


@pytest.mark.slow
@pytest.mark.parametrize("family", LONG)
def test_prompts_of_one_token_and_of_more_than_a_window(family):
    for prompt_len in (1, 300):
        check_generation(Driver(load(family), {0: 5, ROW: prompt_len}), family, prompt_len, WIDTH, 37)


def test_the_command_names_a_family_that_differs(monkeypatch, capsys):
    assert driver.main(["llama"]) == 0
    said = capsys.readouterr().out
    assert "greedy tokens equal" in said and said.endswith("; not equal: none\n")
    for changes in (dict(ATOL=0.0), dict(ATOL=float("inf"), expected=with_another_token)):
        with monkeypatch.context() as patched:
            for name, value in changes.items():
                patched.setattr(driver, name, value)
            assert driver.main(["llama"]) == 1
        said = capsys.readouterr().out
        assert said.endswith("; not equal: llama\n") and ("DIFFER" in said) == ("expected" in changes)


def with_another_token(family):
    found = dict(expected(family))
    return found | {"greedy": np.append(found["greedy"][:-1], found["greedy"][-1] ^ 1)}


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3_experts", "nemotron_h_experts"])
def test_experts_compute_only_their_own_tokens(family):
    """Multiplications of all matrix products, which would be as often as there are experts of all tokens."""
    config, num_tokens = checkpoint.load_config(FIXTURES / family), 35
    experts, size = config.experts, config.hidden_size
    mixture = nnx.eval_shape(lambda: Mixture(config, nnx.Rngs(0), experts))
    tokens = jax.ShapeDtypeStruct((5, 7, size), config.dtype)
    jaxpr = jax.make_jaxpr(lambda mixture, tokens: mixture(tokens))(mixture, tokens)
    num_matrices = 3 if is_gated(config) else 2
    used = experts.num_used * experts.expert_size + (experts.shared_size or 0)
    products = list(matrix_products(jaxpr.jaxpr))
    assert sum(name == "ragged_dot_general" for name, _ in products) == num_matrices
    wanted = num_tokens * size * (experts.num_experts + num_matrices * used)
    assert sum(count for _, count in products) == wanted


def matrix_products(jaxpr):
    """Yields what each matrix product is and how often it multiplies."""
    for equation in jaxpr.eqns:
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            yield from matrix_products(inner) if hasattr(inner, "eqns") else ()
        if equation.primitive.name == "dot_general":
            ((contracted, _), _), first = equation.params["dimension_numbers"], equation.invars[0].aval.shape
            length = math.prod(first[axis] for axis in contracted)
            yield "dot_general", math.prod(equation.outvars[0].aval.shape) * length
        if equation.primitive.name == "ragged_dot_general":
            (rows, inner), (_, _, outputs) = (value.aval.shape for value in equation.invars[:2])
            yield "ragged_dot_general", rows * inner * outputs


def test_latents_are_expanded_where_a_row_has_room_for_more_than_128_tokens(monkeypatch):
    """And read as they are elsewhere, also in packed steps of more tokens: each of them is a row there."""
    decoder, expanded, attention = load("deepseek_v3"), {}, kv.attention

    def spy(*args, weights, **options):
        expanded[args[-1].positions.shape].add(weights is not None)
        return attention(*args, weights=weights, **options)

    monkeypatch.setattr(kv, "attention", spy)
    config = cache_config(decoder.config, max_seqs=1, max_seq_len=160)

    def logits(tokens, **room):
        cache, _ = kv.allocate(kv.init(config), [0], [1])
        cache, step = kv.extend(cache, [1], **room)
        return forward(decoder, tokens, cache, step)

    for shape in ((1, 1), (1, 128), (1, 129), (130,)):
        room = {"num_tokens": 130} if shape == (130,) else {"max_new": shape[1]}
        expanded[shape] = set()
        jax.eval_shape(functools.partial(logits, **room), jax.ShapeDtypeStruct(shape, jnp.int32))
    assert expanded == {(1, 1): {False}, (1, 128): {False}, (1, 129): {True}, (130,): {False}}


@pytest.mark.parametrize("part", ["decode", "prefill"])
def test_an_implementation_without_soft_caps_says_so(part):
    """Each half of a backend is told of the cap by name, and what it raises comes through."""

    def refuse(*_, soft_cap, **__):
        raise NotImplementedError(f"soft_cap is {soft_cap}, expected None; use implementation 'xla'")

    name = f"without soft caps, {part}"
    kv.backends.register_backend(kv.backends.Backend(name, lambda *_: None, **{part: refuse}))
    decoder, num_new = load("gemma2"), {"decode": 1, "prefill": 9}[part]
    config = cache_config(decoder.config, max_seqs=1, max_seq_len=16, implementation=name)

    def logits(tokens):
        cache, step = kv.extend(kv.allocate(kv.init(config), [0], [9])[0], [num_new], max_new=num_new)
        return forward(decoder, tokens, cache, step)

    with pytest.raises(NotImplementedError, match="soft_cap is 2.0, expected None; use implementation 'xla'"):
        jax.eval_shape(logits, jax.ShapeDtypeStruct((1, num_new), jnp.int32))
