"""Doors into programs of others, a file each. To import one takes its package; the library imports none."""
