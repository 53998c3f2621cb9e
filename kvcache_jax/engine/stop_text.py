"""Stop strings: texts that end a request, wherever they begin within its tokens."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

Detokenize = Callable[[list[int]], str]
"""The text of a request's generated tokens, the first ones of which have the first part of it.

Bytes of a character that is not complete are U+FFFD, or nothing.
"""
_INCOMPLETE = "\ufffd"


class Said(NamedTuple):
    """What a consumer is told."""

    num_tokens: int  # the next ones
    text: str  # what comes next
    has_stopped: bool  # a stop string follows the text


class StopText:
    """Follows the text of one request's tokens, and holds back what may belong to a stop string."""

    def __init__(self, stops: Sequence[str], detokenize: Detokenize):
        self._stops, self._detokenize = tuple(stops), detokenize
        self._tokens: list[int] = []
        self._num_told, self._text_len = 0, 0

    def add(self, tokens: Sequence[int], is_end: bool) -> Said:
        """Adds tokens, the last ones at the end, and returns what may be told now."""
        self._tokens += tokens
        text = self._detokenize(self._tokens)
        places = [place for stop in self._stops if (place := text.find(stop, self._text_len)) >= 0]
        if places:
            safe = min(places)
        elif is_end:
            safe = len(text)
        else:
            safe = len(text.rstrip(_INCOMPLETE))
            safe -= max((_overlap(text[self._text_len : safe], stop) for stop in self._stops), default=0)
        is_all = is_end and not places
        num = len(self._tokens) if is_all else self._num_within(safe)
        said = Said(num - self._num_told, text[self._text_len : safe], bool(places))
        self._num_told, self._text_len = num, max(safe, self._text_len)
        return said

    def _num_within(self, text_len: int) -> int:
        """Counts the first tokens whose text is complete and within the first characters."""
        num = len(self._tokens)
        while num > self._num_told:
            text = self._detokenize(self._tokens[:num])
            if len(text) <= text_len and not text.endswith(_INCOMPLETE):
                return num
            num -= 1
        return num


def _overlap(text: str, stop: str) -> int:
    """Counts the characters at the end of a text that may begin a stop string."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
