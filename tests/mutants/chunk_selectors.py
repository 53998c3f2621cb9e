"""The mutations of what is computed again of composed chunks: selectors, attention and formulas."""

from tests.mutants.mutations import in_module

SELECTOR, FORMULAS = "core/test_chunk_selector.py", "core/test_cache_craft.py"
CHOSEN = f"{SELECTOR}::test_the_highest_scores_are_chosen_and_of_equal_ones_the_first"
NAMED = f"{SELECTOR}::test_each_selector_looks_at_what_it_is_named_after"
OWN = f"{SELECTOR}::test_a_selector_of_ones_own_is_checked"
BY_HAND = f"{FORMULAS}::test_three_chunks_by_hand"
PAIRS = f"{FORMULAS}::test_pairs_of_four_chunks_count_by_their_order"
ZERO = f"{FORMULAS}::test_what_is_zero"
ROUNDED = f"{FORMULAS}::test_a_share_is_rounded_up_and_no_further"
BETWEEN = "attention/test_chunk_attention.py::test_attention_between_chunks_is_that_of_each_pair_of_tokens"
KNOWN = "attention/test_chunk_attention.py::test_statistics_are_of_the_chunks_in_front_in_their_order"
VARIANTS = "operations/test_chunk_variants.py"
SCRIPT = f"{VARIANTS}::test_a_random_script_of_variants"
FITS = f"{VARIANTS}::test_the_variant_that_fits_best_is_found"
ORDER = f"{VARIANTS}::test_the_least_uses_times_tokens_go_first_and_then_the_oldest_use"
EVICTED = f"{VARIANTS}::test_chunks_are_evicted_for_blocks_that_nobody_else_holds"
OF_BOTH = f"{VARIANTS}::test_a_block_of_two_chunks_is_free_once_both_are_gone"
DIGESTS = f"{VARIANTS}::test_digests_are_of_the_tokens_alone"
FOUND_BROKEN = "inspect/test_chunk_invariants.py::test_broken_stores_are_found"
OF_TOKENS = (
    "operations/test_chunk_metadata.py::test_attention_is_that_of_each_token_when_the_chunk_was_computed"
)
DEVIATION = "attention/test_chunk_deviation.py::test_deviations_stand_at_the_places_of_the_tokens"
NO_COPY = "attention/test_chunk_deviation.py::test_a_step_that_looks_and_writes_copies_no_pool"
DESCRIBED = "operations/test_chunk_metadata.py::test_tokens_of_chunks_are_described_at_their_places"

