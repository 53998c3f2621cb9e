"""Tables of words and numbers, aligned for a terminal or as markdown."""

from collections.abc import Sequence


class Table:
    """A table whose first columns are known before the others are.

    Args:
      headings: Of all columns; the last one is left open to the right.
      words: The first columns' cells, which are aligned to the left; all others are numbers.
      is_markdown: Whether lines are printed as markdown.
    """

    def __init__(self, headings: Sequence[str], words: Sequence[Sequence[str]], is_markdown: bool):
        self.is_markdown = is_markdown
        self.headings = headings
        self.num_words = len(words)
        self.widths = [
            max(len(heading), *map(len, column)) for heading, column in zip(headings, words, strict=False)
        ]
        self.widths += [max(len(heading), 9) for heading in headings[self.num_words : -1]]

    def head(self) -> str:
        """Returns the line of headings, in markdown with the rule below it."""
        if not self.is_markdown:
            return self.line(self.headings)
        rules = ["---"] * self.num_words + ["--:"] * (len(self.headings) - self.num_words - 1) + ["---"]
        return "\n".join("| " + " | ".join(cells) + " |" for cells in (self.headings, rules))

    def line(self, cells: Sequence[object]) -> str:
        """Returns the line of one row; None is an empty cell."""
        texts = [_text(cell) for cell in cells]
        if self.is_markdown:
            return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"
        aligned = [
            f"{text:<{width}}" if i < self.num_words else f"{text:>{width}}"
            for i, (text, width) in enumerate(zip(texts, self.widths, strict=False))
        ]
        return "  ".join([*aligned, texts[-1]])


def _text(cell: object) -> str:
    if cell is None:
        return ""
    return f"{cell:,}" if isinstance(cell, int) else " ".join(str(cell).split())
