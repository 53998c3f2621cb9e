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
        ("a name may be taken twice", "if name in _selectors:", "if name is _selectors:", OWN),
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
    ),
    *in_module(
        "operations/chunk_metadata",
        ("no chunk is exact", "is_exact = (starts == 0) &", "is_exact = (starts < 0) &", DESCRIBED),
        ("all chunks in front are exact", " & (get_at(chunks.start, chunk_ids, 0) == 0)", "", DESCRIBED),
    ),
]
