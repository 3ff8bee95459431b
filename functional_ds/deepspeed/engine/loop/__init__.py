"""What an engine drives: a step in halves, the user's module beside its state, values of single parameters."""
