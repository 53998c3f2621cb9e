"""The mutations of the GPU's decode, plan and merge, and of how the cache calls kernels; see `mutations`."""

from tests.mutants.kernels import in_kernel
from tests.mutants.mutations import PACKED, in_module

FILE = "kernels/test_mosaic_gpu_decode.py"
MANY_TILES = f"{FILE}::test_one_program_walks_nine_tiles"
UNSEEN = f"{FILE}::test_values_that_nobody_sees_may_be_nan"
IN_ORDER = f"{FILE}::test_a_plan_has_every_tile_once_and_in_order"
MERGE = f"{FILE}::test_merge[shape1]"
SHADOWS = "kernels/test_mosaic_gpu_races.py::test_what_tensor_cores_read_too_late_or_too_early_races"
BACKENDS = "core/test_backends.py"
CACHE = "attention/test_attention_kernels.py::test_prefill_fork_and_decode"

MULTIPLY_KEYS = "logits = wgmma((TILE_ROWS, tiling.num_lanes), k_smem.at[slot], q_smem.transpose((1, 0)))"
REFILL_KEYS = "refill(k_ref, k_smem, k_barrier, tile + STAGES, next_rows)"
MULTIPLY_VALUES = """new_out = wgmma(
            (head_dim, tiling.num_lanes), v_smem.at[slot].transpose((1, 0)), p_smem.transpose((1, 0))
        )"""
REFILL_VALUES = "refill(v_ref, v_smem, v_barrier, tile + STAGES, next_rows)"


def decode(name: str) -> str:
    return f"{FILE}::test_decode[{name}]"


