"""The cache's attention and copy-on-write by kernels, interpreted, against the dense float64 reference.

Which arithmetic the kernels can do is tested in `test_mosaic_*`; here, that the cache asks for the right one.
"""

import dataclasses
import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu  # noqa: F401  imported later, it would make jax trace anew
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, use_abstract_mesh
from jax.sharding import PartitionSpec as P

import kvcache_jax as kv
from kvcache_jax import testing
from kvcache_jax.core.choose_backend import choose
from pallas_kernels import mosaic_gpu, mosaic_tpu
from pallas_kernels.mosaic_gpu.decode_plan import plan_decode
from pallas_kernels.versions import digest
from tests.aot.hlo import COLLECTIVE
from tests.attention.kernel_configs import IMPLEMENTATIONS, SIZES, config_of, run_interpreted
from tests.support import tiny_model
from tests.support.attention_driver import AttentionDriver, dense_attention, fragment
from tests.support.dense_reference import dense_attention as dense_jnp
from tests.support.helpers import table

pytestmark = pytest.mark.contract

NUM_Q_HEADS = 4


def passed_on_cpus(monkeypatch, implementation):
    """A verdict on the interpreter, and a process with one device."""
    verdict = {"implementation": implementation, "device": {"name": "cpu"}, "jax": jax.__version__}
    verdict |= {"code": digest(), "passed": True}
    monkeypatch.setattr("kvcache_jax.core.verdicts._verdicts", lambda: (verdict,))
    monkeypatch.setattr(jax, "device_count", lambda: 1)


@pytest.fixture
def count_calls(monkeypatch):
    """How often a kernel was traced, by its name."""
    calls = dict.fromkeys(["paged_decode", "paged_prefill", "copy_blocks"], 0)

    def count(module, name):
        function = getattr(module, name)

        def counted(*arguments, **keywords):
            calls[name] += 1
            return function(*arguments, **keywords)

        monkeypatch.setattr(module, name, counted)

    for module in (mosaic_gpu, mosaic_tpu):
        for name in calls:
            count(module, name)
    return calls


PADDED = dict(width=11)
PACKED = dict(
    width=14, packed=True, sink_logits=np.linspace(-1.5, 2.0, 4), soft_cap=2.5, scale=0.3, return_lse=False
)


@pytest.mark.quick_cases("packed-mosaic_tpu")
@pytest.mark.parametrize(
    ("options", "implementation"),
    [
        pytest.param(PADDED, "mosaic_tpu", marks=pytest.mark.newest, id="padded-mosaic_tpu"),
        *(pytest.param(PACKED, name, id=f"packed-{name}") for name in IMPLEMENTATIONS),
    ],
)
def test_prefill_fork_and_decode(options, implementation, count_calls, monkeypatch):
    """Prompts longer than a kernel's queries, ragged rows beside an idle one, branches that copy a block."""
    monkeypatch.setattr(mosaic_tpu.prefill, "MOST_QUERIES", 8)

    def scenario():
        config = config_of(implementation)
        driver = AttentionDriver(config, num_q_heads=NUM_Q_HEADS, cache=fragment(kv.init(config)), **options)
        driver.start(0, 11)
        driver.start(2, 5)
        driver.step({0: 11, 2: 3})
        driver.fork(0, 3)
        driver.step({0: 1, 2: 2, 3: 2})
        assert int(kv.stats(driver.cache).num_copies) == 2  # one in each group
        assert driver.truncate(0, 11) == kv.Status.OK
        driver.step({0: 3, 1: 1, 3: 1}, expected={1: kv.Status.SEQ_NOT_ACTIVE})
        assert kv.check_invariants(driver.cache) == []
        assert driver.run._cache_size() == 1

    run_interpreted(scenario)
    assert count_calls["paged_prefill" if options is PADDED else "paged_decode"]
    assert count_calls["copy_blocks"]


