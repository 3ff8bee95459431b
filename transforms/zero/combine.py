"""Custom reductions of whole leaves' gradients over ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.marks import trainable
from functional_ds.base.torch_private import has_values
from functional_ds.base.weighted import Weighted
from functional_ds.comm.worlds.rng_state import RngState
from functional_ds.optim.kernels import reals
from functional_ds.sharding.sources import values_of
from functional_ds.step.compose import wrap
from functional_ds.step.over_ranks.mesh_axes import AxisRole
from functional_ds.step.phases import Trait
from functional_ds.step.state.state import State
from functional_ds.step.step import Step

from .process_groups import ProcessGroups


@attrs.frozen
class Combine:
    """A custom reduction of whole leaves' gradients: ``T.zero(stage, aggregate=T.Combine(reduce, init=init))``.

    With gᵢ for rank i's part of the gradient, scaled so that the gradient of the whole batch is the mean of all gᵢ, the update
    gets what ``reduce`` returns for g. Law: with ``reduce = lambda g, memory, group: (comm.all_reduce(g, group, op="avg"),
    memory)`` it equals the single-device step on the concatenated batch; with any function, all stages compute the same.

    ``reduce`` runs once a step and must return bitwise equal results on all ranks, or their params diverge. In a pipeline it
    gets the leaves of this rank's stages, so it must treat each leaf by itself, as codecs do; ``init`` looks at that by three
    calls with made-up gradients. A step whose gradients are not finite on any rank, of any stage or slice, leaves the memory
    unchanged. The optimizer skips a leaf that no rank's loss uses, unless the memory adds a gradient.

    Cost: what ``reduce`` sends, and 8 bytes for the weight and the overflow check, which a pipeline sums over its stages, too;
    1 byte more over each axis that divides gradients. Every rank holds whole gradients in fp32 from the first micro-batch to
    the update, also in stages 2 and 3.

    Args:
        reduce: ``(gradients, memory, group) -> (gradients, memory)``: lists of real tensors, fp32 at least, shaped like the
            trained leaves (complex ones with a last dim of 2), in the order of ``step.leaf_map(state).leaves``.
        init: ``(trained tensors, group) -> memory``, a pytree, different on each rank; None for no memory.

    Raises:
        TypeError: ``reduce`` or ``init`` is not a function.
        ValueError: at ``init`` in a pipeline: the results for other leaves change with the gradient of a rank's first leaf.

    >>> import functional_ds as fds
    >>> from functional_ds import transforms as T
    >>> def vote(gradients, memory, group):  # each element by majority of the ranks' signs
    ...     return [comm.all_reduce(g.sign(), group).sign() for g in gradients], memory
    >>> def program():
    ...     step = T.zero(1, aggregate=Combine(vote))(fds.train_step(lambda p, x: (p["w"] * x).sum(), fds.sgd(1.0)))
    ...     state, _ = step(step.init({"w": torch.zeros(2)}), torch.tensor([2.0, comm.world().rank - 1.5]))
    ...     return step.params(state)["w"].tolist()
    >>> comm.simulate(program, world_size=3)[0]
    [-1.0, 1.0]
    """

    reduce: Callable[[list[Tensor], Any, comm.Group], tuple[Sequence[Tensor], Any]]
    init: Callable[[list[Tensor], comm.Group], Any] | None = attrs.field(default=None, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if not callable(self.reduce):
            raise TypeError(f"reduce={self.reduce!r} is not a function of (gradients, memory, group)")
        if self.init is not None and not callable(self.init):
            raise TypeError(f"init={self.init!r} is not a function of (trained tensors, group)")

    def __repr__(self) -> str:
        return f"Combine({getattr(self.reduce, '__name__', type(self.reduce).__name__)})"

    def fresh(self, leaves: list[Tensor], ranks: comm.Group) -> Any:
        """The memory before the first step."""
        return () if self.init is None else self.init(reals(leaves), ranks)

    def check_separate(self, step: Step, state: State, leaves: list[Tensor], memory: Any, ranks: comm.Group) -> None:
        """Calls ``reduce`` on made-up gradients of these leaves, in a pipeline.

        Raises:
            ValueError: a leaf's result depends on another leaf's gradient, on any rank.
        """
        if not step.has(AxisRole.STAGES) or not has_values(state.step):
            return
        device = state.step.device
        coupled = torch.full((), float(self._couples(leaves, memory, ranks, device)), device=device)
        if step.sum_over_ranks(state, coupled):
            raise ValueError(
                f"{self}: in a pipeline reduce gets the leaves of one rank's stages, so it must treat each leaf by itself, and "
                "on a rank its result for a leaf depends on the gradient of another; leave out T.pipeline, or compute what "
                "depends on all leaves in the phase update, where step.norm is of all stages"
            )

    def _couples(self, leaves: list[Tensor], memory: Any, ranks: comm.Group, device: torch.device) -> bool:
        """Whether other leaves' results change with the first leaf's gradient; False if they do without a change.

        Leaves may be deferred, and then have no values.
        """
        if len(leaves) < 2:
            return False
        sums = [_wide(torch.linspace(-1, 1, x.numel(), device=device).view(x.shape).to(x.dtype)) for x in reals(leaves)]

        def others(factor: float) -> list[Tensor]:
            given = comm.varying([sums[0] * factor, *(grad.clone() for grad in sums[1:])], ranks)
            kept = tree.map(lambda x: x.clone() if isinstance(x, Tensor) else x, memory)
            return list(self.reduce(given, kept, ranks)[0])[1:]

        before = RngState.now()
        plain, *calls = others(1.0), others(1.0), others(1024.0)
        before.restore()
        again, changed = (all(map(_same, plain, found)) for found in calls)
        return again and not changed

    def combined(self, step: Step, state: State, grads: Weighted, slot: str, ranks: comm.Group) -> tuple[State, Weighted]:
        """Combines this rank's sums into those of all ranks, one tensor per leaf; the memory is in the slot."""
        before = state.slots[slot]
        comm.varying(grads.sum, ranks)  # ``reduce`` and the overflow check need not be linear
        bad = _finite(reals(grads.sum), grads.weight).logical_not()  # on this rank: ``reduce`` may make numbers of infinities
        weight, bad = step.sum_over_ranks(state, torch.stack([grads.weight, bad.to(grads.weight.dtype)]))
        weight = torch.where(weight == 0, torch.ones_like(weight), weight)
        sums = [_wide(grad) * (ranks.size / weight) for grad in reals(grads.sum)]
        means, memory = self.reduce(sums, before, ranks)
        means = comm.invariant(means, ranks)
        finite = _finite(means, weight) & (bad == 0)
        finite = step.finite(state, [torch.where(finite, torch.zeros_like(weight), torch.inf)])  # in all stages and slices
        memory = tree.map(lambda new, old: torch.where(finite, new, old), memory, before)
        state = tree.replace(state, finite=finite if state.finite is None else finite & state.finite)
        shaped = [_like((mean * weight).view(-1), grad) for mean, grad in zip(means, grads.sum, strict=True)]
        if self.init is not None:
            state = tree.replace(state, unused=_unused(step, state, means))
        return state.put(**{slot: memory}), tree.replace(grads, sum=shaped)


