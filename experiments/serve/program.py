"""The engine's program: how long it takes to compile, how many there are, and what memory it wants."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.monitoring
from jax.experimental.compilation_cache import compilation_cache

import kvcache_jax as kv

_COMPILED = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def nothing_kept() -> Iterator[None]:
    """Within it no compiled program is taken from a file, and none is kept."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # jax looks at the setting once
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


@contextlib.contextmanager
def counted() -> Iterator[list[str]]:
    """Lists the programs that are compiled within it, one entry each."""
    found: list[str] = []

    def note(event: str, duration_secs: float, **_: Any) -> None:
        if event == _COMPILED:
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def program_cost(engine: kv.Engine) -> dict[str, float]:
    """Compiles an engine's program anew: seconds, and bytes of its temporaries and of the pools."""
    with nothing_kept():
        start = time.perf_counter()
        compiled = engine.lower().compile()
        seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    assert memory is not None
    return {
        "compile_s": seconds,
        "temporary_bytes": memory.temp_size_in_bytes,
        "pool_bytes": kv.memory_bytes(engine.config),
    }


def warm_up(engine: kv.Engine) -> int:
    """Serves two requests, so that all is compiled, and counts the programs that were."""
    with counted() as programs:
        engine.push([kv.GenerationRequest([1, 2, 3], 2), kv.GenerationRequest([4], 1)])
        for _ in engine:
            pass
    return len(programs)