@pytest.mark.slow
@pytest.mark.newest
def test_copies_of_one_call_leave_their_sources():
    """Rows 0 and 1 copy the block that they share, and row 2 its own; what they leave stays published."""
    *heads, dtype = SIZES["mosaic_gpu"].values()
    tokens = np.arange(24, dtype=np.int32).reshape(3, 8)
    k = np.random.default_rng(0).standard_normal((1, 3, 8, *heads)).astype(jnp.dtype(dtype))
    config = kv.CacheConfig(
        [kv.FullAttention(*heads)],
        num_blocks=5,
        block_size=8,
        max_seqs=3,
        max_seq_len=16,
        dtype=dtype,
        implementation="mosaic_gpu",
        enable_prefix_caching=True,
    )

    @jax.jit
    def scenario(k):
        cache, _ = kv.allocate(kv.init(config), [0, 2], [8, 8], tokens=tokens[::2])

        def go_on(cache, now):
            v, num_new, committed, forked, truncated = now
            cache, _ = kv.append(cache, k, v, num_new, tokens=tokens)
            cache, _ = kv.commit(cache, committed)
            cache, _ = kv.fork(cache, [0], forked)
            cache, _ = kv.truncate(cache, truncated, [4, 4, 4])
            return cache, cache

        # The prompts, then one token each; there is no row 3.
        num_new, committed = jnp.array([[8, 0, 8], [1, 1, 1]]), jnp.array([[0, 2], [3, 3]])
        forked, truncated = jnp.array([[1], [3]]), jnp.array([[0, 1, 2], [3, 3, 3]])
        rounds = jnp.stack([k + 1, k]), num_new, committed, forked, truncated
        return jax.lax.scan(go_on, cache, rounds)[1]

    both = run_interpreted(lambda: jax.device_get(scenario(k)))
    before, cache = (jax.tree.map(lambda x, i=i: x[i], both) for i in range(2))
    assert [table(before, row) for row in range(3)] == [[0], [0], [1]]
    assert sorted(block for row in range(3) for block in table(cache, row)) == [2, 3, 4]
    k = k[0].astype(np.float32)
    for pool, old in ((cache.pools[0].k, k), (cache.pools[0].v, (k + 1).astype(dtype).astype(np.float32))):
        blocks = np.asarray(pool).astype(np.float32).swapaxes(1, 2)
        np.testing.assert_array_equal(blocks[:2], old[[0, 2]])
        for row, source in enumerate((0, 0, 2)):
            (block,) = table(cache, row)
            np.testing.assert_array_equal(blocks[block, :4], old[source, :4])
            np.testing.assert_array_equal(blocks[block, 4], k[row, 0])


def chunk(implementation, num_new, seed):
    """q, k and v of all rows for one call."""
    num_kv_heads, head_dim, dtype = SIZES[implementation].values()
    rng = np.random.default_rng(seed)
    shapes = [(4, num_new, heads, head_dim) for heads in (NUM_Q_HEADS, num_kv_heads, num_kv_heads)]
    return [rng.standard_normal(shape).astype(jnp.dtype(dtype)) for shape in shapes]


def two_chunks(implementation, width):
    """q, k and v of two calls, with an entry for each."""
    return jax.tree.map(lambda *x: np.stack(x), *(chunk(implementation, width, seed) for seed in range(2)))


def append_and_attend(cache, chunks, num_first, num_second, **options):
    """Row 0 prefills and forks to row 2; both go on. Returns the attention of both calls, for each layer."""
    cache, _ = kv.allocate(cache, [0], [num_first])

    def go_on(cache, now):
        (q, k, v), counts, target = now
        cache, step = kv.extend(cache, counts, max_new=q.shape[1])
        outs = []
        for layer in range(cache.config.num_layers):
            cache, out = kv.attention(cache, layer, q, k, v, step, **options)
            outs.append(out)
        cache, _ = kv.fork(cache, [0], target)
        return cache, outs

    counts = np.array([[num_first, 0, 0, 0], [num_second, 0, num_second, 0]], np.int32)
    targets = np.array([[2], [4]], np.int32)  # of the fork; there is no row 4, so the second skips it
    return jax.lax.scan(go_on, cache, (chunks, counts, targets))


def rows_of(chunks, num_first, num_second):
    """q, k and v of what `append_and_attend` attends to: row 0's prompt, its second chunk, row 2's."""
    first = [x[0, 0, :num_first] for x in chunks]
    yield first
    for row in (0, 2):
        q, k, v = (x[1, row, :num_second] for x in chunks)
        yield q, jnp.concatenate([first[1], k]), jnp.concatenate([first[2], v])


