"""Optimizers of whole matrices: Muon, and rules of your own by matrix or by leaf."""
