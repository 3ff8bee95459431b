"""What a step refuses by name, before anything has changed (law 61)."""

from collections import UserDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm, testing, tree
from functional_ds import transforms as T


def square(params: Any, x: Tensor) -> Tensor:
    return (x @ params["w"]).square().mean()


def made(*strategy: fds.Transform) -> tuple[fds.Step, fds.State]:
    step = fds.compose(*strategy)(fds.train_step(square, fds.sgd(0.1)))
    return step, step.init({"w": torch.ones(3, 2)})


class Batch:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class Pairs(UserDict[str, Tensor]):
    """A mapping that no dict makes."""

    def __init__(self, one: Tensor, other: Tensor) -> None:
        super().__init__(one=one, other=other)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (3, r"batch: 3 has no tensor, so it has no rows.*torch.tensor"),
        (Batch(torch.ones(4, 3)), r"batch: it is a Batch, in which no tensors are found; pass a dict, list or tuple"),
        (Pairs(torch.ones(4, 3), torch.ones(4, 3)), r"batch: it is a Pairs, in which no tensors are found; pass dict\(batch\)"),
        ({"x": torch.ones(4, 3).numpy()}, r"the leaf at 'x' is a ndarray.*torch.as_tensor\(array\)"),
    ],
)
def test_batches_without_tensors(batch: Any, message: str) -> None:
    step, state = made()
    with pytest.raises(TypeError, match=message):
        step(state, batch)
    step(state, torch.ones(4, 3))  # the state is as it was


def test_a_module_as_params() -> None:
    step = fds.train_step(square, fds.sgd(0.1))
    with pytest.raises(TypeError, match=r"params: this is the module Linear; write apply, params = fds.functional\(module\)"):
        step.init(nn.Linear(2, 2))


@pytest.mark.parametrize("stage", [None, 1, 3])
def test_a_loss_that_calls_the_module_itself(stage: int | None) -> None:
    """Its gradients would go to the module, and nothing would be trained."""
    module = nn.Linear(3, 2)
    _, params = fds.functional(module)
    step = fds.train_step(lambda params, x: module(x).square().mean(), fds.sgd(0.1))
    step = step if stage is None else T.zero(stage)(step)
    with pytest.raises(RuntimeError, match=r"a parameter of shape \[2.*\] that is not one of the step's params.*apply\(params"):
        step(step.init(params), torch.ones(4, 3))


@pytest.mark.parametrize("found", [(1.0, 2.0), (torch.ones(()), {}, {}), (torch.ones(()), [1])])
def test_a_loss_with_further_values_of_another_form(found: Any) -> None:
    step = fds.train_step(lambda params, x: found, fds.sgd(0.1))
    with pytest.raises(TypeError, match=r"returned a tuple of \(.*return the loss alone, or \(loss, "):
        step(step.init({"w": torch.ones(3, 2)}), torch.ones(4, 3))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_before_mixed_precision(stage: int) -> None:
    with pytest.warns(UserWarning, match=rf"put it before zero\({stage}.*compose\(mixed_precision.*masters of all params"):
        made(T.zero(stage), T.mixed_precision("bf16"))


def test_steps_and_transforms_in_each_others_places() -> None:
    step, _ = made()
    with pytest.raises(TypeError, match=r"compose: train_step\(.* is a step; apply the transforms to it"):
        fds.compose(T.clip(1.0), step)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"compose\(...\) is a transform: give it a step"):
        fds.compose(T.clip(1.0))(square)  # type: ignore[arg-type]


def test_states_of_other_strategies() -> None:
    plain, of_plain = made()
    zero, of_zero = made(T.zero(1))
    with pytest.raises(ValueError, match=r"it lacks the slot 'zero' of zero\(1.*fds.load\(folder, like=step.init"):
        zero(of_plain, torch.ones(4, 3))
    with pytest.raises(ValueError, match="it has the slot 'zero', which no transform of the step keeps"):
        plain(of_zero, torch.ones(4, 3))
    for use in (zero.params, lambda state: zero.evaluate(state, torch.ones(4, 3))):
        with pytest.raises(ValueError, match="it lacks the slot 'zero'"):
            use(of_plain)
    with pytest.raises(TypeError, match="state: dict is not a State"):
        plain({"w": torch.ones(3, 2)}, torch.ones(4, 3))  # type: ignore[arg-type]


def test_a_gradient_of_weight_zero_moves_nothing() -> None:
    """A transform's, too: 0 / 0 would make every param NaN."""

    def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
        return inner(step, state, fds.Weighted(grads.sum, 0.0))

    step, state = made(fds.wrap("weightless", update=update))
    after, _ = step(state, torch.ones(4, 3))
    assert torch.equal(after.params["w"], torch.ones(3, 2))


