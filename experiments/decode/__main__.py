"""Question: what does a decoder say, and what does its cache do meanwhile?

Command: python -m experiments.decode [PROMPT ...] [--samples N] [--speculative K] [--greedy]
         [--checkpoint DIR] [--prompts FILE] [--json]; --help lists the others
         python -m experiments.decode --map     a small cache, step by step
Answer:  text while it is decoded, figures, and who held which block when: samples share their prompt.

Prompts are arguments, the lines of a file or standard input, or two of our own. What is wrong with the input
is one sentence on standard error and exit code 2; logits that are NaN are one too, and exit code 1.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import os
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import kvcache_jax as kv
from experiments.common import command
from experiments.common.command import InputError
from experiments.decode import block_map_demo
from experiments.decode import options as decode_options
from experiments.decode import view as decode_view
from kvcache_jax.core.config import format_bytes
from kvcache_jax.core.describe import control_bytes
from models import checkpoint
from models.decoder import Decoder, forward
from models.tokenizer import Tokenizer


@dataclasses.dataclass
class Job:
    """What is to be decoded, by which model, in which cache."""

    options: argparse.Namespace
    decoder: Decoder
    tokenizer: Tokenizer
    prompts: list[str]
    tokens: list[list[int]]
    config: kv.CacheConfig

    def text(self, tokens: Sequence[int]) -> str:
        """Of new tokens, a stop token left out."""
        stops = self.tokenizer.stop_tokens
        return self.tokenizer.decode([token for token in tokens if token not in stops])


@dataclasses.dataclass
class Outcome:
    """What came of it."""

    result: kv.decoding.GenerateResult
    check_ins: list[kv.decoding.Snapshot]
    warm_up_seconds: float


def prepare(options: argparse.Namespace) -> Job:
    """Reads everything and checks that it fits; what does not is an InputError or a CheckpointError."""
    decode_options.check(options)
    prompts = decode_options.read_prompts(options)
    if not os.path.exists(options.checkpoint):  # `Path.exists` raises where the name is too long
        train = ": train it with python -m experiments.train" * (options.checkpoint == decode_options.MODEL)
        raise InputError(f"there is no checkpoint {options.checkpoint}{train}")
    decoder = _load(options, options.checkpoint)
    tokenizer = checkpoint.load_tokenizer(options.checkpoint)
    tokens = decode_options.encode(prompts, tokenizer, decoder.config)
    config = decode_options.plan(options, decoder.config, tokens)
    _check_memory(options, config, decoder)
    return Job(options, decoder, tokenizer, prompts, tokens, config)


def _load(options: argparse.Namespace, folder: Path) -> Decoder:
    """Without --dtype a CPU computes in float32, and others in what is stored, if models compute in it."""
    stored, dtype = checkpoint.stored_dtype(folder), options.dtype
    if dtype is None and stored not in decode_options.COMPUTED:
        print(
            f"{folder} is stored in {stored}, which models do not compute in: taking float32 "
            "(--dtype bfloat16 takes half the memory)",
            file=sys.stderr,
        )
        dtype = "float32"
    return checkpoint.load(folder, dtype=dtype or ("float32" if jax.default_backend() == "cpu" else None))


def _check_memory(options: argparse.Namespace, config: kv.CacheConfig, decoder: Decoder) -> None:
    """Before anything is made: a CPU hands out memory that it does not have, and ends the process later."""
    need = kv.memory_bytes(config) + control_bytes(config)
    # The logits of a piece, the largest of what else grows with the rows; tokens and their log-probabilities.
    need += 4 * (config.query_len_limit + config.max_seqs) * decoder.config.vocab_size
    need += 8 * config.max_seqs * config.max_seq_len
    free = _free_bytes()
    if free is not None and need > free:
        raise InputError(
            f"decoding needs {format_bytes(need)}, but {format_bytes(free)} of memory are free: "
            f"lower {decode_options.SIZES}"
        )


def _free_bytes() -> int | None:
    """Memory that the default device can still give; None where the device does not tell."""
    figures = jax.local_devices()[0].memory_stats()
    if figures and "bytes_limit" in figures:
        return figures["bytes_limit"] - figures["bytes_in_use"]
    if jax.default_backend() != "cpu":
        return None
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return None


def warm_up(job: Job) -> float:
    """Compiles the programs by two tokens of prompts that share nothing; returns the seconds."""
    start = time.perf_counter()
    try:
        generate(job, [tokens[:1] for tokens in job.tokens], 2, kv.decoding.Watch(check_in_every=8))
        if job.config.enable_prefix_caching:
            # Asked of prompts that share blocks.
            tokens = np.zeros((1, job.config.max_seq_len), np.int32)
            kv.lookup(kv.init(job.config, storage=False), tokens, [1])
    except NotImplementedError as error:
        raise InputError(str(error)) from error
    except jax.errors.JaxRuntimeError as error:
        if "out of memory" not in str(error).lower():
            raise
        raise InputError(f"decoding does not fit into memory: lower {decode_options.SIZES}") from error
    return time.perf_counter() - start


def generate(
    job: Job, prompts: Sequence[Sequence[int]], max_new_tokens: int, watch: kv.decoding.Watch
) -> kv.decoding.GenerateResult:
    options = job.options
    return kv.generate(
        forward,
        job.decoder,
        prompts,
        job.config,
        max_new_tokens=max_new_tokens,
        num_samples=options.samples,
        sampling=kv.decoding.SamplingParams(
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            seed=options.seed,
        ),
        stop_tokens=job.tokenizer.stop_tokens,
        stop_strings=kv.decoding.StopStrings(options.stop, job.text),
        drafts=kv.decoding.Drafts(options.speculative) if options.speculative else None,
        prefill_len=decode_options.PREFILL_LEN,
        watch=watch,
    )


def decode(job: Job, view: decode_view.View) -> Outcome:
    check_ins: list[kv.decoding.Snapshot] = []

    def note(check_in: kv.decoding.Snapshot) -> None:
        check_ins.append(check_in)
        view.on_check_in(check_in)

    with view:
        seconds = warm_up(job)
        result = generate(job, job.tokens, job.options.max_new, kv.decoding.Watch(view.on_tokens, note, 8))
    return Outcome(result, check_ins, seconds)


def figures(job: Job, outcome: Outcome) -> dict[str, float]:
    """The numbers of the table; times are seconds, sizes bytes."""
    result, stats = outcome.result, kv.stats(outcome.result.cache)
    lengths = [len(generation.tokens) for generation in result.generations]
    # The first token of each is drawn in the prefill.
    num_decoded = sum(max(length - 1, 0) for length in lengths)
    pools, groups = result.cache.control.block_pools, job.config.groups
    device, unit = jax.local_devices()[0].memory_stats() or {}, 1 if sys.platform == "darwin" else 1024
    drafts = {"num_drafted": result.num_drafted, "num_accepted": result.num_accepted}
    return {
        "warm_up_seconds": outcome.warm_up_seconds,
        "prefill_seconds": result.prefill_seconds,
        "decode_seconds": result.decode_seconds,
        "num_prompt_tokens": result.num_prompt_tokens,
        "num_cached_tokens": result.num_cached_tokens,
        "num_new_tokens": sum(lengths),
        "num_decoded_tokens": num_decoded,
        "prefill_tokens_per_second": result.num_prompt_tokens / result.prefill_seconds,
        "decode_tokens_per_second": num_decoded / result.decode_seconds if num_decoded else 0.0,
        "num_steps": result.num_steps,
        **(drafts if job.options.speculative else {}),
        "num_forks": int(stats.num_forks),
        "num_copies": int(stats.num_copies),
        "peak_blocks_used": int(stats.peak_used),
        "num_blocks_total": int(stats.num_blocks_total),
        "peak_blocks_saved": max(each.num_refs - each.num_blocks_used for each in result.timeline),
        "peak_cache_bytes": sum(
            int(pool.peak_used) * group.block_bytes for pool, group in zip(pools, groups, strict=True)
        ),
        "cache_bytes": kv.memory_bytes(job.config),
        "peak_process_bytes": unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        **({"peak_device_bytes": device["peak_bytes_in_use"]} if "peak_bytes_in_use" in device else {}),
    }


def settings(job: Job) -> dict[str, Any]:
    options, device = job.options, jax.local_devices()[0]
    names = "max_new stop samples speculative greedy temperature top_k top_p seed block_size"
    return {
        "checkpoint": str(options.checkpoint),
        **{name: getattr(options, name) for name in names.split()},
        "num_blocks": job.config.num_blocks,
        "rows": job.config.max_seqs,
        "max_seq_len": job.config.max_seq_len,
        "dtype": str(np.dtype(job.decoder.config.dtype)),
        "device": device.device_kind,
        "platform": device.platform,
        "jax": jax.__version__,
    }


def report(job: Job, outcome: Outcome) -> dict[str, Any]:
    prompts = [
        {"prompt": prompt, "num_prompt_tokens": len(tokens), "samples": []}
        for prompt, tokens in zip(job.prompts, job.tokens, strict=True)
    ]
    for c in outcome.result.generations:
        logprobs = [value if math.isfinite(value) else None for value in c.logprobs]
        sample = {"tokens": c.tokens, "text": job.text(c.tokens), "logprobs": logprobs}
        prompts[c.prompt_id]["samples"].append(sample | {"finish_reason": c.finish_reason})
    return {"prompts": prompts, "figures": figures(job, outcome), "settings": settings(job)}


def make_view(job: Job, color: bool) -> decode_view.View:
    """Says what is decoded by what, and goes on from there."""
    options, config = job.options, job.config
    num_params = sum(leaf.size for leaf in jax.tree.leaves(job.decoder))
    device = jax.local_devices()[0].device_kind
    heading = (
        f"{options.checkpoint.name}: {num_params / 1e6:,.1f} M parameters, "
        f"{np.dtype(job.decoder.config.dtype)}, on {device}\n{kv.describe(config)}"
    )
    prompts = [(prompt, len(tokens)) for prompt, tokens in zip(job.prompts, job.tokens, strict=True)]
    arguments = heading, prompts, options.samples, job.tokenizer, color
    return decode_view.make_view(*arguments, num_blocks=config.groups[0].num_blocks)


def main(arguments: list[str] | None = None) -> int:
    parser = decode_options.make_parser(__doc__)
    options = decode_options.parse(parser, arguments)
    color = command.wants_color(options.no_color)
    try:
        if options.map:
            decode_options.check(options)
            return block_map_demo.run(color)
        job = prepare(options)
        view = decode_view.View() if options.json else make_view(job, color)
        outcome = decode(job, view)
    except (InputError, checkpoint.CheckpointError) as error:
        parser.error(str(error))
    if options.json:
        print(json.dumps(report(job, outcome), allow_nan=False))
    else:
        decode_view.show_figures(figures(job, outcome), color)
        print(decode_view.timeline_text(outcome.check_ins, job.config, color))
    reasons = [generation.finish_reason for generation in outcome.result.generations]
    if "nan_logits" in reasons:
        parser.fail(
            f"{reasons.count('nan_logits')} of {len(reasons)} continuations ended at logits that are NaN or "
            f"infinite: look for a weight that is not finite in {options.checkpoint}"
        )
    return 0


if __name__ == "__main__":
    command.run(main)