def assert_like_dense_attention(out, chunks, num_first, num_second):
    """Compares one layer's output of `append_and_attend` with attention without a cache."""
    out = np.asarray(out)
    found = [out[0, 0, :num_first], *out[1, [0, 2], :num_second]]
    for each, row in zip(found, rows_of(chunks, num_first, num_second), strict=True):
        np.testing.assert_allclose(each, dense_attention(*row)[0], atol=1e-5)


@pytest.mark.slow
def test_gradients_equal_a_dense_reference():
    """Through attention, sink logits, copy-on-write and the pools."""
    chunks = two_chunks("mosaic_gpu", 3)
    sink_logits = np.linspace(-1, 1, 4, dtype=np.float32)
    config = config_of("mosaic_gpu", windows=(None,))

    def score(outs):
        return sum(jnp.sum(jnp.sin(out.astype(jnp.float32))) for out in outs)

    def loss(chunks, sink_logits):
        return score(append_and_attend(kv.init(config), chunks, 3, 1, sink_logits=sink_logits)[1])

    def dense_loss(chunks, sink_logits):
        return score(dense_jnp(*row, sink_logits=sink_logits)[0] for row in rows_of(chunks, 3, 1))

    found = run_interpreted(lambda: jax.jit(jax.grad(loss, argnums=(0, 1)))(chunks, sink_logits))
    chunks = jax.tree.map(lambda x: x.astype(np.float32), chunks)
    wanted = jax.jit(jax.grad(dense_loss, argnums=(0, 1)))(chunks, sink_logits)
    for each, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        each, want = (np.asarray(x).astype(np.float32) for x in (each, want))
        assert np.abs(want).max() > 0.01
        np.testing.assert_allclose(each, want, rtol=3e-2, atol=3e-2)  # the pools are bfloat16


# A prompt of more tokens than a kernel's row takes, and one of fewer.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("axis_type", "width"), [(AxisType.Auto, 9), (AxisType.Explicit, 5)], ids=["auto", "explicit"]
)
def test_each_device_runs_its_own_heads(axis_type, width, count_calls):
    """With the pools never gathered."""
    config = config_of("mosaic_tpu", windows=(None,))
    chunks = two_chunks("mosaic_tpu", width)
    mesh = jax.make_mesh((2, 2), ("data", "heads"), axis_types=(axis_type,) * 2)

    def scenario():
        with jax.set_mesh(mesh):
            cache = kv.init(dataclasses.replace(config, head_axis="heads"))
            split = NamedSharding(mesh, P(None, None, None, "heads", None))
            step_fn = functools.partial(append_and_attend, num_first=width, num_second=2)
            arguments = cache, jax.device_put(chunks, split)
            program = jax.jit(step_fn).lower(*arguments).compile()
            assert not COLLECTIVE.findall(program.as_text())
            return program(*arguments)

    cache, (out,) = run_interpreted(scenario)
    assert cache.pools[0].k.sharding.shard_shape(cache.pools[0].k.shape)[1] == 1
    assert count_calls["copy_blocks"]
    assert out.sharding.shard_shape(out.shape)[3] == 2
    assert_like_dense_attention(out, chunks, width, 2)


@pytest.mark.slow
def test_caches_side_by_side_run_one_after_the_other():
    """Pallas has no batched form of pools that stay in a TPU's memory."""
    config = config_of("mosaic_tpu", windows=(None,))
    chunks = two_chunks("mosaic_tpu", 9)

    def scenario():
        caches, twice = (jax.tree.map(lambda x: np.stack([x, x]), tree) for tree in (kv.init(config), chunks))
        step_fn = functools.partial(append_and_attend, num_first=9, num_second=2)
        return jax.jit(jax.vmap(step_fn))(caches, twice)[1]

    (out,) = run_interpreted(scenario)
    for element in jax.device_get(out):
        assert_like_dense_attention(element, chunks, 9, 2)


def test_what_was_interpreted_is_not_taken_for_what_runs():
    cache = jax.eval_shape(functools.partial(kv.init, config_of("mosaic_tpu")))
    extend = jax.jit(functools.partial(kv.extend, max_new=1))
    with testing.interpreted():
        jax.eval_shape(extend, cache, jnp.ones(4, jnp.int32))
    with pytest.raises(NotImplementedError, match="'mosaic_tpu' does not run here"):
        jax.eval_shape(extend, cache, jnp.ones(4, jnp.int32))


