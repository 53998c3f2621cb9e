"""Stop strings by the text of a few tokens, against the text of all of them."""

import itertools
from typing import Any

import numpy as np
import pytest

import kvcache_jax as kv
from kvcache_jax.engine.stop_text import StopStrings, StopText
from tests.engine.exact_engine import ask, expect, make_engine
from tests.engine.exact_model import decode_alone, note

INCOMPLETE = "\ufffd"
BYTES = [bytes([each]) for each in "é中😀".encode()]
PIECES = [b"a", b"b", b" ", b" a", b"ab", b"", b"a\xe4", b"\xb8\xad", b"\xf0\x9f", b"\x80", *BYTES]
WORDS = ["a", "b", " ", " a", "ab", "中", ""]


def replaced(tokens):
    """Pieces of bytes, as of most vocabularies."""
    return b"".join(PIECES[token] for token in tokens).decode(errors="replace")


def ignored(tokens):
    """Bytes of no character have no text."""
    return b"".join(PIECES[token] for token in tokens).decode(errors="ignore")


def spaced(tokens):
    """The first space is left out, and bytes are characters where all of a run of them are."""
    text, run = "", b""
    for token in [*tokens, None]:
        if token is not None and token >= len(WORDS):
            run += BYTES[token - len(WORDS)]
            continue
        try:
            text += run.decode()
        except UnicodeDecodeError:
            text += INCOMPLETE * len(run)
        text, run = text + ("" if token is None else WORDS[token]), b""
    return text.removeprefix(" ")


def joined(tokens):
    """Words with spaces between them, and the ends of words."""
    pieces = [["a", "b", "##b", "##ab", "c"][token] for token in tokens]
    return " ".join(pieces).replace(" ##", "")


def random_pieces(rng, num):
    """Characters, characters in parts, and now and then many bytes that are none."""
    tokens = []
    while len(tokens) < num:
        kind = rng.integers(0, 12)
        if kind < 8:
            tokens += rng.integers(0, 10 if kind < 2 else 6, 1).tolist()
        elif kind < 11:
            first = 10 + [0, 2, 5][kind - 8]
            tokens += range(first, first + kind - 6)
        else:
            tokens += rng.integers(9, 19, int(rng.integers(1, 30))).tolist()
    return tokens[:num]


def random_words(rng, num):
    """Words and whole characters of bytes, of which the last one may be cut."""
    tokens = []
    while len(tokens) < num:
        kind = rng.integers(0, 6)
        first = len(WORDS) + [0, 2, 5][kind % 3]
        tokens += range(first, first + kind % 3 + 2) if kind < 3 else [int(rng.integers(0, len(WORDS)))]
    return tokens[:num]


def random_ends(rng, num):
    return rng.integers(0, 5, num).tolist()


KINDS = {
    "replaced": (replaced, random_pieces),
    "ignored": (ignored, random_pieces),
    "spaced": (spaced, random_words),
    "joined": (joined, random_ends),
}


def said_at_once(tokens, detokenize, stops):
    """All tokens, the text and whether a stop string ended them, by the texts of all first tokens."""
    parts = [detokenize(tokens[:n]) for n in range(len(tokens) + 1)]
    complete = max((part for part in parts if not part.endswith(INCOMPLETE)), key=len)
    text = parts[-1] if parts[-1].startswith(complete) else complete
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    if not ends:
        return tokens, text, False
    text = text[: min(ends)[1]]
    return tokens[: max(n for n, part in enumerate(parts) if text.startswith(part))], text, True


def say(tokens, detokenize, stops, lens):
    """Hands tokens over as many at a time, until a stop string ends them: what the consumer was told."""
    num_decoded, told, text, has_stopped = 0, [], "", False

    def counted(some):
        nonlocal num_decoded
        num_decoded += len(some)
        return detokenize(some)

    follower, begin = StopText(StopStrings(stops, counted)), 0
    while begin < len(tokens) and not has_stopped:
        end = begin + next(lens)
        new = tokens[begin:end]
        said = follower.add((new, [*range(begin, begin + len(new))], new), end >= len(tokens))
        assert said.columns[1] == [*range(len(told), len(told) + len(said.columns[0]))]
        told, text, has_stopped, begin = told + said.columns[0], text + said.text, said.has_stopped, end
    return (told, text, has_stopped), num_decoded


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_tokens_have_the_text_of_all(kind):
    """Random texts and stop strings, handed over in any pieces: tokens, text and end as by all at once."""
    detokenize, draw = KINDS[kind]
    num_stopped = 0
    for seed in range(300):
        rng = np.random.default_rng(seed)
        tokens = draw(rng, int(rng.integers(1, 120)))
        text = detokenize(tokens)
        places = rng.integers(0, max(len(text), 1), int(rng.integers(0, 3)))
        stops = [text[place : place + rng.integers(1, 6)] for place in places] + ["never said", "aaaaaaaab"]
        stops = [stop for stop in stops if stop and INCOMPLETE not in stop]
        lens = rng.integers(1, int(rng.choice([1, 2, 5, 40])) + 1, len(tokens)).tolist()
        found, _ = say(tokens, detokenize, stops, iter(lens))
        assert found == said_at_once(tokens, detokenize, stops), (seed, tokens, stops)
        num_stopped += found[2]
    assert 50 < num_stopped < 300


