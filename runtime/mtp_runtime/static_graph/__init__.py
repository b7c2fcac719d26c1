"""Decode steps as graphs of static shapes: captured on a GPU, or compiled ahead for a CPU."""
