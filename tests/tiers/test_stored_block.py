"""Blocks as bytes: a value is what was asked for, or it is named what it is not."""

import numpy as np
import pytest

from kvcache_jax.tiers.stored_block import (
    BadValueError,
    BlockName,
    Scope,
    arrays_text,
    pack_block,
    unpack_block,
)


@pytest.mark.parametrize("token", [-(2**31) - 1, 2**31])
def test_a_forged_key_brings_no_token_that_a_cache_cannot_hold(token):
    """A store may list keys of its own, of blocks that are as they should be but for that."""
    block = BlockName(Scope("w" * 64, "c" * 64, "0" * 32), "", (1, 2, token, 4), 0)
    value = pack_block(block, {"k": np.zeros(3)})
    end = arrays_text([["k", "float64", [3]]])
    with pytest.raises(BadValueError, match="no header"):
        unpack_block(value, block.key, block.scope, "", (0, 0), end)
    good = block._replace(tokens=(1, -(2**31), 2**31 - 1, 4))
    found, _ = unpack_block(pack_block(good, {"k": np.zeros(3)}), good.key, block.scope, "", (0, 0), end)
    assert found == good
