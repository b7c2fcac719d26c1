"""Bundles: what goes into OUT/main and OUT/mtp, and how it gets there."""
