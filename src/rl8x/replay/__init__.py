"""Replay memories: a ring of rows on the device, n-step returns, prioritised sampling, and data sets."""
