"""Values of stored weights, in pieces of bounded size."""
