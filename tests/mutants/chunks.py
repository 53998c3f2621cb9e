"""The mutations of `store_chunk`, `find_chunks`, `compose` and what they rest on."""

from tests.mutants.mutations import in_module

ROWS, ARGUMENTS = "chunks/test_chunks.py", "chunks/test_chunk_arguments.py"
PLACES = f"{ROWS}::test_chunks_stand_at_any_place_of_a_row[group]"
IN_PLACE = f"{ROWS}::test_chunks_that_stay_in_place_are_the_same_bit_for_bit"
SHARED = f"{ROWS}::test_a_chunk_shares_the_whole_blocks_of_its_span"
REFUSED = f"{ROWS}::test_what_cannot_be_composed_is_said_and_changes_nothing"
PUBLISHED = f"{ROWS}::test_a_composed_row_publishes_what_is_in_front_alone"
FOUND = f"{ROWS}::test_chunks_are_found_by_all_their_tokens_in_their_namespace"
SCARCE = f"{ROWS}::test_scarce_blocks_and_places_go_in_entry_order"
SCRUBBED = f"{ROWS}::test_scrubbing_a_namespace_forgets_its_chunks_and_no_others"
BY_KIND = (
    "chunks/test_chunks_by_kind.py::test_windows_and_latents_are_composed_with_what_the_next_token_reads"
)
NOT_STORED = f"{ROWS}::test_what_cannot_be_stored_is_said_and_changes_nothing"
WINDOWS = "chunks/test_chunk_scripts.py::test_a_random_script_of_windows[0]"
PREFIXES = "chunks/test_chunk_scripts.py::test_a_random_script_of_rows_that_share_prefixes[1]"
SCRIPT = "chunks/test_chunk_scripts.py::test_a_random_script[1]"
ROTATED = f"{ARGUMENTS}::test_keys_are_rotated_by_a_table_of_float64"

MUTATIONS = [
    *in_module(
        "chunks/compose_chunks",
        ("composed keys move back", "starts - get_at(chunks.start", "get_at(chunks.start", PLACES),
        (
            "chunks of another namespace are composed",
            "(is_chunk & chunks.owned_by(",
            "(is_chunk | chunks.owned_by(",
            REFUSED,
        ),
        ("chunks may overlap", "is_bad = overlaps.any(axis=(1, 2)) | ", "is_bad = ", REFUSED),
    ),
    *in_module(
        "chunks/composed_columns",
        (
            "a chunk begins where its first block does",
            "remainder(first, group.block_size) + places",
            "places",
            PLACES,
        ),
        (
            "chunks are written into blocks of others",
            "is_written & ~(is_last_owner & ~block_pool.is_published(pool, entries))",
            "is_written & (entries == pool.num_blocks)",
            PLACES,
        ),
        (
            "rows lack nothing that a chunk lacks",
            "lacks_sinks | (first > group",
            "lacks_sinks & (first > group",
            BY_KIND,
        ),
        (
            "chunks are written into published blocks",
            "& ~block_pool.is_published(pool, entries))",
            ")",
            PREFIXES,
        ),
        ("a composed window has no sinks", "| (columns < group.num_sink_blocks)\n", "\n", BY_KIND),
        (
            "what leaves a window is not counted",
            "jnp.sum(is_left & is_last_owner",
            "jnp.sum(is_left & ~is_left",
            WINDOWS,
        ),
        (
            "a window keeps what chunks lack",
            "jnp.maximum(first, jnp.max(",
            "jnp.minimum(first, jnp.max(",
            BY_KIND,
        ),
    ),
    *in_module(
        "blocks/span_moves",
        ("no chunk is rotated", "name in rotated_features:", "name in {}:", PLACES),
    ),
    *in_module(
        "layers/latent_attention",
        (
            "all of a latent is rotated",
            "slice(self.latent_dim, None)}",
            "slice(self.latent_dim - 1, None)}",
            BY_KIND,
        ),
    ),
    *in_module(
        "chunks/store_chunk",
        (
            "chunks are stored of what a window lost",
            "is_read & (entries == pool.num_blocks)",
            "is_read & (entries < 0)",
            BY_KIND,
        ),
        (
            "a chunk has more tokens than its name",
            "max_len=tokens.shape[1]",
            "max_len=name.shape[1]",
            NOT_STORED,
        ),
        ("a chunk does not own what it shares", "block_pool.share(pool, shared)", "pool", SHARED),
        ("edges of chunks are shared", "is_in & is_whole & ", "is_in & ", SHARED),
        ("equal chunks of a call are two", "wants = is_new & (leader == order)", "wants = is_new", SCARCE),
    ),
    *in_module(
        "chunks/stored_chunks",
        (
            "chunks are found in any namespace",
            "is_equal &= (self.namespace[None]",
            "(self.namespace[None]",
            FOUND,
        ),
        (
            "chunks are found by some token",
            "tokens[:, None]).all(axis=-1)",
            "tokens[:, None]).any(axis=-1)",
            FOUND,
        ),
    ),
    *in_module(
        "operations/commit",
    ),
    *in_module(
        "compression/drop_tokens",
        (
            "dropping forgets where chunks stand",
            "config.hooks.move(control, plan.rows, plan.holes.prefix_len)",
            "control",
            SCRIPT,
        ),
    ),
    *in_module(
        "compression/compress_rows",
        (
            "compressing forgets where chunks stand",
            "config.hooks.move(control, plan.rows, prefix_len)",
            "control",
            SCRIPT,
        ),
    ),
    *in_module(
        "operations/scrub",
    ),
    *in_module(
        "blocks/key_rotation",
        ("keys never move back", "jnp.where((distance < 0)", "jnp.where((distance > 2**30)", ROTATED),
    ),
    *in_module(
        "chunks/compose_chunks",
        (
            "a composed row is a plain text",
            "set_at(chunks.first_composed, rows, first)",
            "chunks.first_composed",
            PLACES,
        ),
    ),
    *in_module(
        "chunks/stored_chunks",
        (
            "composed tokens are published",
            "jnp.where(first > 0, jnp.minimum(length, first - 1), length)",
            "length",
            PUBLISHED,
        ),
    ),
    *in_module(
        "chunks/store_chunk",
        (
            "composed tokens become chunks",
            "most = prefix_len(control, seq_ids, most, config)",
            "",
            IN_PLACE,
        ),
    ),
    *in_module(
        "operations/scrub",
        (
            "scrubbing takes blocks of chunks",
            "is_kept.at[of_others].set(True",
            "is_kept.at[of_others].min(True",
            SCRUBBED,
        ),
    ),
]
