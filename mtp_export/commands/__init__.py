"""The commands' options, and what they print."""
