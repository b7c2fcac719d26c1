"""Layers of a model; each owns its weights, and attention says what it caches."""
