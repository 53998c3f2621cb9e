"""The mutations of the prefix cache; see `mutations`."""

from tests.mutants.mutations import in_module

SCRIPT = "prefix/test_prefix_scripts.py::test_a_short_random_script"
GROUPS = "prefix/test_prefix_windows.py::test_a_short_random_script_of_three_groups"
ROLLED = "prefix/test_prefix_windows.py::test_case_aa_a_rolled_window_serves_only_what_is_still_there"
FORKS = (
    "prefix/test_prefix_windows.py::"
    "test_forks_that_are_committed_together_do_not_both_keep_the_block_they_share"
)
LINKED_WHEN_FULL = "prefix/test_prefix_windows.py::test_blocks_are_linked_once_they_are_full"
WHOLE_BLOCKS = "prefix/test_prefix_windows.py::test_hits_are_whole_blocks_of_every_group"
COLLISIONS = "prefix/test_prefix_collisions.py::test_case_cc_ten_thousand_prompts_with_a_hash_of_four_bits"
FULL_BUCKET = "prefix/test_prefix_collisions.py::test_a_full_bucket_refuses_blocks_and_takes_them_later"
IN_BATCHES = "prefix/test_prefix_scripts.py::test_a_random_script_in_small_batches"
PARTS = "prefix/test_prefix_copies.py::test_a_row_holds_a_part_of_a_block_that_another_row_publishes"
TOGETHER = "prefix/test_prefix_collisions.py::test_rows_that_are_committed_together_collide"
COMMON = "decoding/test_generate_prefix.py::test_prompts_of_one_call_share_what_they_have_in_common"
SHARED_TAIL = "prefix/test_prefix_copies.py::test_a_copy_overwrites_what_two_earlier_ones_read"
INDEX = "inspect/test_check_invariants.py::test_a_broken_index_is_found"
LATER = "decoding/test_generate_prefix.py::test_a_later_call_finds_prompts_and_answers_of_an_earlier_one"

