"""Mutations of the benchmark of the GPU kernels, which runs on a GPU alone; see `mutations`."""

from tests.mutants.mutations import Mutation

CALLS = "experiments/test_kernel_speed_crashes.py::test_calls_complete_what_one_measures"
OTHERWISE = "experiments/test_kernel_speed_crashes.py::test_what_was_measured_otherwise_is_not_mixed"
NO_REPORT = "experiments/test_kernel_speed_crashes.py::test_a_file_that_is_no_report_is_left_alone"
SKIPPED = "experiments/test_kernel_speed_crashes.py::test_what_was_skipped_is_not_tried_again"
WHOLE_PATH = "experiments/test_kernel_speed.py::test_the_whole_path_runs_interpreted"
CUDNN = "experiments/test_kernel_speed.py::test_cudnn_is_asked_for_the_same"
STEP = "experiments/test_kernel_speed.py::test_a_step_is_checked_whether_or_not_xla_runs"
FLASHINFER = "experiments/test_kernel_speed_torch.py::test_flashinfer_is_asked_for_the_same"
PYTORCH = "experiments/test_kernel_speed_torch.py::test_pytorch_is_asked_for_the_same"
OWN_CEILINGS = (
    "experiments/test_kernel_speed_report.py::test_an_entry_is_compared_with_the_ceilings_of_its_own_call"
)


def in_benchmark(module: str, *mutations: tuple[str, str, str, str]) -> list[Mutation]:
    """Mutations of one module: (name, old, new, test)."""
    file = f"experiments/{module}.py"
    return [Mutation(f"{module.replace('/', ' ')}: {name}", file, *rest) for name, *rest in mutations]


MUTATIONS = [
    *in_benchmark(
        "kernel_speed/resume",
        ("measures again what there is", "job not in done and job[1]", "job[1]", CALLS),
        (
            "keeps the ceilings of the first call",
            "for kind in MEASURED_KINDS",
            "for kind in KEPT[1:5]",
            CALLS,
        ),
        ("never complete", "return [] if is_complete else todo", "return todo", CALLS),
        ("forgets the crashes", '"skipped", "crashes")', '"skipped")', CALLS),
        ("tries again what was skipped", " and job[1] not in skipped", "", SKIPPED),
        ("mixes code", '    "sources",\n', "", OTHERWISE),
        ("mixes devices", '    "device",\n', "", OTHERWISE),
        ("mixes sides", '    "without",\n', "", OTHERWISE),
        ("takes any file", "or not all(", "or not any(", NO_REPORT),
    ),
    *in_benchmark(
        "kernel_speed/__main__",
        (
            "who crashed before is asked again",
            "                self._blame(crash)\n",
            "                pass\n",
            CALLS,
        ),
        (
            "the worker outlives the error",
            "                self.close()\n                raise",
            "                raise",
            NO_REPORT,
        ),
        ("all entries are of the first call", 'len(self.report["calls"]) - 1', "0", CALLS),
        ("the log is emptied", "if not options.resume:\n", "if True:\n", CALLS),
    ),
    *in_benchmark(
        "kernel_speed/summary",
        (
            "the ceilings of the first call are everybody's",
            'calls[entry["call"]]["ceilings"].get(READ)',
            'calls[0]["ceilings"].get(READ)',
            OWN_CEILINGS,
        ),
        (
            "each call's ceilings are the best of all",
            ' if entry["call"] == nth])',
            "])",
            OWN_CEILINGS,
        ),
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
