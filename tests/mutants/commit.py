"""The mutations of `commit`: blocks of one call that are equal, adoption, and chains that end."""

from tests.mutants.mutations import PREFIX_SCRIPT, in_module

CASES = "prefix/test_prefix_cases.py"
ONE_COPY = f"{CASES}::test_case_v_of_two_equal_computations_one_copy_remains[True]"
IN_CHUNKS = f"{CASES}::test_case_u_keys_built_in_pieces_equal_keys_built_at_once[7]"
FULL_BLOCKS = f"{CASES}::test_case_o_the_full_blocks_of_a_prompt_are_published_and_its_tail_is_not"
DRAFTS = f"{CASES}::test_drafts_that_are_taken_back_are_never_found"
REPEATED = f"{CASES}::test_case_bb_empty_prompts_and_duplicate_ids"

CALLS = "prefix/test_prefix_case_calls.py"
REVIVED_ONCE = f"{CALLS}::test_two_rows_that_adopt_a_cached_block_revive_it_once"
ADOPTED_ONCE = f"{CALLS}::test_forks_that_are_committed_together_adopt_a_block_once"

COLLISIONS = "prefix/test_prefix_collisions.py"
FOREIGN = f"{COLLISIONS}::test_case_cc_ten_thousand_prompts_with_a_hash_of_four_bits"
TOGETHER = f"{COLLISIONS}::test_rows_that_are_committed_together_collide[24]"
IN_BATCHES = f"{COLLISIONS}::test_rows_that_are_committed_together_collide[3]"
NOT_FOLLOWED = f"{COLLISIONS}::test_a_block_behind_one_that_collides_is_not_followed"
APART = f"{COLLISIONS}::test_equal_rows_of_namespaces_that_collide_stay_apart"
FULL_BUCKET = f"{COLLISIONS}::test_a_full_bucket_refuses_blocks_and_takes_them_later[True-2]"

PARTS = (
    "prefix/test_prefix_copies.py::"
    "test_a_row_holds_a_part_of_a_block_that_another_row_publishes[before it is published]"
)
WINDOWS_OF_EQUALS = (
    "prefix/test_prefix_windows.py::"
    "test_rows_of_equal_contents_that_are_committed_together_complete_each_other"
)
SMALL_BATCHES = "prefix/test_prefix_scripts.py::test_a_random_script_in_small_batches"
SWEEPS = "prefix/test_prefix_transforms.py::test_calls_that_change_nothing_sweep_nothing"

WHICH_BLOCKS = in_module(
    "operations/commit",
    (
        "queue not swept for what is published",
        "tuple(block_pool.sweep_queue(pool, pending.num_blocks > 0) for",
        "tuple(pool for",
        "prefix/test_eviction.py::test_a_policy_evicts_inside_jit_and_scan",
    ),
    (
        "queue swept by a call that changes nothing",
        "sweep_queue(pool, pending.num_blocks > 0)",
        "sweep_queue(pool, jnp.bool_(True))",
        SWEEPS,
    ),
    (
        "a block too many published",
        "context_len), 0), block_size)",
        "context_len), 0) + block_size - 1, block_size)",
        FULL_BLOCKS,
    ),
    ("final_len ignored", "jnp.minimum(final_len, context_len)", "context_len", DRAFTS),
    ("idle rows of all are committed", "((~control.is_active, Status.SKIPPED),)", "()", PREFIX_SCRIPT),
    (
        "idle rows are committed",
        "(is_idle, Status.SEQ_NOT_ACTIVE))",
        "(is_idle & False, Status.OK))",
        REPEATED,
    ),
    (
        "published blocks are published again",
        "jnp.maximum(num_full - num_published, 0), 0)",
        "num_full, 0)",
        IN_CHUNKS,
    ),
    (
        "a call's last block is left out",
        "is_entry = (place < pending.num_blocks)",
        "is_entry = (place < pending.num_blocks - 1)",
        FULL_BLOCKS,
    ),
    ("batches begin in front of the row", "jnp.maximum(first - row_start, 0)", "0", SMALL_BATCHES),
    ("batches begin with the row", "jnp.maximum(row_start - first, 0)", "row_start", SMALL_BATCHES),
    (
        "hashes go on from the root",
        "base = jnp.where((batch.before == nowhere)[:, None], root, get_at(index.block_hash, batch.before))",
        "base = root",
        IN_CHUNKS,
    ),
    ("rows' hashes go on from each other", " - get_at(up_to - added, batch.start)", "", ONE_COPY),
)

