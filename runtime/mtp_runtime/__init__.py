"""The reference runner: decodes exported bundles, with and without speculation."""
