"""Memories of past experience: a ring of rows on the device, n-step returns, and prioritised sampling."""
