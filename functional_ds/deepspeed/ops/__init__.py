"""``deepspeed.ops``: DeepSpeed's optimizers by name. Its kernels are not here: torch's are used."""

from functional_ds.deepspeed.op_builders import COMPATIBLE as __compatible_ops__

from . import adagrad, adam, lamb, lion

__all__ = ["__compatible_ops__", "adagrad", "adam", "lamb", "lion"]
