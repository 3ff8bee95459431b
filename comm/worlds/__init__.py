"""Worlds: processes over Gloo or NCCL, shapes without values, one rank for all, and one rank alone."""
