"""A Flax decoder on the cache, its checkpoints and its tokenisers: one user of the library among others."""
