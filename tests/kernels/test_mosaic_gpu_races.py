"""What the race detector sees of a GPU decode that waits for too little."""

import inspect
import types
from collections.abc import Sequence

import jax
import pytest

from pallas_kernels.mosaic_gpu import decode, interpret, products
from pallas_kernels.shapes import DecodeShape
from tests.mutants.reading import Mutation, read_all
from tests.support.interpreters import callbacks_on_the_host

# Three full tiles, so that one is refilled, and none is cleared after its last key.
PROBLEM = DecodeShape("full_tiles", (192,), num_kv_heads=1, group_size=1, block_size=64).problem()
# What they get wrong is read by tensor cores alone.
HASTY = [
    mutation
    for mutation in read_all()
    if mutation.name.startswith("GPU decode: ")
    and mutation.name.endswith("refilled before they are multiplied")
]


def run(mutations: Sequence[Mutation], **changes: object) -> None:
    """Interprets the decode with all the mutations, and with changes of its module."""
    source = inspect.getsource(decode)
    for mutation in mutations:
        assert source.count(mutation.old) == 1
        source = source.replace(mutation.old, mutation.new)
    module = types.ModuleType("hasty_decode")
    exec(source, module.__dict__)
    vars(module).update(changes, _INTERPRETED_PROGRAMS=1)
    options, arrays = PROBLEM.options, PROBLEM._replace(options=None)
    kernel = jax.jit(lambda x: module.paged_decode(*x[:5], options, layer=x.layer, interpret=True))
    with callbacks_on_the_host():
        interpret.run_interpreted(kernel, arrays)


@pytest.mark.slow
@pytest.mark.parametrize("mutation", HASTY, ids=lambda mutation: mutation.name.removeprefix("GPU decode: "))
def test_what_tensor_cores_read_too_late_or_too_early_races(mutation):
    with pytest.raises(interpret.RaceError, match="RACE DETECTED"):
        run([mutation])


def test_without_shadow_reads_nothing_of_it_is_seen():
    run(HASTY, multiply_on=lambda gpu, is_interpreted: products.multiply_on(gpu, False))
