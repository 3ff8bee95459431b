"""Activation checkpointing: policies, recomputation, CPU offload and partitioning of saved tensors."""
