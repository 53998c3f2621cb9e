"""The mutations of `rewrite`."""

from tests.mutants.mutations import in_module

TESTS = "operations/test_rewrite.py"
SHARED = f"{TESTS}::test_private_blocks_are_written_in_place_and_shared_ones_copied"
SCARCE = f"{TESTS}::test_scarce_blocks_go_in_the_order_of_the_entries"
BEHIND = f"{TESTS}::test_published_blocks_behind_a_copied_one_are_copied_too"
CELL = "kinds/test_kinds.py::test_a_cell[full-rewrite]"
LOST = "kinds/test_kinds.py::test_a_cell[window-rewrite]"

MUTATIONS = [
    *in_module(
        "operations/rewrite",
        ("a shared block is written anew", "block_pool.ref_counts(pool, blocks) > 1", "False", SHARED),
        ("a published block is written anew", "is_written & (is_published |", "is_written & (", BEHIND),
        (
            "children of a copied block stay published",
            "is_published & has_broken",
            "False & has_broken",
            BEHIND,
        ),
        (
            "a private block is copied before it is written anew",
            "_pool.ref_counts(pool, blocks) > 1",
            "_pool.ref_counts(pool, blocks) > 0",
            SHARED,
        ),
        ("rows that rewrite take no block in turn", "jnp.where(row_ok, left, free)", "free", SCARCE),
        ("a repeated index is written anew", "indices[:, 1:] <= indices", "indices[:, 1:] < indices", CELL),
        (
            "an index outside is written anew",
            "(indices >= context_len[:, None])",
            "(indices > context_len[:, None])",
            CELL,
        ),
        (
            "a token whose window left is written anew",
            "<= indices) & (entries",
            "< indices - 99) & (entries",
            LOST,
        ),
        (
            "tokens that are written anew are taken for a run",
            "is_contiguous=False",
            "is_contiguous=True",
            CELL,
        ),
        (
            "a row that rewrites keeps its count of published blocks",
            "min_at(control.num_published, rows, first_copied)",
            "control.num_published",
            BEHIND,
        ),
    ),
]
