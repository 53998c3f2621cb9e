"""What predictions of held-out bytes are worth: bits per byte, and the KL divergence to exact ones."""

import math

import numpy as np

from experiments.common import corpus


def held_out_windows(num_files: int, skipped: int, length: int) -> np.ndarray:
    """Cuts i32[num_files, length], a piece of each of the first held-out files that are long enough.

    Args:
      num_files: Pieces.
      skipped: Bytes before a piece: what a file begins with is alike in many.
      length: Bytes of a piece.
    """
    pieces = [file[skipped : skipped + length] for file in corpus.held_out_files().values()]
    pieces = [piece for piece in pieces if len(piece) == length][:num_files]
    return np.stack([np.frombuffer(piece, np.uint8) for piece in pieces]).astype(np.int32)


def bits(log_p: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Computes the bits f64[n, T] that log-probabilities `[n, T.., vocab]` spend on targets i32[n, T]."""
    of_targets = np.asarray(log_p, np.float64)[:, : targets.shape[1]]
    return -np.take_along_axis(of_targets, targets[..., None], axis=-1)[..., 0] / math.log(2)


def kl(log_p: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Computes the divergence, in nats a token, of log-probabilities `[..., vocab]` from exact ones."""
    exact = exact.astype(np.float64)
    return (np.exp(exact) * (exact - log_p.astype(np.float64))).sum(axis=-1)