EQUAL_BLOCKS = in_module(
    "operations/commit",
    ("equal blocks both published", "is_first = is_new & (leader == order)", "is_first = is_new", ONE_COPY),
    (
        "followers are not compared with their leader",
        "jnp.where(is_new, is_like_leader,",
        "jnp.where(is_new, has_way[leader],",
        TOGETHER,
    ),
    (
        "tokens of followers are not compared",
        "(tokens == tokens[leader]).all(axis=-1) & (parent == parent[leader])",
        "(parent == parent[leader])",
        TOGETHER,
    ),
    (
        "parents of followers are not compared",
        ".all(axis=-1) & (parent == parent[leader])",
        ".all(axis=-1)",
        TOGETHER,
    ),
    (
        "namespaces of followers are not compared",
        "is_like_leader &= (namespace == namespace[leader]).all(axis=-1) & has_way[leader]",
        "is_like_leader &= has_way[leader]",
        APART,
    ),
    (
        "what is found is not compared",
        "prefix_index.matches(index, published, content))",
        "published < nowhere)",
        FOREIGN,
    ),
    (
        "the parent is the block before, published or not",
        "jnp.roll(canonical, 1)",
        "jnp.roll(batch.block_ids, 1)",
        ONE_COPY,
    ),
    (
        "new blocks of a bucket take one place",
        "jnp.sum(goes_before, axis=1, dtype=jnp.int32)",
        "0 * jnp.sum(goes_before, axis=1, dtype=jnp.int32)",
        FULL_BUCKET,
    ),
)

CHAINS = in_module(
    "operations/commit",
    ("blocks without room published", ".all(axis=-1) & has_way[leader]", ".all(axis=-1)", FULL_BUCKET),
    (
        "blocks behind the end of a chain published",
        "is_done = batch.is_entry & ~is_bad",
        "is_done = batch.is_entry & is_good",
        TOGETHER,
    ),
    (
        "leaders behind the end of a chain are followed",
        "with_successors(is_bad | (is_new & is_bad[leader]))",
        "with_successors(is_bad)",
        NOT_FOLLOWED,
    ),
    (
        "chains that ended go on in the next batch",
        "& ~get_at(is_cut, row)",
        "& (get_at(is_cut, row) | True)",
        IN_BATCHES,
    ),
    ("ends of chains are forgotten", "set_at(is_cut, cut_rows, True)", "is_cut", IN_BATCHES),
    (
        "parts of blocks that others publish",
        "return _note_published_tails(control, config), status",
        "return control, status",
        PARTS,
    ),
    (
        "windows of rows with equal contents left out",
        "control, found.is_done, batch.seq_ids,",
        "control, found.is_new, batch.seq_ids,",
        WINDOWS_OF_EQUALS,
    ),
)

ADOPTION = in_module(
    "operations/commit",
    (
        "adopted in the row alone that commits",
        "is_held = mask[None] & (entries",
        "is_held = mask[None] & (jnp.arange(entries.shape[0])[:, None] == batch.seq_ids[None]) & (entries",
        ADOPTED_ONCE,
    ),
    (
        "a block of two rows is adopted twice",
        "mask = is_exchanged & ~_stands_before(batch.block_ids, is_exchanged)",
        "mask = is_exchanged",
        ADOPTED_ONCE,
    ),
    (
        "owners of adopted blocks are lost",
        "add_at(ref_count, new, num_owners)",
        "ref_count",
        ADOPTED_ONCE,
    ),
    (
        "adopted blocks are lost",
        "return block_pool.put_on_free_stack(pool, old, mask)",
        "return pool",
        ONE_COPY,
    ),
    ("a revived block stays cached", "num_cached - num_true(is_revived)", "num_cached", REVIVED_ONCE),
    (
        "a block that two rows revive counts twice",
        "is_revived &= ~_stands_before(new, is_revived)",
        "",
        REVIVED_ONCE,
    ),
    (
        "blocks are exchanged only where all are",
        "is_exchanged.any(), lambda",
        "is_exchanged.all(), lambda",
        ONE_COPY,
    ),
    (
        "adoptions are not counted",
        "{Counter.ADOPTIONS: num_adopted}",
        "{Counter.ADOPTIONS: 0 * num_adopted}",
        ONE_COPY,
    ),
)

MUTATIONS = [*WHICH_BLOCKS, *EQUAL_BLOCKS, *CHAINS, *ADOPTION]
