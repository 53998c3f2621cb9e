"""Samples for training: groups that share their prompt, within a jitted step and from an engine beside it."""
