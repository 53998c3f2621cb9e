"""The gate of the compiled TPU kernels (`tests.aot.tpu`): judging programs. `make aot-tpu` compiles."""

import jax
import pytest

from pallas_kernels import mosaic_tpu
from tests.aot import tpu

POOL_BYTES = 4 * 2**16 * 8 * 128 * 2
COPY = "%copy.1 = bf16[16384,8,16,128]{3,2,1,0:T(8,128)(2,1)} copy(%param_0)"
KERNEL = '%k = f32[] custom-call(%q), custom_call_target="tpu_custom_call", "used_scoped_memory_configs":['
CASE = tpu.move_case(mosaic_tpu.copy_blocks, num_lists=2)


def test_a_program_in_place_passes():
    assert tpu.failures(CASE, "", POOL_BYTES - 1, 2 * POOL_BYTES) == []


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ((COPY, 0, 2 * POOL_BYTES), "copies a pool 1 times"),
        (("", POOL_BYTES, 2 * POOL_BYTES), f"{POOL_BYTES} temporary bytes, as many as a pool has"),
        (("", 0, POOL_BYTES), f"{POOL_BYTES} bytes not updated in place"),
    ],
)
def test_a_program_that_copies_fails(program, expected):
    assert tpu.failures(CASE, *program) == [expected]


def test_the_largest_use_of_vmem_counts():
    sizes = [f'{KERNEL}{{"memory_space":"1","offset":"0","size":"{size}"}}]' for size in (7, 2048)]
    assert tpu.vmem_bytes("\n".join(sizes)) == 2048


def test_case_names_differ():
    names = [case.name for case in tpu.CASES]
    assert len(set(names)) == len(names)


@pytest.mark.contract
@pytest.mark.parametrize("case", tpu.CASES, ids=lambda case: case.name)
def test_every_case_is_lowered_to_a_tpu_kernel(case):
    lowered = jax.jit(case.function).trace(*case.arguments).lower(lowering_platforms=("tpu",))
    assert "tpu_custom_call" in lowered.as_text()
