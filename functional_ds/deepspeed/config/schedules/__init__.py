"""Learning-rate schedules: DeepSpeed's, one class each, torch's schedulers, and OneCycle's betas."""
