"""Text to tokens and back: a checkpoint's tokenizer.json, or bytes; and text as it comes, token by token."""

import os
import pathlib
from collections.abc import Sequence
from typing import Protocol

import tokenizers

_INCOMPLETE = "\ufffd"  # What decoders write for bytes that are no character, or not yet.


class Tokenizer(Protocol):
    """What decoding needs of a tokeniser.

    Attributes:
      vocab_size: Token ids are below it.
      stop_tokens: Ids that end a text.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def stop_tokens(self) -> tuple[int, ...]: ...

    def encode(self, text: str) -> list[int]:
        """Tokens of a prompt, with what the tokeniser puts in front of one."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of the tokens; stop tokens and other special ones have none."""
        ...


class ByteTokenizer:
    """Tokens are the bytes of UTF-8; ids from 256 on are special and have no text."""

    vocab_size = 256

    def __init__(self, stop_tokens: Sequence[int] = ()):
        self.stop_tokens = tuple(stop_tokens)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(int(token) for token in tokens if token < 256).decode(errors="replace")


class FileTokenizer:
    """A tokenizer.json, by the `tokenizers` library; truncation and padding that it asks for are left out.

    Raises:
      ValueError: the file is none; names it.
    """

    def __init__(self, path: str | os.PathLike[str], stop_tokens: Sequence[int] = ()):
        self.stop_tokens = tuple(stop_tokens)
        try:
            self.inner = tokenizers.Tokenizer.from_str(pathlib.Path(path).read_text(encoding="utf-8"))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"{path} is no tokenizer.json: {error}") from error
        # The file also says how training cut and padded texts; a prompt is to stay as it is.
        self.inner.no_truncation()
        self.inner.no_padding()

    @property
    def vocab_size(self) -> int:
        return max(self.inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text).ids

    def decode(self, tokens: Sequence[int]) -> str:
        return self.inner.decode([int(token) for token in tokens])


class TextStream:
    """Text as its tokens come; holds back a character until its last byte is there.

    What `push` and `finish` return, joined, is `tokenizer.decode` of all tokens. (One exception: where bytes
    are a fallback, an invalid one spoils those before it, and they may have been shown.)
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        # Tokens since the last but one point at which nothing was held back: those up to the last such point
        # stay as context, for some decoders drop a leading space.
        self._tokens: list[int] = []
        self._num_context = 0
        self._num_shown = 0  # characters of their text

    def push(self, tokens: int | Sequence[int]) -> str:
        """Text that the tokens complete; "" while a character is not whole."""
        self._tokens += tokens if isinstance(tokens, Sequence) else [tokens]
        text = self._tokenizer.decode(self._tokens)
        complete = text.rstrip(_INCOMPLETE)
        new_text = complete[self._num_shown :]
        self._num_shown = max(self._num_shown, len(complete))
        if new_text and complete == text:
            self._tokens = self._tokens[self._num_context :]
            self._num_context = len(self._tokens)
            self._num_shown = len(self._tokenizer.decode(self._tokens))
        return new_text

    def finish(self) -> str:
        """What was held back, for no more tokens follow."""
        new_text = self._tokenizer.decode(self._tokens)[self._num_shown :]
        self._num_shown += len(new_text)
        return new_text