MUTATIONS = [
    *in_module(
        "core/select_tokens",
        ("NaN is never computed again", "jnp.isnan(scores), jnp.inf", "jnp.isnan(scores), -jnp.inf", CHOSEN),
        ("minus infinity is computed again", ".is_token & (scores > -jnp.inf)", ".is_token", CHOSEN),
        ("infinity counts as any score", "(rank < num) | (scores == jnp.inf)", "(rank < num)", CHOSEN),
        (
            "too many are cut by place",
            "_ranks(row, scores, is_chosen)",
            "_ranks(row, row, is_chosen)",
            CHOSEN,
        ),
        ("chunks are one part of a row", "_ranks(chunks.nth_chunk, ", "_ranks(row, ", CHOSEN),
        ("ranks count from the row's start", "jnp.where(is_first, places, 0)", "0 * places", CHOSEN),
        ("the lowest scores are chosen", "part, -scores, places)", "part, scores, places)", CHOSEN),
    ),
    *in_module(
        "core/chunk_selector",
        ("the last tokens are the first", "return -chunks.place", "return chunks.place", NAMED),
    ),
    *in_module(
        "core/cache_craft",
        (
            "what is gone counts as common",
            "is_common = new_order >= 0",
            "is_common = new_order >= -1",
            BY_HAND,
        ),
        ("pairs in order are turned", "new_order[..., :, None] >", "new_order[..., :, None] <", BY_HAND),
        ("order does not matter", "return beta * (1 - gamma)", "return beta", BY_HAND),
        ("pairs count twice", "jnp.sum(mask & (first < second)", "jnp.sum(mask & (first != second)", PAIRS),
        ("nothing in front is no overlap", "jnp.where(total > 0, total, 1), 1)", "1, 0)", ZERO),
        (
            "more than all is computed again",
            "jnp.minimum(alpha * impact * (1 - overlap), 1)",
            "alpha * impact * (1 - overlap)",
            ZERO,
        ),
        ("a rounded share adds a token", "(1 - 2**-21)", "(1 + 2**-21)", ROUNDED),
    ),
    *in_module(
        "attention/chunk_attention",
        ("chunks are outside of themselves", "first = jnp.sum(", "first = places + 0 * jnp.sum(", BETWEEN),
        ("a chunk gives to itself as to others", "jnp.where(is_own, 0, pairs)", "pairs", BETWEEN),
        ("heads are summed", "(jnp.float32).mean(axis=1)", "(jnp.float32).sum(axis=1)", BETWEEN),
        ("chunks have no end", "(behind < lengths[:, None])", "(behind < 99)", BETWEEN),
        (
            "chunks stand as the caller lists them",
            "order = jnp.argsort(jnp.where(lengths > 0, starts, jnp.iinfo(jnp.int32).max), axis=1)",
            "order = jnp.argsort(0 * starts, axis=1)",
            KNOWN,
        ),
        ("a chunk's own size is left out", "[:, None], axis=-1) / sizes", "[:, None], axis=-1)", KNOWN),
        ("no chunk at a place stands in front", "is_before &= (lengths > 0)[..., None]", "", KNOWN),
    ),
    *in_module(
        "operations/chunk_metadata",
        ("no chunk is exact", "is_exact = (starts == 0) &", "is_exact = (starts < 0) &", DESCRIBED),
        ("all chunks in front are exact", " & (get_at(chunks.start, chunk_ids, 0) == 0)", "", DESCRIBED),
        (
            "attention is that of the first tokens",
            "(chunk_id, place_in_chunk)",
            "(chunk_id, 0 * chunk_id)",
            OF_TOKENS,
        ),
    ),
    *in_module(
        "core/chunk_stats",
        ("0 is a chunk in front", "is_same &= (stats.before != 0).any(axis=-1)[..., None]", "", SCRIPT),
        ("nothing known is nothing to do", "jnp.where(stats.b > 0, share, 1)", "share", FITS),
    ),
    *in_module(
        "core/chunks",
        ("the worst variant is found", "lax.sort((share, -num", "lax.sort((-share, -num", FITS),
        ("few in front again fit best", "(share, -num_common,", "(share, num_common,", SCRIPT),
        ("uses of chunks are not counted", ".add(jnp.uint32(1), mode", ".add(jnp.uint32(0), mode", SCRIPT),
    ),
    *in_module(
        "operations/chunk_names",
        (
            "the same variant is kept twice",
            "is_namesake & _is_same(before[:, None], before[None])",
            "is_namesake & jnp.eye(asks.size, dtype=bool)",
            SCRIPT,
        ),
        (
            "a name has any number of variants",
            "has_room = num_there + num_before <",
            "has_room = 0 * num_before <",
            SCRIPT,
        ),
        ("variants of a call do not count", "num_there + num_before <", "num_there <", SCRIPT),
        ("all variants are the same", "is_there & (before is None or", "is_there & (True or", SCRIPT),
    ),
    *in_module(
        "operations/store_chunk",
        (
            "when a chunk was stored is not known",
            "set_at(chunks.last_used, plan.new_ids, control.clock)",
            "chunks.last_used",
            SCRIPT,
        ),
        (
            "statistics are those of other chunks",
            "lambda old, new: set_at(old, plan.new_ids, new)",
            "lambda old, new: set_at(old, plan.new_ids[::-1], new)",
            SCRIPT,
        ),
    ),
    *in_module(
        "operations/free_chunks",
        (
            "statistics outlive their chunks",
            "lambda values: set_at(values, chunk_ids, 0)",
            "lambda values: values if values.ndim == 3 else set_at(values, chunk_ids, 0)",
            SCRIPT,
        ),
    ),
    *in_module(
        "operations/evict_chunks",
        (
            "chunks to keep are evicted",
            "set_at(chunks.length > 0, keep, False)",
            "chunks.length > 0",
            EVICTED,
        ),
        ("the chunk used last goes first", "value, ~age, ids", "value, age, ids", ORDER),
        ("length has no value", " * chunks.length.astype(jnp.float32)", "", ORDER),
        (
            "all go where that is too few",
            "jnp.where(num_evicted > chunks.num_chunks, 0, num_evicted)",
            "jnp.minimum(num_evicted, chunks.num_chunks)",
            SCRIPT,
        ),
        (
            "blocks that rows hold are free",
            "(num_holding == block_pool.ref_counts(pool, ids))",
            "(num_holding > 0)",
            EVICTED,
        ),
        (
            "blocks of two chunks never are free",
            "(num_holding == block_pool.ref_counts(pool, ids))",
            "(block_pool.ref_counts(pool, ids) == 1)",
            OF_BOTH,
        ),
    ),
    *in_module(
        "operations/chunk_digests",
        ("padding has a digest", "jnp.where(is_token, hashes, 0)", "hashes", DIGESTS),
    ),
    *in_module(
        "inspect/chunk_invariants",
        (
            "broken variants are fine",
            "if max_variants > 1 and behind in seen:",
            "if max_variants > 9 and behind in seen:",
            FOUND_BROKEN,
        ),
    ),
    *in_module(
        "attention/chunk_deviation",
        (
            "rows that fail deviate",
            "jnp.where(nth < step.query_len[:, None], places, old.shape[1])",
            "places",
            DEVIATION,
        ),
        (
            "deviations are of the first tokens",
            "set_at(jnp.zeros(old.shape[:2], jnp.float32), (order, places)",
            "set_at(jnp.zeros(old.shape[:2], jnp.float32), (order, nth)",
            DEVIATION,
        ),
        (
            "rounding deviates",
            "new.astype(old.dtype).astype(jnp.float32) - ",
            "new.astype(jnp.float32) - ",
            DEVIATION,
        ),
        (
            "deviations are read after the write",
            "= read_first(deviations, cache)",
            "= deviations, cache",
            NO_COPY,
        ),
    ),
]
