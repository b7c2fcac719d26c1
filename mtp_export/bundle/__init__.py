"""Bundles: the content of OUT/main and OUT/mtp, and the runs that write it."""
