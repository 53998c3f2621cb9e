"""Stop strings: texts that end a request, wherever they begin within its tokens."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvcache_jax.arrays.number_checks import as_list

_INCOMPLETE = "\ufffd"
_MOST_INCOMPLETE = 3
"""Characters that may stand for the bytes of one that is not complete."""
_MOST_PARTS = 8
"""Tokens of which one completes a character, unless their bytes are none."""
_CONTEXT_LEN = 16
"""Tokens before others by which these may have another text than alone."""


@dataclasses.dataclass(frozen=True)
class StopStrings:
    """Texts that end a request.

    Attributes:
      texts: Not empty.
      detokenize: `list of tokens -> text`, called with tokens that a request generated one after the other.
        The first ones have the first part of the text; bytes of a character that is not complete are U+FFFD,
        or nothing. A token's text may depend on the 16 tokens before it: earlier ones may be left out. If it
        raises, that request ends with the finish reason "cancelled".

    Raises:
      ValueError, TypeError: no texts, no function.
    """

    texts: Sequence[str]
    detokenize: Callable[[list[int]], str]

    def __post_init__(self):
        if not callable(self.detokenize):
            raise TypeError(f"detokenize is {self.detokenize!r}, expected a function: tokens -> text")
        texts = self.texts if isinstance(self.texts, str) else as_list("texts", self.texts, "strings")
        if isinstance(texts, str) or not texts or not all(map(_is_text, texts)):
            raise ValueError(f"texts is {texts!r}, expected a list of strings that are not empty")
        object.__setattr__(self, "texts", tuple(texts))


def _is_text(text: object) -> bool:
    return isinstance(text, str) and text != ""


class Said(NamedTuple):
    """Columns of the next tokens that a consumer is told, the text that comes next, and if that is all."""

    columns: list[list]
    text: str
    has_stopped: bool


class StopText:
    """Follows the text of one request's tokens, and holds back what may belong to a stop string.

    The tokens that it decodes are those held back, and before them the context, some that were told: the work
    does not grow with the length of the request.
    """

    def __init__(self, stops: StopStrings):
        self._stops, self._detokenize = stops.texts, stops.detokenize
        self._context: list[int] = []
        self._context_text = ""
        self._ends = [0]  # of the context's first tokens, each as far as the consumer was told at a time
        self._held: list[list] = [[], [], []]
        self._told_len = 0  # characters that were told after the context's text

    def add(self, columns: Sequence[list], is_end: bool) -> Said:
        """Adds tokens and two columns beside them, the last ones at the end, and returns what may be told."""
        self._held = [held + new for held, new in zip(self._held, columns, strict=True)]
        num, told_len = len(self._held[0]), self._told_len
        text = self._final_text(is_end)
        places = [(text.find(stop, told_len), len(stop)) for stop in self._stops]
        ends = [(place + length, place) for place, length in places if place >= 0]
        # The one that ends first, however many tokens come at a time.
        _, safe = min(ends, default=(0, len(text)))
        if not ends and not is_end:
            safe -= max(_overlap(text[told_len:], stop) for stop in self._stops)
        if ends or not is_end:
            parts = ((n, self._text_of(n)) for n in range(num, 0, -1))
            num = next((n for n, part in parts if text[:safe].startswith(part)), 0)
        told = [held[:num] for held in self._held]
        self._told_len = max(safe, told_len)
        self._take_into_context(num)
        return Said(told, text[told_len:safe], bool(ends))

    def _text_of(self, num: int) -> str:
        """Decodes the first tokens that are held back."""
        return self._decode(self._held[0][:num])[len(self._context_text) :]

    def _decode(self, tokens: list[int]) -> str:
        """Decodes tokens that follow the context, and it."""
        text = self._detokenize(self._context + tokens)
        if not isinstance(text, str):
            raise TypeError(f"detokenize returned a {type(text).__name__}, expected a str, the tokens' text")
        return text

    def _final_text(self, is_end: bool) -> str:
        """Decodes what is held back as far as no later token changes it."""
        num = len(self._held[0])
        whole = self._text_of(num)
        if not whole.endswith(_INCOMPLETE):
            return whole
        parts = (self._text_of(n) for n in range(num, max(num - _MOST_PARTS, -1), -1))
        complete = (part for part in parts if not part.endswith(_INCOMPLETE))
        # Without a complete one the bytes are no character, but for the last ones.
        final = max(whole.rstrip(_INCOMPLETE), next(complete, whole[:-_MOST_INCOMPLETE]), key=len)
        if is_end and self._decode(self._held[0]).startswith(self._context_text + final):
            return whole
        return final

    def _take_into_context(self, num: int) -> None:
        """Takes tokens that were told into the context, which then begins where the consumer was told all."""
        if not num:
            return
        self._told_len -= len(self._text_of(num))
        self._context += self._held[0][:num]
        self._held = [held[num:] for held in self._held]
        self._ends.append(len(self._context))
        start = max((end for end in self._ends if end + _CONTEXT_LEN <= len(self._context)), default=0)
        self._context = self._context[start:]
        self._ends = [end - start for end in self._ends if end >= start]
        self._context_text = self._decode([])


def _overlap(text: str, stop: str) -> int:
    """Counts the characters at the end of a text that may begin a stop string."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
