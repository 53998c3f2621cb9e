"""Where commands keep the programs that they compile, so that their next start is a fast one.

Jax's own settings come first: JAX_COMPILATION_CACHE_DIR names another folder, and
JAX_ENABLE_COMPILATION_CACHE=false keeps nothing, as does the option --no-cache of every command.
"""

import argparse
import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace_s",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower_s",
    "/jax/core/compile/backend_compile_duration": "compile_s",
}


class NoCache(argparse.Action):
    """The option --no-cache: takes effect as it is read."""

    def __init__(self, option_strings: Any, dest: str, **options: Any):
        super().__init__(option_strings, dest, nargs=0, default=False, **options)

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *_: Any) -> None:
        setattr(namespace, self.dest, True)
        if "jax" in sys.modules:
            sys.modules["jax"].config.update("jax_enable_compilation_cache", False)


def keep() -> Path | None:
    """Has jax keep all programs in the user's folder; None where it keeps none, or elsewhere."""
    jax = sys.modules.get("jax")
    if jax is None or jax.config.jax_compilation_cache_dir or not jax.config.jax_enable_compilation_cache:
        return None
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "kvcache_jax")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    if not os.access(folder, os.W_OK):
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Small programs too: a start compiles dozens of them.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder


def num_kept(folder: Path | None) -> int:
    return sum(1 for _ in folder.glob("*-cache")) if folder else 0


@dataclasses.dataclass
class Cost:
    """Seconds until the programs of something are ready to run."""

    name: str
    trace_s: float = 0.0
    lower_s: float = 0.0
    compile_s: float = 0.0
    num_programs: int = 0

    @property
    def total_s(self) -> float:
        return self.trace_s + self.lower_s + self.compile_s


@contextlib.contextmanager
def watched(name: str) -> Iterator[Cost]:
    """Adds up what jax compiles within the `with`."""
    import jax.monitoring

    cost = Cost(name)

    def add(event: str, duration_secs: float, **_: Any) -> None:
        if event in _EVENTS:
            setattr(cost, _EVENTS[event], getattr(cost, _EVENTS[event]) + duration_secs)
            cost.num_programs += _EVENTS[event] == "compile_s"

    jax.monitoring.register_event_duration_secs_listener(add)
    try:
        yield cost
    finally:
        jax.monitoring.unregister_event_duration_listener(add)


@contextlib.contextmanager
def nothing_kept() -> Iterator[None]:
    """Within it no compiled program is taken from a file, and none is kept."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # jax looks at the setting once
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()
