"""Cross attention: all tokens of a row read a source that was written once."""

import dataclasses

import jax

from kvcache_jax.layers.layer_kind import LayerKind, check_positive


@dataclasses.dataclass(frozen=True)
class CrossAttention(LayerKind):
    """A layer in which every token attends to the whole source of its row, such as a text that was encoded.

    `write_source(cache, seq_ids, k, v, source_len)` stores the sources of rows, of all such layers at once.
    A model then calls `attend(cache, layer, q, step)` there; `attention` and `write` refuse it. A row without
    a source gets 0 (and -inf). Forks, beams and shortened rows keep the source; it is never copied.

    Prefix caching is refused: the keys of a decoder's tokens depend on the source, too, and prefixes are
    found by their tokens alone.

    Attributes:
      max_source_len: Most tokens of a source. By default each row has blocks for so many.

    Example:
      >>> import kvcache_jax as kv
      >>> layers = [kv.FullAttention(2, 64), kv.CrossAttention(2, 64, max_source_len=1500)]
      >>> [group.max_blocks_per_seq for group in kv.CacheConfig(layers, max_seq_len=448).groups]
      [28, 94]
    """

    max_source_len: int

    is_causal = False

    def __post_init__(self):
        super().__post_init__()
        check_positive(self, "max_source_len")

    @property
    def source_len_limit(self) -> int:
        """Most tokens of a source."""
        return self.max_source_len

    @property
    def label(self) -> str:
        """Name and most tokens of a source."""
        return f"CrossAttention({self.max_source_len})"

    def row_len(self, context_len: jax.Array, source_len: jax.Array | None) -> jax.Array:
        """Returns the tokens of each row's source."""
        assert source_len is not None
        return source_len
