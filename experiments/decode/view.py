"""What `experiments.decode` shows: text as it comes, and a table of figures."""

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

import kvcache_jax as kv
from experiments.decode.timeline import map_line
from kvcache_jax.core.config import format_bytes
from kvcache_jax.inspect.block_view import is_bright, row_color, row_glyph
from models.tokenizer import TextStream, Tokenizer

_PROMPT_LINES = 8  # of a prompt's end

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

    def compiling(self) -> contextlib.AbstractContextManager:
        """Around the warm-up, before the view is entered."""
        return contextlib.nullcontext()

    def on_tokens(self, prompt_id: int, sample_id: int, tokens: list[int]) -> None: ...

    def on_check_in(self, check_in: kv.decoding.Snapshot) -> None: ...

    def on_beams(
        self, check_in: kv.decoding.Snapshot, beams: Sequence[Sequence[kv.decoding.Beam]]
    ) -> None: ...


class TextView(View):
    """Collects each continuation's text; plain: a lone one as it comes, several when each of them ends.

    Args:
      heading: Goes before everything.
      prompts: Text and number of tokens of each.
      num_samples: Continuations of each.
    """

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
        self.labels = dict.fromkeys(self.keys, "")  # row or score
        self.rows: dict[tuple[int, int], int] = {}
        self.notes = dict.fromkeys(self.keys, "")  # why it ended
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
        self.rows |= {key: row for row, key in check_in.running.items()}
        for generation in check_in.ended:
            key = generation.prompt_id, generation.sample_id
            self._add(key, self.streams[key].finish())
            self.notes[key] = _why(generation)
        for generation in check_in.ended:
            self.show_end((generation.prompt_id, generation.sample_id))
        self.refresh(check_in)

    def on_beams(self, check_in: kv.decoding.Snapshot, beams: Sequence[Sequence[kv.decoding.Beam]]) -> None:
        for prompt_id, hypotheses in enumerate(beams):
            for i, beam in enumerate(hypotheses):
                spoken = [token for token in beam.tokens if token not in self.tokenizer.stop_tokens]
                self.texts[prompt_id, i] = visible(self.tokenizer.decode(spoken))
                self.labels[prompt_id, i] = f"{beam.score:.3f}"
                self.notes[prompt_id, i] = "" if beam.finish_reason == "running" else _why(beam)
        self.refresh(check_in)
        if all(self.notes[key] for key in self.keys if self.labels[key]):
            for key in self.keys:
                self.show_end(key)

    def _add(self, key: tuple[int, int], text: str) -> None:
        text = visible(text)
        self.texts[key] += text
        if self.is_lone:
            self.show_piece(text)

    def show_piece(self, text: str) -> None:
        """New text of a lone continuation."""
        print(text, end="", flush=True)

    def show_end(self, key: tuple[int, int]) -> None:
        """A continuation is complete."""
        if self.is_lone and not self.labels[key]:
            print(self._paint(f"\n[{self.notes[key]}]", "2"))
        elif self.notes[key]:
            prompt_id, sample_id = key
            what = (
                f"hypothesis {sample_id}, score {self.labels[key]}"
                if self.labels[key]
                else f"sample {sample_id}"
            )
            print(self._paint(f"prompt {prompt_id}, {what}, {self.notes[key]}", "1"))
            print(_indent(self.texts[key]), flush=True)

    def refresh(self, check_in: kv.decoding.Snapshot) -> None: ...

    def _paint(self, text: str, style: str) -> str:
        return paint(text, style) if self.color else text


