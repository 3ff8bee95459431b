"""Data parallelism with whole params on every rank: gradients combined by a function, through a codec, or by the optimizer."""
