"""What `experiments.decode` shows: text as it comes, and a table of figures."""

import contextlib
import itertools
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

import kvcache_jax as kv
from kvcache_jax.core.config import format_bytes
from kvcache_jax.inspect.block_view import is_bright, row_color, row_glyph
from models.tokenizer import TextStream, Tokenizer

MAX_CHECK_INS, MAX_BLOCKS = 20, 100
"""Lines of the text, blocks in a line."""
_GREY, _SHARED = "38;5;245", "1;38;5;231;48;5;240"
_FREE, _SHARED_BLOCK = -1, -2
_PROMPT_LINES = 8  # of a prompt's end


def owners(block_table: np.ndarray, num_blocks: int) -> np.ndarray:
    """i64[num_blocks]: the row that holds the block, `_SHARED_BLOCK` or `_FREE`."""
    rows, columns = np.nonzero(block_table < num_blocks)
    held = block_table[rows, columns]
    result = np.full(num_blocks, _FREE)
    result[held] = rows
    result[np.bincount(held, minlength=num_blocks) > 1] = _SHARED_BLOCK
    return result


def map_line(block_table: np.ndarray, num_blocks: int, width: int, color: bool) -> str:
    """One character per block, `width` of them: the row's glyph, `#` where rows share it, `.` if free."""
    text = ""
    for owner, run in itertools.groupby(owners(block_table, num_blocks)[:width].tolist()):
        glyph = {_FREE: ".", _SHARED_BLOCK: "#"}.get(owner) or row_glyph(owner)
        glyphs = glyph * len(list(run))
        text += f"\x1b[{_style(owner)}m{glyphs}\x1b[0m" if color else glyphs
    return text


def _style(owner: int) -> str:
    """ANSI parameters, as `kv.block_map` has them."""
    if owner < 0:
        return _GREY if owner == _FREE else _SHARED
    return f"38;5;{16 if is_bright(owner) else 231};48;5;{row_color(owner)}"


def timeline_text(timeline: Sequence[kv.decoding.Snapshot], config: kv.CacheConfig, color: bool) -> str:
    """One line per check-in, each layer group by itself; what is too long is cut, and the text says so."""
    chosen = sorted({round(i) for i in np.linspace(0, len(timeline) - 1, MAX_CHECK_INS)})
    width = MAX_BLOCKS
    if sys.stdout.isatty():
        width = max(min(width, shutil.get_terminal_size((120, 24)).columns - 13), 20)
    lines = []
    for group_id, group in enumerate(config.groups):
        layers = f"{group.kind.label} x {group.num_layers} layer{'s' * (group.num_layers > 1)}"
        blocks = f"{group.num_blocks:,} blocks of {group.block_size} tokens"
        lines += ["", f"Blocks over time, {layers}: {blocks}", f"{'step':>6} {'used':>5} "]
        for check_in in (timeline[i] for i in chosen):
            table = check_in.block_tables[group_id]
            num_used = int((owners(table, group.num_blocks) != _FREE).sum())
            line = map_line(table, group.num_blocks, width, color)
            lines.append(f"{check_in.num_steps:>6} {num_used:>5} {line}")
        if group.num_blocks > width:
            lines.append(f"{'':>13}... and {group.num_blocks - width:,} blocks more")
    if len(chosen) < len(timeline):
        lines.append(f"{len(chosen)} of {len(timeline)} check-ins are shown.")
    lines.append("0 held by row 0   # shared by rows   . free")
    return "\n".join(lines)


# Control characters act on a terminal, and a model may say any byte: they become pictures of themselves.
_VISIBLE = {code: 0x2400 + code for code in range(32)} | {code: 0xFFFD for code in range(0x80, 0xA0)}
_VISIBLE |= {ord("\n"): "\n", ord("\t"): "    ", 0x7F: 0x2421}


def visible(text: str) -> str:
    """The text, made harmless to a terminal."""
    return text.translate(_VISIBLE)


def last_lines(text: str, num_lines: int) -> str:
    """The text's end, with a mark where something is left out."""
    lines = text.rstrip("\n").split("\n")
    return "\n".join(["\u2026", *lines[-num_lines:]] if len(lines) > num_lines else lines)


class View:
    """Is told what is decoded while it is decoded; this one shows nothing."""

    def __enter__(self) -> "View":
        return self

    def __exit__(self, *_) -> None: ...

    def on_tokens(self, prompt_id: int, sample_id: int, tokens: list[int]) -> None: ...

    def on_check_in(self, check_in: kv.decoding.Snapshot) -> None: ...


