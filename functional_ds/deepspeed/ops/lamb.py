"""``deepspeed.ops.lamb``: ``fds.lamb`` with DeepSpeed's bounds and its correction of the rate."""

from .named_optimizer import NamedOptimizer

__all__ = ["FusedLamb"]


class FusedLamb(
    NamedOptimizer,
    rule="Lamb",
    lr=1e-3,
    bias_correction=True,
    betas=(0.9, 0.999),
    eps=1e-8,
    eps_inside_sqrt=False,
    weight_decay=0.0,
    max_grad_norm=0.0,
    max_coeff=10.0,
    min_coeff=0.01,
    amsgrad=False,
):
    """DeepSpeed's LAMB."""
