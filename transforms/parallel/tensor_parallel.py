"""Tensor parallelism: leaves sliced along a dim, one slice per rank (Shoeybi et al., "Megatron-LM", 2019)."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.device import generator_states
from functional_ds.base.marks import like_marked, mark_slices, slices_of, trainable
from functional_ds.base.weighted import Weighted
from functional_ds.parallel.tensor.leaf_cuts import Cuts, cuts_of
from functional_ds.parallel.tensor.module_calls import TensorCalls
from functional_ds.parallel.tensor.pairs import SLICES
from functional_ds.parallel.tensor.slice_draws import DrawLog
from functional_ds.parallel.tensor.words import Plan, word_of
from functional_ds.sharding.leaf_map import LeafMap, LeafShard
from functional_ds.sharding.leaf_slice import LeafSlice
from functional_ds.sharding.path_patterns import check_expression
from functional_ds.sharding.sources import is_deferred, sliced
from functional_ds.step.axes import asked
from functional_ds.step.compose import wrap
from functional_ds.step.guards import check_same_leaves
from functional_ds.step.over_ranks.mesh_axes import Axis, AxisRole, GradientParts
from functional_ds.step.pass_scope import current_pass
from functional_ds.step.phase_signatures import Passed
from functional_ds.step.phases import Trait, innermost, outermost
from functional_ds.step.state.state import State
from functional_ds.step.step import Step, Transform

from .slice_checks import (
    Compared,
    check_batch,
    check_draws,
    check_loss,
    check_partial_gradients,
    check_whole_gradients,
    declared_batch,
    declared_loss,
)
from .slice_errors import named_errors

_SLOT = "tensor_parallel"


def tensor_parallel(plan: Plan, group: comm.Group | None = None, *, sequence_dim: int = 1) -> Transform:
    """Tensor parallelism: each rank of ``group`` stores a slice of the leaves that a plan names, and all of the others.

    A plan maps paths to how layers are sliced. A key is the path of a module or leaf, or its last names, each of which may be a
    pattern: ``"layers.*.q_proj"``. Modules of ``fds.functional`` run unchanged: the transform adds the collectives around the
    layers of the library's copy. ``fds.tp.plan_of(model)`` is a Hugging Face model's own plan; all its words are supported.

    | word | the weight of a linear | its output |
    |---|---|---|
    | ``"colwise"`` | sliced by outputs | this rank's features |
    | ``"colwise_gather_output"`` | sliced by outputs | whole |
    | ``"rowwise"`` | sliced by inputs; takes this rank's features | whole |
    | ``"rowwise_split_input"`` | sliced by inputs; takes a whole input | whole |
    | ``"vocab"`` | sliced by the vocabulary: an embedding, or a head for ``fds.tp.cross_entropy`` | whole; a head's is sliced |
    | ``"packed_colwise"``, ``fds.tp.Packed(sizes)`` | sliced by outputs, each packed block by itself | this rank's |
    | ``"replicated"`` | whole | whole |
    | ``"replicated_with_grad_allreduce"`` | whole, used on slices: gradients are summed over the ranks | as its input |
    | ``"sequence_parallel"``, of a list of layers | activations between its layers are split along ``sequence_dim`` | whole |
    | ``"local"``, of an attribute | divided by the ranks while the module runs, as GPT-2's ``split_size`` | |

    Heads are not divided. With fewer key-value heads than ranks, neighbouring ranks hold the same head and sum its gradients. A
    weight with two places (a tied head) is sliced in both, and counts once. Without modules, for a loss of ``fds.tp``
    functions, leaves take the same words, laid out as in ``torch.nn.Linear``, or ``{regular expression: dim}``. The most
    specific key for a layer applies: with ``"experts.up": "replicated"`` in addition to ``"up": "colwise"`` experts stay whole.

    It equals the single-device step on the whole leaves (loss, gradients, norms, updates) on any mesh, with any stage
    of ZeRO, pipeline, precision and remat. Replicated leaves are bitwise equal on all ranks. Batch and loss are the same on
    every rank of the group, as are the activations between blocks; activations inside blocks and slices differ.

    Cost: a layer of attention and MLP sends two all-reduces forward and two backward, of one activation each; with
    ``"sequence_parallel"`` as many all-gathers and reduce-scatters, with the same elements. A step adds one all-reduce of the
    gradients of replicated leaves that are used on slices, one among the ranks that share heads, and a few scalars; the first
    step compares the ranks' batches, and the first pass with random draws what they are for.

    Put it after ``zero`` and ``pipeline``, whose ranks are along other axes. It sums nothing over those: without ``zero`` each
    row of a mesh trains alone. ``init`` uses rank 0's params. Optimizers that need whole leaves (``lamb``, ``muon``) raise an
    error. So do draws from torch's generator (``nn.Dropout``), whose masks would differ from a single device's; use ``Key``.

    Args:
        plan: from path to word, or from a regular expression for paths to the dim to slice.
        group: the ranks; None for the whole world. Functions of ``fds.tp`` get it from ``axis("tp")``.
        sequence_dim: of activations between layers, for ``"sequence_parallel"``.

    Raises:
        ValueError: a key matches no path, or is not a regular expression; two equally specific keys slice one leaf, or
            contradict each other; a word is unknown, or a layer's param has another than the layer; a size or a number of heads
            is not divisible by the ranks; another transform has sliced a leaf along the dim; the group shares ranks with
            ZeRO's; the ranks' params differ in more than values; in the first step: the ranks' batches differ; a key draws for
            slices without ``places``; the plan would sum gradients that each rank has whole.
        TypeError: ``group`` is not a ``comm.Group``.
        RuntimeError: in a step: the loss draws from torch's generator.

    >>> import torch
    >>> import functional_ds as fds
    >>> def program():
    ...     torch.manual_seed(0)
    ...     apply, params = fds.functional(torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1)))
    ...     step = fds.train_step(lambda p, x: apply(p, x).sum(), fds.sgd(0.5))
    ...     step = tensor_parallel({"0": "colwise", "2": "rowwise"})(step)
    ...     state, metrics = step(step.init(params), torch.ones(1, 2))
    ...     return state.params["0.weight"].shape, metrics["loss"].item(), step.params(state)["0.weight"].shape
    >>> comm.simulate(program, world_size=2)[0][0], len({loss for _, loss, _ in comm.simulate(program, world_size=2)})
    (torch.Size([2, 2]), 1)
    """
    axis = Axis(group, parts=_parts, name="tp")
    for key, value in plan.items():
        if isinstance(value, int):
            check_expression("plan: ", key)
        else:
            word_of(value)
    return _TensorParallel(dict(plan), axis, sequence_dim).transform()


@attrs.define(eq=False)
class _KnownCuts(tree.Uncompared):
    """A plan's slices in the state: not compared with another state's structure.

    Attributes:
        cuts: which leaves are slices.
        calls: runs modules on this rank; None before the first pass.
        draws: what keys draw for in the current pass.
    """

    cuts: Cuts
    calls: TensorCalls | None = None
    draws: DrawLog = attrs.field(factory=DrawLog)

    def __reduce__(self) -> Any:
        return _KnownCuts, (self.cuts,)


@tree.record
class TensorSlices:
    """tensor_parallel's slot in the state: which leaves are slices."""

    known: _KnownCuts = tree.static()


