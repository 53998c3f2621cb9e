"""Question: what do passages lose that were computed once and stand anywhere, and what do they save?

Command: python -m experiments.chunks [--json] [--picture FILE]
         python -m experiments.chunks --check DIR PROMPTS [--selector NAME] [--share S] [--json]
Machine: 2 virtual cores of an Intel Xeon; jax 0.12.0.1
Answer:  re-rotated they are 0.005 to 0.006 nats a byte off full prefill, not rotated 0.08 to 0.16. The first
  fifth of each computed again leaves 59 to 69% of that, the half whose second layer is off most 27 to 31%.
  With the first fifth a prediction comes in 0.40 times prefill's time. Of 138 thousand bytes of requests
  about 40 files 33 are computed so, with a prefix cache 102.
Record:  experiments/results/chunks.json, docs/chunks.png; docs/measured.md tells what is compared.

Each passage is computed alone and stored, and composed into a row, where its keys are rotated to their new
place. Then a share of the tokens after the first passage is computed again, the ones with the highest scores.
Selectors see what they would have: attention to what was in front of a passage when it was met before, in
an earlier prompt with the passages in the opposite order, after one of another file; deviations in the
second layer, which cost the first layer of all tokens; places; chance. What the attention of this prompt's
own full prefill would have said is printed beside them, and counts for no bar.

With --check the question is whether another checkpoint may be used so: its own prompts (see `check.py`) are
compared with full prefill. Exit status 1 says that a bar does not hold.
"""

import argparse
from typing import Any

import jax.numpy as jnp

import kvcache_jax as kv
from experiments.chunks import check, quality, report, rows, times, trace
from experiments.chunks.rows import read_prompts
from experiments.common import command, corpus
from experiments.common.report import add_options, deliver
from models import checkpoint
from models.decoder import Decoder


def main(arguments: list[str] | None = None) -> int:
    parser = command.Parser("experiments.chunks", __doc__)
    add_options(parser)
    parser.add_argument(
        "--check",
        type=command.name,
        nargs=2,
        metavar=("DIR", "PROMPTS"),
        help="compare a checkpoint's predictions for prompts, lines of JSON with chunks and question",
    )
    _add_limits(parser)
    options = parser.parse_args(arguments)
    if options.check:
        found = _checked(parser, options)
        deliver(found, options, check.show)
        return int(not all(bar["holds"] for bar in found["bars"]))
    found = _studied(checkpoint.load(corpus.MODEL, dtype=jnp.float32))
    return deliver(found, options, report.show, report.draw)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    add, share = parser.add_argument, command.number(0, 1)
    add("--selector", default="first", metavar="NAME", help="of the tokens to compute again; default: first")
    add("--share", type=share, default=0.2, metavar="S", help="of each chunk's tokens; default: 0.2")
    text = f"most KL divergence, nats a token, that is right; default: {check.MOST_KL}"
    add("--most-kl", type=command.number(0), default=check.MOST_KL, metavar="NATS", help=text)
    text = f"least share of tokens with the same best one; default: {check.LEAST_AGREEMENT}"
    add("--least-agreement", type=share, default=check.LEAST_AGREEMENT, metavar="SHARE", help=text)


def _studied(decoder: Decoder) -> dict[str, Any]:
    prompts = read_prompts()
    texts = [quality.measure(quality.Study(decoder, of_text)) for of_text in prompts]
    requests = trace.make_requests()
    computed = trace.measure(requests)
    return {
        "texts": texts,
        "times": times.measure(decoder, prompts[0]),
        "num_requests": len(requests),
        "num_files": trace.NUM_FILES,
        "trace": computed,
        "bars": report.bars_of(texts, computed),
    }


def _checked(parser: command.Parser, options: argparse.Namespace) -> dict[str, Any]:
    """Compares another checkpoint's predictions; what cannot be compared is bad input."""
    if options.picture:
        parser.error("got --picture with --check, expected one of them: a check has no figure")
    folder, path = options.check
    with parser.refusing(checkpoint.CheckpointError, NotImplementedError):
        decoder = checkpoint.load(folder, dtype=jnp.float32)
        prompts = check.read_prompts(path, checkpoint.load_tokenizer(folder))
        longest = max(int(prompt.starts[-1]) for prompt in prompts)
        reuse = _reuse(rows.rotations_of(decoder, longest), options)
        found = check.measure(decoder, prompts, reuse, options.most_kl, options.least_agreement)
    return {"model": folder.name, **found}


def _reuse(rotate: Any, options: argparse.Namespace) -> kv.chunks.Reuse:
    try:
        return kv.chunks.Reuse(rotate=rotate, selector=options.selector, share=options.share)
    except ValueError as error:
        raise command.InputError(f"got --selector {options.selector}: {error}") from None


if __name__ == "__main__":
    command.run(main)
