"""Likely causes of failures, in words: each sentence is here once, in one file per room.

Constants are whole sentences; functions fill in names and figures.
"""
