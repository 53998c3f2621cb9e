"""Kernels: arrays in, arrays out; they know nothing of cache states.

`mosaic_gpu` has them for Hopper GPUs, `mosaic_tpu` for TPUs; importing those imports Pallas. `reference` is
the interface: plain jnp, in float32. `decode_rows` and `move_arguments` say what arguments must look like,
`shapes` has the problems on which kernels are compared with the reference.
"""
