"""The mutations of `generate` and `score` with chunks."""

from tests.mutants.mutations import Mutation, in_module

TESTS = "chunks/test_generate_chunks.py"
PLACES = f"{TESTS}::test_prompts_are_made_of_chunks_wherever_those_stand"
OWN = f"{TESTS}::test_a_prompt_is_its_own_whatever_stands_beside_and_was_before"
ROOM = f"{TESTS}::test_chunks_without_room_are_computed_as_other_text"
ONE_PLACE = f"{TESTS}::test_a_store_of_one_place_is_enough"
GIVE_WAY = f"{TESTS}::test_chunks_that_are_stored_give_way_to_prompts_without_any"
PREFIX = f"{TESTS}::test_the_text_in_front_of_chunks_is_shared_as_a_prefix"
TENANTS = f"{TESTS}::test_chunks_are_found_within_their_namespace"
DRAWN = f"{TESTS}::test_a_selector_of_ones_own_and_one_that_draws"
ATTENTION = f"{TESTS}::test_selectors_see_what_first_layers_compute[attention]"
DEVIATION = f"{TESTS}::test_selectors_see_what_first_layers_compute[key deviation]"
WINDOWS = f"{TESTS}::test_spans_beyond_what_windows_hold_at_once_are_refused"
NUMBERS = f"{TESTS}::test_a_chunk_whose_logits_are_no_numbers_is_not_stored"
LEAST_USE = f"{TESTS}::test_chunks_of_least_use_are_forgotten_first"

MUTATIONS = [
    *in_module(
        "chunks/prompt_chunks",
        (
            "texts between chunks are not computed",
            "(is_selected | ~placed.is_composed)",
            "is_selected",
            PLACES,
        ),
        ("nothing of chunks is computed again", "(is_selected | ", "(", PLACES),
        (
            "tokens are computed again in place of others",
            "prompt[piece], piece",
            "prompt[: len(piece)], piece",
            PLACES,
        ),
        (
            "what is computed again is cut off",
            "range(0, len(places), width)",
            "range(0, 1)",
            PLACES,
        ),
        ("chunks are taken back together with the last token", "rows, [end])", "rows, [first])", PLACES),
        ("composed tokens are counted as computed", "int((~is_again).sum())", "int(is_again.sum())", PLACES),
        ("chunks of another namespace are taken", "[len(tokens)], words)[0]", "[len(tokens)])[0]", TENANTS),
        ("chunks of NaN are stored", "if are_numbers(fed.logits[row]):", "if True:", NUMBERS),
        (
            "what stands in front of chunks is not found",
            "return spans[0][0] if spans",
            "return 0 if spans",
            PREFIX,
        ),
        ("all draws are one", "np.uint32(reuse.seed)", "np.uint32(0)", DRAWN),
        (
            "more chunks are forgotten than room is needed for",
            "evict_chunks(cache, num_empty + 1,",
            "evict_chunks(cache, num_empty + 2,",
            LEAST_USE,
        ),
    ),
    *in_module(
        "chunks/chunk_reuse",
        (
            "chunks find room beside a prompt that leaves none",
            "min(left) < 0 or ",
            "min(left) < -1 or ",
            ROOM,
        ),
        (
            "windows are asked for more than they hold",
            "if windows and one_call",
            "if False and one_call",
            WINDOWS,
        ),
        ("equal chunks of a prompt need room twice", "if name not in names:", "if True:", ONE_PLACE),
    ),
    *in_module(
        "chunks/observed_chunks",
        (
            "keys deviate from nothing",
            "new.astype(jnp.float32) - old.astype(jnp.float32)",
            "new.astype(jnp.float32)",
            DEVIATION,
        ),
        (
            "attention is that of the last piece",
            'found["attention"] += outside',
            'found["attention"] = outside',
            ATTENTION,
        ),
    ),
    Mutation(
        "first layers ask in the model's own scale",
        "models/first_layers.py",
        "if attention.scale is not None:",
        "if False:",
        "models/test_first_layers.py::test_first_layers_store_and_ask_what_the_model_does[gemma]",
    ),
    *in_module(
        "decoding/score",
        (
            "continuations find no room beside chunks",
            "cache = context_rows.make_room(cache, has_room)",
            "pass",
            GIVE_WAY,
        ),
    ),
    *in_module(
        "chunks/prompt_chunks",
        (
            "chunks that are found are computed anew",
            "chunk_id < chunks_of(cache.control).num_chunks else",
            "False else",
            OWN,
        ),
        (
            "stored chunks stay whatever prompts need",
            "return self.with_room(cache, lambda cache: (cache, is_enough(cache) or None), kept)[0]",
            "return cache",
            GIVE_WAY,
        ),
    ),
]
