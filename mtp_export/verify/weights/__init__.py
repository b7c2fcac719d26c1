"""Level weights: every tensor by itself, and against the source."""
