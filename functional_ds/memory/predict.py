"""Predicts a rank's memory from shapes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.marks import is_trainable, without_values
from functional_ds.dry_run.dry_run import loss_of_all
from functional_ds.dry_run.events import recorded
from functional_ds.step.compose import wrap
from functional_ds.step.state.slots import stored_layout
from functional_ds.step.state.state import State
from functional_ds.step.step import Step

from .account import Memory, measured
from .counting import stored

_ROWS = 720_720  # of a micro-batch without values: a step's own transforms may cut it into any number up to 16
_PASSES = 2  # the first learns in which order units are used, and fetches nothing ahead


def predicted(make: Callable[[], Step], params: Any, *, world_size: int = 1, rank: int = 0) -> Memory:
    """Predicts a rank's memory: params, masters, optimizer, gradients, the peak of gathered units, buffers.

    ``make`` makes the step, with its meshes, as on a real rank. It runs as one rank of a world whose other ranks do the same
    (``comm.symmetric``), with params without values, so any model on any number of ranks costs almost no memory and time. Then
    gradients of a loss that uses every leaf, in the tree's order, go through the step's phases twice, because only later passes
    prefetch units.

    These are exactly ``measured``'s bytes. On a GPU the allocator rounds each tensor up to 512 bytes.

    Gathered units count in the form in which they arrive, compressed if the gather is. Not counted: activations
    (``activations``), gradients before they are reduced (at most three units in stages 2 and 3), and what kernels need. The
    ranks of a pipeline differ, so ask for each; gradients are sums over micro-batches there.

    Args:
        make: makes the step.
        params: the user's tree; values are not read.
        world_size: how many ranks.
        rank: which one.

    Raises:
        ValueError: no such rank.
        TypeError: ``make`` does not return a step.

    >>> import functional_ds as fds
    >>> from functional_ds import transforms as T
    >>> params = {f"{i}.w": torch.empty(16384, 16384, device="meta") for i in range(24)}  # 6.4 B
    >>> def make():
    ...     loss = lambda params, batch: NotImplemented
    ...     return fds.compose(T.mixed_precision("bf16"), T.zero(1))(fds.train_step(loss, fds.adam(1e-4)))
    >>> memory = predicted(make, params, world_size=64)
    >>> memory.params, memory.masters + memory.optimizer - 4 * 24
    (12884901888, 1207959552)
    """
    bare = without_values(params)

    def program() -> Memory:
        step = make()
        if not isinstance(step, Step):
            raise TypeError(f"make: it returned {step!r}, and not a step")
        state = step.init(bare)
        return measured(state).plus(**_within_a_step(step, state, bare))

    memory: Memory = comm.symmetric(program, world_size=world_size, rank=rank)
    return memory


def _within_a_step(step: Step, state: State, params: Any) -> dict[str, int]:
    """The bytes of the gradients of a loss that uses all leaves, and the peak of gathered units."""
    if not _is_trained(state):
        return {}
    used = loss_of_all(params)

    def loss(inner: Any, step: Step, state: State, params: Any, batch: Any) -> Any:
        return used(params, batch), {}

    probe = wrap("probe", loss=loss)(step)
    batch = torch.empty(_ROWS * step.micro_batches(state), device="meta")
    with recorded() as run:
        for _ in range(_PASSES):
            state, grads, _ = probe.gradients(state, batch, None, True)
    _, grads = probe.reduce(state, grads)
    return {"gradients": stored(grads.sum), "gathered": run.events.peak("all_gather")}


def _is_trained(state: State) -> bool:
    """Whether any leaf is trained."""
    stored_as = stored_layout(state)
    if stored_as is not None:
        return bool(stored_as.leaf_map.leaves)
    return any(isinstance(leaf, Tensor) and is_trainable(leaf) for leaf in tree.leaves(state.params))
