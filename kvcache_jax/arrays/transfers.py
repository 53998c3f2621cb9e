"""Transfers between host and devices that the library means, as `jax.device_put` and `jax.device_get` do.

Values of the host go with the call of a program, which knows the places, in a tenth of the time. For jax that
is an implicit transfer, and a caller may have disallowed these to find their own.
"""

import contextlib
import functools
from collections.abc import Callable

import jax


def explicit_transfers[**P, T](function: Callable[P, T]) -> Callable[P, T]:
    """Decorates a function that moves values between host and devices, and calls no function of the caller.

    Under `jax.transfer_guard("disallow")` it does all the same, and under "log" says nothing. Copies from
    device to device stay guarded: no function needs one.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        config = jax.config
        with (
            _allowed(jax.transfer_guard_host_to_device, config.jax_transfer_guard_host_to_device),
            _allowed(jax.transfer_guard_device_to_host, config.jax_transfer_guard_device_to_host),
        ):
            return function(*args, **kwargs)

    return call


def _allowed(
    guard: Callable[[str], contextlib.AbstractContextManager[None]], level: str | None
) -> contextlib.AbstractContextManager[None]:
    """Allows what a guard is for, unless the caller disallows, or logs, explicit transfers too."""
    return contextlib.nullcontext() if level and level.endswith("_explicit") else guard("allow")
