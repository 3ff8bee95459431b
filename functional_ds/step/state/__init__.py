"""The training state: its slots, module buffers, and leaves that no rank has used."""
