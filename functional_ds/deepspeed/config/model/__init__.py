"""What a config uses of a model's modules: which of them are units of ZeRO."""