def test_phases_of_another_form() -> None:
    with pytest.raises(
        TypeError, match=r"short: its update takes \(step, grads\), and must take \(inner, step, state, grads\)"
    ):
        fds.wrap("short", update=lambda step, grads: None)
    with pytest.raises(TypeError, match="word: its rate is 'fast', not a function"):
        fds.wrap("word", rate="fast")  # type: ignore[arg-type]
    step, state = made(fds.wrap("lossy", update=lambda inner, step, state, grads: inner(step, state, grads)[0]))
    with pytest.raises(TypeError, match=r"lossy: its update returned State, and must return \(State, dict of metrics\)"):
        step(state, torch.ones(4, 3))


def test_slots_have_one_owner() -> None:
    def init(inner: Any, step: fds.Step, params: Any) -> fds.State:
        return inner(step, params).put(mean=torch.zeros(()))

    first, second = (fds.wrap(name, slot="mean", init=init) for name in ("first", "second"))
    with pytest.raises(ValueError, match="second: the slot 'mean' belongs to first already"):
        made(first, second)
    with pytest.raises(ValueError, match="'buffers' belongs to the buffers of modules"):
        made(fds.wrap("third", slot="buffers", init=init))
    with pytest.raises(ValueError, match=r"the slots \['mean'\] belong to no transform.*wrap\(name, slot="):
        made(fds.wrap("silent", init=init))


@pytest.mark.law(61)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_is_refused_is_refused_on_every_rank(stage: int) -> None:
    """A batch, a state or a loss that is refused leaves every rank's state as it was."""

    def program() -> list[float]:
        step, state = made(T.zero(stage), T.clip(1.0))
        for batch, error in ((3, TypeError), ({"x": Batch(torch.ones(1))}, TypeError)):
            with pytest.raises(error):
                step(state, batch)
        broken = fds.compose(T.zero(stage), T.clip(1.0))(fds.train_step(lambda p, x: x @ p["w"], fds.sgd(0.1)))
        with pytest.raises(ValueError, match="the loss must be a scalar"):
            broken(state, torch.ones(4, 3))
        state, _ = step(state, torch.ones(4, 3))
        return step.params(state)["w"].flatten().tolist()

    step, state = made(T.clip(1.0))
    want = step.params(step(state, torch.ones(4, 3))[0])["w"].flatten()
    for found in comm.simulate(program, world_size=3):
        torch.testing.assert_close(torch.tensor(found), want)


def test_a_model_that_fails_on_no_rows() -> None:
    """Torch's error names a shape, and not that the rank has no rows."""

    def loss(params: Any, x: torch.Tensor) -> fds.Weighted:
        heads = (x @ params["w"]).view(len(x), -1, 2)  # as attention has it
        return fds.Weighted(heads.square().sum(), len(x))

    def program(rows: int) -> None:
        step = T.zero(1)(fds.train_step(loss, fds.sgd(0.1)))
        step(step.init({"w": torch.ones(3, 4)}), torch.ones(rows, 3).tensor_split(2)[comm.world().rank])

    comm.simulate(program, 2, world_size=2)
    with pytest.raises(ValueError, match=r"this rank has no rows, and the loss fails on none \(cannot reshape tensor of 0"):
        comm.simulate(program, 1, world_size=2)


@given(data=st.data())
@pytest.mark.parametrize("stage", [None, 1])
def test_params_have_one_leaf_a_path(stage: int | None, data: st.DataObject) -> None:
    """Keys with dots are allowed, but for two leaves of one path: one of them would be lost."""
    keys, leaf = st.sampled_from(["a", "b", "a.b", "b.a", "a.0", "", "."]), st.just(0.0).map(torch.tensor)
    params = data.draw(
        testing.trees(leaf, max_leaves=2).flatmap(lambda one: st.dictionaries(keys, st.just(one) | leaf, min_size=1))
    )
    params = {**params, "a": data.draw(st.dictionaries(keys, leaf, max_size=2))}
    paths = [path for path, _ in tree.named(params)]
    step = fds.compose(*([] if stage is None else [T.zero(stage)]))(fds.train_step(square, fds.sgd(0.1)))
    if len({*paths}) == len(paths):
        assert [path for path, _ in tree.named(step.params(step.init(params)))] == paths
    else:
        with pytest.raises(ValueError, match=r"params: the leaves at .* have one path, '.*; rename one of the keys"):
            step.init(params)
