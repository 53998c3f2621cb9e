"""The mutations of the TPU kernels; see `mutations`."""

from tests.mutants.mutations import Mutation

COSTS = "kernels/test_kernel_costs.py::test_bytes_are_those_read_and_written"

MANY_TILES = "kernels/test_mosaic_tpu.py::test_many_tiles"
UNSEEN = "kernels/test_mosaic_tpu.py::test_values_that_nobody_sees_are_nan"
OVERWRITTEN = "kernels/test_mosaic_tpu_movement.py::test_a_source_may_be_overwritten_by_a_later_copy"
MANY = "kernels/test_mosaic_tpu_movement.py::test_one_block_copied_to_many"
COPIED = "kernels/test_mosaic_tpu_movement.py::test_copy[12]"
IN_ANY_ORDER = "kernels/test_mosaic_tpu_movement.py::test_tokens_in_any_order_and_nowhere[bfloat16]"
CHUNKS = "kernels/test_mosaic_tpu_movement.py::test_more_tokens_than_one_chunk"


def in_kernel(module: str, *mutations: tuple[str, str, str, str]) -> list[Mutation]:
    """Mutations of one module: (name, old, new, test)."""
    file = f"pallas_kernels/mosaic_tpu/{module}.py"
    return [Mutation(f"TPU {module}: {name}", file, *rest) for name, *rest in mutations]


MUTATIONS = [
    *in_kernel(
        "decode",
        (
            "values cost nothing",
            "key_bytes = 2 * num_kv_heads",
            "key_bytes = num_kv_heads",
            f"{COSTS}[TPU decode_block_16_group_4]",
        ),
        (
            "the next tile lands on the one in use",
            "jnp.where(is_last, 0, tile + 1), 1 - slot)",
            "jnp.where(is_last, 0, tile + 1), slot)",
            f"{MANY_TILES}[plain]",
        ),
        (
            "blocks that the row does not read are read",
            "jnp.minimum(blocks_per_tile, rows.num_columns[of_row] - tile * blocks_per_tile)",
            "blocks_per_tile",
            f"{MANY_TILES}[plain]",
        ),
        ("the layer ignored", "layer[0] * options", "0 * options", f"{MANY_TILES}[plain]"),
        (
            "unseen values not cleared",
            "jnp.logical_not(all_seen)",
            "all_seen & ~all_seen",
            f"{MANY_TILES}[plain]",
        ),
        (
            "keys that are not read seen",
            "(nth < num_keys) & (position <= query",
            "(position <= query",
            UNSEEN,
        ),
        ("values that are not read not cleared", "all_seen = (end <= num_keys) &", "all_seen =", UNSEEN),
        ("values before the window not cleared", "all_seen &= position", "all_seen |= position", UNSEEN),
        (
            "a key too many in the window",
            "position > query_position - options.window",
            "position >= query_position - options.window",
            f"{MANY_TILES}[window_drafts]",
        ),
        (
            "sink columns lie at the window",
            "jnp.where(nth < num_sink_blocks * block_size, nth, nth + skipped)",
            "nth + skipped",
            f"{MANY_TILES}[kept_tokens]",
        ),
        (
            "earlier tiles keep too much weight",
            "kept * total[...] +",
            "total[...] +",
            f"{MANY_TILES}[long]",
        ),
        (
            "the largest logit forgotten where a tile is unseen",
            "jnp.maximum(old, logits.max(axis=2, keepdims=True))",
            "logits.max(axis=2, keepdims=True)",
            f"{MANY_TILES}[drafts]",
        ),
        (
            "queries that do not count are answered",
            "query_position <= last_position",
            "query_position < 2**30",
            f"{MANY_TILES}[drafts]",
        ),
    ),
    *in_kernel(
        "movement",
        ("a copy not waited for", "pl.loop(num_ended, count_ref[0])(wait)", "pass", COPIED),
        ("a source overwritten", "return dst[i] == src[earlier]", "return dst[i] < src[i] - 99", OVERWRITTEN),
        ("only the one before looked at", "reversed(range(1, NUM_IN_FLIGHT))", "range(1, 2)", OVERWRITTEN),
        (
            "the seventh before not looked at",
            "reversed(range(1, NUM_IN_FLIGHT))",
            "reversed(range(1, NUM_IN_FLIGHT - 1))",
            OVERWRITTEN,
        ),
        ("one too many in flight", "i + 1 - NUM_IN_FLIGHT", "i - NUM_IN_FLIGHT", OVERWRITTEN),
        ("more than all", "jnp.clip(count, 0, ids[0].size)", "jnp.maximum(count, 0)", MANY),
    ),
    *in_kernel(
        "append",
        ("tokens of one tile written apart", "tiles = (slots // tile_len)", "tiles = (slots // 1)", CHUNKS),
        (
            "tokens after the last block stored",
            "& (slots < num_blocks",
            "& (slots < 2 * num_blocks",
            IN_ANY_ORDER,
        ),
        (
            "the next chunk reads before this one is written",
            "for_leaders(False, lambda copy: copy.wait())",
            "pass",
            CHUNKS,
        ),
    ),
]
