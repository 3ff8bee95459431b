"""ZeRO: what is stored, gathered and reduced in each stage."""
