"""Training of a bundle's draft against the bundle's own target."""
