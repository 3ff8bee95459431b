"""What carries collectives between processes: messages over Gloo, and NCCL's own collectives."""
