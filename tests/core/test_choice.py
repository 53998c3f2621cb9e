"""The choice of a backend where none is named: by verdicts, by the environment, by where a program runs."""

import functools
import json
import logging
import types

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.core import choose_backend, verdicts
from kvcache_jax.core.backends import TargetDevice, target_device
from kvcache_jax.core.choose_backend import choose

FRESH, NAME, NOWHERE = "abc", "test: proven", "test: nowhere near"
SIZES = dict(num_blocks=6, block_size=4, max_seqs=2, max_seq_len=16)


def decode(q, pool, block_table, plan, group, *, layer, scale, soft_cap, sink_logits):
    return jnp.full_like(q, 7.25), jnp.zeros(q.shape[:-1], jnp.float32)


def write(pool, new, slots, group, *, layer):
    return jax.tree.map(lambda x: x.at[layer].set(7.5), pool)


def copy_blocks(pool, src, dst, num_copies, group):
    return jax.tree.map(lambda x: x - 7.75, pool)


for each in (
    kv.backends.Backend(
        NAME,
        lambda *_: None,
        decode,
        write=write,
        copy_blocks=copy_blocks,
        code=lambda device: FRESH if device.platform == "cuda" else None,
    ),
    kv.backends.Backend(NOWHERE, lambda *_: "no device runs it"),
):
    kv.backends.register_backend(each)
H200 = types.SimpleNamespace(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")
PASSED = {
    "implementation": NAME,
    "device": {"name": "NVIDIA H200", "driver": "580"},
    "jax": jax.__version__,
    "code": FRESH,
    "passed": True,
}


@pytest.fixture
def gpu(monkeypatch):
    """A process whose first device is one GPU, and what its verdicts are."""
    cpu, found = jax.devices("cpu"), []
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: cpu if backend == "cpu" else [H200])
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(verdicts, "_verdicts", lambda: tuple(found))
    verdicts._tell.cache_clear()
    return found


@pytest.fixture
def environment(monkeypatch):
    """Sets the operators' variable; it is read again at each choice."""
    monkeypatch.setattr(choose_backend, "_of_environment", choose_backend._of_environment.__wrapped__)
    return functools.partial(monkeypatch.setenv, choose_backend.VARIABLE)


def config_of(name=None, **sizes):
    return kv.CacheConfig([kv.FullAttention(1, 4)], **SIZES | sizes, implementation=name)


def chosen(name=None):
    config = config_of(name)
    (pool,) = jax.eval_shape(functools.partial(kv.init, config)).pools
    return choose(config, None, pool, config.groups[0])


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([], "xla"),
        ([{}], NAME),
        ([{"device": {"name": "NVIDIA H200", "driver": "600"}}], NAME),
        ([{"device": {"name": "NVIDIA H100"}}], "xla"),
        ([{"jax": "0.11.1"}], "xla"),
        ([{"code": "of before"}], "xla"),
        ([{"implementation": "mosaic_gpu"}], "xla"),
        ([{"passed": False}], "xla"),
        ([{}, {"passed": False}], "xla"),
        ([{"code": "of before", "passed": False}, {}], NAME),
    ],
)
def test_none_picks_what_passed_on_such_a_device_by_this_jax_and_code(gpu, found, expected):
    gpu += [PASSED | changes for changes in found]
    assert chosen().name == expected
    assert chosen("xla").name == "xla"


def test_none_is_xla_where_the_verdict_does_not_reach(gpu, monkeypatch):
    gpu.append(PASSED)
    assert chosen().name == NAME
    with jax.default_device("cpu"):
        assert target_device().platform == "cpu" and chosen().name == "xla"
    with jax.default_device(jax.devices("cpu")[3]):
        assert target_device().platform == "cpu" and chosen().name == "xla"
    with jax.set_mesh(jax.make_mesh((1,), ("heads",))):
        assert chosen().name == "xla"
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    assert chosen().name == "xla"


def test_how_to_get_a_verdict_is_said_once(gpu, caplog):
    caplog.set_level(logging.INFO, "kvcache_jax")

    def said():
        return [r.getMessage() for r in caplog.records if "first_gpu_run" in r.getMessage()]

    with jax.default_device("cpu"):
        assert chosen().name == "xla" and not said()
    assert chosen().name == chosen().name == "xla"
    (line,) = said()
    assert "attention on NVIDIA H200 is XLA's" in line and "mosaic_gpu or test: proven" in line
    gpu.append(PASSED)
    verdicts._tell.cache_clear()
    assert chosen().name == NAME and len(said()) == 1


