"""Checks of the options of a config that concern the store of chunks."""


def check_chunk_variants(
    num_chunks: int | None, max_chunks_before: int | None, max_chunk_variants: int
) -> None:
    """Refuses statistics and variants without what they are of."""
    if max_chunks_before is not None and num_chunks is None:
        raise ValueError(
            f"max_chunks_before is {max_chunks_before} and there is no store of chunks, expected "
            "num_chunks= and max_chunk_len= with it"
        )
    if max_chunk_variants > 1 and max_chunks_before is None:
        raise ValueError(
            f"max_chunk_variants is {max_chunk_variants} and no statistics are kept, expected "
            "max_chunks_before= with it: variants differ in the chunks that stood in front of them"
        )
