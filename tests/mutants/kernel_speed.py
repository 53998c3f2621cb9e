"""Mutations of the benchmark of the GPU kernels, which runs on a GPU alone; see `mutations`."""

from tests.mutants.mutations import Mutation

WHOLE_PATH = "experiments/test_kernel_speed.py::test_the_whole_path_runs_interpreted"
CUDNN = "experiments/test_kernel_speed.py::test_cudnn_is_asked_for_the_same"
STEP = "experiments/test_kernel_speed.py::test_a_step_is_checked_whether_or_not_xla_runs"
FLASHINFER = "experiments/test_kernel_speed_torch.py::test_flashinfer_is_asked_for_the_same"
PYTORCH = "experiments/test_kernel_speed_torch.py::test_pytorch_is_asked_for_the_same"
ENDS = "experiments/test_kernel_speed_process.py::test_a_side_ends_or_hangs_its_process"
LEFT_OUT = "experiments/test_kernel_speed_process.py::test_who_crashes_repeatedly_is_left_out"
KEPT = (
    "experiments/test_kernel_speed_process.py::test_what_was_measured_is_kept_if_the_memory_cannot_be_freed"
)
IN_TIME = "experiments/test_kernel_speed_process.py::test_the_time_ends_a_side_that_hangs"


def in_benchmark(module: str, *mutations: tuple[str, str, str, str]) -> list[Mutation]:
    """Mutations of one module: (name, old, new, test)."""
    file = f"experiments/{module}.py"
    return [Mutation(f"{module.replace('/', ' ')}: {name}", file, *rest) for name, *rest in mutations]


MUTATIONS = [
    *in_benchmark(
        "kernel_speed/__main__",
        ("a crash ends the entry", "                    continue\n", "                    return\n", ENDS),
        ("the side takes part again", "        without[crash.side] = str(crash)\n", "", ENDS),
        ("never left out", ">= ALLOWED_CRASHES", "> 99", LEFT_OUT),
        ("a second crash ends the entry", "crash.side is None and has_crashed", "has_crashed", LEFT_OUT),
        ("no second try", " and has_crashed:", ":", KEPT),
        ("the time is not looked at", "if time.monotonic() >= self._end:", "if False:", IN_TIME),
    ),
    *in_benchmark(
        "kernel_speed/timing",
        ("a lost device is not noticed", "                check_device()\n", "", ENDS),
    ),
    *in_benchmark(
        "kernel_speed/step",
        ("checked against bfloat16", "_in_float32(decoder), sizes", "decoder, sizes", WHOLE_PATH),
        ("loose", "TOLERANCE = 3e-2", "TOLERANCE = 5e-2", STEP),
    ),
    *in_benchmark(
        "kernel_speed/torch_sides",
        ("heads behind tokens", 'kv_layout="HND"', 'kv_layout="NHD"', FLASHINFER),
        ("logits not scaled", "bmm1_scale=problem.scale", "bmm1_scale=1.0", FLASHINFER),
        ("the planned scale is another", "sm_scale=problem.scale", "sm_scale=1.0", FLASHINFER),
        (
            "values are keys",
            "(k_pool, v_pool),\n            workspace",
            "(k_pool, k_pool),\n            workspace",
            FLASHINFER,
        ),
        ("the last page holds one token", "(cell.batch,), cell.block_size,", "(cell.batch,), 1,", FLASHINFER),
        (
            "rows of one page",
            "num_indices + 1, cell.num_columns, dtype",
            "num_indices + 1, 1, dtype",
            FLASHINFER,
        ),
        (
            "fa2 in place of cuDNN",
            "use_tensor_cores=use_tensor_cores, backend=backend",
            "use_tensor_cores=use_tensor_cores, backend='fa2'",
            FLASHINFER,
        ),
        ("one tensor-core setting", "use_tensor_cores=use_tensor_cores, ", "", FLASHINFER),
        (
            "key/value heads are query heads",
            "cell.num_kv_heads * cell.group_size,\n        cell.num_kv_heads,",
            "cell.num_kv_heads * cell.group_size,\n        cell.num_kv_heads * cell.group_size,",
            FLASHINFER,
        ),
        ("always the first buffer", "pool[nth % problem.num_buffers]", "pool[0]", FLASHINFER),
        ("the graph is not replayed", "        graph.replay()\n", "", FLASHINFER),
        (
            "heads and rows exchanged",
            "cell.context, cell.head_dim).transpose(0, 1)",
            "cell.context, cell.head_dim).reshape(cell.batch, -1, cell.context, cell.head_dim)",
            PYTORCH,
        ),
        ("not grouped", ", enable_gqa=True", "", PYTORCH),
        ("another scale", "scale=problem.scale, enable_gqa", "scale=1.0, enable_gqa", PYTORCH),
    ),
    *in_benchmark(
        "kernel_speed/sides",
        (
            "cuDNN reads blocks in their order",
            "jnp.searchsorted(owned, problem.block_table)[",
            "jnp.arange(owned.size).reshape(problem.block_table.shape)[",
            CUDNN,
        ),
        ("cuDNN always reads the first buffer", "*buffers[nth % problem.num_buffers]", "*buffers[0]", CUDNN),
        ("cuDNN reads a token less", "kv_seqlen=lens", "kv_seqlen=lens - 1", CUDNN),
        (
            "cuDNN does not scale",
            "scale=problem.scale,\n                    mask_type",
            "scale=1.0,\n                    mask_type",
            CUDNN,
        ),
        ("cuDNN is asked without lengths", "cudnn.MaskType.PADDING", "cudnn.MaskType.NO_MASK", CUDNN),
        (
            "cuDNN launches once",
            "for nth in range(num_launches):\n            zero",
            "for nth in range(1):\n            zero",
            CUDNN,
        ),
    ),
    *in_benchmark(
        "kernel_speed/cells",
        (
            "the cells that have a bar of their own wait",
            "key=lambda entry: (entry[1].kv_bytes < LARGE_BYTES, entry[0])",
            "key=lambda entry: entry[0]",
            "experiments/test_kernel_speed.py::test_every_cell_is_there_once_and_the_important_ones_first",
        ),
    ),
]
