"""Kernels: arrays in, arrays out; they know nothing of cache states.

`mosaic_gpu` has them for the GPUs that `gpus` lists, `mosaic_tpu` for TPUs; importing those imports Pallas.
`reference` is the interface: plain jnp, in float32. `decode_rows` and `move_arguments` say what arguments
must look like, `shapes` has the problems on which kernels are compared with the reference.

`kvcache_jax` calls `paged_decode`, the GPU's `plan_for`, `paged_prefill`, `copy_blocks`, and for blocks that
are exported and imported `gather_blocks` and `scatter_blocks`. Nothing but tests and benchmarks calls
`append_kv` and `merge_attention`: they are for users with storage of their own. The cache writes new tokens
with XLA's scatter. `kv.gather` reads a row with XLA's gather, which puts tokens before heads and hides what
is no token on the way; blocks that a kernel moved would take a second pass. The host tier moves a block each
trip of a loop, which XLA does in place, where around a kernel it copied the pools of TPUs.
"""
