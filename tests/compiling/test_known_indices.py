"""What follows from ``torch.arange`` alone may be read in a trace; what is written over or drawn may not."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import functional_ds as fds
from functional_ds import comm
from functional_ds.compiling import JitWarning
from tests.planting import Bug, planted

Loss = Callable[[Any, Tensor], Tensor]


def losses(loss_fn: Loss, *, jits: bool) -> tuple[list[float], list[str]]:
    step = fds.train_step(loss_fn, fds.sgd(0.1))
    step = fds.jit(step) if jits else step
    state, found = step.init({"w": torch.arange(1.0, 5.0)}), []
    for i in range(3):
        state, metrics = step(state, torch.full((4,), 1.0 + i))
        found.append(metrics["loss"].item())
    return found, getattr(step, "reasons", [])


def reads(params: Any, x: Tensor) -> Tensor:
    places = torch.arange(4, device=x.device)
    mask = places.unsqueeze(0) >= places.unsqueeze(1)
    rows = (params["w"] * x)[places.flip(0)] * places * int(places[-1])
    return rows.sum() + (params["w"] * mask).sum() * (2.0 if mask.all() else 3.0)


def writes(params: Any, x: Tensor) -> Tensor:
    places = torch.arange(4)
    places[:1].add_(x[:1].long())
    return params["w"].sum() * (2.0 if places[0] > 1 else 1.0)


def draws(params: Any, x: Tensor) -> Tensor:
    return params["w"].sum() * (2.0 if torch.randint_like(torch.arange(4), 10).sum() > 20 else 1.0)


def parts(params: Any, x: Tensor) -> Tensor:
    places = torch.arange(4, dtype=torch.int32)
    places.split(2)[1].view(torch.float32).add_(x[:2])
    return params["w"].sum() * (2.0 if places.sum() > 8 else 1.0)


def resizes(params: Any, x: Tensor) -> Tensor:
    places = torch.arange(0)
    torch.add(x.long(), 1, out=places)
    return params["w"].sum() * len(places)


def lists(params: Any, x: Tensor) -> Tensor:
    places = torch.arange(4)
    places.add_(x.long())
    return params["w"].sum() * float(sum(places.tolist()))


def reshapes(params: Any, x: Tensor) -> Tensor:
    places = torch.arange(4)
    same = places.view(4)
    places.unsqueeze_(0)
    return (params["w"] * x * places).sum() * places.dim() * same.dim()


def conjugates(params: Any, x: Tensor) -> Tensor:
    places = torch.arange(4).to(torch.complex64) * 1j
    places.conj()
    return (params["w"] * x * (places * 1j).real).sum()


def encodes(params: Any, x: Tensor) -> Tensor:
    first, second = torch.arange(4).split(2)
    return (params["w"] * x * torch.nn.functional.one_hot(torch.arange(4), 4)).sum() * int(second[0] - first[0])


@pytest.mark.parametrize("loss_fn", [reads, reshapes, conjugates, encodes])
def test_positions_are_read(loss_fn: Loss) -> None:
    found, reasons = losses(loss_fn, jits=True)
    assert reasons == []
    assert found == losses(loss_fn, jits=False)[0]


def test_collectives_take_them() -> None:
    def gathers(params: Any, x: Tensor) -> Tensor:
        return (params["w"] * x * comm.all_gather(torch.arange(2)).flatten()).sum()

    jitted, eager = (comm.simulate(partial(losses, gathers, jits=jits), world_size=2) for jits in (True, False))
    assert jitted == eager


def test_they_may_be_kept() -> None:
    def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
        state, metrics = inner(step, state, grads)
        return state.put(places=torch.arange(3)), metrics

    def init(inner: Any, step: fds.Step, params: Any) -> fds.State:
        return inner(step, params).put(places=torch.arange(3))

    keeping = fds.wrap("keeping", slot="places", init=init, update=update)
    step = fds.jit(keeping(fds.train_step(reads, fds.sgd(0.1))))
    state = step.init({"w": torch.ones(4)})
    for _ in range(3):
        state, _ = step(state, torch.ones(4))
    assert step.reasons == []
    assert state.slots["places"].tolist() == [0, 1, 2]


def exports(params: Any, x: Tensor) -> Tensor:
    return params["w"].sum() * float(np.from_dlpack(x).sum())


@pytest.mark.parametrize(
    ("loss_fn", "reason"),
    [
        (writes, "reads a value on the host"),
        (parts, "reads a value on the host"),
        (lists, "reads a value on the host"),
        (draws, "reads a value on the host"),
        (resizes, "larger or smaller"),
        (exports, "reads a tensor's address"),
    ],
)
def test_other_values_are_not_read(loss_fn: Loss, reason: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", JitWarning)
        _, reasons = losses(loss_fn, jits=True)
    assert len(reasons) == 1
    assert reason in reasons[0]


MAY = "compiling.graphs.known_indices:_may_have_values"
KNOWN = "compiling.graphs.known_indices:KnownIndices.__torch_dispatch__"


@pytest.mark.parametrize(
    ("loss_fn", "bug"),
    [
        (writes, Bug("written ones keep their values", KNOWN, "storage_id(self.traced(x)) not in self._written", "True")),
        (parts, Bug("writes into parts are missed", KNOWN, "x.layout == torch.strided", "self._has(x)")),
        (draws, Bug("draws have values", KNOWN, "torch.Tag.nondeterministic_seeded not in func.tags", "True")),
    ],
)
def test_a_bug_is_seen(loss_fn: Loss, bug: Bug) -> None:
    with planted(bug), pytest.raises(AssertionError):
        test_other_values_are_not_read(loss_fn, "reads a value on the host")


@pytest.mark.parametrize(
    ("loss_fn", "bug"),
    [
        (reshapes, Bug("views in place are missed", KNOWN, "torch.Tag.inplace_view in func.tags", "False")),
        (conjugates, Bug("complex numbers have values", MAY, "x.dtype in _DTYPES", "not x.is_floating_point()")),
    ],
)
def test_a_bug_of_places_is_seen(loss_fn: Loss, bug: Bug) -> None:
    with planted(bug), pytest.raises((AssertionError, JitWarning)):
        test_positions_are_read(loss_fn)
