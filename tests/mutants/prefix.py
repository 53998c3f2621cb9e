"""The mutations of the prefix cache; those of `commit` are in a file of their own."""

from tests.mutants.mutations import PREFIX_SCRIPT, in_module

SCRIPT = PREFIX_SCRIPT
GROUPS = "prefix/test_prefix_windows.py::test_a_short_random_script_of_three_groups"
ROLLED = "prefix/test_prefix_windows.py::test_case_aa_a_rolled_window_serves_only_what_is_still_there"
FORKS = (
    "prefix/test_prefix_windows.py::"
    "test_forks_that_are_committed_together_do_not_both_keep_the_block_they_share"
)
LINKED_ONCE = (
    "prefix/test_prefix_windows.py::test_of_equal_rows_that_are_committed_together_one_links_its_window"
)
LINKED_WHEN_FULL = "prefix/test_prefix_windows.py::test_blocks_are_linked_once_they_are_full"
WHOLE_BLOCKS = "prefix/test_prefix_windows.py::test_hits_are_whole_blocks_of_every_group"
COLLISIONS = "prefix/test_prefix_collisions.py::test_case_cc_ten_thousand_prompts_with_a_hash_of_four_bits"
IN_BATCHES = "prefix/test_prefix_scripts.py::test_a_random_script_in_small_batches"
INDEX = "inspect/test_check_invariants.py::test_a_broken_index_is_found"

EVICTION = "prefix/test_eviction.py"
IN_ORDER = f"{EVICTION}::test_the_least_are_taken_in_order"
LAST_USER = f"{EVICTION}::test_the_least_valuable_block_goes[priority-requests2-gone2]"
LEAST_USED = f"{EVICTION}::test_the_least_used_block_goes[lfu-3-prompts3-gone3]"
MOST_VALUABLE_CHILD = f"{EVICTION}::test_a_parent_counts_as_its_most_valuable_child[1]"
TWO_CHILDREN = f"{EVICTION}::test_a_parent_of_two_does_not_compete_while_one_is_left"
HELD_PARENT = f"{EVICTION}::test_a_parent_that_a_row_holds_does_not_compete"

MUTATIONS = [
    *in_module(
        "prefix/namespace",
        (
            "a namespace within itself is the default one",
            "words = np.concatenate([outer, inner])",
            "words = outer ^ inner\n    if not words.any():\n        return words\n    words = words",
            "engine/test_namespaces.py::test_no_two_pairs_share_a_namespace",
        ),
    ),
    *in_module(
        "prefix/partial_hit",
        (
            "a prompt begins inside a block of another namespace",
            "is_child &= (index.namespace == namespace[None]).all(axis=1)",
            "",
            "prefix/test_partial_hits.py::test_nothing_is_found_in_another_namespace_nor_unasked",
        ),
        (
            "a row that fills the pool begins inside a block, and its copy has no room",
            "most_held < pool.num_blocks",
            "most_held <= pool.num_blocks",
            "prefix/test_partial_hits.py::test_a_pool_of_exactly_the_row_takes_whole_hits_alone",
        ),
        (
            "a hit ends inside an item",
            "jnp.where(is_whole & (lengths <= num_same[best]), lengths, 0)",
            "jnp.where(lengths <= num_same[best], lengths, 0)",
            "prefix/test_partial_hits.py::test_nothing_is_found_in_another_namespace_nor_unasked",
        ),
        (
            "a child of any block counts",
            "pool.cached.is_published & (index.parent == parent)",
            "pool.cached.is_published",
            "prefix/test_partial_hits.py::test_a_random_script[full]",
        ),
    ),
    *in_module(
        "operations/allocate",
        (
            "a block is reserved where one that is hit in part stands",
            "is_new = (columns >= first + num_partial[:, None])",
            "is_new = (columns >= first)",
            "prefix/test_partial_hits.py::test_a_prompt_begins_inside_a_block_and_its_next_step_copies_it",
        ),
        (
            "the copy of a block that is hit in part is not needed",
            "num_blocks -= quotient(num_cached, group.block_size)",
            "num_blocks -= quotient(num_cached, group.block_size) + num_partial",
            "prefix/test_partial_hits.py::test_the_copy_is_needed_and_not_held",
        ),
        (
            "the block that is hit in part counts as the row's own",
            ".block_size) + num_partial,",
            ".block_size),",
            "prefix/test_partial_hits.py::test_a_prompt_begins_inside_a_block_and_its_next_step_copies_it",
        ),
    ),
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
        "arrays/registry",
        (
            "a kept decorator gives two functions one name",
            "self._require_new(name)  # a decorator",
            "# a decorator",
            "prefix/test_eviction.py::test_registration_refuses_what_cannot_work",
        ),
        (
            "a name may be taken twice",
            "if name in self.names:",
            "if name is self.names:",
            "chunks/test_chunk_selector.py::test_a_selector_of_ones_own_is_checked",
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
        (
            "a trip evicts all that is left",
            "return control, left - num_evicted",
            "return control, 0 * left",
            IN_BATCHES,
        ),
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
        "prefix/prefix_index",
        (
            "hits change no priority",
            "priorities = jnp.broadcast_to(priority[:, None], block_ids.shape)",
            "priorities = get_at(history.priority, block_ids)",
            LAST_USER,
        ),
    ),
    *in_module(
        "prefix/block_metadata",
        (
            "uses are not counted by policies",
            "add_at(history.num_hits, block_ids, 1)",
            "history.num_hits",
            LEAST_USED,
        ),
        (
            "children that went are counted",
            "add_at(history.num_children, parents, change)",
            "add_at(history.num_children, parents, abs(change))",
            MOST_VALUABLE_CHILD,
        ),
    ),
    *in_module(
        "prefix/victim_heap",
        (
            "a group's least stays in front",
            "least=set_at(heap.least, group, least)",
            "least=heap.least",
            IN_ORDER,
        ),
        (
            "recency goes before the key",
            "for values in (key, recency):",
            "for values in (recency, key):",
            IN_ORDER,
        ),
        ("taken though nobody asks", "is_taken = is_wanted & ~heap", "is_taken = ~heap", IN_ORDER),
        (
            "whoever is out is taken again",
            "jnp.where(jnp.arange(_GROUP, dtype=jnp.int32) == place, is_out, outs)",
            "outs",
            IN_ORDER,
        ),
        (
            "the first group has the least",
            "block_id = group * _GROUP + heap.least[group]",
            "block_id = 0 * group * _GROUP + heap.least[group]",
            IN_ORDER,
        ),
    ),
    *in_module(
        "prefix/eviction",
        (
            "a parent competes with its children",
            "(pool.ref_count == 0) & (index.history.num_children == 0)",
            "(pool.ref_count == 0)",
            MOST_VALUABLE_CHILD,
        ),
        (
            "a parent competes before its last child went",
            "get_at(index.history.num_children, parents, 1) == 0",
            "get_at(index.history.num_children, parents, 1) <= 1",
            TWO_CHILDREN,
        ),
        (
            "a parent that a row holds competes",
            "competes &= block_pool.has_no_owner(pool.ref_count, parents)",
            "",
            HELD_PARENT,
        ),
    ),
    *in_module(
        "prefix/group_links",
        (
            "equal rows link both their windows",
            "is_linked &= ~_is_linked_before(is_linked, canonical)",
            "",
            LINKED_ONCE,
        ),
    ),
]
