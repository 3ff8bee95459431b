"""``gradients``, ``measure``: run one batch through a pipeline, with or without backwards."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import reduce
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.batch import micro_rows, split
from functional_ds.base.weighted import Weighted, weight_dtype
from functional_ds.comm.worlds.current import recorder
from functional_ds.pipelining.schedules.action import Action
from functional_ds.pipelining.schedules.schedule import Schedule
from functional_ds.pipelining.stages.stages import LossInput, Stages
from functional_ds.step.pass_scope import Pass, with_buffers
from functional_ds.step.phase_signatures import Passed
from functional_ds.step.phases import Layer, Trait
from functional_ds.step.state.buffer_scope import BufferScope
from functional_ds.step.state.buffers import BUFFERS
from functional_ds.step.state.state import State, without
from functional_ds.step.step import Step
from functional_ds.step.views.view import wide

from .boundary import Crossing, ShapeRun, TensorMeta, on_shapes, signature, view_metas
from .gathered import GatheredParams
from .placement import Placement, StageParams
from .recorder import Recorder
from .runner import MicroBatch, Rehearsal, Runner

_LEAD = 2  # how many compute actions early receives are posted
_CAPACITY = 256  # kinds of micro-batches; the cache is emptied when a run has more


@attrs.frozen(eq=False)
class PipelineSpec:
    """What a pipeline runs, and where.

    Attributes:
        schedule: lowered.
        stages: the model's.
        group: the pipeline's ranks.
        weight: the weight of a plain mean over the whole batch, for any number of micro-batches.
        recorder: records times and memory.
    """

    schedule: Schedule
    stages: Stages
    group: comm.Group
    weight: int
    recorder: Recorder | None = None


def gradients(spec: PipelineSpec, step: Step, state: State, batch: Any, carry: Weighted | None, last: bool) -> Passed:
    """The state with new buffers; ``carry`` plus the batch's gradients by this rank's stored params; the batch's metrics.

    The rank of the last stage has the weight and the metrics; other ranks have zeros.

    Args:
        spec: what runs where.
        step: the finished step.
        state: its state, with this rank's params.
        batch: the whole batch.
        carry: gradients of earlier batches of the same optimizer step.
        last: whether no further batch follows.
    """
    placement: Placement = state.slots["pipeline"]
    with ExitStack() as stack:
        gathered = _gathered(spec, step, state, stack, trains=True)
        for held in gathered.values():
            held.carry, held.last = None if carry is None else [carry.sum[place] for place in held.places], last
        scope = BufferScope(state.slots.get(BUFFERS))
        stack.enter_context(Pass(buffers=scope))
        runner = _runner(spec, step, state, batch, gathered, records=True)
        if spec.recorder is not None:
            spec.recorder.begin()
        runner.run(_steps(spec, state))
        recorder().gathers(None)  # params stay whole for the whole step
        if spec.recorder is not None:
            spec.recorder.end()
        _push_shared(runner, placement)
        grads: list[Any] = [None] * sum(len(held.places) for held in gathered.values())
        for held in gathered.values():
            for place, grad in zip(held.places, held.collect(), strict=True):
                grads[place] = grad
        state = without(state, frozenset().union(*(held.unused() for held in gathered.values())))
        metrics = _metrics(runner, state)
    weight = metrics["loss"].weight if carry is None else carry.weight + metrics["loss"].weight
    return with_buffers(state, scope), Weighted(grads, weight), metrics


def measure(spec: PipelineSpec, step: Step, state: State, batch: Any) -> dict[str, Weighted]:
    """The loss of a batch and its metrics, without gradients."""
    with ExitStack() as stack:
        gathered = _gathered(spec, step, state, stack, trains=False)
        state = tree.replace(state, key=None)
        scope = BufferScope(state.slots.get(BUFFERS), keeps=False)
        stack.enter_context(Pass(trains=False, buffers=scope))
        runner = _runner(spec, step, state, batch, gathered, records=False)
        runner.run(_steps(spec, state))
        return _metrics(runner, state)


def _gathered(spec: PipelineSpec, step: Step, state: State, stack: ExitStack, *, trains: bool) -> dict[str, GatheredParams]:
    """This rank's params, by part, closed by the stack."""
    placement: Placement = state.slots["pipeline"]
    gathered = {}
    for part in placement.here(spec.group.rank):
        gathered[part.name] = GatheredParams(step, *step.select(state, frozenset(part.paths)), trains=trains)
        stack.callback(gathered[part.name].close)
    return gathered


def _steps(spec: PipelineSpec, state: State) -> list[tuple[Action, ...]]:
    """This rank's steps. If messages run in the order in which they are posted, as on GPUs, receives must not be early."""
    placement: Placement = state.slots["pipeline"]
    ordered = spec.group.world.in_launch_order(state.step.device)
    return placement.cache.row(spec.schedule, spec.group.rank, lead=0 if ordered else _LEAD)


