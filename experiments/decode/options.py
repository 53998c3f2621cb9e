"""What a user may ask of `experiments.decode`: options, prompts, and the sizes that follow from them.

What is wrong is a `command.InputError` with got, expected and what to do.
"""

import argparse
import sys
from collections.abc import Sequence

import kvcache_jax as kv
from experiments.common import command
from experiments.common.command import InputError
from experiments.common.corpus import MODEL
from kvcache_jax.layers.span import ceil_div
from models.decoder import DecoderConfig, cache_config
from models.tokenizer import Tokenizer

PREFILL_LEN = 128
MAX_ROWS = 16
"""Rows unless more are asked for; prompts that find none wait."""

COMPUTED = "float32", "bfloat16"
"""Dtypes that models compute in."""

_SHARED_START = '''"""Read and write small tables of text."""

import re


class Table:
    """Rows of cells, each of them a string."""

    def __init__(self, rows):
        self.rows = rows

'''
OWN_PROMPTS = (
    _SHARED_START + "    def __len__(self):\n",
    _SHARED_START + "    def read(self, path):\n",
)


def make_parser(doc: str | None) -> command.Parser:
    parser = command.Parser("experiments.decode", doc)
    add, count = parser.add_argument, command.integer(1, 2**20)
    text = "text to continue, after -- also what begins with a dash; a single - reads standard input"
    add("prompts", nargs="*", metavar="PROMPT", help=text)
    add("--prompts", dest="file", type=command.name, metavar="FILE", help="a prompt per line")
    text = "default: the model trained by experiments.train"
    add("--checkpoint", type=command.name, metavar="DIR", help=text)
    add("--dtype", choices=COMPUTED, help="of the computation; default on a CPU: float32")
    add("--max-new", type=count, default=96, metavar="N", help="tokens; default %(default)s")
    add("--stop", action="append", default=[], metavar="TEXT", help="ends a continuation; may be repeated")
    add("--samples", type=count, metavar="N", help="per prompt; default 3, with --greedy 1")
    drafts = command.integer(1, PREFILL_LEN - 1)
    add("--speculative", type=drafts, metavar="K", help="drafts per step, by n-grams")
    add("--greedy", action="store_true", help="the most probable token each time")
    add("--temperature", type=command.number(0, 1000), metavar="T", help="default 0.7")
    add("--top-k", type=command.integer(0, 2**31 - 1), metavar="K", help="keeps so many tokens; 0 keeps all")
    add("--top-p", type=command.number(0, 1, is_above=True), metavar="P", help="keeps this mass")
    add("--seed", type=command.integer(0), metavar="N", help="of all draws; default 0")
    add("--block-size", type=count, default=16, metavar="N", help="tokens; default %(default)s")
    add("--num-blocks", type=count, metavar="N", help="of the cache; default: enough")
    add("--rows", type=count, metavar="N", help=f"at the same time; default up to {MAX_ROWS}")
    add("--map", action="store_true", help="decode nothing: play with a small cache and show its blocks")
    add("--json", action="store_true", help="print one JSON object and nothing else")
    add("--no-color", action="store_true", help="plain text, also in a terminal")
    return parser


def parse(parser: command.Parser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; what follows -- are prompts, whatever they begin with."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    end = given.index("--") if "--" in given else len(given)
    options = parser.parse_intermixed_args(given[:end])
    options.prompts += given[end + 1 :]
    return options


def check(options: argparse.Namespace) -> None:
    """Refuses options that contradict each other, and fills in those that follow from others."""
    drawing = ("temperature", "top_k", "top_p")
    if options.map:
        _refuse(options, "--map", "samples", "speculative", "checkpoint", *drawing)
        if options.prompts or options.file or options.json:
            raise InputError("got --map with prompts or --json, expected only one of them")
    if options.greedy:
        _refuse(options, "--greedy", *drawing)
    if "" in options.stop:
        raise InputError("got an empty --stop, expected some text: every text contains the empty one")
    defaults = {
        "samples": 1 if options.greedy else 3,
        "temperature": 0.0 if options.greedy else 0.7,
        "top_k": 0,
        "top_p": 1.0,
        "seed": 0,
        "checkpoint": MODEL,
    }
    for name, value in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, value)


def _refuse(options: argparse.Namespace, option: str, *others: str) -> None:
    given = [f"--{name.replace('_', '-')}" for name in others if getattr(options, name) not in (None, [])]
    if given:
        raise InputError(f"got {option} with {', '.join(given)}, expected only one of them")


