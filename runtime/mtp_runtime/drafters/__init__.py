"""Who proposes tokens."""
