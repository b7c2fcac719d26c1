"""Benchmarks, one script a subject, and the checkpoints they and the tests run on."""
