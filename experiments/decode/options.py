"""What a user may ask of `experiments.decode`: options, prompts, and the sizes that follow from them.

What is wrong is a `command.InputError` with got, expected and what to do.
"""

import argparse
import json
import os
import select
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

import kvcache_jax as kv
from experiments.common import command
from experiments.common.command import InputError
from experiments.common.corpus import MODEL
from kvcache_jax.core.backends import backend_names
from kvcache_jax.layers.layer_kind import STORAGE_DTYPES
from kvcache_jax.layers.span import ceil_div
from models.decoder import DecoderConfig, cache_config
from models.tokenizer import Tokenizer

PREFILL_LEN = 128
MAX_ROWS = 16
"""Rows unless more are asked for; prompts that find none wait."""

COMPUTED = "float32", "bfloat16"
"""Dtypes that models compute in."""

PIPE_SECONDS = 2.0
"""How long a pipe that nobody asked to read may stay silent."""

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
    add = parser.add_argument
    add(
        "prompts",
        nargs="*",
        metavar="PROMPT",
        help="text to continue, behind -- also what begins with a dash; a single - reads standard input, as "
        "does a pipe",
    )
    add(
        "--prompts",
        dest="file",
        type=command.name,
        metavar="FILE",
        help='a prompt per line; .jsonl: {"prompt": ...} per line',
    )
    add(
        "--checkpoint",
        type=command.name,
        metavar="DIR",
        help="default: the model trained by experiments.train",
    )
    add("--dtype", choices=COMPUTED, help="of the computation; default on a CPU: float32")
    add("--max-new", type=command.integer(1), default=96, metavar="N", help="tokens; default %(default)s")
    add("--stop", action="append", default=[], metavar="TEXT", help="ends a continuation; may be repeated")
    add("--samples", type=command.integer(1), metavar="N", help="per prompt; default 3, with --greedy 1")
    add("--beams", type=command.integer(1), metavar="N", help="beam search in place of samples")
    add(
        "--speculative",
        type=command.integer(1, PREFILL_LEN - 1),
        metavar="K",
        help="drafts per step, by n-grams",
    )
    add("--draft", type=command.name, metavar="DIR", help="a checkpoint that drafts for --speculative")
    add("--greedy", action="store_true", help="the most probable token each time")
    add("--temperature", type=command.number(0, 1000), metavar="T", help="default 0.7")
    add("--top-k", type=command.integer(0, 2**31 - 1), metavar="K", help="keeps so many tokens; 0 keeps all")
    add("--top-p", type=command.number(0, 1, is_above=True), metavar="P", help="keeps this mass")
    add("--min-p", type=command.number(0, 1), metavar="P", help="keeps what is so probable beside the best")
    add("--seed", type=command.integer(0), metavar="N", help="of all draws; default 0")
    add("--block-size", type=command.integer(1), default=16, metavar="N", help="tokens; default %(default)s")
    add("--num-blocks", type=command.integer(1), metavar="N", help="of the cache; default: enough")
    add("--rows", type=command.integer(1), metavar="N", help=f"at the same time; default up to {MAX_ROWS}")
    add(
        "--implementation",
        choices=backend_names(),
        help="of attention; default: xla, until the kernels are measured",
    )
    add("--cache-dtype", choices=STORAGE_DTYPES, help="default the model's, and bfloat16 with mosaic_gpu")
    add("--picture", type=command.picture, metavar="FILE", help="draw who held which block when")
    add("--map", action="store_true", help="decode nothing: play with a small cache and show its blocks")
    add("--json", action="store_true", help="print one JSON object and nothing else")
    add("--no-color", action="store_true", help="plain text, also in a terminal")
    return parser


