"""The mutations of what is computed again of composed chunks: selectors, attention and eviction."""

from tests.mutants.mutations import in_module

SELECTOR = "chunks/test_chunk_selector.py"
CHOSEN = f"{SELECTOR}::test_the_highest_scores_are_chosen_and_of_equal_ones_the_first"
NAMED = f"{SELECTOR}::test_each_selector_looks_at_what_it_is_named_after"
OWN = f"{SELECTOR}::test_a_selector_of_ones_own_is_checked"
ROUNDED = f"{SELECTOR}::test_a_share_is_rounded_up_and_no_further"
IN_FRONT = "chunks/test_chunk_attention.py::test_attention_in_front_of_chunks_is_that_of_each_pair_of_tokens"
EVICT = "operations/test_evict_chunks.py"
SCRIPT = f"{EVICT}::test_a_random_script_of_uses_and_evictions"
ORDER = f"{EVICT}::test_the_least_uses_times_tokens_go_first_and_then_the_oldest_use"
EVICTED = f"{EVICT}::test_chunks_are_evicted_for_blocks_that_nobody_else_holds"
OF_BOTH = f"{EVICT}::test_a_block_of_two_chunks_is_free_once_both_are_gone"
FOUND_BROKEN = "chunks/test_chunk_invariants.py::test_broken_stores_are_found"
DEVIATION = "chunks/test_chunk_deviation.py::test_deviations_stand_at_the_places_of_the_tokens"
NO_COPY = "chunks/test_chunk_deviation.py::test_a_step_that_looks_and_writes_copies_no_pool"
DESCRIBED = "chunks/test_chunk_metadata.py::test_tokens_of_chunks_are_described_at_their_places"

MUTATIONS = [
    *in_module(
        "chunks/selected_tokens",
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
        ("a rounded share adds a token", "(1 - 2**-21)", "(1 + 2**-21)", ROUNDED),
    ),
    *in_module(
        "chunks/chunk_selector",
        ("the last tokens are the first", "return -chunks.place", "return chunks.place", NAMED),
    ),
    *in_module(
        "chunks/chunk_attention",
        ("chunks are outside of themselves", "first = jnp.sum(", "first = places + 0 * jnp.sum(", IN_FRONT),
        ("heads are summed", "(jnp.float32).mean(axis=1)", "(jnp.float32).sum(axis=1)", IN_FRONT),
        ("chunks have no end", "(behind < lengths[:, None])", "(behind < 99)", IN_FRONT),
    ),
    *in_module(
        "chunks/chunk_metadata",
        ("no chunk is exact", "is_exact = (starts == 0) &", "is_exact = (starts < 0) &", DESCRIBED),
        ("all chunks in front are exact", " & (get_at(chunks.start, chunk_ids, 0) == 0)", "", DESCRIBED),
    ),
    *in_module(
        "chunks/stored_chunks",
        ("uses of chunks are not counted", ".add(jnp.uint32(1), mode", ".add(jnp.uint32(0), mode", SCRIPT),
    ),
    *in_module(
        "chunks/store_chunk",
        (
            "when a chunk was stored is not known",
            "set_at(chunks.last_used, plan.new_ids, control.clock)",
            "chunks.last_used",
            SCRIPT,
        ),
    ),
    *in_module(
        "chunks/free_chunks",
    ),
    *in_module(
        "chunks/evict_chunks",
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
        "chunks/chunk_invariants",
    ),
    *in_module(
        "chunks/chunk_deviation",
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
    *in_module(
        "chunks/stored_chunks",
        (
            "two chunks may have one name",
            "names.setdefault(name, chunk) != chunk",
            "name in ()",
            FOUND_BROKEN,
        ),
        (
            "uses outlive their chunks",
            '"tokens", "length", "start", "namespace", "num_uses", "last_used"',
            '"tokens", "length", "start", "namespace", "last_used"',
            SCRIPT,
        ),
    ),
]
