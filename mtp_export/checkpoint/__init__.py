"""Checkpoint format: byte sources, strict readers of headers and indexes, and a writer."""
