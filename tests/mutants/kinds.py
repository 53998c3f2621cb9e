"""The mutations of layer kinds: which positions of a row stay."""

from tests.mutants.attention import PADDED, WINDOW
from tests.mutants.attention import SINKS as SINK_LOGITS
from tests.mutants.mutations import BOUNDED, GROUPED_HEADS, RESERVED, ROLLBACK, WINDOWS, in_module
from tests.mutants.operations import TRUNCATE

SINKS = f"{BOUNDED}[window 7, 5 sinks]"
AMONG_SINKS = f"{WINDOWS}::test_a_window_that_begins_among_the_sinks_and_was_given_back_behind_them_is_lost"

MUTATIONS = [
    *in_module(
        "core/layer_kinds/span",
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
            f"{BOUNDED}[window 6]",
        ),
        (
            "window has no room for new tokens",
            "self.window + max_query_len + self.max_rollback",
            "self.window + self.max_rollback",
            f"{BOUNDED}[window 6]",
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
            f"{BOUNDED}[window 6]",
        ),
    ),
    *in_module(
        "core/layer_kinds/span",
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
        "core/layer_kinds/sliding_window",
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
]