class LiveView(TextView):
    """In a terminal: a panel per prompt with its continuations, and the blocks below; needs `rich`."""

    def __init__(self, *args, num_blocks: int):
        super().__init__(*args)
        from rich.console import Console
        from rich.live import Live

        self.num_blocks = num_blocks
        self.console = Console(highlight=False, color_system="auto" if self.color else None)
        self.live = Live(console=self.console, auto_refresh=False, transient=True)

    def compiling(self) -> contextlib.AbstractContextManager:
        return self.console.status("compiling")

    def __enter__(self) -> View:
        print(self.heading, end="\n\n", flush=True)
        self.live.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self.live.__exit__(*error)
        for panel in self._panels(range(len(self.prompts)), self.keys, _PROMPT_LINES, None):
            self.console.print(panel)

    def show_piece(self, text: str) -> None: ...

    def show_end(self, key: tuple[int, int]) -> None: ...

    def refresh(self, check_in: kv.decoding.Snapshot) -> None:
        from rich.console import Group
        from rich.text import Text

        room = self.console.height - 3
        keys = [key for key in self.keys if not self.notes[key] and (key in self.rows or self.labels[key])]
        keys = keys or self.keys
        shown, num_lines = [], 0
        for key in keys:
            num_lines += 1 if shown and key[0] == shown[-1][0] else 4
            if num_lines > room:
                break
            shown.append(key)
        shown = shown or keys[:1]
        per_text = 1 + max(0, room - num_lines) // len(shown)
        prompt_ids = list(dict.fromkeys(prompt_id for prompt_id, _ in shown))
        panels = self._panels(prompt_ids, shown, 1, per_text)
        summary = (
            f"step {check_in.num_steps}, {check_in.seconds:.1f} s: {check_in.num_blocks_used} of "
            f"{self.num_blocks} blocks used, {check_in.num_refs} without sharing"
        )
        if len(keys) > len(shown):
            summary += f"; {len(keys) - len(shown)} texts more"
        footer = Text(summary, style="dim", no_wrap=True, overflow="ellipsis")
        blocks = map_line(check_in.block_tables[0], self.num_blocks, self.console.width, self.color)
        line = Text.from_ansi(blocks, no_wrap=True)
        self.live.update(Group(*panels, footer, line), refresh=True)

    def _panels(
        self,
        prompt_ids: Sequence[int],
        keys: Sequence[tuple[int, int]],
        prompt_lines: int,
        text_lines: int | None,
    ) -> list[Any]:
        from rich.console import Group
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        panels = []
        for prompt_id in prompt_ids:
            text, num_tokens = self.prompts[prompt_id]
            lines = last_lines(text, prompt_lines).split("\n")[-prompt_lines - (text_lines is None) :]
            prompt = Text("\n".join(lines), style="dim", no_wrap=text_lines is not None, overflow="ellipsis")
            grid = Table.grid(padding=(0, 1), expand=True)
            grid.add_column(no_wrap=True)
            grid.add_column(ratio=1)
            for key in keys:
                if key[0] == prompt_id:
                    grid.add_row(self._label(key), self._body(key, text_lines))
            title = f"prompt {prompt_id}, {num_tokens} tokens"
            panels.append(Panel(Group(prompt, grid), title=title, title_align="left", border_style="dim"))
        return panels

    def _label(self, key: tuple[int, int]) -> Any:
        from rich.text import Text

        row = self.rows.get(key)
        if row is None:
            return Text(self.labels[key])
        front = "black" if is_bright(row) else "white"
        return Text(f" {row_glyph(row)} ", style=f"{front} on color({row_color(row)})")

    def _body(self, key: tuple[int, int], num_lines: int | None) -> Any:
        from rich.text import Text

        text = self.texts[key]
        if num_lines is None:
            body = Text(text.rstrip("\n"), overflow="fold")
        else:
            lines = [line for line in text.split("\n") if line.strip()] or [""]
            body = Text("\n".join(lines[-num_lines:]), no_wrap=True, overflow="ellipsis")
        return body.append(f"  [{self.notes[key]}]", style="dim") if self.notes[key] else body


def make_view(*args: Any, num_blocks: int) -> View:
    """Live in a terminal that can, plain elsewhere; arguments are those of `TextView` and `LiveView`."""
    if sys.stdout.isatty():
        with contextlib.suppress(ImportError):
            view = LiveView(*args, num_blocks=num_blocks)
            if not view.console.is_dumb_terminal:
                return view
    return TextView(*args)


def _why(continuation: kv.decoding.Generation | kv.decoding.Beam) -> str:
    num_tokens = len(continuation.tokens)
    reason = continuation.finish_reason.replace("_", " ")
    return f"{reason} after {num_tokens} token{'s' * (num_tokens != 1)}"


def _indent(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.rstrip("\n").split("\n"))


def paint(text: str, style: str) -> str:
    """With ANSI parameters."""
    return f"\x1b[{style}m{text}\x1b[0m"


def show_figures(figures: dict[str, float], color: bool) -> None:
    """Prints the table, in words."""
    f = figures
    saved, num_forks, num_copies = (int(f[name]) for name in ("peak_blocks_saved", "num_forks", "num_copies"))
    lines = {
        "prefill": f"{f['prefill_tokens_per_second']:,.0f} tokens/s: "
        f"{f['num_prompt_tokens']:,} in {f['prefill_seconds']:.2f} s",
        "decode": f"{f['decode_tokens_per_second']:,.0f} tokens/s: "
        f"{f['num_decoded_tokens']:,} in {f['decode_seconds']:.2f} s, {f['num_steps']:,} steps",
        "compilation": f"{f['warm_up_seconds']:.1f} s, in a warm-up before",
        "blocks used": f"{f['peak_blocks_used']:,} of {f['num_blocks_total']:,} at the peak",
        "saved by sharing": f"{saved:,} blocks at the peak, by {num_forks:,} forks",
        "copies on write": f"{num_copies:,} blocks",
    }
    if num_cached := int(f["num_cached_tokens"]):
        num_tokens = num_cached + int(f["num_prompt_tokens"])
        lines["prefix cache"] = f"{num_cached:,} of {num_tokens:,} prompt tokens were there already"
    if "num_drafted" in f:
        share = f["num_accepted"] / f["num_drafted"] if f["num_drafted"] else 0.0
        lines["drafts"] = f"{f['num_accepted']:,} of {f['num_drafted']:,} tokens accepted ({share:.0%})"
    lines["cache memory"] = (
        f"{format_bytes(int(f['peak_cache_bytes']))} of {format_bytes(int(f['cache_bytes']))} at the peak"
    )
    lines["process memory"] = f"{format_bytes(int(f['peak_process_bytes']))} at the peak"
    if "peak_device_bytes" in f:
        lines["device memory"] = f"{format_bytes(int(f['peak_device_bytes']))} at the peak"
    print()
    for name, value in lines.items():
        label = f"{name:<18}"
        print(f"{paint(label, '1') if color else label}{value}")
