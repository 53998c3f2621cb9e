"""Stop strings: texts that end a request, wherever they begin within its tokens."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

Detokenize = Callable[[list[int]], str]
"""The text of a request's generated tokens, the first ones of which have the first part of it.

Bytes of a character that is not complete are U+FFFD, or nothing.
"""
_INCOMPLETE = "\ufffd"


class Said(NamedTuple):
    """Columns of the next tokens that a consumer is told, the text that comes next, and whether that is all."""

    columns: list[list]
    text: str
    has_stopped: bool


class StopText:
    """Follows the text of one request's tokens, and holds back what may belong to a stop string."""

    def __init__(self, stops: Sequence[str], detokenize: Detokenize):
        self._stops, self._detokenize = tuple(stops), detokenize
        self._tokens: list[int] = []
        self._held: list[list] = [[], [], []]
        self._text_len = 0

    def add(self, columns: Sequence[list], is_end: bool) -> Said:
        """Adds tokens and two columns beside them, the last ones at the end, and returns what may be told."""
        self._tokens += columns[0]
        self._held = [held + new for held, new in zip(self._held, columns, strict=True)]
        text = self._detokenize(self._tokens)
        places = [place for stop in self._stops if (place := text.find(stop, self._text_len)) >= 0]
        num_told = len(self._tokens) - len(self._held[0])
        if places or not is_end:
            safe = min(places, default=len(text.rstrip(_INCOMPLETE)))
            if not places:
                safe -= max(_overlap(text[self._text_len : safe], stop) for stop in self._stops)
            last = (n for n in range(len(self._tokens), num_told, -1) if self._is_within(n, safe))
            num = next(last, num_told)
        else:
            safe, num = len(text), len(self._tokens)
        told = [held[: num - num_told] for held in self._held]
        self._held = [held[num - num_told :] for held in self._held]
        said = Said(told, text[self._text_len : safe], bool(places))
        self._text_len = max(safe, self._text_len)
        return said

    def _is_within(self, num: int, text_len: int) -> bool:
        """Tests whether the text of the first tokens is complete, and within its first characters."""
        text = self._detokenize(self._tokens[:num])
        return len(text) <= text_len and not text.endswith(_INCOMPLETE)


def _overlap(text: str, stop: str) -> int:
    """Counts the characters at the end of a text that may begin a stop string."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
