"""The mutations of layer kinds: which positions of a row stay, and how quantised layers store them."""

from tests.mutants.attention import PADDED, WINDOW
from tests.mutants.attention import SINKS as SINK_LOGITS
from tests.mutants.mutations import BOUNDED, GROUPED_HEADS, RESERVED, ROLLBACK, WINDOWS, in_module
from tests.mutants.operations import TRUNCATE

SINKS = f"{BOUNDED}[window 7, 5 sinks]"
AMONG_SINKS = f"{WINDOWS}::test_a_window_that_begins_among_the_sinks_and_was_given_back_behind_them_is_lost"
OFFSETS = "attention/test_offsets.py::test_keys_and_values_with_offsets_are_what_they_stand_for"
QUANTISED = "quantised/test_quantised_kind.py"
DECODED = f"{QUANTISED}::test_attention_is_that_to_the_decoded_values[padded]"
HALF_A_STEP = f"{QUANTISED}::test_a_number_is_off_by_half_a_step_of_the_range_of_its_vector_at_most"
SOURCES = "operations/test_sources.py"
ONE_BEHIND = f"{SOURCES}::test_a_row_without_blocks_is_as_it_was_and_a_smaller_one_behind_it_fits"
READ_BACK = f"{SOURCES}::test_sources_are_read_back_and_take_their_blocks_alone"
KEPT = f"{SOURCES}::test_a_row_takes_over_its_parent_s_source_and_keeps_it_when_it_is_cut"
SOURCE_STATUS = f"{SOURCES}::test_each_status"
SHARED = "layers/test_shared_layers.py"
NOT_FINITE = f"{QUANTISED}::test_what_is_not_finite_is_nan_in_its_row_and_head_alone"

