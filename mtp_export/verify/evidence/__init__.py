"""Texts, statistics and runs that several checks share."""
