"""Level run: how the bundle decodes."""
