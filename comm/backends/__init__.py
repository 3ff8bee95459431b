"""Back ends of processes: messages over Gloo, and NCCL's collectives."""