MUTATIONS = [
    *in_kernel(
        "interpret",
        (
            "XLA is not told the cost",
            'options["cost_estimate"] = cost',
            'options["cost_estimate"] = None',
            "kernels/test_kernel_costs.py::test_bytes_are_those_read_and_written[append_64]",
        ),
    ),
    *in_kernel(
        "decode",
        (
            "values cost nothing",
            "bytes_accessed=2 * num_keys",
            "bytes_accessed=num_keys",
            "kernels/test_kernel_costs.py::test_bytes_are_those_read_and_written[decode_128_rows_group_1]",
        ),
        ("the layer ignored", "layer_ref[0] * options", "0 * layer_ref[0] * options", decode("plain")),
        ("keys not waited for", "plgpu.barrier_wait(k_barrier.at[slot])", "pass", decode("plain")),
        ("values not waited for", "plgpu.barrier_wait(v_barrier.at[slot])", "pass", decode("plain")),
        ("queries not waited for", "plgpu.barrier_wait(q_barrier)", "pass", decode("plain")),
        (
            "keys refilled before they are multiplied",
            f"        {MULTIPLY_KEYS}\n        {REFILL_KEYS}\n",
            f"        {REFILL_KEYS}\n        {MULTIPLY_KEYS}\n",
            MANY_TILES,
        ),
        (
            "values refilled before they are multiplied",
            f"        {MULTIPLY_VALUES}\n        {REFILL_VALUES}\n",
            f"        {REFILL_VALUES}\n        {MULTIPLY_VALUES}\n",
            MANY_TILES,
        ),
        (
            "refilled unseen, for left factors are not touched",
            "                touch(a)\n",
            "",
            f"{SHADOWS}[keys refilled before they are multiplied]",
        ),
        (
            "refilled unseen, for right factors are not touched",
            "                touch(b)\n",
            "",
            f"{SHADOWS}[queries not waited for]",
        ),
        ("what came before does not decay", "out * per_lane(decay, head_dim)", "out", MANY_TILES),
        ("the total does not decay", "total * decay +", "total +", MANY_TILES),
        (
            "values are keys again",
            "refill(v_ref, v_smem, v_barrier, tile",
            "refill(k_ref, v_smem, v_barrier, tile",
            MANY_TILES,
        ),
        (
            "unseen values not cleared",
            "@pl.when(mask.is_edge(first_tile + tile))",
            "@pl.when(tile < 0)",
            UNSEEN,
        ),
        (
            "sink logits count in every item",
            "first_tile), by_lane) == 0",
            "first_tile), by_lane) >= 0",
            decode("sink_logits"),
        ),
        (
            "large soft caps cancel",
            "jnp.where(jnp.abs(x) < _SMALL, x - x * x * x * (1 / 3), tanh)",
            "tanh",
            "kernels/test_mosaic_gpu_decode.py::test_soft_caps_are_as_good_as_float32",
        ),
        (
            "soft cap forgotten behind tanh",
            "(options.soft_cap * _LOG2_E)",
            "_LOG2_E",
            decode("group_16_soft_cap"),
        ),
        ("the scale ignored", "logits * (options.scale * _LOG2_E)", "logits * _LOG2_E", decode("plain")),
        ("queries that do not count have a result", " | (query >= num_queries)", "", UNSEEN),
        (
            "the peak forgotten where a tile is unseen",
            "jnp.maximum(peak, logits.max(axis=0))",
            "logits.max(axis=0)",
            decode("drafts"),
        ),
        (
            "idle rows look before the table",
            "jnp.maximum(num_columns * tiling.pieces_per_block, 1) - 1",
            "num_columns * tiling.pieces_per_block - 1",
            decode("idle_rows"),
        ),
        ("parts written as whole rows", "pl.when(is_part == 0)", "pl.when(is_part >= 0)", decode("long")),
    ),
    *in_kernel(
        "decode_mask",
        (
            "the next token seen",
            "(position <= query_pos) &",
            "(position <= query_pos + 1) &",
            decode("plain"),
        ),
        (
            "the window one longer",
            "position > query_pos - self",
            "position >= query_pos - self",
            decode("window_drafts"),
        ),
        (
            "one kept token more",
            "position < self.options.num_sink_tokens",
            "position <= self.options.num_sink_tokens",
            decode("kept_tokens"),
        ),
        (
            "keys that are not read seen",
            "return is_read & (position <= query",
            "return (position <= query",
            UNSEEN,
        ),
        ("drafts see each other", "if self.tiling.num_queries > 1:", "if False:", decode("drafts")),
        (
            "columns counted without the kept ones",
            "self.first_column - self.num_sink_blocks)\n        if",
            "self.first_column)\n        if",
            decode("kept_tokens"),
        ),
        ("values before the window not cleared", "is_edge |= self", "is_edge &= self", UNSEEN),
    ),
    *in_kernel(
        "decode_plan",
        (
            "all items begin at the first tile",
            "(item - first_item[row]) * run_len[row]",
            "0 * (item - first_item[row])",
            f"{IN_ORDER}[7-num_columns2]",
        ),
        (
            "a tile too few",
            "jnp.clip(num_tiles[row] - first_tile, 0",
            "jnp.clip(num_tiles[row] - first_tile - 1, 0",
            f"{IN_ORDER}[1-num_columns2]",
        ),
        (
            "idle rows look into the table",
            "jnp.where(reads, rows.table_row[row], 0)",
            "rows.table_row[row]",
            decode("idle_rows"),
        ),
        (
            "nothing is split",
            "if num_parallel <= num_rows:",
            "if True:",
            f"{FILE}::test_few_long_rows_fill_the_gpu",
        ),
    ),
    *in_kernel(
        "merge",
        (
            "parts that saw nothing count",
            "weight = jnp.where(part_lse > _MASKED, weight, 0.0)",
            "pass",
            MERGE,
        ),
        (
            "NaN of parts that saw nothing",
            "jnp.where(per_lane(weight) > 0, part_out * per_lane(weight), 0.0)",
            "part_out * per_lane(weight)",
            MERGE,
        ),
        ("the total does not decay", "total * decay + weight", "total + weight", MERGE),
        ("rows of two parts not merged", "min_parts=2", "min_parts=3", decode("block_512")),
        ("parts not waited for", "plgpu.barrier_wait(barrier.at[slot])", "pass", MERGE),
        (
            "the ring goes round too early",
            "fetch(part + _STAGES))",
            "fetch(part + _STAGES - 1))",
            f"{FILE}::test_merge[shape2]",
        ),
    ),
    *in_kernel(
        "move_blocks",
        (
            "written before it is read",
            "if cut.is_in_order:",
            "if False:",
            "kernels/test_mosaic_gpu_move.py::test_a_source_may_be_overwritten_by_a_later_copy",
        ),
    ),
    *in_module(
        "attention/mosaic",
        (
            "all cuts of a prompt begin alike",
            "plan.first_position[:, None] + starts",
            "plan.first_position[:, None] + 0 * starts",
            f"{CACHE}[padded-mosaic_tpu]",
        ),
        (
            "every cut of a prompt is full",
            "jnp.clip(num_left, 0, most)",
            "jnp.where(num_left > 0, most, 0)",
            f"{CACHE}[padded-mosaic_tpu]",
        ),
        (
            "each layer plans anew",
            "kernels.DecodePlan(*plan.work)} if plan.work else {}",
            "kernels.DecodePlan(*plan.work)} if False else {}",
            "attention/test_attention_kernels.py::test_a_step_is_planned_once_for_all_layers_of_a_group",
        ),
        (
            "kernels copy backwards",
            "src, dst, num_copies, num_blocks=num_blocks",
            "dst, src, num_copies, num_blocks=num_blocks",
            f"{CACHE}[padded-mosaic_tpu]",
        ),
        (
            "an untested jax is used",
            "reason = untested_jax() or _why_not_here(name, device)",
            "reason = _why_not_here(name, device)",
            "attention/test_attention_kernels.py::test_an_untested_jax_is_named_and_xla_goes_on",
        ),
        (
            "GPUs are known by their compute capability alone",
            "if capability is None and _HOPPER_KINDS.search(device.kind):",
            "if False:",
            "attention/test_attention_kernels.py::test_a_mesh_of_gpus_runs_the_kernels_for_them",
        ),
    ),
    *in_module(
        "attention/attention_plan",
        (
            "a column too few",
            "return first_position + num_queries - 1",
            "return first_position + num_queries - 2",
            f"{CACHE}[packed-mosaic_tpu]",
        ),
        (
            "packed tokens ask for the row before",
            'step.cu_query_lens[1:], order, side="right"',
            'step.cu_query_lens[1:], order, side="left"',
            PACKED,
        ),
        (
            "packed tokens are planned as padded ones",
            "step.positions.shape[1] if step.cu_query_lens is None else 1",
            "step.positions.shape[1] if step.cu_query_lens is None else 9",
            f"{BACKENDS}::test_packed_tokens_are_decoded_one_by_one",
        ),
    ),
    *in_module(
        "core/choose_backend",
        (
            "named implementation falls back",
            "raise NotImplementedError(f",
            "return get_backend(XLA)\n        raise NotImplementedError(f",
            f"{BACKENDS}::test_a_backend_that_does_not_serve_is_refused_by_name",
        ),
        (
            "none picks what does not serve",
            "fits = (name for name in _MEASURED if not _why_not(",
            "fits = (name for name in _MEASURED if not None and (",
            "attention/test_attention_kernels.py::test_none_picks_a_measured_kernel_where_it_serves",
        ),
        (
            "the cache goes before the call",
            "name = asked or config.implementation",
            "name = config.implementation or asked",
            f"{BACKENDS}::test_a_call_may_name_another_backend_than_the_cache",
        ),
    ),
    *in_module(
        "core/backends",
        (
            "a mesh of GPUs is not for the GPU's kernels",
            'platform = "cuda" if device.platform == "gpu" else device.platform',
            "platform = device.platform",
            "attention/test_attention_kernels.py::test_a_mesh_of_gpus_runs_the_kernels_for_them",
        ),
        (
            "long steps are decoded",
            "return self.decode if num_queries <= MAX_DECODE_QUERIES else self.prefill",
            "return self.decode",
            f"{BACKENDS}::test_a_step_of_more_tokens_than_eight_is_prefilled[9-prefill-2.5]",
        ),
        (
            "a step of eight tokens is prefilled",
            "num_queries <= MAX_DECODE_QUERIES",
            "num_queries < MAX_DECODE_QUERIES",
            f"{BACKENDS}::test_a_step_of_more_tokens_than_eight_is_prefilled[8-decode-1.5]",
        ),
        (
            "a name is taken twice",
            "if _backends.get(backend.name, backend) is not backend:",
            "if False:",
            f"{BACKENDS}::test_registration_refuses_what_cannot_work",
        ),
    ),
    *in_module(
        "attention/attention",
        (
            "another backend gets the plan of the cache's own",
            "plan = dataclasses.replace(plan, work=())",
            "pass",
            f"{BACKENDS}::test_a_call_may_name_another_backend_than_the_cache",
        ),
    ),
    *in_module(
        "arrays/sharding",
        (
            "heads not split",
            "    if axis is None:\n        return function",
            "    if True:\n        return function",
            "attention/test_attention_kernels.py::test_each_device_runs_its_own_heads[auto]",
        ),
    ),
    *in_module(
        "core/init",
        (
            "kernels imported within a trace",
            "load(config.implementation)",
            "pass",
            "attention/test_attention_kernels.py::test_init_imports_the_kernels_and_the_library_does_not",
        ),
    ),
]