@attrs.frozen(eq=False)
class _TensorParallel:
    plan: Plan
    axis: Axis
    sequence_dim: int

    def transform(self) -> Transform:
        """The phases that it wraps."""
        return wrap(
            f"tensor_parallel({dict(self.plan)}, {self.axis})",
            slot=_SLOT,
            traits=[Trait.HEEDS_SKIPS],
            options={"plan": self.plan, "sequence_dim": self.sequence_dim},
            axes=[self.axis],
            init=self.init,
            gradients=outermost(self.gradients),
            forward=innermost(self.forward),
            reduce=self.reduce,
            guards={"forward": self.guard_forward, "reduce": self.guard_reduce},
            params=self.params,
        )

    # -- what is stored ----------------------------------------------------------------------------------------------------

    def init(self, inner: Any, step: Step, params: Any) -> State:
        """The inner state of slices."""
        group = self.axis.ranks()
        check_same_leaves(params, group)
        try:
            cuts = cuts_of(params, self.plan, group)
        except ValueError as error:
            name = next(layer.name for layer in step.layers if layer.slot == _SLOT)
            after = [step.has(trait, after=name) for trait in (Trait.SHARDS_PARAMS, AxisRole.BATCH, AxisRole.STAGES)]
            other = next(filter(None, after), None)
            if other is None:
                raise
            raise ValueError(
                f"tensor_parallel: put it after {other}: compose({other}, tensor_parallel(...)), which stores something else "
                f"than the leaves that the plan names ({error})"
            ) from None
        slot = TensorSlices(_KnownCuts(cuts))
        params = tree.map_named(lambda path, leaf: _sliced(path, leaf, cuts.slices.get(path), group), params)
        state: State = inner(step, params).put(**{_SLOT: slot})
        _check_axes(group, step.leaf_map(state))
        return state

    def params(self, inner: Any, step: Step, state: State) -> Any:
        """The user's tree, gathered from the slices."""
        group, params, slices = self.axis.ranks(), inner(step, state), _cuts(state).slices

        def whole(path: str, leaf: Tensor) -> Tensor:
            cut = slices.get(path)
            if cut is None:
                return leaf
            rows = comm.all_gather(leaf.detach(), group, tiled=False)
            others = tuple(other for other in slices_of(leaf) if other.dim != cut.dim)
            return mark_slices(like_marked(cut.whole(list(rows.unbind())), leaf), others)

        return tree.map_named(whole, params)

    # -- how the loss runs -------------------------------------------------------------------------------------------------

    def gradients(self, inner: Any, step: Step, state: State, batch: Any, carry: Weighted | None, last: bool) -> Passed:
        """The inner gradients, with checks of a key's draws and of unsliced leaves."""
        key, group = state.key, self.axis.ranks()
        if group.world.watch is not None:
            comm.invariant(_whole(state, step.leaf_map(state)), group)  # also of a loaded state, and after an update
        if key is None or group.size == 1:
            return inner(step, state, batch, carry, last)  # type: ignore[no-any-return]
        watched = tree.replace(key, watch=state.slots[_SLOT].known.draws)
        after, grads, metrics = inner(step, tree.replace(state, key=watched), batch, carry, last)
        return tree.replace(after, key=key), grads, metrics

    def forward(self, inner: Any, step: Step, state: State, function: Callable[[Any], Any], batch: Any) -> Any:
        """The inner forward, with the plan's layers run on slices."""
        pass_, group, run = current_pass(), self.axis.ranks(), function
        if not step.has(AxisRole.STAGES):
            run = lambda given: declared_loss(function(declared_batch(given, group)), group)  # noqa: E731
        if pass_ is None:
            return inner(step, state, run, batch)
        calls = self._calls(state)
        try:
            with pass_.run_by(calls):
                return inner(step, state, run, batch)
        finally:
            calls.leave(pass_)

    def _calls(self, state: State) -> TensorCalls:
        known: _KnownCuts = state.slots[_SLOT].known
        if known.calls is None:
            known.calls = TensorCalls(self.plan, self.axis.ranks(), self.sequence_dim)
        return known.calls

    # -- gradients ---------------------------------------------------------------------------------------------------------

    def reduce(self, inner: Any, step: Step, state: State, grads: Weighted) -> tuple[State, Weighted]:
        """Sums partial gradients: of replicated leaves that are used on slices, and of slices that several ranks hold."""
        state, grads = inner(step, state, grads)
        group, cuts, parts = self.axis.ranks(), _cuts(state), step.leaf_map(state)
        _sum_shards(parts, grads.sum, cuts.summed, group)
        shared: dict[tuple[int, ...], set[str]] = {}
        for path, cut in cuts.slices.items():
            if len(cut.sharers) > 1:
                shared.setdefault(cut.sharers, set()).add(path)
        for sharers, paths in shared.items():
            ranks = [group.ranks[place] for place in sharers]
            _sum_shards(parts, grads.sum, paths, group.world.group(ranks, f"{group.name} sharers"))
        return state, grads

    # -- guards ------------------------------------------------------------------------------------------------------------

    def guard_forward(self, inner: Any, step: Step, state: State, function: Callable[[Any], Any], batch: Any) -> Any:
        """Refuses batches, draws and losses that differ over ranks, and slices not used as such.

        Raises:
            ValueError: the ranks' batches differ, or in the first pass their losses; a key draws for slices without ``places``;
                the loss calls no module that the plan slices, or functions of ``fds.tp`` although the plan slices nothing.
            RuntimeError: the loss drew from torch's generator.
        """
        pass_, group, cuts, pipelines = current_pass(), self.axis.ranks(), _cuts(state), step.has(AxisRole.STAGES)
        if state.batch is None and group.size > 1 and not pipelines:
            check_batch(batch, group)
        if pass_ is None:
            return inner(step, state, function, batch)
        draws: DrawLog = state.slots[_SLOT].known.draws
        draws.recorded = [] if pass_.trains and self.axis.compares else None
        drawn = generator_states() if pass_.trains and group.size > 1 else []
        try:
            with named_errors(cuts.slices, group):
                result = inner(step, state, function, batch)
        finally:
            keyed, draws.recorded = draws.recorded, None  # a recomputation notes nothing
        if not all(map(torch.equal, drawn, generator_states() if drawn else [])):
            raise RuntimeError(
                "tensor_parallel: the loss drew from torch's random generator (nn.Dropout in training?); on slices the ranks' "
                "masks would not be the single device's. Set its probability to 0, or draw by the step's Key: "
                "key.dropout(x, p, name, places=fds.tp.places(x, dim))"
            )
        if cuts.in_modules and not self._calls(state).seen and not pipelines:
            raise ValueError(
                f"tensor_parallel: {sorted(cuts.in_modules)[0]!r} is a slice of a module's parameter, and the loss called no "
                "module that the plan cuts: call apply(params, ...) of fds.functional with the params that the loss gets"
            )
        if asked(SLICES) and not cuts.slices and group.size > 1 and not pipelines:
            raise ValueError(
                f"tensor_parallel: plan={dict(self.plan)} splits no leaf, and the loss calls functions of fds.tp, which would "
                f"sum whole products over the {group.size} ranks of {group.name!r}: name their weights, {{'up': 'colwise'}}"
            )
        draws.known.update(check_draws(keyed or [], group))
        if pass_.trains and group.size > 1 and not pipelines and state.graphs.is_new("loss over tp"):
            check_loss(result, group)
        return result

    def guard_reduce(self, inner: Any, step: Step, state: State, grads: Weighted) -> tuple[State, Weighted]:
        """Refuses, in the first steps, gradients of whole leaves that differ over the group, and partial ones that do not.

        Raises:
            ValueError: on all ranks.
        """
        group = self.axis.ranks()
        if group.size > 1 and state.graphs.is_new("partial gradients over tp"):
            compared = check_partial_gradients(step.leaf_map(state), grads.sum, _cuts(state), group)
            _note(state, "partial gradients over tp", compared)
        after, grads = inner(step, state, grads)
        if group.size > 1 and not step.has(AxisRole.STAGES) and state.graphs.is_new("gradients over tp"):
            compared = check_whole_gradients(step.leaf_map(after), grads.sum, _cuts(after).slices.keys(), group)
            _note(state, "gradients over tp", compared)
        return after, grads


