"""Tuning and measurements on a GPU, in a given number of minutes."""
