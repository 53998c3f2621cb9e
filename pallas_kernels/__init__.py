"""Kernels: arrays in, arrays out; they know nothing of cache states.
The kernels land here later, one plain-jnp reference beside each."""
