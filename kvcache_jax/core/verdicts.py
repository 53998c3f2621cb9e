"""Verdicts: JSON files that say where, and with which code, the kernels of a backend were right.

`python -m experiments.first_gpu_run` writes them, and `CacheConfig(implementation=None)` goes by them. They
lie in the folder that `KVCACHE_JAX_VERDICTS` names, by default the user's cache folder, and beside this file.
"""

import functools
import json
import logging
import os
from pathlib import Path
from typing import Any

import jax

from kvcache_jax.core.backends import TargetDevice, codes_for

FOLDER = "KVCACHE_JAX_VERDICTS"
FIELDS = "implementation", "jax", "code", "passed"
_log = logging.getLogger("kvcache_jax")


def verdict_folder() -> Path:
    """Returns the folder of the verdicts that were made here, whether or not there is one."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get(FOLDER) or Path(cache, "kvcache_jax", "verdicts"))


def proven(device: TargetDevice) -> tuple[str, ...]:
    """Lists the backends whose sources, as they are, passed on such a device with this version of jax.

    Imports no kernels. The driver is noted in a verdict and not compared.
    """
    place = device.kind, jax.__version__
    here = [verdict for verdict in _verdicts() if (verdict["device"]["name"], verdict["jax"]) == place]
    if not here and device.platform == "cpu":
        return ()
    passed = {}
    for name, code in codes_for(device).items():
        on_it = [each for each in here if (each["implementation"], each["code"]) == (name, code)]
        passed[name] = bool(on_it) and all(each["passed"] is True for each in on_it)
    found = tuple(name for name in passed if passed[name])
    if passed and not found:
        _tell(device.kind, " or ".join(passed))
    return found


@functools.cache
def _verdicts() -> tuple[dict[str, Any], ...]:
    """Reads the verdicts, once: all programs of a process go by the same."""
    found = []
    for path in [*sorted(Path(__file__).parent.glob("*.json")), *sorted(verdict_folder().glob("*.json"))]:
        try:
            verdict = json.loads(path.read_text())
            _ = verdict["device"]["name"], *(verdict[name] for name in FIELDS)
            found.append(verdict)
        except (OSError, ValueError, LookupError, TypeError) as error:
            _log.warning("%s is no verdict, expected what experiments.first_gpu_run writes: %r", path, error)
    return tuple(found)


@functools.cache
def _tell(kind: str, names: str) -> None:
    _log.info(
        "attention on %s is XLA's, for no verdict in %s says that %s was right there with jax %s: write one "
        "by python -m experiments.first_gpu_run, in a clone of the repository, or do without, by "
        "KVCACHE_JAX_IMPLEMENTATION=%s or CacheConfig(implementation=)",
        *(kind, verdict_folder(), names, jax.__version__, names),
    )
