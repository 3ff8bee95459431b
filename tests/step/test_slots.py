"""Slots answer for themselves: nothing below knows the transform that keeps them (law 60). Phases that come in pairs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import functional_ds as fds
from functional_ds import comm, memory, tree
from functional_ds import transforms as T
from functional_ds.base.marks import is_trainable
from functional_ds.step.state.slots import Role
from functional_ds.testing import assert_same
from tests.planting import Bug, planted


@tree.record
class Slow:
    """Slow weights (Lookahead), and a count of the transform's own."""

    weights: list[Tensor | None]
    count: Tensor

    roles: ClassVar[Mapping[str, Role]] = {"weights": Role.AVERAGE}


def lookahead(every: int, alpha: float = 0.5) -> fds.Transform:
    """Lookahead (Zhang et al. 2019) as a user writes it: no stage of ZeRO, no precision is named."""

    def init(inner: Any, step: fds.Step, params: Any) -> fds.State:
        state = inner(step, params)
        slow = [leaf.detach().clone() if is_trainable(leaf) else None for leaf in tree.leaves(state.params)]
        return state.put(lookahead=Slow(slow, torch.zeros((), dtype=torch.int64)))

    def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
        state, metrics = inner(step, state, grads)
        slot: Slow = state.slots["lookahead"]
        now = (slot.count + 1) % every == 0
        fast, spec = tree.flatten(state.params)
        slow = [None if s is None else torch.where(now, s.lerp(f, alpha), s) for s, f in zip(slot.weights, fast, strict=True)]
        params = [f if s is None else torch.where(now, s, f) for s, f in zip(slow, fast, strict=True)]
        state = tree.replace(state, params=tree.unflatten(spec, params))
        return state.put(lookahead=Slow(slow, slot.count + 1)), metrics

    return fds.wrap("lookahead", slot="lookahead", init=init, update=update)


def loss(params: Any, x: Tensor) -> Tensor:
    return ((x @ params["a"]).tanh() @ params["b"]).square().mean()


def build(*strategy: fds.Transform) -> tuple[fds.Step, fds.State]:
    step = fds.compose(lookahead(2), *strategy)(fds.train_step(loss, fds.adamw(0.05)))
    generator = torch.Generator().manual_seed(0)
    params = {"a": torch.randn(3, 5, generator=generator), "b": torch.randn(5, 1, generator=generator)}
    return step, step.init(params)


def batch(index: int) -> Tensor:
    here = comm.world()
    return torch.randn(12, 3, generator=torch.Generator().manual_seed(index)).chunk(here.size)[here.rank]


def trained(step: fds.Step, state: fds.State, start: int, steps: int) -> fds.State:
    for index in range(start, steps):
        state, _ = step(state, batch(index))
    return state


def trained_alone(steps: int) -> fds.State:
    step, state = build()
    return trained(step, state, 0, steps)


@pytest.mark.law(60)
@pytest.mark.parametrize(("one", "other"), [((0, 1), (3, 2)), ((2, 3), (1, 2)), ((3, 2), (0, 1))])
def test_a_new_slot_is_saved_resharded_counted_and_exported(tmp_path: Path, one: Any, other: Any) -> None:
    """run(k + j) = run(j) ∘ load ∘ save ∘ run(k) on other ranks and stages; its bytes and its averages are found by role."""

    def first() -> Any:
        step, state = build(T.zero(one[0]))
        state = trained(step, state, 0, 3)
        fds.save(state, tmp_path / "run")
        fds.export(state, tmp_path / "mean.safetensors", averaged=True)
        return step.params(state)

    def second() -> Any:
        step, state = build(T.zero(other[0]))
        state = fds.load(tmp_path / "run", like=state)
        assert state.slots["lookahead"].count == 3
        before = step.params(state)
        return before, step.params(trained(step, state, 3, 6))

    def whole() -> Any:
        step, state = build()
        return step.params(trained(step, state, 0, 6))

    saved = comm.simulate(first, world_size=one[1])[0]
    want = comm.simulate(whole, world_size=1)[0]
    for before, after in comm.simulate(second, world_size=other[1]):
        assert_same(before, saved)
        torch.testing.assert_close(after, want)
    slow = dict(zip("ab", trained_alone(3).slots["lookahead"].weights, strict=True))
    torch.testing.assert_close(load_file(tmp_path / "mean.safetensors"), slow)


@pytest.mark.law(60)
def test_predicted_bytes_are_measured_ones() -> None:
    def make() -> fds.Step:
        return build(T.zero(1))[0]

    def run() -> Any:
        return memory.measured(build(T.zero(1))[1])

    predicted = memory.predicted(make, {"a": torch.ones(3, 5), "b": torch.ones(5, 1)}, world_size=2)
    found = comm.simulate(run, world_size=2)[0]
    assert (predicted.params, predicted.masters, predicted.optimizer, predicted.buffers) == (
        found.params,
        found.masters,
        found.optimizer,
        found.buffers,
    )