MUTATIONS = [
    *in_module(
        "operations/lookup",
        (
            "a prompt that is refused is found",
            "(num_tokens <= min(",
            "(num_tokens <= max(",
            "prefix/test_prefix_scripts.py::test_lookup_finds_nothing_where_the_length_is_refused",
        ),
    ),
    *in_module(
        "prefix/item_tokens",
        (
            "items of all sizes are one",
            'num_tokens.to_bytes(8, "little")',
            'b""',
            "prefix/test_prefix_items.py::test_an_item_of_another_size_is_another_item",
        ),
    ),
    *in_module(
        "core/eviction_policy",
        (
            "one name for two policies",
            "_require_new(name)\n        _policies",
            "_policies",
            "prefix/test_eviction.py::test_registration_refuses_what_cannot_work",
        ),
    ),
    *in_module(
        "prefix/prefix_index",
        (
            "tokens of a hit not compared",
            "is_same &= (get_at(index.block_tokens",
            "is_same |= (get_at(index.block_tokens",
            COLLISIONS,
        ),
        (
            "parent of a hit not compared",
            "block_ids) == content.parent",
            "block_ids) == index.parent[block_ids]",
            COLLISIONS,
        ),
        (
            "the last token is a hit too",
            "quotient(jnp.maximum(num_tokens - 1, 0), block_size)",
            "quotient(num_tokens, block_size)",
            SCRIPT,
        ),
        (
            "evicted blocks stay in the index",
            "jnp.where(block_ids < nowhere, buckets,",
            "jnp.where(False, buckets,",
            SCRIPT,
        ),
        (
            "every block in the bucket's first place",
            "return first_true(is_it)",
            "return 0 * first_true(is_it)",
            SCRIPT,
        ),
    ),
    *in_module(
        "prefix/content_hash",
        ("the namespace left out of the root", "value ^ namespace[..., word, None]", "value", SCRIPT),
        ("positions left out of the hash", "_mix(positions[..., None, :] * odd + key)", "_mix(key)", SCRIPT),
    ),
    *in_module(
        "blocks/block_pool",
        (
            "queue not swept for what is reused",
            "sweep_queue(_note_peak(pool), num_revived > 0)",
            "_note_peak(pool)",
            "prefix/test_prefix_transforms.py::test_calls_that_change_nothing_sweep_nothing",
        ),
        ("a block too many wiped", "order < num_taken", "order <= num_taken", SCRIPT),
        ("wiped blocks mixed up", "get_at(taken, rank)", "get_at(taken, 0 * rank)", SCRIPT),
    ),
    *in_module(
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
            "prefix/test_prefix_transforms.py::test_calls_that_change_nothing_sweep_nothing",
        ),
        (
            "windows of rows with equal contents left out",
            "return control, is_left & ~mask",
            "return control, is_left & False",
            "prefix/test_prefix_windows.py::test_rows_of_equal_contents_that_are_committed_together_complete_each_other",
        ),
        (
            "a block too many published",
            "context_len), 0), block_size)",
            "context_len), 0) + block_size - 1, block_size)",
            SCRIPT,
        ),
        ("final_len ignored", "jnp.minimum(final_len, context_len)", "context_len", SCRIPT),
        ("idle rows of all are committed", "((~control.is_active, Status.SKIPPED),)", "()", SCRIPT),
        (
            "a batch's last block is left out",
            "num_blocks - first, size)",
            "num_blocks - first - 1, size)",
            SCRIPT,
        ),
        (
            "new blocks that meet in a bucket are not compared",
            "== own_bucket[None]) > order.shape[0]",
            "== own_bucket[None]) > order.shape[0] + 2",
            TOGETHER,
        ),
        ("blocks without room published", "~(is_new & has_way)", "~is_new", FULL_BUCKET),
        ("equal blocks both published", "is_first = is_new & ~follows", "is_first = is_new", SCRIPT),
        (
            "followers are not compared with their leader",
            "jnp.where(follows, is_like_leader, has_way)",
            "follows | has_way",
            TOGETHER,
        ),
        (
            "what is found is not compared",
            "prefix_index.matches(index, found, content), is_good)",
            "True, is_good)",
            COLLISIONS,
        ),
        (
            "rows that end in the root have another's",
            "(batch.is_entry & is_root).any(), from_root",
            "jnp.bool_(False), from_root",
            SCRIPT,
        ),
        ("batches begin in front of the row", "jnp.maximum(first - row_start, 0)", "0", IN_BATCHES),
        ("batches begin with the row", "jnp.maximum(row_start - first, 0)", "row_start", IN_BATCHES),
        (
            "chains that ended go on in the next batch",
            "& ~get_at(is_cut, row)",
            "& (get_at(is_cut, row) | True)",
            TOGETHER,
        ),
        (
            "parts of blocks that others publish",
            "return skip_unless(is_shared, ",
            "return skip_unless(is_shared & False, ",
            PARTS,
        ),
        (
            "the parent is the block before, published or not",
            "jnp.roll(canonical, 1)",
            "jnp.roll(batch.block_ids, 1)",
            SCRIPT,
        ),
        (
            "adopted in the row alone that commits",
            "is_held = mask[None] & (entries",
            "is_held = mask[None] & (jnp.arange(entries.shape[0])[:, None] == batch.row) & (entries",
            SCRIPT,
        ),
        (
            "adopted blocks are lost",
            "return block_pool.put_on_free_stack(pool, old, mask)",
            "return pool",
            SCRIPT,
        ),
        ("a revived block stays cached", "num_cached - num_true(is_revived)", "num_cached", SCRIPT),
    ),
    *in_module(
        "prefix/victim_heap",
        (
            "the leader of a group stays in front",
            "group[None], first + _least(members)",
            "group[None], block_id",
            "prefix/test_eviction.py::test_the_least_are_taken_in_order",
        ),
        (
            "a tier is evicted to its end before what joins the one before it",
            "(leading.tier[group] <= last_tier)",
            "(leading.tier[group] < OUT)",
            "prefix/test_prefix_copies.py::test_a_parent_that_competes_only_later_goes_before_the_original_of_a_copy",
        ),
        (
            "a parent enters once per child that went",
            "remainder(members.tier, OUT) + out",
            "members.tier + (out or -OUT)",
            "prefix/test_eviction.py::test_a_parent_whose_children_go_together_goes_once",
        ),
    ),
    *in_module(
        "prefix/eviction",
        (
            "the newest goes first",
            "is_cached & (rank < most)",
            "is_cached & (num_found - rank <= most)",
            SCRIPT,
        ),
        (
            "evicted block passed over",
            "first_true(stays).astype(jnp.uint32)",
            "1 + first_true(stays).astype(jnp.uint32)",
            SCRIPT,
        ),
        ("a trip evicts all that is left", "left - num_evicted", "jnp.zeros_like(left)", IN_BATCHES),
        ("evicts too little", "needs[group_id] - num_free, 0", "needs[group_id] - num_free - 1, 0", SCRIPT),
    ),
    *in_module(
        "prefix/group_links",
        (
            "one block for two of another group",
            "is_linked, marks = first_of_equal(links.indexed_ids, is_linked, ids)",
            "marks = links.indexed_ids",
            FORKS,
        ),
        (
            "a window that rolled is not missed",
            "is_usable &= num_missing[end] ==",
            "is_usable |= num_missing[end] ==",
            ROLLED,
        ),
        (
            "hits end inside blocks of other groups",
            "remainder(lengths, step)",
            "remainder(lengths, 1)",
            WHOLE_BLOCKS,
        ),
        (
            "links of evicted blocks stay",
            "(indexed_ids, slots), nowhere),",
            "(indexed_ids, slots), block_ids),",
            GROUPS,
        ),
        (
            "blocks that are not full are linked",
            "(column + 1) * group.block_size <=",
            "column * group.block_size <=",
            LINKED_WHEN_FULL,
        ),
    ),
    *in_module(
        "operations/extend_plan",
        (
            "a published block written by its owner",
            "| demand.is_tail_published\n            num_back",
            "\n            num_back",
            SCRIPT,
        ),
        (
            "published last blocks are not seen",
            "is_published = has_tail & (wish.num_published *",
            "is_published = has_tail & (0 *",
            SCRIPT,
        ),
        ("what is shared is taken at once", "return fits & ~is_shared & ", "return fits & ", SCRIPT),
        ("what is published is taken at once", "~is_shared & ~is_published,", "~is_shared,", SCRIPT),
        ("too few blocks are taken at once", "return fits & ~is_shared", "return ~is_shared", SCRIPT),
    ),
    *in_module(
        "operations/extend",
        (
            "tokens of a copied block forgotten",
            "set_at(block_tokens, dst[i], block_tokens[src[i]])",
            "block_tokens",
            SCRIPT,
        ),
        (
            "rows take at once what may be evicted for each other",
            "is_one_by_one | decision.must_take_turns",
            "is_one_by_one",
            "prefix/test_prefix_copies.py::test_linked_blocks_that_go_with_what_is_evicted",
        ),
        (
            "taken before it is known who takes turns",
            "is_decided = takes_turns == is_one_by_one",
            "is_decided = wish.wants.any() | True",
            "prefix/test_prefix_copies.py::test_linked_blocks_that_go_with_what_is_evicted",
        ),
        (
            "copies of an earlier turn forgotten",
            "jnp.where(mask, copies.num_copies + rank, tails.shape[0])",
            "jnp.where(mask, rank, tails.shape[0])",
            SHARED_TAIL,
        ),
        (
            "a row's last block evicted for its copy",
            "config, last=tails[config.indexed_group]",
            "config",
            "prefix/test_prefix_copies.py::test_case_dd_the_original_stays_cached_whatever_the_policy",
        ),
        (
            "copied blocks are published in the row",
            "return _forget_copied(control, wish, copies_tail, config), ",
            "return control, ",
            SCRIPT,
        ),
        ("taken although not at once", "opens & at_once & is_free for", "opens & is_free for", SCRIPT),
        ("taken although not free", "opens & at_once & is_free for", "opens & at_once for", SCRIPT),
        ("taken after eviction although not at once", "opens & at_once, *", "opens, *", SCRIPT),
        (
            "clock advances on an empty call with the index",
            "control.clock + grows.any().astype(jnp.uint32)",
            "control.clock + 1",
            SCRIPT,
        ),
        ("grows although not at once", "grows = wish.wants & at_once", "grows = wish.wants", SCRIPT),
        ("room made although not at once", "jnp.where(at_once, jnp.sum(", "jnp.where(True, jnp.sum(", SCRIPT),
        ("tokens not recorded", "step.slots[group_id], tokens, ", "step.slots[group_id], 0, ", SCRIPT),
    ),
    *in_module(
        "blocks/storage",
        (
            "gradient of a block copied to itself lost",
            ".set(jnp.zeros_like(moved)).at[layers + src[i]].add(moved)",
            ".set(0 * moved).at[layers + src[i]].add(0 * moved)",
            SHARED_TAIL,
        ),
    ),
    *in_module(
        "operations/rows",
        (
            "truncation leaves blocks published in the row",
            "return _count_published(control, row, config), status",
            "return control, status",
            SCRIPT,
        ),
        (
            "a cut block is not counted",
            "num_full + 1, num_published)",
            "num_published, num_published)",
            SCRIPT,
        ),
        (
            "the first blocks are evicted first",
            "jnp.where(is_dropped, entries, pool.num_blocks)[::-1]",
            "jnp.where(is_dropped, entries, pool.num_blocks)",
            SCRIPT,
        ),
    ),
    *in_module(
        "operations/allocate",
        (
            "reuse although it was not wanted",
            "jnp.where(prompt.reuse, found,",
            "jnp.where(True, found,",
            "prefix/test_prefix_scripts.py::test_reuse_can_be_declined",
        ),
    ),
    *in_module(
        "inspect/check_invariants",
        (
            "ids beyond nowhere are followed",
            "ids[(ids < 0) | (ids > nowhere)]",
            "ids[ids < 0]",
            INDEX,
        ),
        (
            "hashes not checked",
            'violations.append(f"block {block} has another hash',
            'str(f"block {block} has another hash',
            INDEX,
        ),
        ("published last blocks not checked", "and num_published[row] <= num_full:", "and False:", INDEX),
        (
            "buckets not checked",
            'violations.append(f"block {block} is in the wrong',
            'str(f"block {block} is in the wrong',
            INDEX,
        ),
    ),
    *in_module(
        "decoding/generate",
        ("prompts that share are computed together", "num_common > 0 and", "False and", COMMON),
    ),
    *in_module(
        "decoding/host",
        ("answers are not published", "cache, _ = commit(cache, published)", "pass", LATER),
    ),
]