MUTATIONS = [
    *in_module(
        "layers/span",
        (
            "window read from one token later",
            "length + 1 - self.window",
            "length + 2 - self.window",
            ROLLBACK,
        ),
        (
            "no look behind the sinks",
            "jnp.maximum(quotient(first_position, block_size), self.num_sink_blocks(block_size))",
            "quotient(first_position, block_size)",
            AMONG_SINKS,
        ),
        (
            "window may hold a block less",
            "self.max_rollback, block_size) + 1",
            "self.max_rollback, block_size)",
            f"{BOUNDED}[window 7, 5 sinks]",
        ),
        (
            "window has no room for new tokens",
            "self.window + max_query_len + self.max_rollback",
            "self.window + self.max_rollback",
            f"{BOUNDED}[window 7, 5 sinks]",
        ),
        (
            "sinks end with a full block",
            "ceil_div(self.num_sink_tokens, block_size)",
            "self.num_sink_tokens // block_size",
            SINKS,
        ),
        (
            "blocks of one call leave too few",
            "ceil_div(max_query_len, block_size) + 1",
            "1",
            f"{BOUNDED}[window 7, 5 sinks]",
        ),
    ),
    *in_module(
        "layers/span",
        (
            "rows keep the column behind their last",
            "return quotient(length + block_size - 1, block_size)",
            "return quotient(length + block_size, block_size)",
            TRUNCATE,
        ),
        (
            "a row's last block is not its own",
            "return quotient(length + block_size - 1, block_size)",
            "return quotient(length, block_size)",
            RESERVED,
        ),
        ("no causal mask", "seen = key_position <= last", "seen = key_position >= 0", GROUPED_HEADS),
        ("tokens do not see themselves", "seen = key_position <= last", "seen = key_position < last", PADDED),
        ("no window mask", "(key_position > first - self.window) |", "(key_position >= 0) |", WINDOW),
        ("window one token longer", "> first - self.window)", "> first - self.window - 1)", WINDOW),
        ("sink tokens masked", "(key_position < self.num_sink_tokens)", "(key_position < 0)", SINK_LOGITS),
    ),
    *in_module(
        "layers/sliding_window",
        (
            "a window reaches past 32 bits",
            "if reach >= MAX_INDEX:",
            "if False:",
            "core/test_static_errors.py::test_windows_reach_as_far_as_positions",
        ),
        (
            "nothing is kept to roll back to",
            "Span(self.window, self.num_sink_tokens, self.max_rollback)",
            "Span(self.window, self.num_sink_tokens, 0)",
            ROLLBACK,
        ),
    ),
    *in_module(
        "core/config",
        (
            "shared layers read the first layer",
            "layer if shared_layer is None else shared_layer",
            "layer if shared_layer is None else 0",
            f"{SHARED}::test_they_take_no_memory_and_are_found_where_the_other_layer_is",
        ),
        (
            "a shared layer may read a shared one",
            "owner < i and layers[owner].shared_layer is None",
            "owner < i",
            f"{SHARED}::test_another_layer_than_an_own_one_before_it_is_refused",
        ),
        (
            "a later layer may be read",
            "owner < i and layers[owner].shared_layer is None",
            "owner < len(layers) and layers[owner].shared_layer is None",
            f"{SHARED}::test_another_layer_than_an_own_one_before_it_is_refused",
        ),
    ),
    *in_module(
        "layers/cross_attention",
        (
            "cross attention is causal",
            "is_causal = False",
            "is_causal = True",
            f"{SOURCES}::test_every_query_sees_the_whole_source_padded_and_packed",
        ),
        (
            "cross attention reads as many tokens as the row has",
            "return source_len",
            "return context_len",
            READ_BACK,
        ),
    ),
    *in_module(
        "operations/write_source",
        ("a source is overwritten", "> 0, Status.HAS_SOURCE)", "> 99, Status.HAS_SOURCE)", SOURCE_STATUS),
        (
            "a source may be longer than its kind allows",
            "(source_len > min(group.max_len for group in groups.values()), Status.TOO_LONG)",
            "(source_len > 99, Status.TOO_LONG)",
            SOURCE_STATUS,
        ),
        (
            "a source may be longer than its array",
            "(source_len > width, Status.BAD_LENGTH)",
            "(source_len > 99, Status.BAD_LENGTH)",
            SOURCE_STATUS,
        ),
    ),
    *in_module(
        "operations/rows",
        (
            "sources take blocks that there are not",
            "jnp.where(is_short, 0, num_rows), available, wants",
            "jnp.where(is_short, num_rows, num_rows), available, wants",
            ONE_BEHIND,
        ),
        (
            "a source that fails keeps blocks from others",
            "jnp.where(fits, left, free)",
            "left",
            ONE_BEHIND,
        ),
        (
            "one group's blocks are enough for a source",
            "(left >= 0).all()",
            "(left >= 0).any()",
            ONE_BEHIND,
        ),
    ),
    *in_module(
        "operations/truncate",
    ),
    *in_module(
        "operations/rows",
        ("forks have no source", '"num_published", "source_len"', '"num_published"', KEPT),
        (
            "forks share as many blocks of a source as they have tokens",
            "row_len(control, group.kind), seq_ids",
            "control.context_len, seq_ids",
            KEPT,
        ),
    ),
    *in_module(
        "operations/allocate",
        (
            "prompts take blocks of sources",
            "if group.holds_sources:  # which come later",
            "if False:",
            f"{SOURCES}::test_prompts_start_without_blocks_for_sources",
        ),
    ),
    *in_module(
        "operations/scrub",
        (
            "sources of others are scrubbed beyond their rows' tokens",
            "columns * group.block_size < length[:, None]",
            "columns * group.block_size < control.context_len[:, None]",
            f"{SOURCES}::test_scrubbing_a_namespace_leaves_the_sources_of_others",
        ),
        (
            "slots of sources are counted by their rows' tokens",
            "jnp.clip(row_len(control, group.kind)[:, None]",
            "jnp.clip(control.context_len[:, None]",
            READ_BACK,
        ),
    ),
    *in_module(
        "operations/stats",
        ("tokens take blocks of sources", "if layer_group.holds_sources:", "if False:", READ_BACK),
    ),
    *in_module(
        "core/arguments",
        (
            "new tokens overwrite a source",
            "if group.holds_sources:",
            "if False:",
            f"{SOURCES}::test_calls_that_do_not_fit_are_refused",
        ),
        (
            "shared layers are overwritten",
            "if shared_layer is not None:",
            "if False:",
            f"{SHARED}::test_new_keys_and_values_are_refused_and_those_of_own_layers_are_read",
        ),
    ),
    *in_module(
        "layers/layer_kind",
        (
            "keys and values are meant without offsets",
            "return x if offset is None else",
            "return x if x.size else",
            OFFSETS,
        ),
    ),
    *in_module(
        "attention/tiles",
        ("logits without offsets of keys", "if read.k_offset is not None:", "if False:", OFFSETS),
    ),
    *in_module(
        "attention/xla",
        ("sums without offsets of values", "if stored.v_offset is not None:", "if False:", OFFSETS),
        (
            "offsets of slots without a token count",
            "jnp.where(is_held, stored.v_offset, 0)",
            "stored.v_offset",
            OFFSETS,
        ),
    ),
    *in_module(
        "quantised/quantised",
        (
            "scales of keys and values swapped",
            "KeysValues(k, v, k_scale, v_scale, ",
            "KeysValues(k, v, v_scale, k_scale, ",
            DECODED,
        ),
        ("offsets of keys and values swapped", ", k_offset, v_offset)", ", v_offset, k_offset)", DECODED),
        ("results stay rotated", "return self._rotated(out)", "return out", DECODED),
        ("queries are not rotated", "return self._rotated(q)", "return q", DECODED),
    ),
    *in_module(
        "quantised/formats",
        (
            "ranges are stretched to hold 0",
            "low, high = x.min(axis=-1), x.max(axis=-1)",
            "low, high = jnp.minimum(x.min(axis=-1), 0), jnp.maximum(x.max(axis=-1), 0)",
            HALF_A_STEP,
        ),
        ("ranges are as if about 0", "high * 0.5 - low * 0.5", "jnp.maximum(high, -low)", HALF_A_STEP),
        ("scales are rounded down", "bits + (2**_CUT_BITS - 1)", "bits", HALF_A_STEP),
        ("the offset is left out", "offset = low + half * scale", "offset = 0 * low", HALF_A_STEP),
        (
            "nibbles of int4 in the other order",
            "jnp.stack([packed & 15, packed >> 4], axis=-1)",
            "jnp.stack([packed >> 4, packed & 15], axis=-1)",
            DECODED,
        ),
        (
            "an infinite number is read as 0",
            "jnp.where(is_finite, 0, jnp.nan)",
            "jnp.where(is_finite, 0, 0.0)",
            NOT_FINITE,
        ),
    ),
    *in_module(
        "operations/truncate",
        (
            "a row that is cut loses its source",
            "groups = config.row_groups.items()",
            "groups = [*enumerate(config.groups)]",
            KEPT,
        ),
    ),
]
