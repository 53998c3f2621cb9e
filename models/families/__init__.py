"""Families of published models: a file each, between the entries of config.json and `DecoderConfig`."""
