"""What an engine runs: a step in two halves, the user's module next to its state, values of single parameters."""
