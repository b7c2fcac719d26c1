"""Processes that run one model together: their collectives, and the watch over them."""
