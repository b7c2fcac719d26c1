"""Causes of a failure: each undoes one known export bug."""
