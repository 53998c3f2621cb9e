"""Who owns which block while sequences start, branch, roll back and end: `experiments.decode --map`.

One sentence, one line of Python and one block map per step; what is printed is what runs. A token is a word,
and its keys and values are made from the word's number, so that `kv.gather` can read each row's text back
from the cache: a branch that writes leaves the others' words alone.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

import kvcache_jax as kv
from kvcache_jax.inspect.block_map import block_map

CONFIG = kv.CacheConfig(
    layers=[kv.FullAttention(num_kv_heads=1, head_dim=4)] * 2,
    num_blocks=20,
    block_size=4,
    max_seqs=5,
    max_seq_len=64,
)
MAX_NEW = 10


@dataclasses.dataclass(frozen=True)
class Step:
    """What a step does, in words and in Python: the code assigns `cache` and a result with the status."""

    sentence: str
    code: str


STEPS = (
    Step(
        "Rows 0 and 1 start: blocks for prompts of 10 and 13 words are reserved, none is filled.",
        "cache, admission = kv.allocate(cache, [0, 1], [10, 13])",
    ),
    Step(
        "The first prompt arrives whole, the second in part: the last blocks of row 1 stay reserved.",
        "cache, step = append(cache, *words({0: 'a cat sat on my mat and sang to me', "
        "1: 'once upon a time'}))",
    ),
    Step(
        "Row 0 is forked into rows 2 and 3: they share its blocks, and nothing is copied.",
        "cache, status = kv.fork(cache, [0, 0], [2, 3])",
    ),
    Step(
        "Row 2 writes: it gets its own copy of the half-filled block 2, and a new block after it.",
        "cache, step = append(cache, *words({2: 'with big eyes'}))",
    ),
    Step(
        "Rows 1 and 2 take words back: blocks without a word are free again, also reserved ones.",
        "cache, status = kv.truncate(cache, [1, 2], [3, 12])",
    ),
    Step(
        "A prompt of 64 words needs 16 blocks: it is refused, and the state is as it was.",
        "cache, admission = kv.allocate(cache, [4], [64])",
    ),
    Step(
        "Row 0 ends: what others share stays, and block 2 has one owner left.",
        "cache, status = kv.free(cache, [0])",
    ),
    Step(
        "Row 3 writes into block 2: as the last owner it needs no copy.",
        "cache, step = append(cache, *words({3: 'and purred'}))",
    ),
    Step("All rows end: every block is free.", "cache, status = kv.free(cache, [1, 2, 3])"),
)


class Words:
    """Words as tokens: numbers them, makes keys and values of them, and reads them back."""

    def __init__(self, config: kv.CacheConfig):
        self.config = config
        self.numbers: dict[str, int] = {}

    def __call__(self, texts: dict[int, str]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`(k, v, num_new)` for `append`: the words of each row, padded to `MAX_NEW`."""
        tokens = np.zeros((self.config.max_seqs, MAX_NEW), np.float32)
        num_new = np.zeros(self.config.max_seqs, np.int32)
        for row, text in texts.items():
            numbers = [self.numbers.setdefault(word, len(self.numbers)) for word in text.split()]
            num_new[row] = len(numbers)
            tokens[row, : len(numbers)] = numbers
        kind = self.config.layers[0]
        shape = (self.config.num_layers, *tokens.shape, kind.num_kv_heads, kind.head_dim)
        k = np.broadcast_to(tokens[None, :, :, None, None], shape)
        return k, -k, num_new

    def read(self, cache: kv.Cache, row: int) -> str:
        """The row's text, from the values of the last layer."""
        _, v, length = kv.gather(cache, row, layer=self.config.num_layers - 1)
        words = list(self.numbers)
        return " ".join(words[round(-number)] for number in np.asarray(v)[: int(length), 0, 0].tolist())


def play(show: Callable[[Step, str, dict[int, str], kv.Cache], Any]) -> kv.Cache:
    """Runs the steps and calls `show(step, status, texts by row, cache)` after each; returns the cache."""
    words = Words(CONFIG)
    names: dict[str, Any] = {
        "kv": kv,
        "append": kv.donate(kv.append),
        "words": words,
        "cache": kv.init(CONFIG),
    }
    for step in STEPS:
        exec(step.code, names)
        result = names[step.code.split(" = ")[0].removeprefix("cache, ")]
        statuses = [kv.Status(code).name for code in np.asarray(getattr(result, "status", result)).tolist()]
        cache: kv.Cache = names["cache"]
        active = np.flatnonzero(cache.is_active).tolist()
        show(step, ", ".join(dict.fromkeys(statuses)), {row: words.read(cache, row) for row in active}, cache)
    return names["cache"]


def show_stats(cache: kv.Cache) -> None:
    figures = kv.stats(cache)
    print("kv.stats(cache)")
    for field in dataclasses.fields(figures):
        print(f"  {field.name:<22}{int(getattr(figures, field.name)):>6,}")


def run(color: bool) -> int:
    def bold(text: str) -> str:
        return f"\x1b[1m{text}\x1b[0m" if color else text

    def show(step: Step, status: str, texts: dict[int, str], cache: kv.Cache) -> None:
        *lines, legend = block_map(cache, color=color).splitlines()
        number = STEPS.index(step) + 1
        if number == 1:
            print(f"{legend}\n")
        print(bold(f"{number}. {step.sentence}"))
        print(f"   {step.code}  # {status}")
        print("\n".join(lines))
        for row, text in texts.items():
            if text:
                print(f"  row {row} reads: {text}")
        print(flush=True)

    cache = play(show)
    show_stats(cache)
    violations = kv.check_invariants(cache)
    print(f"\nkv.check_invariants(cache) finds {violations or 'nothing wrong'}")
    return 1 if violations else 0
