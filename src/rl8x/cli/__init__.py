"""The command line, `rl8x`."""