class TextView(View):
    """Prints each continuation when it ends, a lone one as it comes; `prompts` are texts and lengths."""

    def __init__(
        self,
        heading: str,
        prompts: Sequence[tuple[str, int]],
        num_samples: int,
        tokenizer: Tokenizer,
        color: bool,
    ):
        self.heading = heading
        self.prompts = [(visible(text), num_tokens) for text, num_tokens in prompts]
        self.tokenizer, self.color = tokenizer, color
        self.keys = [(p, s) for p in range(len(prompts)) for s in range(num_samples)]
        self.streams = {key: TextStream(tokenizer) for key in self.keys}
        self.texts = dict.fromkeys(self.keys, "")
        self.is_lone = len(self.keys) == 1

    def __enter__(self) -> View:
        print(self.heading, end="\n\n")
        for prompt_id, (text, num_tokens) in enumerate(self.prompts):
            print(self._paint(f"prompt {prompt_id}, {num_tokens} tokens", "1"))
            print(self._paint(_indent(last_lines(text, _PROMPT_LINES)), "2"))
        print(flush=True)
        return self

    def on_tokens(self, prompt_id: int, sample_id: int, tokens: list[int]) -> None:
        key = prompt_id, sample_id
        spoken = [token for token in tokens if token not in self.tokenizer.stop_tokens]
        self._add(key, self.streams[key].push(spoken))

    def on_check_in(self, check_in: kv.decoding.Snapshot) -> None:
        for generation in check_in.ended:
            key = generation.prompt_id, generation.sample_id
            self._add(key, self.streams[key].finish())
            num_tokens, reason = len(generation.tokens), generation.finish_reason.replace("_", " ")
            why = f"{reason} after {num_tokens} token{'s' * (num_tokens != 1)}"
            if self.is_lone:
                print(self._paint(f"\n[{why}]", "2"))
            else:
                head = self._paint(f"prompt {key[0]}, sample {key[1]}, {why}", "1")
                print(f"{head}\n{_indent(self.texts[key])}", flush=True)

    def _add(self, key: tuple[int, int], text: str) -> None:
        self.texts[key] += visible(text)
        if self.is_lone:
            print(visible(text), end="", flush=True)

    def _paint(self, text: str, style: str) -> str:
        return paint(text, style) if self.color else text


class LiveView(TextView):
    """In a terminal: below what has ended, the ends of the texts that grow, and the blocks; needs `rich`."""

    def __init__(self, *args, num_blocks: int):
        super().__init__(*args)
        from rich.console import Console
        from rich.live import Live

        self.num_blocks, self.is_lone = num_blocks, False
        self.console = Console(highlight=False, color_system="auto" if self.color else None)
        self.live = Live(console=self.console, auto_refresh=False, transient=True)

    def __enter__(self) -> View:
        super().__enter__()
        self.live.__enter__()  # what is printed from here on is above
        return self

    def __exit__(self, *error) -> None:
        self.live.__exit__(*error)

    def on_check_in(self, check_in: kv.decoding.Snapshot) -> None:
        super().on_check_in(check_in)
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 1), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        summary = (
            f"step {check_in.num_steps}, {check_in.seconds:.1f} s: {check_in.num_blocks_used} of "
            f"{self.num_blocks} blocks used, {check_in.num_refs} without sharing"
        )
        blocks = map_line(check_in.block_tables[0], self.num_blocks, self.console.width - 2, self.color)
        grid.add_row("", Text(summary, style="dim"))
        grid.add_row("", Text.from_ansi(blocks))
        per_text = max(1, (self.console.height - 4) // max(1, len(check_in.running)))
        for row, key in sorted(check_in.running.items()):
            front = "black" if is_bright(row) else "white"
            label = Text(f" {row_glyph(row)} ", style=f"{front} on color({row_color(row)})")
            lines = self.texts[key].rstrip("\n").split("\n")
            grid.add_row(label, Text("\n".join(lines[-per_text:])))
        self.live.update(grid, refresh=True)


def make_view(*args: Any, num_blocks: int) -> View:
    """Live in a terminal that can, plain elsewhere; arguments are `TextView`'s and `LiveView`'s."""
    if sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            view = LiveView(*args, num_blocks=num_blocks)
            if not view.console.is_dumb_terminal:
                return view
    return TextView(*args)


def _indent(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.rstrip("\n").split("\n"))


def paint(text: str, style: str) -> str:
    """With ANSI parameters."""
    return f"\x1b[{style}m{text}\x1b[0m"


def show_figures(figures: dict[str, float], color: bool) -> None:
    """Prints the table, in words."""
    f, size = figures, {name: format_bytes(int(num)) for name, num in figures.items() if "_bytes" in name}
    lines = {
        "prefill": f"{f['prefill_tokens_per_second']:,.0f} tokens/s: "
        f"{f['num_prompt_tokens']:,} in {f['prefill_seconds']:.2f} s",
        "decode": f"{f['decode_tokens_per_second']:,.0f} tokens/s: "
        f"{f['num_decoded_tokens']:,} in {f['decode_seconds']:.2f} s, {f['num_steps']:,} steps",
        "compilation": f"{f['warm_up_seconds']:.1f} s, in a warm-up before",
        "blocks used": f"{f['peak_blocks_used']:,} of {f['num_blocks_total']:,} at the peak",
        "saved by sharing": f"{f['peak_blocks_saved']:,} blocks at the peak, by {f['num_forks']:,} forks",
        "copies on write": f"{f['num_copies']:,} blocks",
    }
    if num_cached := f["num_cached_tokens"]:
        num_tokens = num_cached + f["num_prompt_tokens"]
        lines["prefix cache"] = f"{num_cached:,} of {num_tokens:,} prompt tokens were there already"
    if "num_drafted" in f:
        share = f["num_accepted"] / f["num_drafted"] if f["num_drafted"] else 0.0
        lines["drafts"] = f"{f['num_accepted']:,} of {f['num_drafted']:,} tokens accepted ({share:.0%})"
    lines["cache memory"] = f"{size['peak_cache_bytes']} of {size['cache_bytes']} at the peak"
    for what in ("process", "device"):
        if f"peak_{what}_bytes" in size:
            lines[f"{what} memory"] = f"{size[f'peak_{what}_bytes']} at the peak"
    print()
    for name, value in lines.items():
        label = f"{name:<18}"
        print(f"{paint(label, '1') if color else label}{value}")
