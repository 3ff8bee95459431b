"""Pipeline parallelism: a model's stages on several ranks, run by a schedule."""

import zlib
from typing import Any

import attrs

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.marks import is_trainable
from functional_ds.base.tree import rows_of
from functional_ds.base.weighted import Weighted
from functional_ds.pipelining.execution.boundary import TensorMeta, on_shapes
from functional_ds.pipelining.execution.gradients import PipelineSpec, gradients, measure
from functional_ds.pipelining.execution.placement import Placement
from functional_ds.pipelining.execution.recorder import Recorder
from functional_ds.pipelining.schedules.action import Kind
from functional_ds.pipelining.schedules.lower import lower
from functional_ds.pipelining.schedules.schedule import Schedule
from functional_ds.pipelining.schedules.validate import validate
from functional_ds.pipelining.stages.stages import Stages
from functional_ds.sharding.leaf_map import LeafMap
from functional_ds.step.compose import wrap
from functional_ds.step.over_ranks.mesh_axes import Axis, AxisRole, GradientParts
from functional_ds.step.phase_signatures import Passed
from functional_ds.step.phases import Trait
from functional_ds.step.state.state import State
from functional_ds.step.step import Step, Transform


def pipeline(
    schedule: Schedule,
    stages: Stages,
    group: comm.Group | None = None,
    *,
    resident: int | None = None,
    recorder: Recorder | None = None,
) -> Transform:
    """Pipeline parallelism: runs the stages of a model on the ranks of ``group``, in the order of a schedule.

    On any mesh, with any ZeRO stage along another axis, it equals the single-device step ``train_step(stages,
    optimizer)`` on the whole batch. Gradients do not depend on the schedule.

    Each rank stores the params and optimizer state of its stages only, under their paths in the user's tree. All ranks of the
    group get the same batch, which is split along dim 0 into the schedule's micro-batches; if the rows do not divide evenly,
    the first micro-batches get one more, and means are weighted by rows. A leaf that stages on several ranks share is stored on
    each; its gradients are summed, and norms count it once.

    Put it after ``zero`` and before transforms that wrap ``gradients``, such as ``accumulate``: it replaces that phase. ZeRO
    along another axis reduces a stage's gradients once a step, after its last backward. In ZeRO stage 3 a rank gathers all its
    params for the whole step, or with ``resident`` those of so many stages at a time.

    Cost: for each micro-batch, the activations between stages on different ranks, and their gradients; the gradient of a shared
    leaf, sent to each other rank that has it; a few scalars.

    Args:
        schedule: is validated and lowered before anything runs. Its own sends, gathers and reductions run where it has them;
            missing ones are inserted. Evaluation runs the forwards only.
        stages: the model, with as many stages as the schedule.
        group: the pipeline's ranks, in the schedule's order; None for the whole world.
        resident: in ZeRO stage 3, how many stages' params a rank keeps gathered at a time; None for all, or as the schedule's
            own gathers say.
        recorder: records times and memory.

    Raises:
        ScheduleError: the schedule is invalid; names the first offending action.
        ValueError: the schedule and the model differ in stages, or the schedule and the group in ranks; a batch has fewer rows
            than micro-batches; a stage does not accept the previous stage's output; the step's ``gradients`` are wrapped
            already; ``resident`` for a schedule with gathers.
        TypeError: ``schedule``, ``stages`` or ``group`` has another type.

    >>> import functional_ds as fds
    >>> from functional_ds import pipelining as pp
    >>> def program():
    ...     params = [{"w": torch.tensor(2.0)}, {"w": torch.tensor(3.0)}]
    ...     model = pp.stages([lambda p, x: x * p["w"]] * 2, params, loss=lambda y, batch: y.mean())
    ...     step = pipeline(pp.one_f_one_b(2, 4), model)(fds.train_step(model, fds.sgd(0.1)))
    ...     state, metrics = step(step.init(params), (torch.arange(8.0),))
    ...     return sorted(state.params), metrics["loss"].item()
    >>> comm.simulate(program, world_size=2)
    [(['0.w'], 21.0), (['1.w'], 21.0)]
    """
    if not isinstance(stages, Stages):
        raise TypeError(f"stages={stages!r} are not Stages; make them with pipelining.stages(...) or pipelining.cut(...)")
    axis = Axis(group, AxisRole.STAGES)
    validate(schedule)
    if len(stages) != schedule.stages:
        raise ValueError(
            f"schedule: it has {schedule.stages} stages, and the model {len(stages)}; split the model into as many"
        )
    if resident is not None and resident < 1:
        raise ValueError(f"resident={resident}: a rank has at least the stage whole that it computes")
    gathers = schedule.has(Kind.GATHER)
    if gathers and resident is not None:
        raise ValueError(f"resident={resident}: the schedule itself has the gathers of params; leave out one of the two")
    gathers = gathers or resident is not None
    training = lower(schedule, gathers=gathers, reduces=True, resident=resident or 2)
    inference = lower(schedule.only_forward(), gathers=gathers, reduces=False, resident=resident or 2)
    return _Pipeline(validate(training), inference, stages, axis, recorder).transform()


