"""Tokens as the server names them, and a choice's text and places as its tokens come."""

import hypothesis
import hypothesis.strategies as st
import pytest
import tokenizers

import kvcache_jax as kv
from models.tokenizer import ByteTokenizer, FileTokenizer
from tests.support.trained_tokenizer import TEXT, byte_fallback_bpe, byte_level_bpe

for package in ("fastapi", "jinja2", "uvicorn"):
    pytest.importorskip(package)

from experiments.server.answers import ChatForm, Choice, Form  # noqa: E402
from experiments.server.tokens import BYTE_OF, QuietTokenizer  # noqa: E402


@pytest.fixture(
    scope="module", params=[byte_level_bpe, byte_fallback_bpe, None], ids=["bpe", "fallback", "bytes"]
)
def tokenizer(request, tmp_path_factory):
    if request.param is None:
        return QuietTokenizer(ByteTokenizer([10]))
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    request.param().save(str(path))
    return QuietTokenizer(FileTokenizer(path, stop_tokens=[1]))


def spaced(tokenizer, text):
    """A text as pieces have it: those with a mark before each word mark the first one too."""
    return f" {text}" if is_fallback(tokenizer) else text


def is_fallback(tokenizer):
    return (
        isinstance(tokenizer.inner, FileTokenizer) and tokenizer.inner.inner.token_to_id("<0x00>") is not None
    )


# --- names ---


def test_a_piece_has_a_character_for_each_byte():
    pieces = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    assert {*BYTE_OF} == {*pieces.alphabet()} and {*BYTE_OF.values()} == {*range(256)}
    text = "".join(map(chr, range(0x1000)))
    [(piece, _)] = pieces.pre_tokenize_str(text)
    assert bytes(BYTE_OF[character] for character in piece) == text.encode()


@hypothesis.example(TEXT)
@hypothesis.example("\ufffd b")
@hypothesis.given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<"), min_size=1))
def test_the_bytes_of_tokens_are_those_of_the_text(tokenizer, text):
    names = [tokenizer.name(token) for token in tokenizer.encode(text, is_whole=True)]
    assert bytes(byte for _, data in names for byte in data) == spaced(tokenizer, text).encode()
    for name, data in names:
        assert name.startswith("bytes:\\x") or name.encode() == bytes(data)


def test_parts_of_characters_spaces_and_special_tokens_have_names(tokenizer):
    parts = [tokenizer.name(token) for token in tokenizer.encode("é")[-2:]]
    assert parts == [("bytes:\\xc3", [0xC3]), ("bytes:\\xa9", [0xA9])]
    words = [tokenizer.name(token)[0] for token in tokenizer.encode("a b", is_whole=True)]
    assert "".join(words) == spaced(tokenizer, "a b")
    if isinstance(tokenizer.inner, FileTokenizer):
        assert tokenizer.name(1)[0] in ("</s>", "<s>") and tokenizer.name(1)[1] == []
    assert tokenizer.name(2**20) == ("", [])


def test_a_whole_prompt_gets_nothing_in_front(tokenizer):
    if isinstance(tokenizer.inner, FileTokenizer):
        begin = tokenizer.inner.inner.token_to_id("<s>")
        whole = tokenizer.encode("and", is_whole=True)
        assert begin not in whole
        assert tokenizer.encode("<s>and", is_whole=True) == [begin, *whole]
        assert tokenizer.encode("and") == ([] if is_fallback(tokenizer) else [begin]) + whole
    else:
        assert tokenizer.encode("and", is_whole=True) == tokenizer.encode("and") == [*b"and"]


# --- as tokens come ---


def event(tokens, is_end=False, text=None):
    zeros = [0.0] * len(tokens)
    return kv.engine.TokenEvent("a", 0, tokens, zeros, [], "length" if is_end else None, text=text)


@hypothesis.given(st.data())
def test_texts_and_places_are_those_of_all_tokens_decoded(tokenizer, data):
    token = st.integers(0, tokenizer.vocab_size - 1)
    if is_fallback(tokenizer):  # a stray byte spoils the whole run of bytes that it ends
        token = token.filter(lambda token: not 3 <= token < 3 + 256)
    whole = st.sampled_from(["é", "日本🙂", " ", "a", "\ufffd"]).map(tokenizer.encode)
    groups = data.draw(st.lists(st.one_of(whole, st.lists(token, max_size=4)), min_size=1, max_size=12))
    choice = Choice(0, tokenizer)
    pieces = [choice.add(event(group, i == len(groups) - 1)) for i, group in enumerate(groups)]
    tokens = sum(groups, [])
    assert "".join(piece.text for piece in pieces) == tokenizer.decode(tokens)
    complete = [len(tokenizer.decode(tokens[:i]).rstrip("\ufffd")) for i in range(len(tokens))]
    places = [max(complete[: i + 1]) for i in range(len(tokens))]
    assert sum((piece.offsets for piece in pieces), []) == places


@pytest.mark.parametrize("form, first", [(Form, " b"), (ChatForm, "b")])
def test_a_completion_goes_on_its_prompt_and_a_chat_is_a_text_of_its_own(tokenizer, form, first):
    prompt, both = (tokenizer.encode(text, is_whole=True) for text in ("a", "a b é"))
    assert both[: len(prompt)] == prompt
    form = form("name", tokenizer, False)
    choice = Choice(0, form.tokenizer)
    answer = both[len(prompt) :]
    text = "".join(choice.add(event([token], i == len(answer) - 1)).text for i, token in enumerate(answer))
    assert text == form.tokenizer.decode(answer)
    assert text == (first if is_fallback(tokenizer) else " b") + " é"


def test_a_text_that_the_engine_cut_stays_so(tokenizer):
    choice, tokens = Choice(0, tokenizer), tokenizer.encode("abc", is_whole=True)
    pieces = [choice.add(event(tokens[:-1], text="")), choice.add(event(tokens[-1:], True, text="a"))]
    assert [piece.text for piece in pieces] == ["", "a"] and pieces[1].offsets == [2]


def test_a_token_more_costs_the_same_however_long_the_text(tokenizer, monkeypatch):
    num_decoded, decode = [0], tokenizer.inner.decode

    def counted(tokens):
        num_decoded[0] += len(tokens)
        return decode(tokens)

    tokens = tokenizer.encode("a é" * 400)
    monkeypatch.setattr(tokenizer.inner, "decode", counted)
    choice = Choice(0, tokenizer)
    for token in tokens:
        choice.add(event([token]))
    assert len(tokens) <= num_decoded[0] <= 20 * len(tokens)
