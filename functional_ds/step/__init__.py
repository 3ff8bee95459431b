"""``Step`` and its phases, ``wrap`` and ``compose``, the state, module buffers, and the tape of a forward and backward pass."""
