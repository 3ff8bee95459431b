"""The command line ``functional-ds``: reports, plans, tuning, checkpoints, drawings, hosts and jobs."""
