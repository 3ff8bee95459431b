"""``deepspeed.ops``: DeepSpeed's optimizers by name, with torch's kernels instead of DeepSpeed's."""

from functional_ds.deepspeed.op_builders import COMPATIBLE as __compatible_ops__

from . import adagrad, adam, lamb, lion

__all__ = ["__compatible_ops__", "adagrad", "adam", "lamb", "lion"]