def _runner(
    spec: PipelineSpec, step: Step, state: State, batch: Any, gathered: dict[str, GatheredParams], *, records: bool
) -> Runner:
    placement: Placement = state.slots["pipeline"]
    parts = {stage: [part.name for part in placement.parts_of(stage)] for stage in spec.schedule.stages_of(spec.group.rank)}
    if Rehearsal.fits(batch, spec.group):
        return Rehearsal.of(spec, step, state, gathered, parts)
    batches = split(batch, spec.schedule.microbatches, uneven=True)
    sizes = micro_rows(batch, spec.schedule.microbatches)
    shares = {rows: rows * spec.weight / sum(sizes) for rows in sizes}
    weights = {rows: None if share == 1 else share for rows, share in shares.items()}
    leaves = _leaves(spec, step, state, gathered, parts)
    crossing = {
        rows: _crossing(spec, step, state, micro, weights[rows], leaves, records=records)
        for rows, micro in dict(zip(sizes, batches, strict=True)).items()
    }
    micros, first = [], 0
    for micro, rows in zip(batches, sizes, strict=True):
        key = None if state.key is None else state.key.at(step=state.key.step, rows=first)
        micros.append(MicroBatch(micro, tree.replace(state, key=key), weights[rows], crossing[rows]))
        first += rows
    return Runner(step, spec.stages, spec.schedule.placement, spec.group, micros, gathered, parts, records, spec.recorder)


def _leaves(
    spec: PipelineSpec, step: Step, state: State, gathered: dict[str, GatheredParams], parts: dict[int, list[str]]
) -> dict[int, dict[str, TensorMeta]]:
    """The leaves that the step's view gives to each stage of this rank; on shapes only, of all ranks.

    Each part of the params is viewed once for all sizes of micro-batches, so that ranks that shard it, whose micro-batches may
    have other sizes, view it together.
    """
    placement: Placement = state.slots["pipeline"]
    known = _known(placement.cache.leaves, step)
    for name, held in gathered.items():
        if name not in known:
            known[name] = view_metas(step, held.state)
    leaves = {stage: {path: leaf for name in names for path, leaf in known[name].items()} for stage, names in parts.items()}
    return placement.all_leaves(leaves, len(spec.stages)) if on_shapes(spec.group) else leaves


def _crossing(
    spec: PipelineSpec,
    step: Step,
    state: State,
    micro: Any,
    weight: float | None,
    leaves: dict[int, dict[str, TensorMeta]],
    *,
    records: bool,
) -> Crossing:
    """What is sent between the stages; cached by the micro-batch's signature."""
    placement: Placement = state.slots["pipeline"]
    known: dict[Any, Crossing] = _known(placement.cache.crossing, step)
    apply = spec.stages.apply
    key = weight is None, apply is None or apply.notice(), signature(micro, trains=records)
    if key not in known:
        if len(known) >= _CAPACITY:
            known.clear()
        shapes = ShapeRun(step, state, spec.stages, leaves, LossInput(micro, None, weight), records, spec.group)
        known[key] = shapes.crossing(spec.schedule.placement)
    return known[key]


def _known(cache: "WeakKeyDictionary[Step, dict[Any, Any]]", step: Step) -> dict[Any, Any]:
    """What is known of a step, or of one with the same layers: a traced step has the shapes of the eager one."""
    if step not in cache:
        cache[step] = next((known for other, known in cache.items() if _layers(other) == _layers(step)), {})
    return cache[step]


def _layers(step: Step) -> list[Layer]:
    return [layer for layer in step.layers if Trait.MARKS not in layer.traits]


def _push_shared(runner: Runner, placement: Placement) -> None:
    """Pushes the gradients of shared leaves: summed over this rank's stages, then over the ranks that hold them."""
    here = runner.group.rank
    for part in placement.here(here):
        if len(part.stages) > 1:
            held = runner.gathered[part.name]
            held.gather()
            stage_grads = [runner.grads(stage) for stage in part.stages if stage in runner.parts]
            sums = [
                _sum(runner, held.leaves[path], [grads[path] for grads in stage_grads if path in grads]) for path in part.paths
            ]
            used = {path for grads in stage_grads for path in grads}
            trained = [(path, total) for path, total in zip(part.paths, sums, strict=True) if held.leaves[path].requires_grad]
            totals = _exchanged([total for _, total in trained], part, runner.group)
            held.push({path: total for (path, _), total in zip(trained, totals, strict=True)})
            held.used &= used  # other ranks may have used the rest, and report it


def _sum(runner: Runner, leaf: Tensor, grads: Sequence[Tensor]) -> Tensor:
    if not grads:  # zeros of the dtype in which other ranks send theirs
        return wide(torch.zeros_like(leaf)) if len(runner.micros) > 1 else torch.zeros_like(leaf)
    total = grads[0]
    for grad in grads[1:]:
        total = total + grad
    return total


def _exchanged(grads: list[Tensor], part: StageParams, group: comm.Group) -> list[Tensor]:
    """The sums over the part's ranks, added in the order of ranks, so that they are bitwise equal on all ranks."""
    others = [rank for rank in part.ranks if rank != group.rank] if group.compares else []
    if not others or not grads:
        return grads
    ops = [op for rank in others for op in (comm.Send(grads, rank), comm.Recv(grads, rank))]
    arrived: dict[int, list[Tensor]] = dict(zip(others, comm.batch_p2p(ops, group)[1::2], strict=True))
    arrived[group.rank] = grads
    totals = arrived[part.ranks[0]]
    for rank in part.ranks[1:]:
        totals = [total + more for total, more in zip(totals, arrived[rank], strict=True)]
    return totals


def _metrics(runner: Runner, state: State) -> dict[str, Weighted]:
    """The sums of all micro-batches' loss and metrics; zeros on ranks without the last stage."""
    if runner.losses:
        losses = [runner.losses[j] for j in sorted(runner.losses)]
        return tree.map(lambda *parts: reduce(torch.add, parts), *losses)  # type: ignore[no-any-return]
    zero, sums = torch.zeros((), device=state.step.device), runner.micros[0].crossing.sums
    return {name: Weighted(zero.to(dtype), zero.to(weight_dtype(dtype))) for name, dtype in sums.items()}
