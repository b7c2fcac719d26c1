"""GPUs as the tables of launch parameters tell them apart, and what was tuned on them."""
