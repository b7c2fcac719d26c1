"""Checks of level weights: every tensor by itself, and compared with the source."""
