"""Programs made with `jax_enable_x64`."""

import jax


def made(make, *args):
    """What `make` gives in 64-bit mode; dtypes that clash within fail the test."""
    with jax.enable_x64(True):
        try:
            return make(*args)
        except (TypeError, ValueError) as error:
            raise AssertionError(f"it is not made: {error}") from error
