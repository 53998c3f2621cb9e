"""Settings of jax and XLA, without which processes wait or end without a word where another one is lost."""

import os
import re
from collections.abc import Iterator

import jax


def risks_of_settings(timeout_s: float) -> Iterator[str]:
    """Says which settings leave processes without a word, or waiting, where another one is lost or slow."""
    if not jax.config.jax_enable_recoverability:  # type: ignore
        yield (
            "JAX_ENABLE_RECOVERABILITY is off: where a process ends, jax aborts all others before the team "
            "can name it, expected JAX_ENABLE_RECOVERABILITY=1 in the environment of all processes"
        )
    if jax.default_backend() != "cpu":
        return
    flag = "--xla_cpu_collective_timeout_seconds"
    found = re.findall(rf"{flag}=(\d+)", os.environ.get("XLA_FLAGS", ""))
    if not found:
        yield (
            f"XLA_FLAGS has no {flag}: where a process is lost, calls outside of an engine and of team.guard "
            f"wait half an hour for it, expected {flag}=N, more than timeout_s = {timeout_s:g}"
        )
    elif int(found[-1]) <= timeout_s:
        yield (
            f"{flag} is {found[-1]}: where a process is slow for as long, and not lost, the others fail, "
            f"expected more than timeout_s = {timeout_s:g}"
        )
