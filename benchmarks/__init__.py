"""Measurements of rl8x beside other libraries; not part of the package."""
