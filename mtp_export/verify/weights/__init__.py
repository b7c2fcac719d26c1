"""Checks of level weights: every tensor by itself (`ledger`), and compared with the source."""
