"""How matrices lie in shared memory, so that wgmma and the copy engine read them without bank conflicts."""

from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu


def tiled(num_columns: int, itemsize: int, widest: int = 128) -> Any:
    """Transforms of `[..., rows, num_columns]`: tiles of 8 rows by the widest swizzle that fits.

    Args:
      num_columns: Of 32 bytes together, or a multiple of it.
      itemsize: Bytes of an element.
      widest: Bytes of the widest swizzle.
    """
    swizzle = next(size for size in (128, 64, 32) if size <= widest and num_columns * itemsize % size == 0)
    # pyright takes the two for abstract classes
    return (
        plgpu.TilingTransform((8, swizzle // itemsize)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(swizzle),  # pyright: ignore[reportAbstractUsage]
    )
