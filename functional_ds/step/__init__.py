"""Training steps: ``Step`` and its phases, ``wrap`` and ``compose``, the state, module buffers, views of params and passes."""
