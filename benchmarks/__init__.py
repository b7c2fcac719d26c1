"""Benchmarks, one script per subject, and the checkpoints that they and the tests use."""
