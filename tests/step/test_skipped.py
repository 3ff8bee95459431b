"""Law 25 for whole states: a step that a loss scale skips changes nothing but the scale, whatever transforms there are."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm, tree
from functional_ds import transforms as T
from functional_ds.base.marks import is_trainable
from functional_ds.step.phases import Trait
from functional_ds.testing import assert_same
from tests.planting import Bug, planted
from tests.step.worked import worked

HALF = T.mixed_precision("fp16", T.DynamicScale(2.0**6, hysteresis=1))
CALM, WILD = 1.0, 6e4  # what a gradient is multiplied by; fp16 ends at 65504
SKIPPED = 2  # the step that overflows


def loss(params: Any, batch: Any) -> Tensor:
    x, factor = batch[:, :3], batch[:, 3]
    return ((x @ params["a"]).tanh() @ params["b"] - 1).square().mean() * factor.mean()


def start() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"a": torch.randn(3, 5, generator=generator), "b": torch.randn(5, 1, generator=generator)}


def batch_of(index: int, factor: float, bad: int | None) -> Any:
    """This rank's rows; on the rank ``bad`` the loss is multiplied."""
    here = comm.world()
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(index)).chunk(here.size)[here.rank]
    return torch.cat([x, torch.full((len(x), 1), factor if bad in (None, here.rank) else CALM)], dim=1)


def queue(delay: int = 2) -> fds.Transform:
    """Gradients that the optimizer gets ``delay`` steps later, in which an infinity would wait."""

    def init(inner: Any, step: fds.Step, params: Any) -> fds.State:
        state = inner(step, params)
        return state.put(queue=[[torch.zeros_like(leaf) for leaf in step.trained(state)] for _ in range(delay)])

    def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
        first, *rest = state.slots["queue"]
        mean = [grad.to(old.dtype).view_as(old) / grads.weight for grad, old in zip(grads.sum, first, strict=True)]
        state, metrics = inner(step, state.put(queue=[*rest, mean]), fds.Weighted(first, torch.ones_like(grads.weight)))
        return state, metrics

    return fds.wrap("queue", slot="queue", init=init, update=update)


def decay_in_update(rate: float = 0.1) -> fds.Transform:
    """Moves params and the momentum after the optimizer, without a slot."""

    def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
        state, metrics = inner(step, state, grads)
        less = lambda x: x * (1 - rate) if is_trainable(x) and x.dim() else x  # noqa: E731
        return tree.replace(state, params=tree.map(less, state.params), optimizer=tree.map(less, state.optimizer)), metrics

    return fds.wrap("decay", update=update)


