"""ZeRO: shards of states, gradients and params, gathered and reduced by FSDP units."""
