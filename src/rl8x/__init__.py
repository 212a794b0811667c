"""rl8x: batched reinforcement learning on one device."""
