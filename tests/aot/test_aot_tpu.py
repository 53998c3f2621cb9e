"""The gate of the compiled TPU kernels (`tests.aot.tpu`): judging programs. `make aot-tpu` compiles."""

import dataclasses

import jax
import pytest

from pallas_kernels import mosaic_tpu
from tests.aot import tpu

POOL_BYTES = 4 * 2**16 * 8 * 128 * 2
KERNEL = '%k = f32[] custom-call(%q), custom_call_target="tpu_custom_call", "used_scoped_memory_configs":['
CASE = dataclasses.replace(
    tpu.move_case(mosaic_tpu.copy_blocks), budget=tpu.Cost(code=3, vmem=5, temporary=7)
)


def test_a_program_at_its_budget_in_place_passes():
    assert tpu.failures(CASE, CASE.budget, 0, 2 * POOL_BYTES) == []


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ((tpu.Cost(4, 5, 7), 0, 2 * POOL_BYTES), "4 code bytes, at most 3"),
        ((tpu.Cost(3, 6, 7), 0, 2 * POOL_BYTES), "6 vmem bytes, at most 5"),
        ((tpu.Cost(3, 5, 8), 0, 2 * POOL_BYTES), "8 temporary bytes, at most 7"),
        ((CASE.budget, 1, 2 * POOL_BYTES), "copies a pool 1 times"),
        ((CASE.budget, 0, POOL_BYTES), f"{POOL_BYTES} bytes not updated in place"),
    ],
)
def test_a_program_beyond_its_budget_or_that_copies_fails(program, expected):
    assert tpu.failures(CASE, *program) == [expected]


def test_budgets_are_what_the_kernels_declare():
    """Counted by hand: two tiles of keys and of values, and what is smaller."""
    budgets = {case.name: case.budget for case in tpu.CASES}
    tiles, logits = 4 * 8 * 512 * 128 * 2, 8 * 8 * 512 * 4
    queries, result, number = 8 * 16 * 128 * 2, 8 * 8 * 128 * 4, 8 * 8 * 128 * 4
    small = 2 * queries + 3 * result + 2 * number + 2 * logits
    temporary = 32 * (queries + result + number) + tpu.XLA_TEMPORARY_BYTES
    assert budgets["decode_block_16_group_4"] == tpu.Cost(tpu.DECODE_CODE, tiles + small, temporary)
    chunk = 2 * 32 * 8 * (16 + 2) * 128 * 2
    assert budgets["append_64"] == tpu.Cost(tpu.APPEND_CODE, chunk, tpu.XLA_TEMPORARY_BYTES)
    assert budgets["layers"] == tpu.Cost(tpu.LAYERS_CODE, tiles + small, temporary)
    assert budgets["copy_blocks_64"] == tpu.Cost(tpu.MOVE_CODE, 0, 0)


def test_temporaries_in_a_budget_are_smaller_than_a_pool():
    for case in tpu.CASES:
        assert case.budget.temporary < case.arguments[0].size * case.arguments[0].dtype.itemsize, case.name


def test_the_largest_use_of_vmem_counts():
    sizes = [f'{KERNEL}{{"memory_space":"1","offset":"0","size":"{size}"}}]' for size in (7, 2048)]
    assert tpu.used_vmem_bytes("\n".join(sizes)) == 2048


def test_case_names_differ():
    names = [case.name for case in tpu.CASES]
    assert len(set(names)) == len(names)


@pytest.mark.contract
@pytest.mark.parametrize("case", tpu.CASES, ids=lambda case: case.name)
def test_every_case_is_lowered_to_a_tpu_kernel(case):
    lowered = jax.jit(case.function).trace(*case.arguments).lower(lowering_platforms=("tpu",))
    assert "tpu_custom_call" in lowered.as_text()
