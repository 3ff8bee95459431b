"""An update in pieces: each is fetched while the one before it is computed, and sent back while the next one is."""

from concurrent.futures import Future
from time import perf_counter
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.base import tree
from functional_ds.base.direct_io import padded
from functional_ds.base.marks import like_marked
from functional_ds.base.weighted import Weighted
from functional_ds.step.state import State
from functional_ds.step.step import Metrics, Step

from .buffers import Lane, typed
from .files import OffloadError
from .handles import OnHost
from .plan import Kind, Unit, bare, content, cut, flat, joined, parted, rest_of
from .storage import Home, Version

__all__ = ["Update"]

_HOST = torch.device("cpu")
_GRAD = -1  # the gradient's place among a unit's regions


@attrs.frozen
class _Job:
    """A piece of a unit."""

    unit: Unit
    start: int
    stop: int

    def of(self, kind: Kind, whole: Tensor) -> Tensor:
        """The piece's stretch of one of its kinds, as a view."""
        low, high = self.unit.span(kind, self.start, self.stop)
        return whole.detach().view(-1)[low:high].view(self.unit.sub_shape(kind, self.start, self.stop))


@attrs.define(eq=False)
class Update:
    """One update of an offloaded state by the inner update.

    The inner update runs once for each piece of a unit, on a state that has nothing else. It must treat elements alike, but
    for what it asks of the step (``norm``, ``finite``, ``parts``), which answers for all. What a state has beside its
    leaves, a loss scale say, every piece gets as it was, and the first piece's result counts.

    Where files are concerned, nothing of the state before is written over until all pieces have been written and no rank
    has failed. A rank whose disk fails goes on with zeros, so that no other one waits for it, and then all give up.
    """

    home: Home
    inner: Any
    step: Step
    state: State
    grads: Weighted
    before: list[list[Any]] = attrs.field(init=False)  # each unit's content
    after: list[list[Any]] = attrs.field(init=False)
    known: dict[str, Tensor] = attrs.field(factory=dict)  # what the step answered for all gradients
    first: "tuple[State, Metrics] | None" = None
    moved: dict[int, Tensor] = attrs.field(factory=dict)  # where params' new values come
    versions: dict[tuple[int, int], Version] = attrs.field(factory=dict)
    reads: "dict[_Job, dict[int, Future[int]]]" = attrs.field(factory=dict)
    failure: OffloadError | None = None
    waited: float = 0.0

    def __attrs_post_init__(self) -> None:
        plan = self.home.plan
        rests = parted(rest_of(self.state, plan.slots), plan.lengths)
        params, _ = flat(self.state.params)
        self.before = [flat({"params": [p], "rest": rest})[0] for p, rest in zip(params, rests, strict=True)]
        self.after = [[*leaves] for leaves in self.before]
        self.grads = tree.replace(self.grads, sum=[grad.detach().contiguous() for grad in self.grads.sum])

    def run(self) -> tuple[State, Metrics]:
        """The state after it.

        Raises:
            OffloadError: a file went wrong, here or on another rank; the state is as it was.
        """
        began, disk = perf_counter(), self.home.disk
        trained = [unit for unit in self.home.plan.units if unit.trained is not None]
        away, here = [u for u in trained if u.away], [u for u in trained if not u.away]
        if disk is None:
            self._move_here(here)
        try:
            self._move_away(away)
        finally:
            self._settle()
        if disk is not None:
            self._ask_alone()
            self._vote()
            self._move_here(here)
            disk.traffic.waited += self.waited
            disk.traffic.computed += perf_counter() - began - self.waited
        for unit in away:
            self._commit(unit)
        return self._whole()

    # -- the inner update --------------------------------------------------------------------------------------------

    def _inner(self, params: Any, rest: Any, grads: list[Tensor], *, device: torch.device, job: _Job | None) -> list[Any]:
        """The inner update of a state that has these leaves alone, on a device; its content's leaves."""
        step = self.step.wrapped(
            "piece",
            leaf_map=lambda *_: self._parts(job),
            norm=lambda inner, *_: self._ask("norm", inner).to(device),
            finite=lambda inner, *_: self._ask("finite", inner).to(device),
        )
        common = {name: self.state.slots[name] for name in self.state.slots if name not in rest["slots"]}
        state = tree.replace(
            self.state,
            params=params,
            optimizer=_to(rest["optimizer"], device),
            step=self.state.step.to(device),
            slots={**common, **_to(rest["slots"], device)},
            skip=_to(self.state.skip, device),
        )
        after, metrics = self.inner(step, state, Weighted(grads, _to(self.grads.weight, device)))
        self.first = self.first or (after, metrics)
        return flat(content(after, self.home.plan.slots))[0]

    def _parts(self, job: _Job | None) -> Any:
        parts = self.step.leaf_map(self.state)
        return cut(parts, None, 0, 0) if job is None else cut(parts, job.unit.trained, job.start, job.stop)

    def _ask(self, phase: str, inner: Any) -> Tensor:
        """What the step says of all gradients: asked at the first piece, before any of them is written over."""
        if phase not in self.known:
            self.known[phase] = inner(self.step, self.state, self.grads.sum)
        return self.known[phase]

    # -- units that are on the device ----------------------------------------------------------------------------------

    def _move_here(self, units: list[Unit]) -> None:
        for unit in units:
            subject = tree.unflatten(unit.spec, self.before[unit.leaf])
            grads, job = [self._grad(unit)], _Job(unit, 0, unit.numel)
            found = self._inner(subject["params"], subject["rest"], grads, device=self.home.device, job=job)
            self.after[unit.leaf] = found

    def _grad(self, unit: Unit) -> Tensor:
        found: Tensor = self.grads.sum[unit.trained]
        return found

    # -- units that are not --------------------------------------------------------------------------------------------

    def _move_away(self, units: list[Unit]) -> None:
        jobs = [_Job(unit, start, stop) for unit in units for start, stop in unit.spans()]
        if not jobs:
            return
        lanes = self.home.lanes
        self.home.copies.begin()
        for place in range(len(jobs) + len(lanes) - 1):  # as many are begun ahead as there are further buffers
            if place < len(jobs):
                self._begin(jobs[place], lanes[place % len(lanes)])
            now = place - len(lanes) + 1
            if now >= 0:
                self._compute(jobs[now], lanes[now % len(lanes)])
        self._drain(lanes)
        self.home.copies.end()

    def _begin(self, job: _Job, lane: Lane) -> None:
        """Starts to fill a buffer."""
        regions, reads = self.home.regions(job.unit), {}
        for i, kind in job.unit.on_disk():
            handle, (low, high) = self.before[job.unit.leaf][i], job.unit.span(kind, job.start, job.stop)
            nbytes, index, start = (high - low) * kind.dtype.itemsize, low // handle.chunk, regions[i][0]
            reads[i] = handle.disk.read(
                handle.extent,
                index * handle.stride,
                into=lane.room[start : start + padded(nbytes)],
                nbytes=nbytes,
                checksum=handle.sums[index],
                after=lane.writes,
            )
        self.reads[job] = reads
        staged = []
        if 0 in regions and 0 not in reads:
            staged.append((regions[0][0], self._resident(job, 0)))
        if _GRAD in regions:
            staged.append((regions[_GRAD][0], self._grad_of(job)))
        lane.copy_in(staged)

    def _compute(self, job: _Job, lane: Lane) -> None:
        """The inner update of a piece; its results are on their way back when this returns."""
        regions = self.home.regions(job.unit)
        self._await(job, lane, regions)
        subject = tree.unflatten(job.unit.spec, [self._leaf(job, i, lane, regions) for i in range(len(job.unit.kinds))])
        grad = self._grad_of(job)
        if _GRAD in regions:
            grad = typed(lane.room[regions[_GRAD][0] :], grad.dtype, grad.shape)
        self._send(job, self._inner(subject["params"], subject["rest"], [grad], device=_HOST, job=job), lane, regions)

    def _await(self, job: _Job, lane: Lane, regions: dict[int, tuple[int, int]]) -> None:
        began = perf_counter()
        for i, begun in self.reads.pop(job).items():
            try:
                begun.result()
            except OffloadError as error:
                self.failure = self.failure or error
                lane.room[slice(*regions[i])].zero_()
        lane.wait_in()
        self.waited += perf_counter() - began

    def _leaf(self, job: _Job, i: int, lane: Lane, regions: dict[int, tuple[int, int]]) -> Any:
        """One leaf of a piece's content, as the inner update gets it."""
        kind, leaf = job.unit.kinds[i], self.before[job.unit.leaf][i]
        if kind is None:
            return leaf.detach().to(_HOST, copy=True) if isinstance(leaf, Tensor) else leaf
        if i in regions:
            return typed(lane.room[regions[i][0] :], kind.dtype, job.unit.sub_shape(kind, job.start, job.stop))
        return self._resident(job, i)

    def _resident(self, job: _Job, i: int) -> Tensor:
        leaf, kind = self.before[job.unit.leaf][i], job.unit.kinds[i]
        if kind is None:
            raise RuntimeError(f"leaf {i} of {job.unit.name} has no pieces")
        return job.of(kind, leaf.host if isinstance(leaf, OnHost) else leaf)

    def _grad_of(self, job: _Job) -> Tensor:
        grad = self._grad(job.unit)
        return grad if job.unit.whole else grad.view(-1)[job.start : job.stop]

    # -- results -------------------------------------------------------------------------------------------------------

    def _send(self, job: _Job, found: list[Any], lane: Lane, regions: dict[int, tuple[int, int]]) -> None:
        """Starts to bring a piece's results where they belong."""
        lane.writes = tuple(begun for begun in lane.writes if not begun.done())  # a unit with no files waits for none
        for i, (kind, new) in enumerate(zip(job.unit.kinds, found, strict=True)):
            if kind is None:
                self.after[job.unit.leaf][i] = self.after[job.unit.leaf][i] if job.start else new
            elif kind.place == "disk":
                self._write(job.unit, i, new, lane, regions[i])
            elif i in regions:
                lane.copy_out(regions[i][0], new, job.of(kind, self._target(job.unit)))
            else:
                own = self._resident(job, i)
                if own.data_ptr() != new.data_ptr():
                    own.copy_(new)

    def _write(self, unit: Unit, i: int, new: Tensor, lane: Lane, region: tuple[int, int]) -> None:
        kind = unit.kinds[i]
        if self.failure is not None or kind is None:
            return
        try:
            if (unit.leaf, i) not in self.versions:
                self.versions[unit.leaf, i] = self.home.version(unit, kind)
            version = self.versions[unit.leaf, i]
            version.write(new, lane.room[slice(*region)])
            lane.writes = (*lane.writes, version.begun[-1])
        except OffloadError as error:
            self.failure = error

    def _target(self, unit: Unit) -> Tensor:
        """Where a param's new values come: where it is, or, if it must stay as it is so far, where its gradient was."""
        if unit.leaf not in self.moved:
            param = self.before[unit.leaf][0]
            param = param.host if isinstance(param, OnHost) else param.detach()
            self.moved[unit.leaf] = param if self.home.disk is None else self._spare(unit, param)
        return self.moved[unit.leaf]

    def _spare(self, unit: Unit, param: Tensor) -> Tensor:
        grad = self._grad(unit)
        holders = sum(other.untyped_storage().data_ptr() == grad.untyped_storage().data_ptr() for other in self.grads.sum)
        if holders == 1 and grad.device == param.device and grad.nbytes >= param.nbytes and grad.numel():
            return typed(grad.view(-1).view(torch.uint8), param.dtype, param.shape)
        return torch.empty_like(param, pin_memory=param.is_pinned())

    def _drain(self, lanes: tuple[Lane, ...]) -> None:
        """Waits until all is written."""
        began = perf_counter()
        for version in self.versions.values():
            for begun in version.begun:
                error = begun.exception()
                if isinstance(error, OffloadError):
                    self.failure = self.failure or error
                elif error is not None:
                    raise error
        for lane in lanes:
            lane.writes = ()
        self.waited += perf_counter() - began

    def _settle(self) -> None:
        """Waits for what was begun and not used, where something failed: the next update has the same buffers."""
        for reads in self.reads.values():
            for begun in reads.values():
                begun.exception()

    def _ask_alone(self) -> None:
        """A rank that has no piece asks the others what a first piece would, before all vote."""
        if self.first is None:
            rest = bare(rest_of(self.state, self.home.plan.slots))
            self._inner([], rest, [], device=self.home.device, job=None)

    def _vote(self) -> None:
        """All ranks that share a batch go on, or none does."""
        failed = torch.tensor(float(self.failure is not None), device=self.state.step.device)
        count = int(self.step.sum_over_ranks(self.state, failed))
        if self.failure is not None:
            raise self.failure
        if count:
            raise OffloadError(f"offload: the files of {count} other ranks went wrong; no rank has changed its state")

    def _commit(self, unit: Unit) -> None:
        """Puts a unit's new values in the place of the old ones."""
        leaves = self.after[unit.leaf]
        for i, _ in unit.on_disk():
            leaves[i] = self.versions[unit.leaf, i].done()
        old, new = leaves[0], self.moved.get(unit.leaf)
        if new is not None and self.home.disk is not None:
            held = old.host if isinstance(old, OnHost) else old
            tight = new.untyped_storage().nbytes() == new.nbytes
            value = like_marked(new, held) if tight else held.detach().copy_(new)
            leaves[0] = self.home.on_host(unit, value) if isinstance(old, OnHost) else value
        if not isinstance(leaves[0], Tensor):
            leaves[0].reader.know(leaves[0])

    def _whole(self) -> tuple[State, Metrics]:
        """The state from its units."""
        plan = self.home.plan
        self._ask_alone()
        if self.first is None:
            raise RuntimeError("the inner update gave nothing")
        state, metrics = self.first
        contents = [tree.unflatten(unit.spec, leaves) for unit, leaves in zip(plan.units, self.after, strict=True)]
        common = _to(bare(rest_of(state, plan.slots)), self.home.device)
        rest = joined([found["rest"] for found in contents], common)
        params = tree.unflatten(flat(self.state.params)[1], [found["params"][0] for found in contents])
        slots = {**self.state.slots, **rest["slots"]}
        step = state.step.to(self.home.device)
        whole = tree.replace(self.state, params=params, optimizer=rest["optimizer"], step=step, slots=slots)
        return whole, _to(metrics, self.home.device)


def _to(values: Any, device: torch.device) -> Any:
    """With every tensor on the device."""
    return tree.map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, values)
