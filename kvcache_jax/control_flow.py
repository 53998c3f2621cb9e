"""Work that is seldom needed."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax


def run_if(condition: jax.Array, fn: Callable, state: Any) -> Any:
    """`fn(state)` where `condition` bool[] holds, else `state`, a pytree of arrays.

    A loop of at most one trip: `lax.cond` would copy the big arrays that it passes through.
    """

    def once(carry):
        state, is_left = carry
        return fn(state), is_left & False

    return lax.while_loop(lambda carry: carry[1], once, (state, condition))[0]