def sam(rho: float) -> fds.Transform:
    """Sharpness-aware minimisation (Foret et al. 2021): the gradient at params + rho g / |g|."""

    def gradients(inner: Any, step: fds.Step, state: fds.State, batch: Any, carry: Any, last: bool) -> Any:
        after, grads, metrics = inner(step, state, batch, None, True)
        reduced, grads = step.reduce(after, grads)
        length = rho / step.norm(reduced, grads.sum)
        there = step.with_trained(state, [x + length * g for x, g in zip(step.trained(state), grads.sum, strict=True)])
        _, grads, _ = inner(step, there, batch, carry, last)
        return after, grads, metrics

    return fds.wrap("sam", gradients=gradients)


def by_hand(steps: int) -> dict[str, Tensor]:
    _, state = build()
    params = {name: leaf.clone().requires_grad_() for name, leaf in state.params.items()}
    optimizer = torch.optim.SGD(params.values(), 0.1)
    for index in range(steps):
        grads = torch.autograd.grad(loss(params, batch(index)), list(params.values()))
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        ahead = {
            name: (leaf + 0.05 * grad / norm).detach().requires_grad_()
            for (name, leaf), grad in zip(params.items(), grads, strict=True)
        }
        for leaf, grad in zip(
            params.values(), torch.autograd.grad(loss(ahead, batch(index)), list(ahead.values())), strict=True
        ):
            leaf.grad = grad
        optimizer.step()
    return {name: leaf.detach() for name, leaf in params.items()}


