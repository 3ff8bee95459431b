"""Matrix optimizers: Muon, and custom update rules per matrix or per leaf."""
