"""``deepspeed.ops``: DeepSpeed's optimizers by name. Its kernels are not here: torch's are used."""

from . import adagrad, adam, lamb, lion

__all__ = ["adagrad", "adam", "lamb", "lion"]