def test_the_gpus_interpreter_is_asked_for_one_device():
    config = dataclasses.replace(config_of("mosaic_gpu"), head_axis="heads")
    config = dataclasses.replace(config, layers=(kv.FullAttention(2, 64),))
    with testing.interpreted(), jax.set_mesh(jax.make_mesh((2,), ("heads",))):
        cache = jax.eval_shape(functools.partial(kv.init, config))
        with pytest.raises(
            NotImplementedError, match="'mosaic_gpu' .*confuses the barriers of several devices"
        ):
            jax.eval_shape(lambda cache: kv.extend(cache, [1, 0, 0, 0], max_new=1), cache)


@pytest.mark.slow
def test_a_call_may_ask_for_other_kernels_than_the_caches():
    sizes = dict(num_blocks=4, block_size=16, max_seqs=1, max_seq_len=32, dtype="bfloat16")
    config = kv.CacheConfig([kv.FullAttention(1, 128)], **sizes, implementation="mosaic_gpu")
    x = jnp.linspace(-1, 1, 3 * 128, dtype=jnp.bfloat16).reshape(1, 3, 1, 128)

    @jax.jit
    def scenario(x):
        cache, _ = kv.allocate(kv.init(config), [0], [3])
        cache, step = kv.extend(cache, [3], max_new=3)
        cache = kv.write(cache, 0, x, x, step)
        return [kv.attend(cache, 0, x, step, implementation=name)[1] for name in ("xla", "mosaic_tpu")]

    expected, found = run_interpreted(lambda: scenario(x))
    np.testing.assert_allclose(found.astype(np.float32), expected.astype(np.float32), atol=1e-2)


@pytest.mark.slow
@pytest.mark.newest
def test_generate_runs_unchanged():
    """Samples that fork one prompt, with drafts, have the log-probabilities of attention without a cache."""
    head_dim = SIZES["mosaic_tpu"]["head_dim"]

    def attention(cache, layer, q, k, v, step):
        """A head of the tiny model is shorter than the kernel takes."""
        padded = (jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, head_dim - tiny_model.DIM)]) for x in (q, k, v))
        cache, out = kv.attention(cache, layer, *padded, step, scale=tiny_model.DIM**-0.5)
        return cache, out[..., : tiny_model.DIM]

    forward = functools.partial(tiny_model.forward, attention=attention)
    config = kv.CacheConfig(
        [kv.FullAttention(tiny_model.HEADS, head_dim)] * tiny_model.LAYERS,
        num_blocks=16,
        block_size=8,
        max_seqs=4,
        max_seq_len=32,
        implementation="mosaic_tpu",
    )

    params, prompts = tiny_model.make_params(), [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7]]

    def generate():
        return kv.generate(
            forward,
            params,
            prompts,
            config,
            max_new_tokens=5,
            num_samples=2,
            sampling=kv.decoding.SamplingParams(temperature=1.0),
            drafts=kv.decoding.Drafts(2),
            prefill_len=8,
        )

    @jax.jit
    def dense_logprobs(tokens):
        return jax.nn.log_softmax(tiny_model.dense_logits(params, tokens), axis=-1)

    generations = run_interpreted(generate).generations
    assert len({tuple(each.tokens) for each in generations}) == len(generations) == 4
    for each in generations:
        text = [*prompts[each.prompt_id], *each.tokens]
        logprobs = np.asarray(dense_logprobs(np.array(text + [0] * (16 - len(text)))))
        wanted = [logprobs[at - 1, text[at]] for at in range(len(text) - 5, len(text))]
        np.testing.assert_allclose(each.logprobs, wanted, atol=1e-5)


