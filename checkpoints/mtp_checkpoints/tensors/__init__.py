"""Tensors of a checkpoint: strict readers of headers and indexes, and a writer of shards."""