@pytest.mark.law(19)
@pytest.mark.parametrize("stage", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("n", [1, 3])
def test_sharpness_aware_minimisation_in_any_stage(stage: int | None, n: int) -> None:
    if stage is None and n > 1:
        return
    want = by_hand(3)

    def program() -> Any:
        strategy = () if stage is None else (T.zero(stage),)
        step = fds.compose(*strategy, sam(0.05))(fds.train_step(loss, fds.sgd(0.1)))
        _, start = build()
        state = step.init(start.params)
        return step.params(trained(step, state, 0, 3))

    for found in comm.simulate(program, world_size=n):
        torch.testing.assert_close(found, want)


@pytest.mark.parametrize("stage", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("half", [False, True])
def test_publish_is_the_inverse_of_scatter(stage: int | None, half: bool) -> None:
    """And ``trained`` lines up with the gradients, in the dtype of updates."""

    def program() -> None:
        strategy = [T.mixed_precision("bf16")] if half else []
        strategy += [] if stage is None else [T.zero(stage)]
        step = fds.compose(*strategy)(fds.train_step(loss, fds.sgd(0.1)))
        state = step.init({"a": torch.randn(3, 5), "b": torch.randn(5, 1)})
        back = step.publish(step.scatter(state))
        assert tree.structure(back) == tree.structure(state)
        assert_same(back.params, state.params)
        _, grads, _ = step.gradients(state, batch(0), None, True)
        found = step.trained(state)
        assert [leaf.numel() for leaf in found] == [grad.numel() for grad in grads.sum]
        assert {leaf.dtype for leaf in found} == {torch.float32}
        if half:
            with pytest.raises(ValueError, match="publish takes a state that scatter gave"):
                step.publish(state)

    comm.simulate(program, world_size=2)


def watching(place: int, seen: list[Any]) -> fds.Transform:
    """Asks for the trained tensors in every phase that has them; notes those in ``init`` and around an update."""

    def note(step: fds.Step, state: fds.State) -> None:
        seen.append([leaf.detach().clone() for leaf in step.trained(state)])

    def init(inner: Any, step: fds.Step, params: Any) -> fds.State:
        state = inner(step, params)
        note(step, state)
        return state

    def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
        note(step, state)
        state, metrics = inner(step, state, grads)
        note(step, state)
        return state, metrics

    def gradients(inner: Any, step: fds.Step, state: fds.State, batch: Any, carry: Any, last: bool) -> Any:
        note(step, state)
        return inner(step, state, batch, carry, last)

    def publish(inner: Any, step: fds.Step, state: fds.State) -> fds.State:
        note(step, state)
        state = inner(step, state)
        note(step, state)
        return state

    def params(inner: Any, step: fds.Step, state: fds.State) -> Any:
        note(step, state)
        return inner(step, state)

    beyond = {"params": params} if place > 1 else {}  # ema must be before all that wrap it
    return fds.wrap(f"watch {place}", init=init, update=update, gradients=gradients, publish=publish, **beyond)


BETWEEN: dict[str, Any] = {
    "bf16": lambda: [T.mixed_precision("bf16")],
    "ema, bf16": lambda: [T.ema(0.5), T.mixed_precision("bf16")],
    "stage 0": lambda: [T.zero(0)],
    "stage 1, fp16, clipped": lambda: [T.mixed_precision("fp16", 8.0), T.zero(1), T.clip(1.0)],
    "stage 2, owners": lambda: [T.mixed_precision("bf16"), T.zero(2, aggregate="owner"), T.accumulate(2)],
    "stage 3": lambda: [T.ema(0.5), T.mixed_precision("bf16"), T.zero(3)],
    "stage 3, some whole": lambda: [T.mixed_precision("bf16"), T.zero(3, persistence_threshold=8)],
    "compressed gathers": lambda: [T.zero(1, all_gather=comm.codecs.compressed(comm.all_gather, comm.codecs.Blocks(8)))],
    "compressed gathers, bf16": lambda: [
        T.mixed_precision("bf16"),
        T.zero(2, all_gather=comm.codecs.compressed(comm.all_gather, comm.codecs.Blocks(8))),
    ],
}


def fresh(params: list[Tensor], grads: fds.Weighted, state: Any, rate: Any) -> tuple[list[Tensor], Any]:
    """Descent by signs; the results lie in new memory."""
    return [p - 0.05 * rate * g.to(p.dtype).sign() for p, g in zip(params, grads.sum, strict=True)], state


def watched(between: str, n: int) -> None:
    """``trained`` gives the same tensors at every place among the transforms, before an update and after it."""

    def program() -> None:
        places, chain = list[list[Any]](), list[fds.Transform]()
        for transform in [*BETWEEN[between](), None]:
            places.append([])
            chain += [watching(len(places), places[-1])] + ([] if transform is None else [transform])
        step = fds.compose(*chain)(fds.train_step(loss, fds.Optimizer(lambda params: (), fresh)))
        generator = torch.Generator().manual_seed(0)
        params = {"a": torch.randn(3, 5, generator=generator), "b": torch.randn(5, 1, generator=generator)}
        state = step.init(fds.freeze({**params, "still": torch.ones(7)}, "still"))
        check(places, [step.trained(state)])
        for i in range(2):
            before = [leaf.clone() for leaf in step.trained(state)]
            state, _ = step(state, batch(i))
            check(places, [before, step.trained(state)])
        now = [leaf.clone() for leaf in step.trained(state)]
        step.params(state)
        step.publish(step.scatter(state))
        check(places, [now])

    def check(places: list[list[Any]], expected: list[Any]) -> None:
        """At each place, all notes but the last are the first of these, and the last is the last."""
        for notes in places:
            assert notes
            assert_same(notes, [expected[0]] * (len(notes) - 1) + [expected[-1]])
            notes.clear()

    comm.simulate(program, world_size=n)


@pytest.mark.parametrize(
    "bug",
    [
        Bug(
            "cut twice",
            "transforms.zero.zero:Zero._scattered",
            "partition is None or partition.frozen is not None",
            "partition is None",
        ),
        Bug(
            "no slot yet",
            "transforms.zero.zero:Zero._scattered",
            "partition: Partition | None = state.slots.get('zero')",
            "partition = state.slots['zero']",
            KeyError,
        ),
        Bug(
            "stale shards",
            "transforms.zero.zero:Zero._scattered",
            "tree.replace(partition, exact=(), frozen=frozen, versions=versions)",
            "tree.replace(partition, frozen=None)",
        ),
        Bug(
            "masters of before",
            "transforms.precision.mixed_precision:_MixedPrecision._widened",
            "slot is None or slot.stored is not None",
            "slot is None",
        ),
    ],
    ids=lambda bug: bug.name,
)
def test_a_planted_bug_breaks_it(bug: Bug) -> None:
    with planted(bug), pytest.raises((bug.shows, RuntimeError)):
        watched("compressed gathers, bf16", 3)


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("n", [1, 3])
def test_trained_is_the_same_in_every_phase_and_at_every_place(between: str, n: int) -> None:
    watched(between, n)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("params", [None, "disk"])
def test_trained_beside_offload(half: bool, params: Any, tmp_path: Path) -> None:
    """An inner update has a piece; what waits on the disk is refused."""
    seen: list[Any] = []
    precision = [T.mixed_precision("bf16")] if half else []
    chain = [watching(1, seen), *precision, T.offload("disk", params, path=tmp_path), T.zero(3)]
    step = fds.compose(*chain)(fds.train_step(loss, fds.adamw(0.05)))
    state = step.init({"a": torch.randn(3, 5), "b": torch.randn(5, 1)})
    assert {leaf.dtype for piece in seen for leaf in piece} == {torch.float32}
    if half or params:
        with pytest.raises(ValueError, match=r"are offloaded between updates.* use step.params"):
            step.trained(state)
    else:
        assert len(step.trained(state)) == 1


def test_innermost_and_outermost_keep_their_place() -> None:
    noted: list[str] = []

    def note(word: str) -> Any:
        def rate(inner: Any, step: fds.Step, state: fds.State) -> Any:
            noted.append(word)
            return inner(step, state)

        return rate

    made = fds.compose(
        fds.wrap("a", rate=note("a")),
        fds.wrap("out", rate=fds.outermost(note("out"))),
        fds.wrap("in", rate=fds.innermost(note("in"))),
        fds.wrap("b", rate=note("b")),
    )(fds.train_step(loss, fds.sgd(0.1)))
    made.rate(build()[1])
    assert noted == ["out", "b", "a", "in"]


def test_gradients_may_write_state() -> None:
    """A second-order estimate needs the batch and leaves something: one phase."""

    def gradients(inner: Any, step: fds.Step, state: fds.State, batch: Any, carry: Any, last: bool) -> Any:
        state, grads, metrics = inner(step, state, batch, carry, last)
        return state.put(seen=state.slots["seen"] + batch.square().sum()), grads, metrics

    def init(inner: Any, step: fds.Step, params: Any) -> fds.State:
        return inner(step, params).put(seen=torch.zeros(()))

    strategy = (fds.wrap("curvature", slot="seen", init=init, gradients=gradients), T.accumulate(3))
    step = fds.compose(*strategy)(fds.train_step(loss, fds.sgd(0.1)))
    state = step.init({"a": torch.ones(3, 5), "b": torch.ones(5, 1)})
    state, _ = step(state, batch(0))
    torch.testing.assert_close(state.slots["seen"], batch(0).square().sum())


def proximal(clone: bool) -> fds.Transform:
    """A pull towards the first params, which the slot holds, or is."""

    def init(inner: Any, step: fds.Step, params: Any) -> fds.State:
        state: fds.State = inner(step, params)
        return state.put(anchor=[leaf.clone() if clone else leaf for leaf in step.trained(state)])

    def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
        moved = zip(step.trained(state), state.slots["anchor"], grads.sum, strict=True)
        pulled = [g + 0.3 * grads.weight * (x.view_as(g) - a.view_as(g)) for x, a, g in moved]
        return inner(step, state, fds.Weighted(pulled, grads.weight))

    return fds.wrap("proximal", slot="anchor", init=init, update=update)


def averaged(clone: bool) -> fds.Optimizer:
    """Descent in place, whose state is, or copies, the first params: half of each step goes back to them."""

    def update(params: list[Tensor], grads: fds.Weighted, start: Any, rate: Any) -> tuple[list[Tensor], Any]:
        for x, first, g in zip(params, start, grads.sum, strict=True):
            x.sub_(0.1 * g / grads.weight).lerp_(first, 0.5)
        return params, start

    return fds.Optimizer(lambda params: [x.clone() if clone else x for x in params], update, "averaged", elementwise=True)


def kept_alike(stage: int | None, donate: bool = True) -> None:
    """What a transform or an optimizer keeps at ``init`` are values, whether it copies the params or not."""

    def program(clone: bool) -> Any:
        strategy = () if stage is None else (T.zero(stage),)
        step = fds.compose(proximal(clone), *strategy)(fds.train_step(loss, averaged(clone)))
        state = step.init(build()[1].params)
        for index in range(3):
            state, _ = step(state, batch(index), donate=donate)
        return step.params(state)

    want = comm.simulate(program, True, world_size=2)
    assert_same(comm.simulate(program, False, world_size=2), want)


@pytest.mark.law(31)
@pytest.mark.parametrize("stage", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("donate", [True, False])
def test_what_is_kept_at_init_are_values(stage: int | None, donate: bool) -> None:
    kept_alike(stage, donate)


def test_a_slot_that_is_the_params_is_seen() -> None:
    bug = Bug("slots are the params", "step.checks:with_own_memory", "id(x) in shared", "False")
    with planted(bug), pytest.raises((AssertionError, ValueError)):
        kept_alike(0)


def test_equal_memory_in_one_slot_is_kept() -> None:
    """Views of one tensor within a slot, and tensors that lie side by side in one storage."""

    def init(inner: Any, step: fds.Step, params: Any) -> fds.State:
        flat = torch.arange(6.0)
        return inner(step, params).put(own={"flat": flat, "view": flat[:3]})  # type: ignore[no-any-return]

    state = fds.wrap("own", slot="own", init=init)(fds.train_step(loss, fds.sgd(0.1))).init(build()[1].params)
    own = state.slots["own"]
    assert own["view"].data_ptr() == own["flat"].data_ptr()
