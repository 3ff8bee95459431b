"""What a config takes from the modules of a model: which of them are units of ZeRO."""
