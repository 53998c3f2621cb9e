"""Where commands keep the programs that they compile, so that their next start is a fast one.

Jax's own settings come first: JAX_COMPILATION_CACHE_DIR names another folder, and
JAX_ENABLE_COMPILATION_CACHE=false keeps nothing, as does the option --no-cache of every command.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any


class NoCache(argparse.Action):
    """The option --no-cache: takes effect as it is read."""

    def __init__(self, option_strings: Any, dest: str, **options: Any):
        super().__init__(option_strings, dest, nargs=0, default=False, **options)

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, *_: Any) -> None:
        setattr(namespace, self.dest, True)
        if "jax" in sys.modules:
            sys.modules["jax"].config.update("jax_enable_compilation_cache", False)


def user_folder() -> Path:
    """The folder of kvcache_jax in the user's cache folder.

    Raises:
      RuntimeError: the user has no home.
    """
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):
        return Path(named) / "kvcache_jax"
    if sys.platform == "win32" and os.environ.get("LOCALAPPDATA"):
        return Path(os.environ["LOCALAPPDATA"]) / "kvcache_jax"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "kvcache_jax"


def keep() -> Path | None:
    """Has jax keep all programs in the user's folder; None where it keeps none, or elsewhere."""
    jax = sys.modules.get("jax")
    if jax is None or jax.config.jax_compilation_cache_dir or not jax.config.jax_enable_compilation_cache:
        return None
    try:
        folder = user_folder()
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return None
    if not os.access(folder, os.W_OK):
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Small programs too: a start compiles dozens of them.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return folder


def num_kept(folder: Path | None) -> int:
    """Programs in the folder."""
    return sum(1 for _ in folder.glob("*-cache")) if folder else 0
