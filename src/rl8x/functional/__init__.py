"""Pure functions of tensors that algorithms are made of."""
