"""The mutations of the GPU kernels that move blocks and append tokens; see `mutations`."""

from tests.mutants.mutations import Mutation

GATHER = "kernels/test_mosaic_gpu_move.py::test_gather[bf16_16x64]"
SCATTER = "kernels/test_mosaic_gpu_move.py::test_scatter[bf16_16x64]"
MORE = "kernels/test_mosaic_gpu_move.py::test_more_than_all_are_all"
COPY = "kernels/test_mosaic_gpu_move.py::test_copy[bf16_16x64]"
OVERWRITTEN = "kernels/test_mosaic_gpu_move.py::test_a_source_may_be_overwritten_by_a_later_copy"
APPEND = "kernels/test_mosaic_gpu_move.py::test_append[3-bf16_16x64]"


def in_kernel(module: str, *mutations: tuple[str, str, str, str]) -> list[Mutation]:
    """Mutations of one module: (name, old, new, test)."""
    file = f"pallas_kernels/mosaic_gpu/{module}.py"
    return [Mutation(f"GPU {module}: {name}", file, *rest) for name, *rest in mutations]


MUTATIONS = [
    *in_kernel(
        "move_blocks",
        ("the count ignored", "jnp.minimum(count, cut.num_ids) *", "cut.num_ids *", SCATTER),
        ("more than all", "jnp.minimum(count, cut.num_ids) *", "count *", MORE),
        ("V is K again", "zip(sources, (k_smem", "zip(sources[:1] * 2, (k_smem", GATHER),
        (
            "layers between each other",
            "def target(layer, nth):\n            return layer * cut.num_ids + nth",
            "def target(layer, nth):\n            return nth * cut.num_layers + layer",
            GATHER,
        ),
        (
            "one layer alone",
            "def source(layer, nth):\n            return layer * cut.num_ids + nth",
            "def source(layer, nth):\n            return nth",
            SCATTER,
        ),
        ("onto the sources", "layer * num_blocks + dst_ref[nth]", "layer * num_blocks + src_ref[nth]", COPY),
        ("the first chunk of each block", "lax.rem(nth_chunk, cut.chunks)", "0", COPY),
        (
            "layers and blocks exchanged",
            "cut.num_layers), lax.div(nth_block, cut.num_layers)",
            "cut.num_ids), lax.div(nth_block, cut.num_ids)",
            GATHER,
        ),
        ("last steps left out", "- cta, 0) + (cut.num_ctas - 1)", "- cta, 0)", SCATTER),
        ("refilled before it is written", "wait_smem_to_gmem(2, wait", "wait_smem_to_gmem(3, wait", COPY),
        (
            "refilled in the wrong place",
            "fetch(later, lax.rem(later, cut.stages))",
            "fetch(later, slot)",
            COPY,
        ),
        ("not waited for", "plgpu.barrier_wait(barrier.at[slot])", "pass", GATHER),
        (
            "a scatter of none moves one",
            "block_ids, jnp.reshape(count, 1), *blocks",
            "block_ids, jnp.reshape(jnp.maximum(count, 1), 1), *blocks",
            SCATTER,
        ),
        (
            "a copy of none moves one",
            "(src, dst, jnp.reshape(count, 1)",
            "(src, dst, jnp.reshape(jnp.maximum(count, 1), 1)",
            COPY,
        ),
        (
            "copies cut among CTAs in no order",
            "    if is_in_order:\n        max_ctas",
            "    if False:\n        max_ctas",
            OVERWRITTEN,
        ),
        ("ends before its writes", "    plgpu.wait_smem_to_gmem(0)", "    pass", SCATTER),
    ),
    *in_kernel(
        "append",
        ("the first slot left out", "(slot >= 0)", "(slot > 0)", APPEND),
        ("negative slots stored", "(slot >= 0) & ", "", APPEND),
        ("slots beyond the layer stored", " & (slot < num_blocks * block_size)", "", APPEND),
        ("tokens of the predecessor stored", "(first + nth >= own) & ", "", APPEND),
        ("the layer ignored", "layer_ref[0] * num_blocks", "0 * layer_ref[0]", APPEND),
        ("V is K again", "v_smem.at[nth], v_pool", "k_smem.at[nth], v_pool", APPEND),
        ("tokens left out", "jnp.minimum(own, num_tokens - cta_tokens)", "own", APPEND),
        ("not waited for", "plgpu.barrier_wait(barrier)", "pass", APPEND),
    ),
]
