"""What is said of a trained model: its evaluation, and the record of its training."""

import json
import platform
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.common import corpus
from experiments.common.report import provenance
from experiments.common.timing import show_table
from experiments.train.bits_per_byte import bits_of_files
from models import checkpoint
from models.tokenizer import ByteTokenizer

RECORD = "training.json"
LOSS_EVERY = 20  # steps whose mean is one number of the record
BAR = 1.65  # bits per byte of the held-out files


def evaluate(folder: Path, progress: Callable[[Sequence], Iterable] = iter) -> dict[str, Any]:
    """Measures a stored model on the held-out files, beside compressors that see them in one stream."""
    files = corpus.held_out_files()
    if not files:
        raise checkpoint.CheckpointError(
            f"{corpus.folder()} has none of the held-out files: use another Python"
        )
    if not isinstance(checkpoint.load_tokenizer(folder), ByteTokenizer):
        raise checkpoint.CheckpointError(f"{folder} has a tokenizer, expected a model whose tokens are bytes")
    decoder = checkpoint.load(folder, dtype=jnp.float32)
    bits = bits_of_files(decoder, list(files.values()), progress)
    stream = b"".join(files.values())
    rows = [
        {"name": name, "num_bytes": len(file), "bits_per_byte": _beside(found, file)}
        for (name, file), found in zip(files.items(), bits, strict=True)
    ]
    return {
        "bits_per_byte": _beside(np.concatenate(bits), stream),
        "num_bytes": len(stream),
        "digest": corpus.digest(stream),
        "context_len": decoder.config.max_seq_len,
        "share_in_training_text": round(
            corpus.share_seen(list(files.values()), corpus.training_bytes().tobytes()), 4
        ),
        "files": rows,
        "missing_files": sorted(set(corpus.HELD_OUT) - set(files)),
        "python": platform.python_version(),
    }


def _beside(bits: np.ndarray, data: bytes) -> dict[str, float]:
    values = {"model": float(bits.mean(dtype=np.float64))} | corpus.compressed_bits(data)
    return {name: round(value, 4) for name, value in values.items()}


def show(report: dict[str, Any]) -> None:
    """Prints what `evaluate` found, or a record that has it."""
    if "minutes" in report:
        print(f"{report['minutes']:.1f} minutes of training, {report['loss'][-1]:.3f} bits per byte at last")
    report = report.get("held_out", report)
    names = list(report["bits_per_byte"])
    total = {"name": f"all {len(report['files'])}, one stream"} | report
    rows = [
        [row["name"], f"{row['num_bytes']:,}", *(f"{row['bits_per_byte'][name]:.3f}" for name in names)]
        for row in (*report["files"], total)
    ]
    show_table("bits per byte of files that were not trained on", ["file", "bytes", *names], rows)
    length = report["context_len"]
    print(
        f"\nThe model predicts each byte from all bytes of its file before it, or from the last "
        f"{length // 2:,} to {length:,}.\nOf all strings of 64 bytes in these files, "
        f"{report['share_in_training_text']:.1%} stand in the training text too."
    )
    if report["missing_files"]:
        print(f"Python {report['python']} does not have {', '.join(report['missing_files'])}.")
    bits = report["bits_per_byte"]["model"]
    print(f"{bits:.3f} bits per byte, at most {BAR}: {'holds' if bits <= BAR else 'does not hold'}")


def make_record(
    settings: dict[str, Any], bits: np.ndarray, minutes: float, num_bytes: int, held_out: dict[str, Any]
) -> dict[str, Any]:
    """The record of a training, whose losses `bits` are per step and byte; `held_out` is from `evaluate`."""
    parts = np.split(bits, range(LOSS_EVERY, len(bits), LOSS_EVERY))
    return provenance() | {
        "settings": json.loads(json.dumps(settings, default=str)),
        "num_bytes": num_bytes,
        "minutes": round(minutes, 1),
        "python": platform.python_version(),
        "held_out": held_out,
        "loss_every": LOSS_EVERY,
        "loss": [round(float(part.mean()), 3) for part in parts],
    }
