"""A side's own seconds."""

import time

import kvcache_jax as kv


class Clock:
    """Seconds in which one side is at work; it stands still while others have their turns.

    Where a side has nothing to do it is set to the next arrival: nobody waits for that.
    """

    def __init__(self):
        self._seconds, self._started = 0.0, None

    def start(self) -> None:
        """Goes on."""
        self._started = time.perf_counter()

    def stop(self) -> None:
        """Stands still."""
        self._seconds, self._started = self.now(), None

    def now(self) -> float:
        """Seconds so far."""
        return self._seconds + (0.0 if self._started is None else time.perf_counter() - self._started)

    def skip_to(self, second: float) -> None:
        """Is set forward."""
        self._seconds += max(second - self.now(), 0.0)

    def count(self, figures: kv.engine.Figures) -> None:
        """Hears of a delivery; what time that took has passed already."""


def computed_tokens(figures: kv.engine.Figures) -> int:
    """Tokens that went through the model: of prompts, and each one that another was drawn behind."""
    counts = figures.counts
    return counts[kv.engine.Counter.PREFILL_TOKENS] + counts[kv.engine.Counter.GENERATED_TOKENS]
