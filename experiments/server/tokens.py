"""Tokens as clients get them: without texts of stop tokens in answers, and each by its own text and bytes."""

import re
from collections.abc import Sequence

from models.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer

_INCOMPLETE = "\ufffd"  # what decoders write for bytes that are no character
_PRINTED = *range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)
_OTHERS = [byte for byte in range(256) if byte not in _PRINTED]
BYTE_OF = {chr(byte): byte for byte in _PRINTED} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}
"""The byte that each character of a byte-level piece stands for, as GPT-2's tokenizer has them."""


class QuietTokenizer:
    """A tokenizer whose stop tokens have no text."""

    def __init__(self, tokenizer: Tokenizer):
        self.inner, self.stop_tokens = tokenizer, tokenizer.stop_tokens
        self.vocab_size = tokenizer.vocab_size
        # Some decoders drop the space in front of a text: a token's own text is what it adds to another's.
        self._before = self.encode("a", is_whole=True)
        self._text_before = self.inner.decode(self._before)

    def encode(self, text: str, *, is_whole: bool = False) -> list[int]:
        """Tokens of a prompt, with what the tokenizer puts in front of one that is not whole."""
        if is_whole and isinstance(self.inner, FileTokenizer):
            return self.inner.inner.encode(text, add_special_tokens=False).ids
        return self.inner.encode(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of the tokens but those that end a text."""
        return self.inner.decode([token for token in tokens if token not in self.stop_tokens])

    def name(self, token: int) -> tuple[str, list[int]]:
        """Returns the text of one token, and its bytes, which the text names where they are no character.

        The bytes of all tokens, joined, are the text's. A special token is named by its piece, and has none.
        """
        text = self.inner.decode([*self._before, token]).removeprefix(self._text_before)
        data = self._bytes(token) if _INCOMPLETE in text else text.encode()
        if not data:
            return self._piece(token), []
        try:
            return data.decode(), [*data]
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), [*data]

    def _bytes(self, token: int) -> bytes:
        """Returns the bytes of a token whose text is no whole characters, or U+FFFD itself."""
        if isinstance(self.inner, ByteTokenizer):
            return bytes([token])
        piece = self._piece(token)
        if match := re.fullmatch("<0x([0-9A-F]{2})>", piece):
            return bytes.fromhex(match[1])
        return bytes(map(BYTE_OF.get, piece)) if BYTE_OF.keys() >= {*piece} else piece.encode()  # type: ignore

    def _piece(self, token: int) -> str:
        """Returns what the vocabulary calls a token; "" of one that it does not have."""
        return (isinstance(self.inner, FileTokenizer) and self.inner.inner.id_to_token(token)) or ""


class ContinuingTokenizer(QuietTokenizer):
    """A tokenizer whose texts follow a prompt's: decoders that drop a text's first space keep it here."""

    def decode(self, tokens: Sequence[int]) -> str:
        return super().decode([*self._before, *tokens]).removeprefix(self._text_before)
