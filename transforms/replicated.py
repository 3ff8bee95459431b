"""Data parallelism with whole params on every rank, and gradients that are combined as the user says."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.marks import trainable
from functional_ds.base.weighted import Weighted
from functional_ds.optim.kernels import reals
from functional_ds.step.compose import wrap
from functional_ds.step.phases import Trait
from functional_ds.step.state.state import State
from functional_ds.step.step import Step, Transform

from .data_parallel import Replicas

__all__ = ["replicated"]

Combine = Callable[[list[Tensor], Any, comm.Group], tuple[Sequence[Tensor], Any]]


def replicated(
    group: comm.Group | None = None,
    *,
    reduce: Combine,
    init: Callable[[list[Tensor], comm.Group], Any] | None = None,
    slot: str = "replicated",
    name: str | None = None,
) -> Transform:
    """Each rank of ``group`` has its own batch and all params; ``reduce`` makes one gradient of the ranks' gradients.

    With gᵢ for rank i's part of the gradient, scaled so that the gradient of the whole batch is the mean of all gᵢ, the update
    gets what ``reduce`` returns for g. Law: with ``reduce = lambda g, memory, group: (comm.all_reduce(g, group, op="avg"),
    memory)`` it is the single-device step on the concatenated batch.

    ``reduce`` must return the same bits on all ranks, or params drift apart. What it keeps between steps, such as the error of
    a compression, is the slot ``slot`` of the state: saved, counted and donated with it. A step whose gradients are not finite
    on any rank leaves it as it was. Transforms that wrap ``update``, ``clip`` for one, get the combined gradient. Rank 0's
    params count at ``init``.

    Cost: what ``reduce`` sends, and 8 bytes for the weight and for whether all gradients are finite.

    Args:
        group: the ranks; None for the whole world.
        reduce: ``(gradients, memory, group) -> (gradients, memory)``: lists of real tensors, fp32 at least, shaped like the
            trained leaves (complex ones with a last dim of 2).
        init: ``(trained tensors, group) -> memory``, a pytree; None for no memory.
        slot: the name of the memory in ``state.slots``.
        name: what the transform is called in errors.

    Raises:
        ValueError: the ranks' params differ in structure; another transform reduces gradients, such as ``zero``.
        TypeError: ``group`` is no group, or ``reduce`` no function.

    >>> import functional_ds as fds
    >>> def vote(grads, memory, group):  # signSGD with majority vote (Bernstein et al. 2018)
    ...     return [comm.all_reduce(grad.sign(), group).sign() for grad in grads], memory
    >>> def program():
    ...     step = replicated(reduce=vote)(fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.sgd(1.0)))
    ...     state, _ = step(step.init({"w": torch.zeros(2)}), torch.tensor([1.0, -1.0]) * (comm.world().rank - 0.5))
    ...     return step.params(state)["w"].tolist()
    >>> comm.simulate(program, world_size=3)[0]
    [-1.0, 1.0]
    """
    if not callable(reduce):
        raise TypeError(f"reduce={reduce!r} is no function of (gradients, memory, group)")
    replicas = Replicas(group, summed_in="reduce")
    title = name or f"replicated({getattr(reduce, '__name__', type(reduce).__name__)}, {replicas})"

    def begin(inner: Any, step: Step, params: Any) -> State:
        state: State = inner(step, replicas.same(params))
        memory = () if init is None else init(reals(trainable(state.params)), replicas.ranks())
        return state.put(**{slot: memory})

    def combine(inner: Any, step: Step, state: State, grads: Weighted) -> tuple[State, Weighted]:
        state, grads = inner(step, state, grads)
        ranks, before = replicas.ranks(), state.slots[slot]
        comm.varying(grads.sum, ranks)  # ``reduce`` and the look for overflow may do to a rank's part what is not linear
        bad = _finite(reals(grads.sum), grads.weight).logical_not()  # on this rank: ``reduce`` may make numbers of infinities
        weight, bad = comm.all_reduce(torch.stack([grads.weight, bad.to(grads.weight.dtype)]), ranks)
        weight = torch.where(weight == 0, torch.ones_like(weight), weight)
        own = [_wide(grad) * (ranks.size / weight) for grad in reals(grads.sum)]
        means, memory = reduce(own, before, ranks)
        means = comm.invariant(means, ranks)
        finite = _finite(means, weight) & (bad == 0)
        memory = tree.map(lambda new, old: torch.where(finite, new, old), memory, before)
        state = tree.replace(state, finite=finite if state.finite is None else finite & state.finite)
        shaped = [_like((mean * weight).view(-1), grad) for mean, grad in zip(means, grads.sum, strict=True)]
        state = state if init is None else tree.replace(state, unused=frozenset())  # what is owed comes in any step
        return state.put(**{slot: memory}), tree.replace(grads, sum=shaped)

    return wrap(
        title,
        check=lambda step: replicas.alone(step, title),
        slot=slot,
        traits=[Trait.RESIDENT_SLOT, Trait.HEEDS_SKIPS],
        options={"reduce": reduce, "init": init},
        axes=[replicas],
        init=begin,
        reduce=combine,
    )


def _finite(tensors: Sequence[Tensor], model: Tensor) -> Tensor:
    """Whether all of them are finite, a bool where the model is."""
    return torch.stack([x.isfinite().all() for x in tensors]).all() if tensors else torch.ones_like(model, dtype=torch.bool)


def _wide(grad: Tensor) -> Tensor:
    return grad.to(torch.promote_types(grad.dtype, torch.float32))


def _like(flat: Tensor, grad: Tensor) -> Tensor:
    """As the gradient is shaped, complex where that is, but as wide as the sum."""
    return torch.view_as_complex(flat.view(*grad.shape, 2)) if grad.is_complex() else flat.view(grad.shape)