def read_prompts(options: argparse.Namespace) -> list[str]:
    """From the arguments, a file or standard input, else our own."""
    if options.file is not None and options.prompts:
        raise InputError("got prompts as arguments and --prompts, expected only one of them")
    if str(options.file) == "-" or options.prompts == ["-"]:
        if sys.stdin is None:
            raise InputError("got -, but standard input is closed: pipe the prompts in")
        return _lines(sys.stdin.buffer.read(), "standard input")
    if options.file is not None:
        try:
            return _lines(options.file.read_bytes(), str(options.file))
        except OSError as error:
            raise InputError(f"cannot read {options.file}: {error.strerror}") from error
    return options.prompts or list(OWN_PROMPTS)


def _lines(data: bytes, name: str) -> list[str]:
    """One prompt per line that is not blank."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    # Not splitlines(): it also splits at characters that a prompt may hold.
    prompts = [line.removesuffix("\r") for line in text.split("\n") if line.strip()]
    if not prompts:
        raise InputError(f"{name} holds no prompt, expected one per line")
    return prompts


def encode(prompts: Sequence[str], tokenizer: Tokenizer, config: DecoderConfig) -> list[list[int]]:
    """Tokens of the prompts."""
    encoded = []
    for i, prompt in enumerate(prompts):
        try:
            tokens = tokenizer.encode(prompt)
        except (UnicodeEncodeError, TypeError) as error:  # a lone surrogate
            raise InputError(f"prompt {i} is no Unicode text: {error}") from error
        if not prompt or not tokens:  # a tokenizer may put a token in front of nothing
            what = "has no token that the model knows" if prompt else "is empty"
            raise InputError(f"prompt {i} {what}, expected some text")
        if len(tokens) >= config.max_seq_len:
            raise InputError(
                f"prompt {i} has {len(tokens)} tokens, expected fewer than {config.max_seq_len}, "
                "the longest sequence of the model"
            )
        encoded.append(tokens)
    return encoded


SIZES = "--samples, --rows, --num-blocks or --max-new"
"""What makes a cache smaller."""


def plan(
    options: argparse.Namespace, config: DecoderConfig, prompts: Sequence[Sequence[int]]
) -> kv.CacheConfig:
    """The cache for the prompts: by default with the blocks they need while their samples share them."""
    per_prompt, block_size = options.samples, options.block_size
    rows = options.rows or max(per_prompt, min(MAX_ROWS, per_prompt * len(prompts)))
    if rows < per_prompt:
        raise InputError(
            f"got --rows {rows} with --samples {per_prompt}, expected at least {per_prompt} rows"
        )
    # Drafts look beyond the last token that is kept.
    ends = [len(prompt) + options.max_new + (options.speculative or 0) for prompt in prompts]
    max_seq_len = min(config.max_seq_len, max(ends))
    sizes = dict(
        block_size=block_size,
        max_seqs=rows,
        max_seq_len=max_seq_len,
        max_query_len=min(PREFILL_LEN, max_seq_len),
        max_rollback=options.speculative or 0,
        dtype=config.dtype,
        # Prompts are found by the blocks of layers that see all of them.
        enable_prefix_caching=not config.windows or None in config.windows,
    )
    try:
        num_blocks = options.num_blocks
        if num_blocks is None:
            unshared = cache_config(config, **sizes)
            # The last token of a continuation is drawn and not stored.
            shared = max(
                full + per_prompt * ceil_div(min(end, max_seq_len) - 1 - full * block_size, block_size)
                for full, end in ((len(p) // block_size, end) for p, end in zip(prompts, ends, strict=True))
            )
            num_blocks = min(rows // per_prompt * shared, max(group.num_blocks for group in unshared.groups))
        cache = cache_config(config, **sizes, num_blocks=num_blocks)
    except ValueError as error:
        raise InputError(str(error)) from error
    needs = [
        max(min(ceil_div(len(prompt), block_size), group.max_held_blocks) for group in cache.groups)
        for prompt in prompts
    ]
    if (need := max(needs)) > num_blocks:
        raise InputError(
            f"prompt {needs.index(need)} needs {need} blocks of {block_size} tokens, got --num-blocks "
            f"{num_blocks}: raise it"
        )
    return cache
