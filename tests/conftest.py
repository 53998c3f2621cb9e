"""The tests' jax: eight host devices, its strict modes, a compilation cache that outlives the run."""

import gc
import os
import pathlib
import shutil
import zlib

# Read when jax is imported or starts its backend, so they stand before the import. Most of the tests' time is
# spent on compiling, so LLVM is told to hurry, and XLA not to verify what each of its passes made of them; it
# decides on fusions, buffers and copies as for users.
FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_disable_hlo_passes=hlo-verifier",
)
os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *FLAGS]).strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# What the user of this machine chose, or found out, is nothing to the tests.
os.environ.pop("KVCACHE_JAX_IMPLEMENTATION", None)
os.environ["KVCACHE_JAX_VERDICTS"] = os.devnull

import hypothesis
import hypothesis.configuration
import jax
import pytest

from kvcache_jax.decoding import arguments
from tests.support import few_kernels

MAPS = pathlib.Path("/proc/self/maps")
SHARED_ROOMS = "tests/engine", "tests/decoding"
NUM_PROGRAMS = [0]  # that this process has compiled or loaded since it last counted its maps
CACHE_DIR = pathlib.Path(__file__).resolve().parent.parent / ".cache"

# Compiled programs are kept, but for those that compile as fast as they are stored. The cache's key leaves
# out source positions and scope names, so a cached executable may carry older ones: test labels on
# `lowered.as_text(debug_info=True)`.
jax.config.update("jax_compilation_cache_dir", str(CACHE_DIR / "jax" / jax.__version__))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
# Callers may have switched these on. `jax_debug_nans` is not among them: the tests fill with NaN on purpose.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_legacy_prng_key", "error")

# On the oldest jax as its users compile.
if jax.__version_info__ >= (0, 12):
    few_kernels.install()

# Tracing makes millions of objects and few cycles: looking for those seldom saves a twentieth of the time.
gc.set_threshold(100_000, 50, 100)

# `pytest --hypothesis-profile=thorough` looks longer, and elsewhere each time.
hypothesis.configuration.set_hypothesis_home_dir(CACHE_DIR / "hypothesis")
hypothesis.settings.register_profile("ci", deadline=None, max_examples=20, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=1000, print_blob=True)
hypothesis.settings.load_profile("ci")


def pytest_addoption(parser):
    parser.addoption("--share", metavar="K/N", help="runs of the chosen tests the K-th share of N, K from 0")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Gives a file to one worker, and the rooms whose files share the dearest programs."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid):
            room = nodeid.partition("::")[0].rpartition("/")[0]
            return room if room in SHARED_ROOMS else super()._split_scope(nodeid)

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(trylast=True)  # after -m and -k have chosen
def pytest_collection_modifyitems(config, items):
    """Keeps a share of the tests, which depends on their names alone: the N shares together are all."""
    if share := config.getoption("share"):
        index, count = map(int, share.split("/"))
        if not 0 <= index < count:
            raise pytest.UsageError(f"--share is {share}, expected K/N with 0 <= K < N")
        shares = [[] for _ in range(count)]
        for item in items:
            shares[zlib.crc32(item.nodeid.encode()) % count].append(item)
        items[:] = shares.pop(index)
        config.hook.pytest_deselected(items=sum(shares, []))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    """Lets `--last-failed` pass where nothing is left that fails."""
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and session.config.getoption("lf"):
        session.exitstatus = pytest.ExitCode.OK


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem():
    """Marks as slow those cases of a test that its `quick_cases` does not name.

    All cases of the test are here, also where a command line chooses one of them.
    """
    collected = yield
    cases = collected if isinstance(collected, list) else []
    quick = {name for case in cases for mark in case.iter_markers("quick_cases") for name in mark.args}
    if quick:
        found = {case.callspec.id: case for case in cases}
        if missing := sorted(quick - found.keys()):
            test = cases[0].nodeid.partition("[")[0]
            raise pytest.UsageError(f"{test}: quick_cases names {missing}, expected cases of the test")
        for name in found.keys() - quick:
            found[name].add_marker("slow")
    return collected


def count_program(event, *_, **__):
    NUM_PROGRAMS[0] += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(count_program)


@pytest.fixture(autouse=True)
def drop_programs():
    """Unloads all programs before they reach the kernel's limit of memory maps per process, 65,530.

    Until then the next tests find what they have in common compiled and traced. A program is up to a few
    hundred maps, and to count these takes up to 30 ms: after a test, where there are 30 programs more.
    """
    yield
    if NUM_PROGRAMS[0] >= 30:
        NUM_PROGRAMS[0] = 0
        if not MAPS.exists() or MAPS.read_bytes().count(b"\n") > 40_000:
            jax.clear_caches()


@pytest.fixture(autouse=True)
def forget_functions():
    """Each test is a program of its own: functions that others made of the same code are no cause to warn."""
    arguments._functions_of_code.clear()


@pytest.fixture
def copy_checkpoint(tmp_path):
    """Copies the checkpoint of a fixture to where it may be broken."""

    def copy(family):
        source = pathlib.Path(__file__).resolve().parent / "fixtures" / family
        return pathlib.Path(shutil.copytree(source, tmp_path / family))

    return copy
