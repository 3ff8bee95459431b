"""ZeRO: optimizer states, gradients and params sharded over ranks, gathered and reduced by FSDP units."""