@attrs.frozen(eq=False, repr=False)
class _Pipeline:
    """The phases that a pipeline wraps.

    Attributes:
        schedule: lowered, for training.
        inference: lowered, its forwards alone.
        stages: the model's.
        axis: the pipeline's ranks.
        recorder: records times and memory.
    """

    schedule: Schedule
    inference: Schedule
    stages: Stages
    axis: Axis
    recorder: Recorder | None

    def transform(self) -> Transform:
        """The phases that a pipeline wraps."""
        return wrap(
            str(self),
            check=self.check,
            slot="pipeline",
            traits=[Trait.HEEDS_SKIPS],
            options=self.options(),
            axes=[attrs.evolve(self.axis, parts=self.parts)],
            micro_batches=self.schedule.microbatches,
            init=self.init,
            gradients=self.gradients,
            measure=self.measure,
            params=self.params,
            leaf_map=self.leaf_map,
        )

    def options(self) -> dict[str, Any]:
        """What must be equal on all ranks of the pipeline and of its data-parallel neighbours."""
        actions = zlib.crc32(b"".join(row.tobytes() for row in self.schedule.codes))
        placement = list(self.schedule.placement)
        return {"placement": placement, "microbatches": self.schedule.microbatches, "actions": f"{actions:08x}"}

    def check(self, step: Step) -> None:
        """Raises an error for a step whose gradients another transform wraps."""
        if step.wraps("gradients"):
            raise ValueError(
                f"{self}: it replaces the gradients, which another transform of this step wraps already ({step}); put "
                "pipeline before it"
            )

    def __str__(self) -> str:
        return f"pipeline({self.schedule.stages} stages, {self.schedule.microbatches} micro-batches, {self.axis})"

    def ranks(self) -> comm.Group:
        """The group; by default the world in which the program runs."""
        group = self.axis.ranks()
        if group.size != self.schedule.ranks:
            raise ValueError(f"schedule: it is for {self.schedule.ranks} ranks, and group {group.name!r} has {group.size}")
        return group

    # -- what is stored ------------------------------------------------------------------------------------------------

    def init(self, inner: Any, step: Step, params: Any) -> State:
        """The inner state of this rank's leaves."""
        group = self.ranks()
        placement = Placement.of(params, self.stages, self.schedule.placement)
        if on_shapes(group):
            placement.cache.given.update(
                {path: attrs.evolve(TensorMeta.of(leaf), grad=is_trainable(leaf)) for path, leaf in tree.named(params)}
            )
        known = step.wrapped(
            "placement", leaf_map=lambda inner, step, state: placement.elsewhere(inner(step, state), group.rank)
        )
        state: State = inner(known, placement.own(params, group.rank))
        return state.put(pipeline=placement)

    def params(self, inner: Any, step: Step, state: State) -> Any:
        """The user's tree, each leaf from the first rank that holds it."""
        return _placement(state).gathered(inner(step, state), self.ranks(), state.step.device)

    def leaf_map(self, inner: Any, step: Step, state: State) -> LeafMap:
        """This rank's leaves, with the paths of the others'."""
        parts: LeafMap = inner(step, state)
        return _placement(state).elsewhere(parts, self.ranks().rank) if "pipeline" in state.slots else parts

    # -- what runs -----------------------------------------------------------------------------------------------------

    def gradients(self, inner: Any, step: Step, state: State, batch: Any, carry: Weighted | None, last: bool) -> Passed:
        """Runs the schedule instead of autograd through the whole loss."""
        return gradients(self._spec(self.schedule, self.recorder), step, state, batch, carry, last)

    def measure(self, inner: Any, step: Step, state: State, batch: Any) -> dict[str, Weighted]:
        """Runs the forwards only; a batch with few rows is split into as many micro-batches as it has rows."""
        count = max(1, min(rows_of(batch), self.schedule.microbatches))
        few = count < self.schedule.microbatches
        schedule = self.inference.first(count) if few else self.inference
        return measure(self._spec(schedule), step, state, batch)

    def _spec(self, schedule: Schedule, recorder: Recorder | None = None) -> PipelineSpec:
        return PipelineSpec(schedule, self.stages, self.ranks(), self.schedule.microbatches, recorder)

    def parts(self, step: Step, state: State) -> GradientParts:
        """This rank's leaves; those of which an earlier rank of the pipeline has a copy count there."""
        placement = _placement(state)
        return GradientParts(
            dict.fromkeys(placement.copies(step.leaf_map(state), self.ranks().rank), 0), dtype=placement.widest
        )


def _placement(state: State) -> Placement:
    placement: Placement = state.slots["pipeline"]
    return placement
