"""Weights of a checkpoint or bundle, as the runtime holds them."""
