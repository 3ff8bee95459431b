"""ZeRO's units of params: which are whole when, as tensors that are gathered at first use and saved as places."""
