"""What both engines have, that of ``initialize`` and a pipeline's: param groups, counts, schedulers, checkpoints."""
