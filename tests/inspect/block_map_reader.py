"""What a block map ought to show, recounted from the block tables, and what one does show, parsed."""

import re

import numpy as np

ANSI = re.compile(r"\x1b\[([0-9;]*)m")


def glyph(row):
    """Row numbers as the text shows them, written down again."""
    if row < 10:
        return str(row)
    return chr(ord("a") + row - 10) if row < 36 else chr(ord("A") + row - 36) if row < 62 else "*"


def recount(cache, group):
    """(cell of each block, {row: (tokens, entries)}) from the block table, lengths and what is published."""
    block_table = np.asarray(cache.control.block_pools[group].block_table).tolist()
    num_blocks, block_size = cache.config.groups[group].num_blocks, cache.config.groups[group].block_size
    lengths = np.asarray(cache.context_len).tolist()
    cached = cache.control.block_pools[group].cached
    is_published = [False] * num_blocks if cached is None else np.asarray(cached.is_published).tolist()
    holders = {block: [] for block in range(num_blocks)}
    for row, blocks in enumerate(block_table):
        for column, block in enumerate(blocks):
            if block < num_blocks:
                holders[block].append((row, column * block_size >= lengths[row]))
    cells, rows = [], {}
    for block in range(num_blocks):
        match holders[block]:
            case []:
                cells.append(":" if is_published[block] else ".")
            case [(row, is_reserved)]:
                cells.append("~" * is_reserved + glyph(row))
            case several:
                cells.append(f"#{len(several)}" if len(several) < 10 else "#+")
    for row in np.flatnonzero(np.asarray(cache.is_active)).tolist():
        last = max([c for c, block in enumerate(block_table[row]) if block < num_blocks], default=-1)
        entries = []
        for block in block_table[row][: max(last + 1, -(-lengths[row] // block_size))]:
            if block == num_blocks:
                is_more = bool(entries) and entries[-1].endswith("gone)")
                gone = int(entries.pop()[1:-6]) if is_more else 0
                entries.append(f"({gone + 1} gone)")
                continue
            count = len(holders[block])
            entries.append("~" * (cells[block][0] == "~") + str(block) + (f"*{count}" if count > 1 else ""))
        rows[row] = (lengths[row], entries)
    return cells, rows


def read_groups(text):
    """The same by group, parsed from a block map that leaves out nothing but free blocks."""
    groups = {}
    for chunk in re.split(r"^(?=group )", text, flags=re.MULTILINE)[1:]:
        title, _, *lines = chunk.splitlines()
        cells, rows = [], {}
        for line in lines:
            if row := re.match(r"  row (\d+)(?: = (.))? +(\d+) tokens?  +\[(.*) \]$", line):
                assert row[2] == (None if int(row[1]) < 10 else glyph(int(row[1])))
                rows[int(row[1])] = (
                    int(row[3]),
                    [entry for entry in re.split(r"  +", row[4].strip()) if entry],
                )
            elif run := re.match(r" {3,}(\d+)  \.\.\. (\d+) free blocks \.\.\.$", line):
                assert int(run[1]) == len(cells)
                cells += ["."] * int(run[2])
            elif re.match(r" {3,}\d+  ", line):
                first, *found = line.split()
                assert int(first) == len(cells)
                cells += found
        groups[int(title.split()[1].rstrip(":"))] = (cells, rows)
    return groups
