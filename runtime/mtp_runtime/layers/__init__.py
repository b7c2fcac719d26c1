"""The layers of a model; each owns its weights and nothing else."""
