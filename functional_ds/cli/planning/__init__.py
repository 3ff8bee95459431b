"""What a step will hold, send and take, from shapes: models by name, strategies, machines, and a step without values."""
