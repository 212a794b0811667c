"""What algorithms that learn from a replay share: collecting into it, updates that are due, networks and their targets."""
