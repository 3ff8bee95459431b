"""``Step`` and its phases, ``wrap`` and ``compose``, the state, module buffers, the view of params and the pass."""
