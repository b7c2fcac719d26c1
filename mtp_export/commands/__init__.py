"""Commands of the command line with a file of their own; cli.py registers them."""
