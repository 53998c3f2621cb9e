"""What the kernels tell XLA's scheduler that they cost, at full tables and lists."""

import jax
import pytest

from tests.aot import tpu
from tests.aot.kernel_cases import CASES

TOKEN = 8 * 128 * 2  # bytes of all heads
BLOCK = 16 * TOKEN
# Of each kernel the bytes that it reads and writes.
GPU = {
    # 49 items run side by side: three programs of 8 heads on each of 132 SMs. Parts have 8 lanes in float32:
    # two for each item more than rows, of which there are 49 and half of 49, or for fewer rows half of 49.
    "decode_128_rows_group_1": {
        "paged_decode": 2 * 128 * 8192 * TOKEN,
        "merge_attention": (2 * 73 * 8 * 4 + 128 * 1 * 2) * 8 * 128,
    },
    "decode_32_rows_group_4": {
        "paged_decode": 2 * 32 * 8192 * TOKEN,
        "merge_attention": (2 * 24 * 8 * 4 + 32 * 4 * 2) * 8 * 128,
    },
    # Of 8 bits: a byte a number, a scale of 2 bytes and an offset of 4.
    "decode_int8": {
        "paged_decode": 2 * 32 * 8192 * 8 * (128 + 2 + 4),
        "merge_attention": (2 * 24 * 8 * 4 + 32 * 4 * 2) * 8 * 128,
    },
    # Keys and values; queries and results of four query heads to one of keys.
    "prefill_8k": {"paged_prefill": 2 * (8192 + 4 * 8192) * TOKEN},
    "prefill_int8": {"paged_prefill": 2 * (2 * 8192 * 8 * (128 + 2 + 4) + 2 * 4 * 2048 * TOKEN)},
    "merge_5_lanes_head_192": {"merge_attention": (3 + 1) * 8 * 192 * 4},
    "append_64": {"append_kv": 2 * 2 * 64 * TOKEN},
    "gather_blocks_bf16_16x128": {"gather_blocks": 2 * 2 * 8 * 128 * BLOCK},
    "scatter_blocks_bf16_16x128": {"scatter_blocks": 2 * 2 * 8 * 128 * BLOCK},
    "copy_blocks_bf16_16x128": {"copy_blocks": 2 * 2 * 8 * 128 * BLOCK},
}
TPU = {
    "decode_block_16_group_4": {"paged_decode": 2 * 32 * 128 * BLOCK},
    # Each token's whole tile of 16 is read and written.
    "append_64": {"append_kv": 2 * 2 * 64 * 16 * TOKEN},
    "gather_blocks_64": {"gather_blocks": 2 * 2 * 4 * 64 * BLOCK},
    "scatter_blocks_64": {"scatter_blocks": 2 * 2 * 4 * 64 * BLOCK},
    "copy_blocks_64": {"copy_blocks": 2 * 2 * 4 * 64 * BLOCK},
}


def kernel_costs(jaxpr):
    """The cost estimates by the kernel's name, of all equations within."""
    found = {}
    for equation in jaxpr.eqns:
        if "cost_estimate" in equation.params:
            found[equation.params["name"]] = equation.params["cost_estimate"]
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns")):
            found |= kernel_costs(inner) if hasattr(inner, "eqns") else {}
    return found


def costs_of(cases, name):
    (case,) = [case for case in cases if case.name == name]
    arguments = case.arguments() if callable(case.arguments) else case.arguments
    return kernel_costs(jax.make_jaxpr(case.function)(*arguments).jaxpr)


@pytest.mark.parametrize(
    ("cases", "name", "expected"),
    [(CASES, *item) for item in GPU.items()] + [(tpu.CASES, *item) for item in TPU.items()],
    ids=[*GPU, *(f"TPU {name}" for name in TPU)],
)
def test_bytes_are_those_read_and_written(cases, name, expected):
    costs = costs_of(cases, name)
    assert {kernel: cost and cost.bytes_accessed for kernel, cost in costs.items()} == expected


@pytest.mark.parametrize(
    ("cases", "name", "num_logits"),
    [
        (CASES, "decode_32_rows_group_4", 32 * 8192 * 32),
        (tpu.CASES, "decode_block_16_group_4", 32 * 2048 * 32),
    ],
    ids=["GPU", "TPU"],
)
def test_each_logit_is_a_product_with_a_key_an_exponential_and_a_product_with_a_value(
    cases, name, num_logits
):
    cost = costs_of(cases, name)["paged_decode"]
    assert (cost.flops, cost.transcendentals) == (num_logits * 2 * 2 * 128, num_logits)
