"""All ranks in one process: threads of which one runs at a time, in an order that a seed picks."""
