"""Mixed precision: policies, loss scales and stochastic rounding."""
