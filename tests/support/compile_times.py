"""Prints the seconds in which XLA compiles a program of four operations, for users and for tests.

python -m tests.support.compile_times
"""

import statistics
import time

import tests.conftest  # its flags of XLA  # noqa: F401 # isort: skip
import jax
import jax.numpy as jnp

import kvcache_jax as kv
from tests.support.few_kernels import compile_for_users


def main() -> None:
    """Compiles it both ways, five times in turns, as little optimised as the tests' programs are."""
    config = kv.CacheConfig([kv.FullAttention(1, 8)] * 2, num_blocks=32, max_seqs=4, max_seq_len=64)

    def program(cache):
        cache, _ = kv.extend(kv.allocate(cache, [0, 1], [5, 7])[0], jnp.array([5, 7, 0, 0]), max_new=7)
        return kv.free(kv.fork(cache, [0], [2])[0], [1])

    jax.config.update("jax_enable_compilation_cache", False)
    ways = {"for users": compile_for_users, "for tests": jax.stages.Lowered.compile}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(5):
        for name, way in ways.items():
            lowered = jax.jit(lambda cache: program(cache)).lower(kv.init(config))
            start = time.process_time()
            way(lowered)
            seconds[name].append(time.process_time() - start)
    for name, each in seconds.items():
        print(f"{name}: {statistics.median(each):.2f} s of CPU time, {min(each):.2f} to {max(each):.2f}")


if __name__ == "__main__":
    main()
