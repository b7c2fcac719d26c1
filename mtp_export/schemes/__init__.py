"""How weights change on their way from a source checkpoint to a bundle."""