def _note(state: State, name: str, compared: Compared) -> None:
    """Has the next step compare again if this one has overflown, and one step more if a leaf's gradients were zeros."""
    if not compared.finite or (compared.zeros and state.graphs.is_new(f"{name}, zeros")):
        state.graphs.kinds.discard(name)


def _cuts(state: State) -> Cuts:
    slot: TensorSlices = state.slots[_SLOT]
    return slot.known.cuts


def _parts(step: Step, state: State) -> GradientParts:
    """Slices, which several ranks may share, and whole leaves; all leaves of a tensor are of one sort."""
    sharers = {path: len(cut.sharers) for path, cut in _cuts(state).slices.items()}
    leaf_map = step.leaf_map(state)
    held = ((p.tensor, sharers.get(leaf_map.leaves[p.leaf].path)) for shards in leaf_map.shards_by_rank for p in shards)
    holders = {place: count for place, count in held if count is not None}
    return GradientParts(holders, others=None, counts=(None, *sorted(set(sharers.values()))))


def _whole(state: State, parts: LeafMap) -> list[Tensor]:
    """The trained tensors of the state that contain no slice."""
    slices = _cuts(state).slices
    cut = {shard.tensor for shards in parts.shards_by_rank for shard in shards if parts.leaves[shard.leaf].path in slices}
    return [tensor for place, tensor in enumerate(trainable(state.params)) if place not in cut]


