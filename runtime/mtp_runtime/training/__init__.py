"""Training of drafts against a frozen target: losses, schedule, and modules under autograd."""
