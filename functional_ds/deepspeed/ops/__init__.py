"""``deepspeed.ops``: DeepSpeed's optimizers by name. Its kernels are not here: torch's are used."""

from typing import TYPE_CHECKING

from functional_ds.deepspeed.api_names import lazily
from functional_ds.deepspeed.op_builders import COMPATIBLE as __compatible_ops__

from . import adagrad, adam, lamb, lion

__all__ = ["__compatible_ops__", "adagrad", "adam", "lamb", "lion"]
if not TYPE_CHECKING:
    __getattr__ = lazily("ops")
