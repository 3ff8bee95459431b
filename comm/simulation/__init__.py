"""The simulator: all ranks as threads of one process, which run one at a time in an order picked by a seed."""
