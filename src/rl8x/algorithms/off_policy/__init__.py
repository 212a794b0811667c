"""What algorithms that learn from a replay share: collecting into it, the updates that are due for it, networks."""
