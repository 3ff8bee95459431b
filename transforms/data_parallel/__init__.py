"""Data parallelism with replicated params: gradients combined by a function, through a codec, or by the optimizer."""