def every_other(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
    """Calls the inner update twice in one step, or not at all."""
    count = state.slots["other"]
    if int(count) % 2:
        return state.put(other=count + 1), {}
    state, _ = inner(step, state.put(other=count + 1), grads)
    return inner(step, state, grads)


def other(inner: Any, step: fds.Step, params: Any) -> fds.State:
    return inner(step, params).put(other=torch.zeros((), dtype=torch.int64))


def grown(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
    """A slot of another form after each step, so that the host chooses."""
    state, metrics = inner(step, state, grads)
    return state.put(other=torch.zeros(len(state.slots["other"].view(-1)) + 1)), metrics


def mine() -> dict[str, fds.Transform]:
    return {
        "queue": queue(),
        "decay": decay_in_update(),
        "every other": fds.wrap("every_other", slot="other", init=other, update=every_other),
        "grown": fds.wrap("grown", slot="other", init=other, update=grown),
        **{name: worked()[name] for name in ("clip_spikes", "lookahead", "count_rows", "within_the_box", "diagonal", "add_l2")},
        "gradient_memory": worked()["gradient_memory"],
        "ema of docs": worked()["ema"],
        "sam": worked()["sam"],
    }


def whole(state: fds.State) -> dict[str, Any]:
    """The state's tensors by path, but for the loss scale and what belongs to one step."""
    found = {path: leaf.clone() for path, leaf in tree.named(state) if isinstance(leaf, Tensor)}
    return {path: leaf for path, leaf in found.items() if "loss_scale" not in path and not path.startswith("key")}


def run(strategy: Any, bad: int | None, donate: bool = True, steps: int = 5, rule: Any = None) -> Any:
    """The states around the step that overflows, its metrics, and the last params."""
    transforms = strategy()
    step = fds.compose(*transforms)(fds.train_step(loss, rule or fds.adamw(0.01)))
    state, around = step.init(start()), {}
    for index in range(steps):
        before = whole(state) if index == SKIPPED else None
        state, metrics = step(state, batch_of(index, WILD if index == SKIPPED else CALM, bad), donate=donate)
        if before is not None:
            assert metrics["skipped"] == 1.0
            around = {"before": before, "after": whole(state)}
        else:
            assert metrics.get("skipped", 0) == 0
    return around, step.params(state)


def unchanged(strategy: Any, n: int, bad: int | None, donate: bool = True) -> None:
    for around, params in comm.simulate(run, strategy, bad, donate, world_size=n):
        assert_same(around["after"], around["before"])
        assert all(leaf.isfinite().all() for leaf in tree.leaves(params))


@pytest.mark.law(25)
@pytest.mark.parametrize("name", mine())
@given(stage=st.sampled_from((None, 0, 1, 2, 3)), inside=st.booleans(), donate=st.booleans())
def test_a_skipped_step_keeps_what_transforms_keep(name: str, stage: int | None, inside: bool, donate: bool) -> None:
    """In any stage, inside of mixed precision or outside: state after = state before, and no infinity waits in a slot."""
    n = 1 if stage is None else 2

    def strategy() -> list[fds.Transform]:
        zero = [] if stage is None else [T.zero(stage)]
        moves_params = name in ("decay", "lookahead", "within_the_box")  # the masters, so before mixed precision
        asks = name in ("add_l2", "sam", "diagonal", "gradient_memory", "queue")  # for ``step.trained``, so after zero
        return [mine()[name], HALF, *zero] if moves_params or (inside and not asks) else [HALF, *zero, mine()[name]]

    unchanged(strategy, n, None if n == 1 else 1, donate)


LIBRARY = {
    "ema": lambda: [T.ema(0.9), HALF, T.zero(1)],
    "clip, schedule": lambda: [HALF, T.zero(2), T.clip(1.0), T.schedule(T.warmup(5))],
    "offload": lambda: [T.ema(0.9), HALF, T.offload("cpu"), T.zero(1)],
    "offload, own": lambda: [decay_in_update(), HALF, T.offload("cpu"), T.zero(1)],
    "replicated": lambda: [HALF, T.replicated(reduce=majority)],
    "one bit": lambda: [HALF, T.compressed_gradients(comm.codecs.OneBit())],
    "top k": lambda: [HALF, T.compressed_gradients(comm.codecs.TopK(0.5)), worked()["clip_spikes"]],
    "power_sgd": lambda: [HALF, worked()["power_sgd"]],
    "sign": lambda: [HALF, T.zero(1), worked()["sign_gradient"]],
    "accumulate": lambda: [HALF, T.zero(2), T.accumulate(2), worked()["count_rows"]],
}


def majority(grads: Any, memory: Any, group: comm.Group) -> Any:
    return [comm.all_reduce(grad.nan_to_num().sign(), group).sign() for grad in grads], memory


@pytest.mark.law(25)
@pytest.mark.parametrize("name", LIBRARY)
def test_a_skipped_step_keeps_the_librarys_slots(name: str) -> None:
    """Also where a transform makes numbers of infinities: signs, votes."""
    unchanged(LIBRARY[name], 2, 1)


@pytest.mark.law(25)
def test_processes_skip_alike() -> None:
    want = comm.simulate(program, world_size=2)
    for found, expected in zip(comm.spawn(program, world_size=2), want, strict=True):
        assert_same(found[0]["after"], found[0]["before"])
        assert_same(found, expected)


def program() -> Any:
    return run(lambda: [HALF, T.zero(1), worked()["clip_spikes"]], 1)


def test_module_buffers_are_the_forward_passes() -> None:
    """As under torch.amp.GradScaler, whose skipped steps keep what BatchNorm has counted."""
    apply, params = fds.functional(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    step = HALF(fds.train_step(lambda p, x: apply(p, x).square().mean() * 6e4, fds.sgd(0.1)))
    state, metrics = step(step.init(params), torch.randn(8, 3))
    assert metrics["skipped"] == 1
    assert step.module_buffers(state)["1.num_batches_tracked"] == 1


def test_what_an_update_makes_infinite_is_skipped_too() -> None:
    """A transform outside of mixed precision overflows by itself; its own slot goes back, too."""

    def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
        state, metrics = inner(step, state, fds.Weighted([grad * 1e6 for grad in grads.sum], grads.weight))
        return state.put(other=state.slots["other"] + 1), metrics

    step = fds.compose(HALF, fds.wrap("loud", slot="other", init=other, update=update))(fds.train_step(loss, fds.sgd(0.1)))
    state = step.init(start())
    before = whole(state)
    state, metrics = step(state, batch_of(0, CALM, None))
    assert metrics["skipped"] == 1
    assert_same(whole(state), before)


def counting(traits: Any = (), where: str = "slot") -> fds.Transform:
    """Writes in place: its count, or the params."""

    def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
        state, metrics = inner(step, state, grads)
        for leaf in [state.slots["other"]] if where == "slot" else tree.leaves(state.params):
            leaf.add_(1)
        return state, metrics

    return fds.wrap("counting", slot="other", init=other, update=update, traits=traits)


@pytest.mark.parametrize(("where", "path"), [("slot", "slots.other"), ("params", "params.a")])
def test_writes_in_place_are_refused_with_a_loss_scale(where: str, path: str) -> None:
    step = fds.compose(counting(where=where), HALF)(fds.train_step(loss, fds.sgd(0.1)))
    with pytest.raises(ValueError, match=rf"counting: its update writes state\.{path} in place.*HEEDS_SKIPS"):
        step(step.init(start()), batch_of(0, CALM, None))
    fine = fds.compose(counting(where=where))(fds.train_step(loss, fds.sgd(0.1)))  # nothing is ever skipped
    fine(fine.init(start()), batch_of(0, CALM, None))


def test_a_transform_can_count_skipped_steps() -> None:
    step = fds.compose(counting([Trait.HEEDS_SKIPS]), HALF)(fds.train_step(loss, fds.sgd(0.1)))
    state = step.init(start())
    for factor in (CALM, WILD, CALM):
        state, _ = step(state, batch_of(0, factor, None))
    assert (int(state.slots["other"]), int(state.step)) == (3, 2)


def test_marks_of_leaves_stay() -> None:
    """A frozen leaf stays one, whoever replaced it."""
    params = fds.freeze(start(), "^a$")
    step = fds.compose(decay_in_update(), HALF)(fds.train_step(loss, fds.sgd(0.1)))
    state = step.init(params)
    for factor in (CALM, WILD):
        state, _ = step(state, batch_of(0, factor, None))
    assert [is_trainable(leaf) for leaf in tree.leaves(state.params)] == [False, True]


BUGS = [
    Bug("slots change", "step.state.skipped:kept_slots", "skip is None or not changed", "True"),
    Bug("params change", "step.state.skipped:_Fallback.unless_skipped", "after is self.state or after.skip is None", "True"),
    Bug(
        "the wrong one is chosen",
        "step.state.skipped:_where",
        "torch.where(skip.to(new.device), old.detach(), new.detach())",
        "torch.where(skip.to(new.device), new.detach(), old.detach())",
    ),
    Bug("all transforms are trusted", "step.phases:compose_phase", "phase == 'update'", "False"),
    Bug(
        "gradients are asked too late",
        "transforms.precision.mixed_precision:_MixedPrecision.transform",
        "wrap(str(self), check=self.check, slot=_SLOT, traits=[Trait.CASTS, Trait.COPIES_PARAMS, "
        "Trait.HEEDS_SKIPS], prepare=self.prepare, init=self.init, loss=self.loss, forward=self.forward, "
        "comm_dtype=self.comm_dtype, scatter=self.scatter, reduce=outermost(self.reduce), "
        "update=self.update, publish=self.publish, params=self.params)",
        "wrap(str(self), check=self.check, slot=_SLOT, traits=[Trait.CASTS, Trait.COPIES_PARAMS, "
        "Trait.HEEDS_SKIPS], prepare=self.prepare, init=self.init, loss=self.loss, forward=self.forward, "
        "comm_dtype=self.comm_dtype, scatter=self.scatter, update=self.update, publish=self.publish, "
        "params=self.params)",
    ),
    Bug(
        "a vote hides an overflow",
        "transforms.zero.combine:Combine.combined",
        "_finite(means, weight) & (bad == 0)",
        "(bad >= 0) | (bad == 0)",
    ),
]


def laws() -> None:
    for name in ("queue", "decay", "clip_spikes", "count_rows"):
        unchanged(lambda name=name: [HALF, T.zero(1), mine()[name]], 2, 1)
    unchanged(LIBRARY["replicated"], 2, 1)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bugs_are_caught(bug: Bug) -> None:
    with planted(bug), pytest.raises(bug.shows):
        laws()
