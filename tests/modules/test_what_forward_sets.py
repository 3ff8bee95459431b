"""What forward sets on a module, what a parameter is beside its values, what is tied: as in plain PyTorch, or refused."""

import dataclasses
import enum
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm, transforms

STAGES = [None, 0, 1, 3]


def batch(index: int, count: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(index)
    return torch.randn(count, 4, generator=generator), torch.randn(count, 3, generator=generator)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.o = nn.Linear(4, 4), nn.Linear(4, 3)
        self.setup()

    def setup(self) -> None: ...

    def base(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.o(self.a(x).tanh()), y)


def plain(build: Callable[[], nn.Module], steps: int = 4) -> dict[str, Tensor]:
    torch.manual_seed(5)
    net = build()
    optimizer = torch.optim.SGD(net.parameters(), 0.05)
    for index in range(steps):
        optimizer.zero_grad()
        net(*batch(index)).backward()
        optimizer.step()
    return {name: p.detach() for name, p in net.named_parameters()}


def program(build: Callable[[], nn.Module], stage: int | None, steps: int = 4) -> dict[str, Tensor]:
    torch.manual_seed(5)
    apply, params = fds.functional(build())
    step = fds.train_step(lambda p, b: apply(p, *b), fds.sgd(0.05))
    if stage is not None:
        step = transforms.zero(stage, unit_of=str)(step)
    state, here = step.init(params), comm.world()
    for index in range(steps):
        state, _ = step(state, tuple(x.tensor_split(here.size)[here.rank] for x in batch(index)))
    return step.params(state)  # type: ignore[no-any-return]


def check(build: Callable[[], nn.Module], stage: int | None) -> None:
    want = plain(build)
    got = comm.simulate(program, build, stage, world_size=1 if stage is None else 2)[0]
    for name, value in want.items():
        torch.testing.assert_close(got[name].detach(), value, rtol=1e-5, atol=1e-6)


def refused(build: Callable[[], nn.Module], stage: int | None, error: type[Exception], words: str, steps: int = 2) -> None:
    with pytest.raises(error, match=words):
        comm.simulate(program, build, stage, steps, world_size=1 if stage is None else 2)


# -- attributes that forward sets ----------------------------------------------------------------------------------------


class Toggled(Base):
    def setup(self) -> None:
        self.phase = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.phase = 1 - self.phase
        return self.base(x, y) * (1 + self.phase)


class Reset(Base):
    def setup(self) -> None:
        self.kept: Tensor | None = None
        self.n = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.n = (self.n + 1) % 3
        loss = self.base(x, y) * (1.0 if self.kept is None else 1 + self.kept)
        self.kept = None if self.n == 2 else torch.tensor(0.5)
        return loss


class Deletes(Base):
    def setup(self) -> None:
        self.n, self.extra = 0, 1

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.n += 1
        if self.n == 2:
            del self.extra
        return self.base(x, y) * (2.0 if hasattr(self, "extra") else 1.0)


class Freezes(Base):
    def setup(self) -> None:
        self.n = 0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.n += 1
        if self.n == 2:
            self.a.eval()
        return self.base(x, y) * (2.0 if self.a.training else 1.0)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("build", [Toggled, Reset, Deletes, Freezes])
def test_what_forward_sets_back_deletes_or_switches_holds(build: type[Base], stage: int | None) -> None:
    check(build, stage)


class Renames(Base):
    def setup(self) -> None:
        self.a.fresh = True

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.base(x, y)
        if not hasattr(self.a, "fresh"):
            return loss
        del self.a.fresh
        self.a.worn = True  # the same object, at the same place of the dict
        return 2 * loss


@pytest.mark.parametrize("stage", [None, 3])
def test_a_new_state_begins_with_the_names_that_were_built(stage: int | None) -> None:
    apply, params = fds.functional(Renames())
    step = fds.train_step(lambda p, b: apply(p, *b), fds.sgd(0.05))
    if stage is not None:
        step = transforms.zero(stage)(step)

    def losses() -> list[float]:
        state, found = step.init(params), []
        for _ in range(3):
            state, metrics = step(state, batch(0))
            found.append(metrics["loss"].item())
        return found

    first = losses()
    assert first[0] > 1.5 * first[1]
    assert losses() == first


class Letter(enum.Enum):
    A = 1
    B = 2


@dataclasses.dataclass(frozen=True)
class Rate:
    rate: float


KINDS: dict[str, tuple[Any, Any, Callable[[Any], float]]] = {
    "str": ("a", lambda x: "b", lambda x: 1.0 if x == "a" else 2.0),
    "enum": (Letter.A, lambda x: Letter.B, lambda x: 1.0 if x is Letter.A else 2.0),
    "numpy number": (np.float64(1), lambda x: x * 2, float),
    "numpy array": (np.ones(1), lambda x: x * 2, lambda x: float(x[0])),
    "frozenset": (frozenset(), lambda x: x | {1}, lambda x: 1.0 + len(x)),
    "dataclass": (Rate(1.0), lambda x: Rate(2.0), lambda x: x.rate),
}


@pytest.mark.parametrize("stage", [None, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_values_of_any_kind_go_on_from_step_to_step(kind: str, stage: int | None) -> None:
    first, change, weight = KINDS[kind]

    class Changes(Base):
        def setup(self) -> None:
            self.x, self.n = first, 0

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            loss = self.base(x, y) * weight(self.x)
            self.n += 1
            if self.n == 1:
                self.x = change(self.x)
            return loss

    check(Changes, stage)


class Named(Base):
    def setup(self) -> None:
        self.mode = "first"

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        factor = 1.0 if self.mode == "first" else 2.0
        self.mode = "later"
        return self.base(x, y) * factor


def test_such_values_belong_to_the_state_and_a_save_says_that_it_has_none(tmp_path: Path) -> None:
    apply, params = fds.functional(Named())
    step = fds.train_step(lambda p, b: apply(p, *b), fds.sgd(0.0))
    before = step.init(params)
    after, first = step(before, batch(0), donate=False)
    again, same = step(before, batch(0), donate=False)
    _, second = step(after, batch(0), donate=False)
    assert first["loss"] == same["loss"]
    torch.testing.assert_close(second["loss"], 2 * first["loss"])
    with pytest.warns(UserWarning, match="have set mode to what no checkpoint has"):
        fds.save(again, tmp_path)


def test_a_mode_that_the_user_sets_later_counts_more_than_that_of_forward() -> None:
    apply, params = fds.functional(Freezes())
    step = fds.train_step(lambda p, b: apply(p, *b), fds.sgd(0.0))
    state, losses = step.init(params), []
    for index in range(4):
        state, metrics = step(state, batch(0))
        losses.append(metrics["loss"].item())
        if index == 2:
            apply.module.a.eval()
            apply.module.a.train()
    assert losses[0] == pytest.approx(2 * losses[1])
    assert losses[1] == losses[2]


class WithGraph(Base):
    def setup(self) -> None:
        self.last: Tensor | None = None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss = self.base(x, y)
        factor = 1.0 if self.last is None else 1 + self.last.detach()
        self.last = loss
        return loss * factor


class Listed(Base):
    def setup(self) -> None:
        self.outputs: list[Tensor] = []

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.outputs.clear()
        self.outputs.append(self.base(x, y))
        return self.outputs[-1] * len(self.outputs)


@pytest.mark.parametrize("stage", [None, 3])
def test_a_value_with_a_graph_is_of_one_pass_alone(stage: int | None) -> None:
    refused(WithGraph, stage, RuntimeError, "'last' was computed, with a graph, in an earlier pass")
    check(Listed, stage)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.aux = nn.Linear(4, 3), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.aux = self.a(x).square().mean()
        return self.a(x)  # type: ignore[no-any-return]


def test_a_value_that_a_call_set_is_refused_where_the_loss_reads_it_from_the_module() -> None:
    apply, params = fds.functional(Experts())
    step = fds.train_step(lambda p, b: F.mse_loss(apply(p, b[0]), b[1]) + apply.module.aux, fds.sgd(0.1))
    with pytest.raises(RuntimeError, match=r"'aux' of apply\.module is not what a call has set"):
        step(step.init(params), batch(0))
    unread = fds.train_step(lambda p, b: F.mse_loss(apply(p, b[0]), b[1]), fds.sgd(0.1))
    state, _ = unread(unread.init(params), batch(0))
    unread(state, batch(1))


class Features:
    def __init__(self, layer: nn.Module) -> None:
        self.mean = torch.zeros(())
        layer.register_forward_hook(self.hook)

    def hook(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.mean = output.square().mean()


def test_a_hook_of_the_callers_object_writes_into_that_object() -> None:
    losses = []
    for ours in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        features = Features(net[1])
        x, y = batch(0)
        if ours:
            apply, params = fds.functional(net)
            step = fds.train_step(lambda p, b: F.mse_loss(apply(p, b[0]), b[1]) + features.mean, fds.sgd(0.1))  # noqa: B023
            losses.append(step(step.init(params), (x, y))[1]["loss"].item())
        else:
            losses.append((F.mse_loss(net(x), y) + features.mean).item())
    assert losses[0] == pytest.approx(losses[1])


# -- where parameters are ------------------------------------------------------------------------------------------------


class Hold:
    def __init__(self, held: Tensor) -> None:
        self.held = held


class Slots:
    __slots__ = ("held",)

    def __init__(self, held: Tensor) -> None:
        self.held = held


@dataclasses.dataclass(frozen=True)
class Data:
    held: Tensor


@attrs.frozen
class Attrs:
    held: Tensor


class Hides:
    """Has its tensor in a set."""

    def __init__(self, held: Tensor) -> None:
        self.items = {held}

    @property
    def held(self) -> Tensor:
        return next(iter(self.items))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", [Hold, Slots, Data, Attrs])
def test_objects_of_any_class_hold_the_steps_parameters_and_buffers(kind: Any, stage: int | None) -> None:
    class Held(Base):
        def setup(self) -> None:
            self.register_buffer("count", torch.zeros(()))
            self.weight, self.counted, self.n = kind(self.a.weight), kind(self.count), 0

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            self.count += 1
            self.n += 1
            with torch.no_grad():
                factor = F.linear(x, self.weight.held).square().mean(1)
            hidden = F.linear(x, self.weight.held) if self.n > 1 else self.a(x)
            error = (self.o(hidden.tanh()) - y).square().mean(1)
            return (error * (1 + factor + self.counted.held)).mean()

    check(Held, stage)


@pytest.mark.parametrize("stage", [None, 3])
def test_a_parameter_in_a_place_that_nothing_can_be_put_into_is_refused(stage: int | None) -> None:
    class Hidden(Base):
        def setup(self) -> None:
            self.hidden = Hides(self.a.weight)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            with torch.no_grad():
                return self.base(x, y) * self.hidden.held.sum()

    refused(Hidden, stage, ValueError, "something in Hidden holds the parameter 'a.weight'")


# -- what parameters are -------------------------------------------------------------------------------------------------


class Regularised(Base):
    def setup(self) -> None:
        self.a.weight.scale = 2.0  # type: ignore[attr-defined]
        self.o.weight.no_decay = True  # type: ignore[attr-defined]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found = (p for p in self.parameters() if isinstance(p, nn.Parameter) and not getattr(p, "no_decay", False))
        return self.base(x, y) + 0.1 * sum(p.square().sum() * getattr(p, "scale", 1.0) for p in found)


@pytest.mark.parametrize("stage", STAGES)
def test_params_are_parameters_in_forward_with_their_attributes(stage: int | None) -> None:
    check(Regularised, stage)


def test_params_that_a_call_had_are_as_they_were() -> None:
    apply, params = fds.functional(Regularised())
    own = {name: p.detach().clone() for name, p in params.items()}
    apply(own, *batch(0))
    assert not any(isinstance(p, nn.Parameter) or vars(p) for p in own.values())
    assert params["a.weight"].scale == 2.0


class Doubled(nn.Parameter):
    pass


@pytest.mark.parametrize(
    ("setup", "words"),
    [
        (lambda net: setattr(net.a, "weight", Doubled(net.a.weight.data)), "'a.weight' of Odd is a Doubled"),
        (lambda net: setattr(net, "table", {id(p): n for n, p in net.named_parameters()}), "keys of 'table' in Odd are param"),
        (lambda net: setattr(net, "table", {p: n for n, p in net.named_parameters()}), "keys of 'table' in Odd are param"),
    ],
)
def test_subclasses_and_tables_of_parameters_are_refused(setup: Callable[[Any], None], words: str) -> None:
    class Odd(Base):
        def setup(self) -> None:
            setup(self)

    with pytest.raises(ValueError, match=re.escape(words)):
        fds.functional(Odd())


def test_a_parameter_that_the_module_leaves_out_is_refused() -> None:
    class Partial(Base):
        def named_parameters(self, *args: Any, **options: Any) -> Any:
            return ((n, p) for n, p in super().named_parameters(*args, **options) if n != "a.bias")

    with pytest.raises(ValueError, match=r"Partial.named_parameters\(\) or parameters\(\) leaves out 'a.bias'"):
        fds.functional(Partial())


class Swaps(Base):
    def setup(self) -> None:
        self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.a.weight, self.b.weight = self.b.weight, self.a.weight
        return self.base(x, y)


class Flags(Base):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.a.requires_grad_(False)
        return self.base(x, y)


@pytest.mark.parametrize("stage", STAGES)
def test_swaps_and_flags_in_forward_are_refused(stage: int | None) -> None:
    refused(Swaps, stage, RuntimeError, "Swaps set its parameter 'a.weight' to another tensor")
    refused(Flags, stage, RuntimeError, "Flags changed requires_grad of a parameter in forward")


# -- memory that is shared -----------------------------------------------------------------------------------------------


class Views(Base):
    as_buffer = False

    def setup(self) -> None:
        if self.as_buffer:
            self.register_buffer("whole", torch.zeros(4))
        else:
            self.whole = torch.zeros(4)
        self.part = self.whole[:2]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.part.add_(1)
        return self.base(x, y) * (1 + 0.1 * self.whole.sum())


class ViewOfBuffer(Views):
    as_buffer = True


class Follows(Base):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.before = self.o.weight.detach()
        return self.base(x, y)


class FollowsInABuffer(Base):
    def setup(self) -> None:
        self.register_buffer("before", torch.zeros(3, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.before = self.o.weight.detach()
        return self.base(x, y)


@pytest.mark.parametrize("stage", STAGES)
def test_attributes_in_shared_memory_are_refused_when_they_are_written(stage: int | None) -> None:
    for build in (Views, ViewOfBuffer):
        refused(build, stage, RuntimeError, "wrote into its attribute 'part', which shares memory with its 'whole'")
    for build in (Follows, FollowsInABuffer):
        refused(build, stage, RuntimeError, "set 'before' to the memory of its parameter 'o.weight'")


def test_one_tensor_in_two_attributes_is_one_tensor() -> None:
    class Twice(Base):
        def setup(self) -> None:
            self.whole = torch.zeros(4)
            self.listed = [self.whole]

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            self.listed[0].add_(1)
            return self.base(x, y) * (1 + 0.1 * self.whole.sum())

    check(Twice, None)


class Net(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.head = encoder, nn.Linear(4, 3)


def test_leaves_in_shared_memory_are_refused() -> None:
    step = fds.train_step(lambda p, x: x, fds.sgd(0.1))
    encoder = nn.Linear(4, 4)
    trees = {name: fds.functional(Net(encoder))[1] for name in "ab"}
    with pytest.raises(ValueError, match=r"'a\.encoder\.\w+' and 'b\.encoder\.\w+' share memory"):
        step.init(trees)
    whole = torch.arange(16.0).view(4, 4)
    with pytest.raises(ValueError, match="leaves at 'a' and 'b' share memory"):
        step.init({"a": nn.Parameter(whole), "b": nn.Parameter(whole[1:])})
    step.init({"a": nn.Parameter(whole[:, :2]), "b": nn.Parameter(whole[:, 2:])})
    step.init({"a": whole, "b": whole})  # values
    step.init({"a": whole, "b": nn.Parameter(whole, requires_grad=False)})
