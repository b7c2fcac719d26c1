"""Making and verifying of a bundle by the machines of a cluster."""
