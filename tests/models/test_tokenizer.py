"""Tokenisers: text there and back, text as it streams, and what a checkpoint's folder offers."""

import json
import pathlib

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from flax import nnx

from models import checkpoint
from models.checkpoint import CheckpointError
from models.decoder import Decoder, DecoderConfig
from models.tokenizer import ByteTokenizer, FileTokenizer, TextStream
from tests.support.trained_tokenizer import TEXT, byte_fallback_bpe, byte_level_bpe

FIXTURES = pathlib.Path(__file__).resolve().parent.parent / "fixtures"
CONFIG = DecoderConfig(
    vocab_size=300, hidden_size=4, mlp_size=4, num_layers=1, num_q_heads=1, num_kv_heads=1, head_dim=4
)


@pytest.fixture(
    scope="module", params=[byte_level_bpe, byte_fallback_bpe, None], ids=["bpe", "fallback", "bytes"]
)
def tokenizer(request, tmp_path_factory):
    if request.param is None:
        return ByteTokenizer()
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    request.param().save(str(path))
    return FileTokenizer(path)


# --- there and back ---


def test_text_comes_back(tokenizer):
    for text in (TEXT, "", " two", "x"):
        tokens = tokenizer.encode(text)
        assert all(type(token) is int and 0 <= token < tokenizer.vocab_size for token in tokens)
        assert tokenizer.decode(tokens) == text
        assert tokenizer.decode(np.array(tokens, np.int32)) == text


def test_bytes_are_tokens():
    assert ByteTokenizer().encode("é!") == [0xC3, 0xA9, 0x21]
    assert ByteTokenizer().decode([0xC3, 0xA9, 0x21, 256, 299]) == "é!"
    assert ByteTokenizer().decode([0x21, 0xC3]) == "!\ufffd"


def test_a_prompt_begins_as_the_tokenizer_says_and_special_tokens_have_no_text(tmp_path):
    byte_level_bpe().save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json", stop_tokens=[1])
    assert tokenizer.stop_tokens == (1,)
    tokens = tokenizer.encode("and")
    assert tokens[0] == 0 and 0 not in tokens[1:]
    assert tokenizer.decode([*tokens, 1]) == "and"


# --- as it comes ---


def streamed(tokenizer, pieces):
    stream = TextStream(tokenizer)
    shown = [stream.push(piece) for piece in pieces]
    return [*shown, stream.finish()]


def test_text_streams_without_broken_characters(tokenizer):
    tokens = tokenizer.encode(TEXT)
    shown = streamed(tokenizer, tokens)
    assert "".join(shown) == TEXT
    assert "\ufffd" not in "".join(shown)
    assert shown[-1] == ""  # nothing is held back longer than it must
    assert sum(map(bool, shown)) >= 40


def test_a_character_waits_for_its_last_byte():
    smile = list("🙂".encode())
    assert streamed(ByteTokenizer(), [*smile, 65]) == ["", "", "", "🙂", "A", ""]
    assert streamed(ByteTokenizer(), [65, *smile[:2]]) == ["A", "", "", "\ufffd"]
    assert streamed(ByteTokenizer(), [smile[0], 65]) == ["", "\ufffdA", ""]
    assert streamed(ByteTokenizer(), [[65, 66], np.int32(67), []]) == ["AB", "C", "", ""]


@hypothesis.given(st.data())
def test_streamed_text_is_the_text_of_all_tokens(tokenizer, data):
    token = st.integers(0, tokenizer.vocab_size - 1)
    if isinstance(tokenizer, FileTokenizer) and tokenizer.inner.token_to_id("<0x00>") is not None:
        # A stray byte spoils the whole run of bytes that it ends, also what was shown of it.
        token = token.filter(lambda token: not 3 <= token < 3 + 256)
    whole = st.sampled_from(["é", "日", "🙂", " ", "a", "\ufffd"]).map(lambda text: tokenizer.encode(text))
    piece = st.one_of(token, st.lists(token, max_size=4), whole)
    pieces = data.draw(st.lists(piece, max_size=12))
    flat = [t for piece in pieces for t in ([piece] if isinstance(piece, int) else piece)]
    assert "".join(streamed(tokenizer, pieces)) == tokenizer.decode(flat)


# --- a checkpoint's ---


def save_model(folder, tokenizer=None, **options):
    checkpoint.save(folder, Decoder(DecoderConfig(**vars(CONFIG) | options), rngs=nnx.Rngs(0)), tokenizer)


def test_a_saved_tokenizer_comes_back(tmp_path):
    byte_level_bpe().save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json", stop_tokens=[1, 7])
    save_model(tmp_path / "model", tokenizer)
    again = checkpoint.load_tokenizer(tmp_path / "model")
    assert isinstance(again, FileTokenizer)
    assert again.stop_tokens == (1, 7)
    assert again.encode(TEXT) == tokenizer.encode(TEXT)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["eos_token_id"] == [1, 7]
    checkpoint.load(tmp_path / "model")


def test_bytes_are_the_default(tmp_path):
    save_model(tmp_path)
    assert isinstance(checkpoint.load_tokenizer(tmp_path), ByteTokenizer)
    assert checkpoint.load_tokenizer(tmp_path).stop_tokens == ()
    save_model(tmp_path, ByteTokenizer(stop_tokens=[0]))
    assert checkpoint.load_tokenizer(tmp_path).stop_tokens == (0,)


def test_generation_config_knows_better_where_to_stop(tmp_path):
    save_model(tmp_path, ByteTokenizer(stop_tokens=[3]))
    path = tmp_path / "generation_config.json"
    for entry, stop_tokens in ((5, (5,)), ([5, 6], (5, 6)), (None, (3,)), ([], (3,))):
        path.write_text(json.dumps({"eos_token_id": entry}))
        assert checkpoint.load_tokenizer(tmp_path).stop_tokens == stop_tokens


def refuses(folder, message):
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load_tokenizer(folder)


def test_a_tokenizer_that_does_not_fit_is_named(tmp_path):
    save_model(tmp_path, vocab_size=256)
    (tmp_path / "tokenizer.json").write_text('{"model": 3')
    refuses(tmp_path, "tokenizer.json is no tokenizer.json: .+")
    byte_level_bpe().save(str(tmp_path / "tokenizer.json"))
    refuses(
        tmp_path,
        r"tokenizer.json has token ids up to 2\d\d, expected them below the model's vocab_size = 256",
    )
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").symlink_to("nowhere")
    refuses(tmp_path, "tokenizer.json is no tokenizer.json: .+No such file")
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.model").touch()
    refuses(tmp_path, "has tokenizer.model, expected tokenizer.json: convert it first")
    (tmp_path / "tokenizer.model").unlink()
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": ["</s>"]}')
    refuses(
        tmp_path, r"generation_config.json: eos_token_id is \['</s>'\], expected a token id or a list of them"
    )
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 1099511627776]}')
    refuses(tmp_path, r"eos_token_id is \[3, 1099511627776\], expected a token id or a list of them")
    refuses(FIXTURES / "llama", "has no tokenizer.json and vocab_size is 97, expected at least 256")


def test_prompts_are_neither_cut_nor_filled_up(tmp_path):
    trained = byte_level_bpe()
    expected = trained.encode(TEXT).ids, trained.encode("x").ids
    trained.enable_truncation(4)
    trained.enable_padding(length=8)
    trained.save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json")
    assert (tokenizer.encode(TEXT), tokenizer.encode("x")) == expected


def test_a_missing_tokenizer_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"gone.json is no tokenizer.json: .*No such file"):
        FileTokenizer(tmp_path / "gone.json")
