"""The public operations on a cache, a file each."""
