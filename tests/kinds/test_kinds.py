"""Every kind of layer in every property: a cell of the table in `table.py` each."""

import dataclasses
import functools
import math

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import kvcache_jax as kv
from kvcache_jax import testing
from tests.aot.hlo import COLLECTIVE
from tests.kinds.composed_rows import compose
from tests.kinds.compressed_rows import compress
from tests.kinds.kind_rows import (
    BLOCK_SIZE,
    MAX_LEN,
    NUM_BLOCKS,
    NUM_ROWS,
    OK,
    SOURCE_WIDTH,
    VOCAB,
    WIDTH,
    Rows,
    config_of,
    dropping_config,
    empty,
    expected_logits,
    extend_and_attend,
    forward,
    make_params,
    oracles_of,
    padded,
    random_text,
    run_step,
    source_of,
    store_sources,
    write_sources,
)
from tests.kinds.published_rows import commit, evict, hit, partial_hit, transfer
from tests.kinds.table import KINDS, PROPERTIES, NoMeaning, Refused
from tests.support.few_kernels import compile_for_users
from tests.support.helpers import assert_same, leaf_bytes, num_copies, statuses


def allocate(kind):
    """Whole prompts are reserved: as many rows as fit get them, the others are as they were."""
    rows = Rows(kind)
    limits = [
        0
        if group.holds_sources or group.span.is_read_later
        else min(MAX_LEN // BLOCK_SIZE, group.max_held_blocks)
        for group in rows.groups
    ]
    num_fit = min(NUM_BLOCKS // limit for limit in limits if limit)
    texts = {row: random_text(MAX_LEN, row) for row in (2, 0, 3, 1)}
    found, num_cached = rows.allocate(texts, writes_sources=False)
    assert found == [OK] * num_fit + [kv.Status.OUT_OF_BLOCKS] * (NUM_ROWS - num_fit)
    assert num_cached == [0] * NUM_ROWS
    left = [group.num_blocks - num_fit * limit for group, limit in zip(rows.groups, limits, strict=True)]
    assert rows.num_available() == left
    rows.write_sources(list(rows.texts))
    rows.feed({row: texts[row] for row in rows.texts})
    for row in set(texts) - set(rows.texts):
        assert not rows.cache.is_active[row] and rows.num_held(row) == [0] * len(limits)


def fork(kind):
    """A fork takes no block and no time of the pools; each row goes its own way, also without its source."""
    rows = Rows(kind)
    rows.start({1: random_text(11)})
    before = rows.cache
    assert rows.fork(1, 3, 0) == [OK, OK]
    for pool, forked in zip(jax.tree.leaves(before.pools), jax.tree.leaves(rows.cache.pools), strict=True):
        assert pool.unsafe_buffer_pointer() == forked.unsafe_buffer_pointer()
    assert rows.num_available() == [
        int(kv.num_available_blocks(before, group=g)) for g in range(len(rows.groups))
    ]
    rows.feed({1: [1, 2], 3: [3], 0: [4, 5, 6, 7, 8]})
    rows.free(1)
    assert rows.fork(3, 0) == [kv.Status.SEQ_IN_USE]
    rows.feed({3: [9, 10, 11], 0: [12]})


def copy_on_write(kind):
    """The first of two writers copies the block that they share, the last writes in place."""
    rows = Rows(kind)
    rows.start({2: random_text(10)})
    assert rows.fork(2, 0, 1) == [OK, OK]
    held = [np.asarray(x) for x in kv.gather(rows.cache, 2, 0)]
    tails = [group.tail_column(jnp.int32(10))[1] for group in rows.groups if not group.holds_sources]
    for row, num_expected in ((0, 1), (1, 2), (2, 2)):
        rows.step({row: [row, 20 + row, 7]})
        assert num_copies(rows.cache) == num_expected * sum(map(bool, tails))  # a point is never copied
        if row != 2:
            for old, new in zip(held, kv.gather(rows.cache, 2, 0), strict=True):
                np.testing.assert_array_equal(old, new)


def in_place(kind):
    """A donated step, sources stored in it too, needs less memory beside the pools than any array of them."""

    def step(cache, params, sources, tokens, num_new):
        if cache.config.source_layers:
            cache, _ = write_sources(params, cache, *sources)
        return extend_and_attend(params, cache, tokens, num_new)

    config = dataclasses.replace(config_of(kind), num_blocks=2**15)
    cache = jax.eval_shape(functools.partial(kv.init, config))
    ones = np.ones(NUM_ROWS, np.int32)
    sources = np.arange(NUM_ROWS), np.zeros((NUM_ROWS, SOURCE_WIDTH), np.int32), ones
    arguments = make_params(len(kind.layers)), sources, np.zeros((NUM_ROWS, WIDTH), np.int32), ones
    program = compile_for_users(kv.donate(step).lower(cache, *arguments))
    memory = program.memory_analysis()
    used = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert used < min(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(cache.pools))


def truncate(kind):
    """Rows go on from where they were cut; what left a window is refused and changes nothing."""
    rows = Rows(kind)
    rows.start({0: random_text(21), 3: random_text(5)})
    rows.fork(0, 2)
    cut = 20 if kind.rollback is None else kind.rollback
    for row, length in ((3, 2), (0, 21 - cut)):
        assert rows.truncate(row, length) == [OK]
    rows.step({0: [1, 2], 3: [3, 4, 5], 2: [6]})
    if kind.rollback is not None:
        before = leaf_bytes(rows.cache)
        assert rows.truncate(2, 1) == [kv.Status.WINDOW_LOST]
        assert leaf_bytes(rows.cache) == before
        rows.feed({2: [7, 8]})


def rewrite(kind):
    """Tokens are computed again in place: what was wrong there is right, and a fork sees neither."""
    rows = Rows(kind)
    rows.start({2: random_text(13), 3: random_text(7)})
    rows.fork(2, 0)
    places = {2: [9, 10, 12], 3: [5]}
    rows.rewrite(places, is_right=False)
    assert num_copies(rows.cache) == 2 * sum(not group.holds_sources for group in rows.groups)
    rows.feed({0: [1, 2]})
    rows.rewrite(places)
    rows.feed({2: [3, 4, 5], 3: [6]})
    before = jax.tree.map(jnp.copy, rows.cache)
    refused = [(2, line, kv.Status.BAD_LENGTH) for line in ([15, 15], [15, 14], [16], [-1])]
    if kind.rollback == 0:
        refused.append((2, [4, 15], kv.Status.WINDOW_LOST))
    for row, line, status in refused:
        rows.rewrite({row: line}, expects=status)
    assert leaf_bytes(testing.poison(rows.cache)) == leaf_bytes(testing.poison(before))


def drop(kind):
    """Tokens that a row drops are not seen again, their blocks come back, and a fork keeps its own."""
    rows = Rows(kind, empty(dropping_config(kind)))
    rows.start({2: random_text(17), 3: random_text(7)})
    num_sinks = max(group.num_sink_tokens for group in rows.groups)
    assert rows.drop(3, max(num_sinks, 2), 2) == OK  # no whole block
    rows.fork(3, 0)
    before = rows.num_held(2)
    assert rows.drop(2, 3, 10) == OK  # of which tokens 4 to 11 are blocks
    for group, held, now in zip(rows.groups, before, rows.num_held(2), strict=True):
        assert held - now == (0 if group.holds_sources else 2) or group.window
    rows.step({2: [1, 2], 3: [3, 4, 5]})
    assert rows.drop(3, 4, 4) == OK
    rows.dropped[0] = {2, 3} if num_sinks < 3 else {3, 4}
    rows.step({0: [6, 7], 2: [8], 3: [9]})
    untouched = leaf_bytes(rows.cache)
    for start, length in ((num_sinks - 1, 1), (15, 3), (20, 1), (3, -1)):
        assert rows.drop(2, start, length) == kv.Status.BAD_LENGTH
    assert leaf_bytes(rows.cache) == untouched


def window(kind):
    """However long a row gets, it holds no more blocks than the bound says, and its sinks stay."""
    rows = Rows(kind)
    rows.start({1: random_text(13), 2: [5]})
    while len(rows.texts[1]) < MAX_LEN:
        rows.step({1: [len(rows.texts[1]) % VOCAB], 2: [6]})
        for row in (1, 2):
            for held, group in zip(rows.num_held(row), rows.groups, strict=True):
                assert held <= group.max_held_blocks
    at_the_end = rows.num_held(1)
    for held, group in zip(at_the_end, rows.groups, strict=True):
        reach = group.window + group.max_rollback + group.num_sink_tokens if group.window else MAX_LEN
        assert held <= -(-reach // BLOCK_SIZE) + 2
    assert min(at_the_end) < MAX_LEN // BLOCK_SIZE
    assert rows.num_available() == [
        group.num_blocks - sum(both)
        for group, *both in zip(rows.groups, at_the_end, rows.num_held(2), strict=True)
    ]


@functools.partial(jax.jit, static_argnames="step")
def two_steps(params, cache, sources, tokens, num_new, weights, step):
    """A weighted sum of what two steps in a scan attend to, after sources that are stored first."""
    if cache.config.source_layers:
        cache, _ = write_sources(params, cache, *sources)

    def body(cache, inputs):
        cache, logits, status = step(params, cache, *inputs)
        return cache, (logits, status)

    _, (logits, status) = jax.lax.scan(body, cache, (tokens, num_new))
    is_token = jnp.arange(WIDTH)[None, None] < num_new[:, :, None]
    return jnp.sum(jnp.where(is_token[..., None], logits * weights, 0)), status


two_steps_gradient = jax.jit(jax.grad(two_steps, has_aux=True), static_argnames="step")


def gradient(kind):
    """Gradients through cached attention, over two steps of rows of odd lengths, are the oracle's."""
    rows = Rows(kind)
    texts = {2: random_text(8), 0: random_text(6)}
    rows.allocate(texts, writes_sources=False)
    sources = rows.source_arguments(list(texts))
    steps = [rows.arguments({r: text[at] for r, text in texts.items()}) for at in (slice(5), slice(5, 10))]
    tokens, num_new = map(np.stack, zip(*steps, strict=True))
    weights = np.random.default_rng(5).standard_normal((2, NUM_ROWS, WIDTH, VOCAB), np.float32)
    cache = testing.poison(rows.cache)
    found, status = two_steps_gradient(
        rows.params, cache, sources, tokens, num_new, weights, extend_and_attend
    )
    assert {int(code) for code in status[:, [0, 2]].reshape(-1)} == {OK}

    of_text = {r: np.concatenate(weights[:, r])[: len(text)] for r, text in texts.items()}
    padded_weights = {r: np.pad(w, [(0, MAX_LEN - len(w)), (0, 0)]) for r, w in of_text.items()}
    expected = [
        oracle_gradient(
            rows.params,
            padded(texts[r]),
            padded(rows.sources[r], SOURCE_WIDTH),
            len(rows.sources[r]),
            padded_weights[r],
            oracles_of(kind),
        )
        for r in texts
    ]
    for name, array in found.items():
        np.testing.assert_allclose(array, sum(tree[name] for tree in expected), rtol=2e-4, atol=2e-5)


@functools.partial(jax.jit, static_argnames="oracles")
def oracle_gradient(params, text, source, source_len, weights, oracles):
    def loss(params):
        return (expected_logits(params, text, source, source_len, oracles) * weights).sum()

    return jax.grad(loss)(params)


def shard(kind):
    """With its heads on two devices, a step computes the same and sends no key or value between them."""
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P(None, "heads", None, None))
    rows = Rows(kind, kv.init(config_of(kind), sharding=sharding))
    texts = {3: random_text(5), 1: random_text(2)}
    rows.allocate(texts)
    cache = testing.poison(rows.cache)
    arguments = jax.device_put((rows.params, rows.arguments(texts)), NamedSharding(mesh, P()))
    params = arguments[0]
    program = run_step.lower(params, cache, *arguments[1]).compile()
    assert_sends_no_pool(program, cache)
    rows.cache, logits, status = program(params, cache, *arguments[1])
    rows.check(texts, logits, status)
    for pool, group in zip(rows.cache.pools, rows.groups, strict=True):
        for name, array in pool.arrays.items():
            heads, local = group.head_positions[name], array.sharding.shard_shape(array.shape)
            want = array.shape[0 if heads is None else heads] // (1 if heads is None else 2)
            assert local[0 if heads is None else heads] == want


def assert_sends_no_pool(program, cache):
    collectives = [line for line in program.as_text().splitlines() if COLLECTIVE.search(line)]
    for pool in jax.tree.leaves(cache.pools):
        for shape in (pool.shape, pool.sharding.shard_shape(pool.shape)):
            assert not [line for line in collectives if f"{[*shape]}".replace(" ", "") in line]


def context(kind):
    """With the tokens of blocks on two devices, all rows compute the same, and results alone are sent."""
    mesh = jax.make_mesh((2,), ("context",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        rows = Rows(kind, kv.init(dataclasses.replace(config_of(kind), context_axis="context")))
        rows.start({3: random_text(11), 1: random_text(6)})
        assert rows.fork(3, 0) == [OK]
        rows.feed({3: [1, 2], 0: [3], 1: random_text(7)})
        assert num_copies(rows.cache) == sum(not group.holds_sources for group in rows.groups)
        if rows.cache.control.prefix_index is not None:
            rows.cache, _ = kv.commit(rows.cache)
        text = rows.texts[1]
        rows.free(1)
        rows.start({2: [*text, 5, 6, 7]})
        arguments = rows.params, rows.cache, *rows.arguments({})
        assert_sends_no_pool(run_step.lower(*arguments).compile(), rows.cache)
    for pool, group in zip(rows.cache.pools, rows.groups, strict=True):
        for name, array in pool.arrays.items():
            axis = group.token_positions[name]
            assert array.sharding.shard_shape(array.shape)[axis] == array.shape[axis] // 2


def export(kind):
    """A step that was exported and read back does bit for bit what it did before."""
    rows = Rows(kind)
    rows.start({2: random_text(9)})
    arguments = (rows.params, rows.cache, *rows.arguments({2: [1, 2, 3]}))
    restored = jax.export.deserialize(jax.export.export(run_step)(*arguments).serialize())
    assert_same(run_step(*arguments), restored.call(*arguments))


def poison(kind):
    """What no row may read is NaN, or for integers the end of their range, and no step notices."""
    rows = Rows(kind)
    rows.start({0: random_text(19), 1: random_text(6)})
    rows.fork(0, 3)
    rows.free(1)
    rows.truncate(3, 19)
    clean, spoilt = rows.cache, testing.poison(rows.cache)
    for pool in spoilt.pools:
        for array in jax.tree.leaves(pool):
            if jnp.issubdtype(array.dtype, jnp.floating):
                is_spoilt = np.isnan(np.asarray(array.astype(jnp.float32)))
            else:
                info = np.iinfo(array.dtype)
                is_spoilt = np.asarray(array) == (info.min if info.min < 0 else info.max)
            assert is_spoilt.any() and not is_spoilt.all()
    arguments = rows.arguments({0: [1], 3: [2, 3, 4]})
    (_, want, _), (after, found, status) = (run_step(rows.params, x, *arguments) for x in (clean, spoilt))
    assert set(statuses(status)) == {OK}
    np.testing.assert_array_equal(found, want)
    for row in (0, 3):
        for values in kv.gather(after, row, 0)[:2]:
            assert np.isfinite(np.asarray(values)).all()


def manager_step(cache, batch, params):
    logits, cache = forward(params, batch.tokens, testing.poison(cache), batch.step)
    return cache, logits


def manager(kind):
    """Requests by id come out as rows do."""
    rows = Rows(kind)
    params = jax.tree.map(jnp.asarray, rows.params)
    texts, sources = {}, {"a": source_of(0), "b": source_of(1)}

    def feed(new):
        logits = owner.run(manager_step, owner.append_tokens(new), params)
        for i, (name, text) in enumerate(new.items()):
            texts[name] = texts[name] + text
            want = rows.expected(texts[name], sources[name])[-len(text) :]
            np.testing.assert_allclose(logits[i, : len(text)], want, rtol=2e-5, atol=2e-5)

    with kv.CacheManager(rows.cache, widths=[WIDTH]) as owner:
        for name in ("a", "b"):
            assert owner.allocate_request(name, random_text(3)) == 0
            texts[name] = []
        if rows.cache.config.source_layers:
            rows.sources = {owner.request(name).seq_id: source for name, source in sources.items()}
            status = owner.run(store_sources, params, *rows.source_arguments(list(rows.sources)))
            assert statuses(status)[:2] == [OK, OK]
        feed({"b": random_text(4), "a": random_text(3)})
        owner.fork_request("b", "c")
        texts["c"], sources["c"] = texts["b"], sources["b"]
        feed({"c": [1], "b": [2, 3, 4, 5, 6]})
        owner.truncate_request("a", 1)
        texts["a"] = texts["a"][:1]
        owner.free_request("b")
        feed({"a": [7, 8], "c": [9, 10]})
        with pytest.raises(kv.manager.UnknownRequest, match="'b'"):
            owner.append_tokens("b", [1])
        assert owner.query(kv.check_invariants) == []


def generate(kind):
    """Greedy continuations are those of the oracle, recomputed from scratch for each token."""
    rows = Rows(kind)
    prompts = [random_text(3), random_text(9)]
    options = dict(max_new_tokens=7, prefill_len=WIDTH)
    result = kv.generate(forward, rows.params, prompts, config_of(kind), **options)
    for prompt, generation in zip(prompts, result.generations, strict=True):
        text = list(prompt)
        for _ in range(7):
            text.append(int(rows.expected(text)[-1].argmax()))
        assert generation.tokens == text[len(prompt) :]


CHECKS = (
    allocate,
    fork,
    copy_on_write,
    in_place,
    truncate,
    rewrite,
    drop,
    compress,
    compose,
    window,
    commit,
    hit,
    partial_hit,
    evict,
    transfer,
    gradient,
    shard,
    context,
    export,
    poison,
    manager,
    generate,
)
TABLE = dict(zip(PROPERTIES, CHECKS, strict=True))
# These compile programs for devices, programs backwards or other steps around what the other cells compile.
# They know of a kind what the step knows, so in `make test` one line says it for all.
AROUND_THE_STEP = {"gradient", "shard", "rewrite"}
LINE_AROUND_THE_STEP = "full"
# Programs of their own, of which `make test` has tests of plain layers; "context" in test_context_axis.py.
WITH_TESTS_OF_ITS_OWN = {
    *"in-place drop compress compose partial-hit transfer context export manager generate".split()
}


# Properties of the tokens that stay in sight, whatever a block stores of them; those of stored blocks; those
# of both; and whole programs, which know of neither. All kinds show the others: they attend, backwards too.
OF_SPANS = {"fork", "truncate", "rewrite", "drop", "compose", "window", "commit", "hit", "evict"}
OF_STORAGE = {"in-place", "shard", "export"}
OF_BOTH = {"compress", "context", "partial-hit", "transfer"}
WHOLE_PROGRAMS = {"manager", "generate"}


def is_said_elsewhere(kind, name):
    """Whether a cell that works is left to a line whose spans or storage this kind shares."""
    like_spans, like_storage = kind.spans_as is not None, kind.stores_as is not None
    if name in kind.cells:
        return False
    return (
        (name in OF_SPANS and like_spans)
        or (name in OF_STORAGE and like_storage)
        or (name in OF_BOTH and like_spans and like_storage)
        or (name in WHOLE_PROGRAMS and (like_spans or like_storage))
    )


def is_slow(kind, name):
    if name in WITH_TESTS_OF_ITS_OWN or (kind.quick is not None and name not in kind.quick):
        return True
    works = name not in kind.cells
    return works and name in AROUND_THE_STEP and kind.name != LINE_AROUND_THE_STEP


CELLS = [
    pytest.param(kind, name, id=f"{kind.name}-{name}", marks=[pytest.mark.slow] * is_slow(kind, name))
    for kind in KINDS
    for name in PROPERTIES
    if not isinstance(kind.cells.get(name), NoMeaning) and not is_said_elsewhere(kind, name)
]


@pytest.mark.parametrize(("kind", "name"), CELLS)
def test_a_cell(kind, name):
    """A cell of which a kind's line says nothing must work."""
    cell = kind.cells.get(name)
    if isinstance(cell, Refused):
        with pytest.raises(cell.error, match=cell.sentence):
            TABLE[name](kind)
    else:
        TABLE[name](kind)


def test_cells_are_those_of_the_properties():
    assert [check.__name__.replace("_", "-") for check in CHECKS] == list(PROPERTIES)
    by_name = {kind.name: kind for kind in KINDS}
    assert len(by_name) == len(KINDS)
    for kind in KINDS:
        for other in (kind.spans_as, kind.stores_as):
            assert other is None or other in by_name
        assert {*kind.cells, *(kind.quick or ())} <= set(PROPERTIES)
        assert len(kind.layers) == len(kind.oracles)
        for cell in kind.cells.values():
            assert cell.why.endswith(".") if isinstance(cell, NoMeaning) else len(cell.sentence) > 15
