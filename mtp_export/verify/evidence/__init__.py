"""Evidence that several checks share: opened parts, weights, prompts, runs, statistics."""