def _sliced(path: str, leaf: Tensor, cut: LeafSlice | None, group: comm.Group) -> Tensor:
    """This rank's slice of rank 0's leaf; every rank reads deferred ones itself."""
    if not is_deferred(leaf) and group.size > 1 and not leaf.is_meta:
        leaf = like_marked(comm.broadcast(leaf.detach(), 0, group), leaf)
    if cut is None:
        return leaf
    try:
        return sliced(leaf, cut)
    except ValueError as error:
        raise ValueError(f"plan: {path!r}: {error}") from None


def _check_axes(group: comm.Group, parts: LeafMap) -> None:
    other = None if parts.group is None else {*parts.group.ranks}.intersection(group.ranks)
    if other is not None and len(other) > 1:
        raise ValueError(
            f"tensor_parallel: its group {group.name!r} and that of zero share the ranks {sorted(other)}: they must be along "
            "two axes of a mesh, mesh['tp'] and mesh['dp'] of comm.mesh(dp=..., tp=...)"
        )


def _sum_shards(parts: LeafMap, grads: Sequence[Tensor], paths: Collection[str], group: comm.Group) -> None:
    """Sums the gradients of some leaves over the ranks of a group, which hold the same shards of them."""
    pieces = [_piece(grads, shard) for shard in parts.shards if parts.leaves[shard.leaf].path in paths]
    if pieces and group.size > 1:
        for piece, total in zip(pieces, comm.all_reduce(pieces, group), strict=True):
            piece.copy_(total)


def _piece(grads: Sequence[Tensor], shard: LeafShard) -> Tensor:
    grad = grads[shard.tensor]
    return grad if shard.numel == grad.numel() else grad.view(-1)[shard.start : shard.start + shard.numel]
