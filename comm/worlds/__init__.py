"""Worlds of processes over Gloo or NCCL, of ranks on shapes only, and of one rank that represents all."""
