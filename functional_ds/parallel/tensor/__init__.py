"""Tensor parallelism of a model: linears cut by columns or rows, embeddings and losses cut by the vocabulary."""
