"""A text of any length in fixed memory: its loss, its time and its blocks, beside what holds all of it."""
