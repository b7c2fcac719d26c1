"""Checks of level run, one module each, which decode with the bundle."""