def combining(zero: Any, combine: Combine, step: Step) -> Step:
    """A step of ``zero`` that keeps each rank's whole gradients, combines them by leaves, then shards the result."""

    def init(inner: Any, step: Step, params: Any) -> State:
        state, groups = inner(step, params), ProcessGroups.by(zero)
        state.slots["zero"].leaf_map.refuse_slices(str(combine), instead="leave aggregate= out of T.zero")
        wanted = [] if combine.init is None else trainable(params)
        leaves = [groups.broadcast(values_of(leaf).detach()) for leaf in wanted]
        memory = combine.fresh(leaves, groups.group)
        combine.check_separate(step, state, trainable(params), memory, groups.group)
        return state.put(combine=memory)  # type: ignore[no-any-return]

    def reduce(inner: Any, step: Step, state: State, grads: Weighted) -> tuple[State, Weighted]:
        state, grads = inner(step, state, grads)
        groups = ProcessGroups.by(zero)
        trained = [segment for segment in state.slots["zero"].layout.segments if segment.trainable]
        flats = [torch.zeros_like(flat) for flat in grads.sum]
        rows = zip(trained, grads.sum, flats, strict=True)
        views = [row for s, summed, flat in rows for row in zip(s.slots, s.views(summed), s.views(flat), strict=True)]
        views.sort(key=lambda row: row[0].leaf)
        by_leaf = tree.replace(grads, sum=[view for _, view, _ in views])
        state, grads = combine.combined(step, state, by_leaf, "combine", groups.group)
        for (_, _, view), total in zip(views, grads.sum, strict=True):
            view.copy_(total)
        if zero.stage:
            flats = [s.own(flat, groups.shards.rank).clone() for s, flat in zip(trained, flats, strict=True)]
        return state, tree.replace(grads, sum=flats)

    return wrap(
        str(combine),
        slot="combine",
        traits=[Trait.RESIDENT_SLOT],
        options={"reduce": combine.reduce, "init": combine.init},
        init=init,
        reduce=reduce,
    )(step)


def _unused(step: Step, state: State, means: Sequence[Tensor]) -> frozenset[str]:
    """The leaves without a gradient from the loss or the memory; read on the host if the loss left some out."""
    unused = state.unused if step.skips_unused else None
    if not unused or not has_values(state.step):
        return unused or frozenset()
    leaves = step.leaf_map(state).leaves
    return frozenset(leaf.path for leaf, mean in zip(leaves, means, strict=True) if leaf.path in unused and not mean.any())


def _finite(tensors: Sequence[Tensor], model: Tensor) -> Tensor:
    """Whether all of them are finite, a bool on the model's device."""
    return torch.stack([x.isfinite().all() for x in tensors]).all() if tensors else torch.ones_like(model, dtype=torch.bool)


def _same(x: Tensor, y: Tensor) -> bool:
    return torch.allclose(x, y, rtol=1e-3, equal_nan=True)


def _wide(grad: Tensor) -> Tensor:
    return grad.to(torch.promote_types(grad.dtype, torch.float32))


def _like(flat: Tensor, grad: Tensor) -> Tensor:
    """The flat tensor in the gradient's shape, complex if that is, in the dtype width of the sum."""
    return torch.view_as_complex(flat.view(*grad.shape, 2)) if grad.is_complex() else flat.view(grad.shape)
