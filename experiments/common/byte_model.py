"""The model of bytes that studies run, by --checkpoint another, and one sentence for one that does not fit.

parser = command.Parser("experiments.some", __doc__)
byte_model.add_option(parser)
options = parser.parse_args(arguments)
decoder = byte_model.load(parser, options.checkpoint)
"""

import argparse
from pathlib import Path

import jax.numpy as jnp

from experiments.common import command, corpus
from experiments.decode_speed import dense_decoder
from models import checkpoint
from models.decoder import Decoder


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint", type=command.name, default=corpus.MODEL, metavar="DIR", help="another model of bytes"
    )


def load(parser: command.Parser, folder: Path, *, beside: str | None = None, reads: bool = True) -> Decoder:
    """Loads a model in float32, or ends the command with what is wrong.

    One that is compared with layers of `dense_decoder`, which are `beside` it, has no options that they lack;
    a model that `reads` texts has a token for each byte.
    """
    with parser.refusing(checkpoint.CheckpointError):
        decoder = checkpoint.load(folder, dtype=jnp.float32)
    if beside is not None and (option := dense_decoder.missing_option(decoder.config)):
        parser.error(
            f"{folder} has {option}, which {beside} does not have, expected a model without: take a Llama, "
            "Qwen or Mistral checkpoint whose layers see all tokens"
        )
    if reads and decoder.config.vocab_size < 256:
        parser.error(f"{folder} has {decoder.config.vocab_size} tokens, expected one per byte, or more")
    return decoder
