"""Learning rates: each of DeepSpeed's schedules as one class, torch's schedulers, and OneCycle's betas."""
