"""Stop strings: texts that end a request, wherever they begin within its tokens."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

_INCOMPLETE = "\ufffd"


@dataclasses.dataclass(frozen=True)
class StopStrings:
    """Texts that end a request.

    Attributes:
      texts: Not empty.
      detokenize: `list of a request's generated tokens -> text`. The first tokens have the first part of the
        text; bytes of a character that is not complete are U+FFFD, or nothing.

    Raises:
      ValueError, TypeError: no texts, no function.
    """

    texts: Sequence[str]
    detokenize: Callable[[list[int]], str]

    def __post_init__(self):
        if not callable(self.detokenize):
            raise TypeError(f"detokenize is {self.detokenize!r}, expected a function: tokens -> text")
        if isinstance(self.texts, str) or not self.texts or not all(map(_is_text, self.texts)):
            raise ValueError(f"texts is {self.texts!r}, expected a list of strings that are not empty")


def _is_text(text: object) -> bool:
    return isinstance(text, str) and text != ""


class Said(NamedTuple):
    """Columns of the next tokens that a consumer is told, the text that comes next, and if that is all."""

    columns: list[list]
    text: str
    has_stopped: bool


class StopText:
    """Follows the text of one request's tokens, and holds back what may belong to a stop string."""

    def __init__(self, stops: StopStrings):
        self._stops, self._detokenize = stops.texts, stops.detokenize
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
