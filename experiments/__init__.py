"""Demos, benchmarks and studies; each file opens with its question, its command and its measured answer."""
