"""The rows of requests whose prompts are put together from parts; see `PromptParts`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from kvcache_jax.arrays.masked_updates import set_at
from kvcache_jax.arrays.pytree import pytree_dataclass
from kvcache_jax.decoding.prompt_parts import NO_PART


@pytree_dataclass()
class PartRows:
    """Rows of requests whose prompts have parts.

    A request whose parts are not all kept gets a row that computes the first one that is missing, alone, is
    freed, and waits again; one such row runs at a time. Its windows let go of nothing, for the first tokens
    of a part are computed again wherever it is put. Once none is missing it gets a row for its prompt.

    Attributes:
      alone: i32[max_seqs, 2], place in the prompt and end of the part that the row computes as a beginning;
        equal ones for a row that computes the prompt.
      ids: i32[max_seqs, P], kept parts of the request, which stay; they are put into a row for the prompt
        once it has the tokens before the first one. `NO_PART` for none, and from then on.
      is_again: bool[max_seqs, max_seq_len], places of the row that are still to be computed again.
    """

    alone: jax.Array
    ids: jax.Array
    is_again: jax.Array

    def set(self, rows: jax.Array, alone: jax.Array, ids: jax.Array) -> "PartRows":
        """Sets `rows` i32[n], which begin."""
        return dataclasses.replace(
            self, alone=set_at(self.alone, rows, alone), ids=set_at(self.ids, rows, ids)
        )

    def where(self, mask: jax.Array) -> "PartRows":
        """Forgets the rows that are not in bool[max_seqs]."""
        return PartRows(
            alone=jnp.where(mask[:, None], self.alone, 0),
            ids=jnp.where(mask[:, None], self.ids, NO_PART),
            is_again=self.is_again & mask[:, None],
        )

    @property
    def alone_len(self) -> jax.Array:
        """i32[max_seqs], tokens of the part that the row computes alone; 0 for none."""
        return self.alone[:, 1] - self.alone[:, 0]


def empty_part_rows(max_parts: int, max_seqs: int, max_seq_len: int) -> PartRows | None:
    """Makes rows without parts, in numpy; None where no request has any."""
    if not max_parts:
        return None
    return PartRows(
        alone=np.zeros((max_seqs, 2), np.int32),  # type: ignore
        ids=np.full((max_seqs, max_parts), NO_PART, np.int32),  # type: ignore
        is_again=np.zeros((max_seqs, max_seq_len), bool),  # type: ignore
    )