@pytest.mark.parametrize("kind", [*KINDS, "no character"])
@pytest.mark.parametrize("length", [1, 32])
def test_the_work_does_not_grow_with_the_text(kind, length):
    """Tokens that are decoded for each one that is told, of bytes that are no character too."""
    detokenize, draw = KINDS.get(kind, (replaced, lambda rng, num: [9] * num))
    some, work = draw(np.random.default_rng(0), 500), []
    for tokens in (some, some * 5):
        (told, _, _), num_decoded = say(tokens, detokenize, ["never said"], itertools.repeat(length))
        assert told == tokens
        work.append(num_decoded / len(tokens))
    assert work[1] < 1.3 * work[0] and work[1] < 400, work


def test_stop_strings_of_one_event_are_found_as_of_many():
    """The one that ends first ends a request, also where another begins before it."""
    for length in (1, 2, 3):
        found, _ = say([0, 1, 4, 0], replaced, ["bab", "ba"], itertools.repeat(length))
        assert found == ([0], "a", True)
        found, _ = say([0, 1, 4, 0], replaced, ["abab", "ba"], itertools.repeat(length))
        assert found == ([0], "a", True)


def test_bytes_of_no_character_are_told():
    said = StopText(StopStrings(["never said"], replaced)).add([[9] * 40] * 3, False)
    assert len(said.columns[0]) == len(said.text) == 40 - 3


@pytest.mark.parametrize("fault", [ZeroDivisionError, TypeError])
def test_an_error_of_a_detokenize_ends_its_request_alone(fault):
    """All others say what they say alone, once, and the error is raised when all that had come is told."""

    def fails(tokens):
        if len(tokens) < 5:
            return "x" * len(tokens)
        return [] if fault is TypeError else 1 // 0

    functions: list[Any] = [fails, lambda tokens: "x" * len(tokens)]
    stops = [kv.engine.StopStrings(["never said"], each) for each in functions]
    requests = [ask([i, 3], 12, i, stop_strings=stops[i != 1]) for i in range(3)]
    engine = make_engine()
    assert engine.push(requests) == 3
    said = {(request.id, 0): ([], [], None) for request in requests}
    with pytest.raises(fault):
        for event in engine:
            note(said, [event])
    for event in engine:
        note(said, [event])
    expect(said, [requests[0], requests[2]])
    assert said[1, 0][2] == "cancelled" and len(said[1, 0][0]) < 5 and engine.figures().running == 0


def test_tokens_that_were_held_back_for_ever_count_nowhere():
    """Metrics are of what the consumer was told, and a stop string ends a request in the midst of tokens."""
    tokens, engine = decode_alone(ask([1, 2, 3], 12))[0], make_engine()

    def letters(tokens):
        return "".join(chr(ord("a") + token) for token in tokens)

    stops = kv.engine.StopStrings([letters(tokens[4:7])], letters)
    assert engine.push([ask([1, 2, 3], 12, stop_strings=stops)]) == 1
    assert sum(len(event.tokens) for event in engine) == 4
    metrics = engine.metrics()
    assert metrics["vllm:request_generation_tokens"]["sum"] == metrics["vllm:generation_tokens"] == 4


def test_a_function_that_cancels_its_own_request_ends_it_once():
    engine, said = make_engine(), {}

    def ends(tokens):
        engine.cancel("ended")
        return "x" * len(tokens)

    other = ask([3], 6, "other")
    stops = kv.engine.StopStrings(["never said"], ends)
    assert engine.push([ask([1, 2], 6, "ended", stop_strings=stops), other]) == 2
    note(said, engine)
    assert said["ended", 0][2] == "cancelled"
    expect(said, [other])
