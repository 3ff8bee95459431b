"""What both engines share, that of ``initialize`` and the pipeline's: param groups, counts, schedulers, checkpoints."""
