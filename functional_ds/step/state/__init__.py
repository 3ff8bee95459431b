"""What a step keeps: the state, what its slots mean, module buffers, and leaves that no rank has used."""
