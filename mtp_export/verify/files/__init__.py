"""Check `files`: the bundle's files agree with its manifest, its configs and each other."""
