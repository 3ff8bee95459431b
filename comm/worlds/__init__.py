"""Worlds: simulated ranks, processes over Gloo or NCCL, shapes without values, and one rank alone."""
