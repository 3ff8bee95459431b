"""``deepspeed.checkpointing``: activation checkpointing, through ``fds.remat``.

Unlike with torch's and DeepSpeed's reentrant checkpoints, params of a function get gradients even if none of its inputs
requires grad, and ``torch.autograd.grad`` works.
"""

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar

import attrs

from functional_ds import comm
from functional_ds.deepspeed.comm.joining import group_of
from functional_ds.deepspeed.config.config_reader import value_of
from functional_ds.remat.remat import remat

__all__ = [
    "checkpoint",
    "configure",
    "is_configured",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
]

T = TypeVar("T")


@attrs.frozen
class ActivationOptions:
    """Where inputs of checkpointed functions are kept: on their device, on the host, or partitioned over a group."""

    offload: bool = False
    partition: bool = False
    group: comm.Group | None = None

    @property
    def policy(self) -> str:
        """Of ``fds.remat``."""
        inputs = "partition" if self.partition and self.group is not None else "offload" if self.offload else "save"
        return f"recompute,inputs={inputs}"


_OPTIONS: ContextVar[ActivationOptions | None] = ContextVar("activation_checkpointing", default=None)


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Configures, for the ``checkpoint`` calls of this thread, where a function's inputs are kept.

    Args:
        mpu_: has a method ``get_model_parallel_group``: ranks with the same activations. None for this rank alone.
        deepspeed_config: a path or a dict, whose block ``activation_checkpointing`` provides omitted arguments.
        partition_activations: each of these ranks keeps a part of the inputs.
        contiguous_checkpointing: has no effect: the allocator reuses memory.
        num_checkpoints: has no effect.
        checkpoint_in_cpu: the inputs are kept in host memory; not together with ``partition_activations`` over ranks.
        synchronize: has no effect: calls do not wait for the device.
        profile: has no effect: ``fds.profile`` measures.

    Raises:
        ConfigError: the config cannot be read.
    """

    def chosen_or(argument: bool | None, key: str) -> bool:
        value = value_of(deepspeed_config or {}, f"activation_checkpointing.{key}") if argument is None else argument
        return bool(value)

    group = None if mpu_ is None else group_of(mpu_.get_model_parallel_group())
    chosen = ActivationOptions(
        chosen_or(checkpoint_in_cpu, "cpu_checkpointing"),
        chosen_or(partition_activations, "partition_activations"),
        None if group is None or group.size == 1 else group,
    )
    _OPTIONS.set(chosen)


def is_configured() -> bool:
    """Whether ``configure`` was called."""
    return _OPTIONS.get() is not None


def reset() -> None:
    """Does nothing: no state is kept between calls."""


def set_num_layers(nlayers: int) -> None:
    """Does nothing: no buffers are allocated in advance."""


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Switches ``partition_activations`` on or off."""
    _OPTIONS.set(attrs.evolve(_OPTIONS.get() or ActivationOptions(), partition=partition_activation))


def checkpoint(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """``function(*args, **kwargs)``, recomputed in the backward pass with the same random draws.

    >>> import torch
    >>> x = torch.ones(2, requires_grad=True)
    >>> checkpoint(lambda x: (x * 3).sin(), x).sum().backward()
    >>> torch.equal(x.grad, 3 * (3 * torch.ones(2)).cos())
    True
    """
    chosen = _OPTIONS.get() or ActivationOptions()
    group = chosen.group if chosen.partition else None
    return remat(function, policy=chosen.policy, group=group)(*args, **kwargs)


non_reentrant_checkpoint = checkpoint
