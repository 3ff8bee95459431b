"""A state as named tensors: how it is described, and where each leaf's elements lie."""