def test_init_imports_the_kernels_and_the_library_does_not():
    """Pallas imported inside a trace would have everything traced twice."""
    script = """
import sys
import kvcache_jax as kv
sizes = dict(num_blocks=2, block_size=8, max_seqs=1, max_seq_len=16)
kv.init(kv.CacheConfig([kv.FullAttention(1, 128)], **sizes))
assert "jax.experimental.pallas" not in sys.modules
kv.init(kv.CacheConfig([kv.FullAttention(1, 128)], **sizes, implementation="mosaic_tpu"))
assert "pallas_kernels.mosaic_tpu" in sys.modules, "not imported"
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_none_picks_a_measured_kernel_where_it_serves(monkeypatch):
    passed_on_cpus(monkeypatch, "mosaic_tpu")
    config = dataclasses.replace(config_of("mosaic_tpu", windows=(None,)), implementation=None)
    short = dataclasses.replace(config, layers=[kv.FullAttention(2, 8)])

    def chosen(config):
        (pool,) = jax.eval_shape(functools.partial(kv.init, config)).pools
        return choose(config, None, pool, config.groups[0], 2).name

    assert chosen(config) == "xla"  # on a CPU
    with testing.interpreted():
        assert [chosen(config), chosen(short)] == ["mosaic_tpu", "xla"]


def test_a_step_is_planned_once_for_all_layers_of_a_group(monkeypatch):
    """Also where some of them are scanned."""
    planned = []

    def plan(*arguments, **keywords):
        planned.append(keywords["num_columns"])
        return plan_decode(*arguments, **keywords)

    monkeypatch.setattr("pallas_kernels.mosaic_gpu.decode.plan_decode", plan)
    # Sizes that are not traced elsewhere.
    config = config_of("mosaic_gpu", windows=(None, (9, 3), None, None), max_seq_len=24)
    q, k, v = chunk("mosaic_gpu", 1, 0)

    def step_fn(cache):
        cache, step = kv.extend(cache, jnp.ones(4, jnp.int32), max_new=1)

        def attend(cache, layer):
            return kv.attention(cache, layer, q, k, v, step)

        for layer in range(2):
            cache, _ = attend(cache, layer)
        return jax.lax.scan(lambda cache, index: attend(cache, (0, index)), cache, jnp.arange(1, 3))

    with testing.interpreted():
        jax.eval_shape(step_fn, jax.eval_shape(functools.partial(kv.init, config)))
    assert planned == [3, 3]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_more_tokens_than_a_kernel_takes_are_cut(implementation):
    """Traced alone, in the tests' strict modes."""
    config = config_of(implementation)
    q, k, v = chunk(implementation, 11, 0)

    def step_fn(cache):
        cache, step = kv.extend(cache, jnp.full(4, 11), max_new=11)
        return kv.attention(cache, 0, q, k, v, step)[1]

    with testing.interpreted():
        out = jax.eval_shape(step_fn, jax.eval_shape(functools.partial(kv.init, config)))
    assert out.shape == q.shape


@pytest.mark.parametrize(
    "kind", ["NVIDIA H200", "NVIDIA B200", "NVIDIA GeForce RTX 5090", "NVIDIA L4", "Tesla T4"]
)
def test_a_mesh_of_gpus_runs_the_kernels_for_them(kind):
    """jax calls them "gpu" there."""
    config = config_of("mosaic_gpu", windows=(None,))
    (pool,) = jax.eval_shape(functools.partial(kv.init, config)).pools
    device = AbstractDevice(device_kind=kind, num_cores=132, platform="gpu")
    with use_abstract_mesh(AbstractMesh((2,), ("heads",), abstract_device=device)):
        try:
            found = choose(config, None, pool, config.groups[0]).name
        except NotImplementedError as error:
            found = str(error)
    refused = "8.9 (L4), 9.0 (H200), 10.0 (B200), 12.0 (RTX 5090) alone, and this is Tesla T4"
    assert refused in found if kind == "Tesla T4" else found == "mosaic_gpu"


def test_an_untested_jax_is_named_and_xla_goes_on(monkeypatch):
    monkeypatch.setattr("pallas_kernels.versions.BEFORE", (0, 11, 2))
    passed_on_cpus(monkeypatch, "mosaic_tpu")
    config = config_of("mosaic_tpu", windows=(None,))
    (q, k, v) = chunk("mosaic_tpu", 1, 0)

    @functools.partial(jax.jit, static_argnums=0)
    def attend(config, q, k, v):
        cache, _ = kv.allocate(kv.init(config), [0], [1])
        cache, step = kv.extend(cache, [1, 0, 0, 0], max_new=1)
        return kv.attention(cache, 0, q, k, v, step)[1]

    with testing.interpreted():
        with pytest.raises(NotImplementedError, match=r"tested with jax >= 0.11.2, < 0.11.2, and this is"):
            attend(config, q, k, v)
        out = attend(dataclasses.replace(config, implementation=None), q, k, v)
    np.testing.assert_allclose(out[0], np.repeat(v[0], 2, axis=1), rtol=1e-6)