def parse(parser: command.Parser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; what follows -- are prompts, whatever they begin with."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    end = given.index("--") if "--" in given else len(given)
    options = parser.parse_intermixed_args(given[:end])
    options.prompts = [_as_text(prompt) for prompt in [*options.prompts, *given[end + 1 :]]]
    options.stop = [_as_text(text) for text in options.stop]
    return options


def _as_text(argument: str) -> str:
    """The argument; if Python took its bytes for ASCII, as it does where the locale is C, read as UTF-8."""
    if not any("\udc80" <= character <= "\udcff" for character in argument):
        return argument
    try:
        return os.fsencode(argument).decode(errors="surrogateescape")
    except UnicodeEncodeError:  # no bytes that were escaped
        return argument


def check(options: argparse.Namespace) -> None:
    """Refuses options that contradict each other, and fills in those that follow from others."""
    drawing = ("temperature", "top_k", "top_p", "min_p")
    if options.map:
        others = ("samples", "beams", "speculative", "draft", "checkpoint", *drawing)
        _refuse(options, "--map", *others)
        if options.prompts or options.file or options.json:
            raise InputError("got --map with prompts or --json, expected only one of them")
    if options.greedy:
        _refuse(options, "--greedy", *drawing)
    if options.beams:
        _refuse(options, "--beams", "samples", "speculative", "draft", "stop", "seed", *drawing)
    if options.draft and not options.speculative:
        raise InputError("got --draft without --speculative, expected both: add --speculative K")
    if "" in options.stop:
        raise InputError("got an empty --stop, expected some text: every text contains the empty one")
    is_greedy = options.greedy or options.beams
    defaults = {
        "samples": 1 if is_greedy else 3,
        "temperature": 0.0 if is_greedy else 0.7,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
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


# --- prompts ---


def read_prompts(options: argparse.Namespace) -> list[str]:
    """From the arguments, a file or standard input, else our own."""
    if options.file is not None and options.prompts:
        raise InputError("got prompts as arguments and --prompts, expected only one of them")
    if str(options.file) == "-" or options.prompts == ["-"]:
        if sys.stdin is None:
            raise InputError("got -, but standard input is closed: pipe the prompts in")
        return _lines(sys.stdin.buffer.read(), "standard input")
    if options.file is not None:
        return _read_file(options.file)
    return options.prompts or _piped() or list(OWN_PROMPTS)


def _read_file(path: Path) -> list[str]:
    try:
        mode = path.stat().st_mode
        data = path.read_bytes() if stat.S_ISREG(mode) or stat.S_ISFIFO(mode) else None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    if data is None:
        raise InputError(f"{path} is no file, expected one with a prompt per line")
    return _lines(data, str(path), is_jsonl=path.suffix == ".jsonl")


def _lines(data: bytes, name: str, is_jsonl: bool = False) -> list[str]:
    """One prompt per line that is not blank."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    # Not splitlines(): it also splits at characters that a prompt may hold.
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    prompts = [
        _prompt_of(line, f"{name}, line {number}") if is_jsonl else line
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not prompts:
        raise InputError(f"{name} holds no prompt, expected one per line")
    return prompts


def _prompt_of(line: str, place: str) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place} is no JSON: {error}") from error
    prompt = value.get("prompt") if isinstance(value, dict) else None
    if not isinstance(prompt, str):
        raise InputError(f'{place} is {line[:60]}, expected an object with a text under "prompt"')
    return prompt


def _piped() -> list[str] | None:
    """Prompts from a pipe or a redirected file; None when there is nothing.

    Whoever starts a process may leave an empty pipe, or one that nobody ever writes to: neither may fail or
    stop a command without arguments.
    """
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):  # closed, or not a real file
        return None
    if stat.S_ISREG(mode):
        return _lines(sys.stdin.buffer.read(), "standard input")
    if not stat.S_ISFIFO(mode):
        return None
    is_ready = bool(select.select([sys.stdin], [], [], PIPE_SECONDS)[0])
    data = sys.stdin.buffer.read() if is_ready else b""
    if data.strip():
        return _lines(data, "standard input")
    state = "is empty" if is_ready else "is a pipe in which nothing comes"
    print(f"standard input {state}: taking our own prompts (- as the prompt waits for it)", file=sys.stderr)
    return None


def encode(prompts: Sequence[str], tokenizer: Tokenizer, config: DecoderConfig) -> list[list[int]]:
    """Tokens of the prompts.

    Raises:
      InputError: a prompt is empty, no Unicode, or longer than the model's context.
    """
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


# --- sizes ---


def sizes_of(options: argparse.Namespace) -> str:
    """What makes a cache smaller."""
    return f"{'--beams' if options.beams else '--samples'}, --rows, --num-blocks or --max-new"


def plan(
    options: argparse.Namespace, config: DecoderConfig, prompts: Sequence[Sequence[int]]
) -> kv.CacheConfig:
    """The cache for the prompts: by default with the blocks they need while their samples share them."""
    per_prompt, block_size = options.beams or options.samples, options.block_size
    what = f"{'--beams' if options.beams else '--samples'} {per_prompt}"
    # Beams of all prompts are searched together.
    least = per_prompt * (len(prompts) if options.beams else 1)
    rows = options.rows or max(least, min(MAX_ROWS, per_prompt * len(prompts)))
    if rows < least:
        prompts_too = f" for {len(prompts)} prompts" if options.beams else ""
        raise InputError(f"got --rows {rows} with {what}{prompts_too}, expected at least {least} rows")
    # Drafts look beyond the last token that is kept.
    ends = [len(prompt) + options.max_new + (options.speculative or 0) for prompt in prompts]
    max_seq_len = min(config.max_seq_len, max(ends))
    _check_sizes(options, f"--rows {rows}" if options.rows else what, rows, max_seq_len)
    sizes = dict(
        block_size=block_size,
        max_seqs=rows,
        max_seq_len=max_seq_len,
        max_query_len=min(PREFILL_LEN, max_seq_len),
        max_rollback=options.speculative or 0,
        implementation=options.implementation,
        # The kernels for GPUs have no float32.
        dtype=options.cache_dtype or ("bfloat16" if options.implementation == "mosaic_gpu" else config.dtype),
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
    need = sum(needs) if options.beams else max(needs)
    if need > num_blocks:
        which = "the prompts together need" if options.beams else f"prompt {needs.index(need)} needs"
        raise InputError(
            f"{which} {need} blocks of {block_size} tokens, got --num-blocks {num_blocks}: raise it"
        )
    return cache


def _check_sizes(options: argparse.Namespace, rows_by: str, num_rows: int, max_seq_len: int) -> None:
    """Refuses what 32-bit indices do not reach, by the options' names; `rows_by` asks for the rows."""
    num_blocks, blocks_by = options.num_blocks, f"--num-blocks {options.num_blocks}"
    if num_blocks is None:
        num_blocks, blocks_by = num_rows * ceil_div(max_seq_len, options.block_size), rows_by
    num_places = num_blocks * options.block_size
    if num_places >= 2**31:
        raise InputError(
            f"got {blocks_by} with --block-size {options.block_size}, which has {num_places} places for "
            "tokens, expected below 2**31: lower one of the two"
        )
    if num_rows >= 2**31:
        raise InputError(f"got {rows_by}, which takes {num_rows} rows, expected below 2**31: lower it")
