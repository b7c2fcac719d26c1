"""Proof that an export decodes as its source does: ten checks, one module each."""