def test_files_that_are_no_verdicts_are_named_and_left_out(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv(verdicts.FOLDER, str(tmp_path / "none yet"))
    read = verdicts._verdicts.__wrapped__
    assert read() == () and not [*tmp_path.iterdir()]
    monkeypatch.setenv(verdicts.FOLDER, str(tmp_path))
    for name, text in {"cut": "{", "list": "[1]", "old": json.dumps({"device": None})}.items():
        (tmp_path / f"{name}.json").write_text(text)
    (tmp_path / "passed.json").write_text(json.dumps(PASSED))
    assert read() == (PASSED,)
    assert [r.getMessage().split(" is no verdict")[0] for r in caplog.records] == [
        str(tmp_path / f"{name}.json") for name in ("cut", "list", "old")
    ]
    monkeypatch.delenv(verdicts.FOLDER)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert verdicts.verdict_folder() == tmp_path / "kvcache_jax" / "verdicts"


def test_the_environment_says_what_none_is(gpu, environment):
    environment(NAME)
    assert chosen().name == NAME and chosen().platform is None  # as a config that names it
    assert chosen("xla").name == "xla"
    gpu.append(PASSED)
    environment("xla")
    assert chosen().name == "xla"
    for value in ("auto", ""):
        environment(value)
        assert chosen().name == NAME


def test_an_environment_that_cannot_be_served_is_refused(environment):
    environment("mosaic")
    message = (
        "KVCACHE_JAX_IMPLEMENTATION is 'mosaic', expected auto or one of xla, mosaic_gpu, .*: set it to one"
    )
    with pytest.raises(ValueError, match=message):
        kv.init(config_of())
    environment(NOWHERE)
    message = (
        "implementation 'test: nowhere near' of KVCACHE_JAX_IMPLEMENTATION does not run here: "
        "no device runs it; use 'xla' or 'auto'"
    )
    with pytest.raises(NotImplementedError, match=message):
        chosen()
    environment("mosaic_gpu")
    with pytest.raises(NotImplementedError, match="it is for cuda devices, and this is cpu"):
        chosen()
    with pytest.raises(ValueError, match="batch_invariant is True and implementation 'mosaic_gpu', expected"):
        kv.Engine(lambda *_: None, {}, config_of(), batch_invariant=True)


def test_a_program_for_several_platforms_runs_the_kernels_where_they_are_for(gpu):
    def step_fn(config, x):
        cache, _ = kv.allocate(kv.init(config), [0, 1], [0, 0])
        cache, step = kv.extend(cache, [1, 1], max_new=1)
        cache, out = kv.attention(cache, 0, x, x, -x, step)
        return out, cache.pools[0].k

    x = jnp.arange(8, dtype=jnp.float32).reshape(2, 1, 1, 4)
    expected = step_fn(config_of("xla", max_seq_len=12), x)
    gpu.append(PASSED)
    program = jax.jit(functools.partial(step_fn, config_of(max_seq_len=12)))
    for_both = jax.export.export(program, platforms=("cpu", "cuda"))(x)
    for one, other in zip(for_both.call(x), expected, strict=True):
        np.testing.assert_array_equal(one, other)
    by_kernels, by_xla = (
        program.trace(x).lower(lowering_platforms=(platform,)).as_text() for platform in ("cuda", "cpu")
    )
    assert "7.25" in by_kernels and "7.25" not in by_xla
    assert "7.25" not in jax.export.export(program, platforms=["cuda"])(x).mlir_module()
    assert not any(number in by_kernels for number in ("7.5", "7.75"))  # moves are XLA's, wherever
    assert "exponential" in by_xla and "exponential" not in by_kernels


def test_an_engine_that_rounds_alike_is_xlas_whatever_passed(gpu):
    from kvcache_jax.engine.options import batch_invariant_config

    gpu.append(PASSED)
    assert batch_invariant_config(config_of()).implementation == "xla"


def test_the_kernels_say_what_their_sources_are():
    from pallas_kernels.versions import digest

    code = verdicts.codes_for(TargetDevice("cuda", "NVIDIA H200"))
    assert code["mosaic_gpu"] == digest() and len(digest()) == 16 and "mosaic_tpu" not in code
    for kind, capability in (("NVIDIA B200", None), ("NVIDIA GeForce RTX 5090", "12.0"), ("unknown", "9.0")):
        assert "mosaic_gpu" in verdicts.codes_for(TargetDevice("cuda", kind, capability))
    for kind, capability in (("Tesla T4", None), ("NVIDIA B200", "10.3")):
        assert "mosaic_gpu" not in verdicts.codes_for(TargetDevice("cuda", kind, capability))
    assert verdicts.codes_for(TargetDevice("tpu", "TPU v6 lite"))["mosaic_tpu"] == digest()
    # A verdict says nothing of a cascade, which has to be asked for.
    assert not [name for name in code if name.endswith("_cascade")]
