"""A process that is killed and started again, and a store with a byte flipped: what is computed again."""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.tiers.serve import BLOCK_SIZE
from kvcache_jax.tiers.stored_block import unpack


def start(model: Path, folder: Path, prompts: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "experiments.tiers.serve", str(model), str(folder), str(prompts)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def run(model: Path, folder: Path, prompts: Path, num_answers: int) -> list[dict[str, Any]]:
    """Runs a process until it has given so many answers, and kills it; returns what it said.

    Raises:
      RuntimeError: it ended before.
    """
    process = start(model, folder, prompts)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(json.loads(line))
        if len(lines) > num_answers:
            process.send_signal(signal.SIGKILL)
            break
    process.stdout.close()
    if len(lines) <= num_answers:
        raise RuntimeError(f"a server ended with status {process.wait()} after {len(lines)} lines")
    process.wait()
    return lines


def flip_a_byte(folder: Path) -> None:
    """Flips a byte of a block that no other block continues."""
    values = {file: unpack(file.read_bytes())[0] for file in folder.glob("??/*")}
    parents = {header.get("parent") for header in values.values()}
    file = min(
        file
        for file, header in values.items()
        if "tokens" in header and file.parent.name + file.name not in parents
    )
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.unlink()
    file.write_bytes(data)


def study(model: Path, folder: Path, prompts: Sequence[Sequence[int]], num_before: int) -> dict[str, Any]:
    """Answers `num_before` prompts, then all in a new process, then all with a byte of the store flipped."""
    store, file = folder / "store", folder / "prompts.json"
    file.write_text(json.dumps(prompts))
    first = run(model, store, file, num_before)
    again = run(model, store, file, len(prompts))
    flip_a_byte(store)
    flipped = run(model, store, file, len(prompts))

    def cached(lines: list[dict[str, Any]]) -> list[int]:
        return [line["num_cached"] for line in lines[1:]]

    # In the warm cache a prompt finds all its whole blocks but the one with its last token.
    warm = [(len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for prompt in prompts[:num_before]]
    return {
        "num_prompts": [num_before, len(prompts)],
        "num_tokens": sum(map(len, prompts[:num_before])),
        "num_loaded": again[0]["num_loaded"],
        "load_seconds": again[0]["seconds"],
        "first_token_seconds": [first[1]["seconds"], again[1]["seconds"]],
        "computed_before": sum(map(len, prompts[:num_before])) - sum(cached(first)),
        "computed_again": sum(warm) - sum(cached(again)[:num_before]),
        "dropped": flipped[0]["reasons"],
        "same_answers": all(
            one["answer"] == other["answer"]
            for lines in (first, again)
            for one, other in zip(lines[1:], flipped[1:], strict=False)
        ),
    }
