"""Changes on ``apply.module`` between steps: each holds from the next call on, as in plain PyTorch, or raises an error."""

import array
import types
import warnings
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm
from functional_ds import pipelining as pp
from functional_ds import transforms as T
from tests.planting import Bug, planted

Change = Callable[[Any], Any]
STEPS = 4
pytestmark = pytest.mark.filterwarnings("ignore::functional_ds.compiling.jitted.jit_step.JitWarning")  # some run eagerly then
STRATEGIES: dict[str, Callable[[], list[fds.Transform]]] = {
    "plain": list,
    **{f"zero({stage})": (lambda stage=stage: [T.zero(stage)]) for stage in range(4)},  # type: ignore[misc]
    "replicated": lambda: [T.replicated(reduce=lambda g, memory, group: (comm.all_reduce(g, group, op="avg"), memory))],
    "remat": lambda: [T.remat(blocks="first")],
    "jit": lambda: [T.zero(1)],
    "jit alone": list,
}


class Box:
    __slots__ = ("gain",)

    def __init__(self, gain: float) -> None:
        self.gain = gain


class Namespace(types.SimpleNamespace):
    """One whose class can be set."""


class Halved(Namespace):
    """A namespace whose numbers are half as large."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        return found / 2 if name == "gain" else found


class Part(nn.Module):
    """A layer whose attributes of many kinds are read in forward."""

    def __init__(self, tensors: bool) -> None:
        super().__init__()
        self.inner, self.tensors = nn.Linear(3, 3), tensors  # a graph of the step has no tensors of its own
        self.scale: Any = 1.0
        self.table: dict[str, Any] = {"a": 1.0, "deep": [1.0, {"b": 1.0}], "tensor": torch.ones(3)}
        self.items, self.row = [1.0, 1.0], deque([1.0])
        self.names, self.chosen = ("x", ["y"]), {1, 2}
        self.space = types.SimpleNamespace(gain=1.0, inner=Namespace(gain=1.0), table={"a": 1.0})
        self.box, self.array = Box(1.0), np.ones(3, dtype=np.float32)
        self.shift = torch.zeros(3)
        self.register_buffer("passing", torch.ones(3), persistent=False)
        self.bytes, self.numbers = bytearray(b"\1"), array.array("f", [1.0])
        self.act = torch.tanh
        self.drop = nn.Dropout(0.0)
        self.more: Any = None

    def forward(self, x: Tensor) -> Tensor:
        table, space = self.table, self.space
        scale = self.scale * table["a"] * table["deep"][0] * table["deep"][1]["b"] * sum(self.items) * self.row[0]
        scale = scale * space.gain * space.inner.gain * space.table["a"] * self.box.gain * len(self.chosen) * len(self.names[1])
        scale = scale * self.bytes[0] * self.numbers[0]
        if not self.tensors:
            scale = scale * (1 + len(table) / 10)
            y = self.drop(self.act(self.inner(x) * scale * self.passing))
            return y if self.more is None else self.more(y)  # type: ignore[no-any-return]
        tensor = table["tensor"] * self.passing * torch.from_numpy(self.array.copy())  # type: ignore[operator]
        y = self.drop(self.act(self.inner(x) * scale * tensor * (1 + len(table) / 10) + self.shift))
        return y if self.more is None else self.more(y)  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self, tensors: bool) -> None:
        super().__init__()
        self.first, self.norm = Part(tensors), nn.BatchNorm1d(3)
        self.rest = nn.Sequential(Part(tensors), nn.Tanh(), nn.Linear(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.norm(self.first(x)))  # type: ignore[no-any-return]


def net(strategy: str) -> Net:
    torch.manual_seed(0)
    return Net(not strategy.startswith("jit"))


def rows(index: int) -> Tensor:
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(index))


def assigned(owner: Any, name: str, value: Any) -> None:
    setattr(owner, name, value)


def twice(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 2 * output


def halves(module: nn.Module, args: Any) -> Any:
    return (args[0] / 2,)


def slower(module: nn.Module, grads_in: Any, grads_out: Any) -> Any:
    return tuple(None if grad is None else grad / 3 for grad in grads_in)


def removed_hook(module: Any) -> None:
    if module.first.inner._forward_hooks:
        module.first.inner._forward_hooks.popitem()
    else:
        module.first.inner.register_forward_hook(twice)


def other_forward(module: Any) -> None:
    part = module.rest[0]
    part.forward = types.MethodType(lambda self, x: self.inner(x).sin(), part)


def by_numpy(module: Any) -> None:
    module.first.array[1] = 3.0


HOLD: dict[str, Change] = {
    "number": lambda m: assigned(m.first, "scale", 0.5),
    "number of another class": lambda m: assigned(m.rest[0], "scale", torch.tensor(1.5)),
    "new": lambda m: assigned(m.first, "more", torch.sin),
    "dict": lambda m: m.first.table.update(a=2.0),
    "key": lambda m: m.rest[0].table.update(other=2.0),
    "deleted key": lambda m: m.first.table.pop("other", None),
    "list in a dict": lambda m: m.first.table["deep"].__setitem__(0, 0.25),
    "dict in a list in a dict": lambda m: m.rest[0].table["deep"][1].update(b=0.5),
    "tensor in a dict": lambda m: m.first.table["tensor"].mul_(0.5),
    "list": lambda m: m.first.items.append(0.5),
    "reordered": lambda m: m.first.row.appendleft(0.5),
    "list in a tuple": lambda m: m.first.names[1].append("z"),
    "set": lambda m: m.first.chosen.add(7),
    "namespace": lambda m: assigned(m.first.space, "gain", 2.0),
    "namespace in a namespace": lambda m: assigned(m.rest[0].space.inner, "gain", 0.5),
    "dict in a namespace": lambda m: m.rest[0].space.table.update(a=0.5),
    "bytes": lambda m: m.first.bytes.__setitem__(0, 2),
    "numbers": lambda m: m.rest[0].numbers.__setitem__(0, 0.5),
    "class": lambda m: assigned(m.first.space.inner, "__class__", Halved),
    "class of a module": lambda m: assigned(m.rest[1], "__class__", nn.Softsign),
    "slots": lambda m: assigned(m.first.box, "gain", 0.5),
    "array": by_numpy,
    "tensor": lambda m: m.first.shift.add_(0.5),
    "tensor's data": lambda m: m.first.shift.data.add_(0.25),
    "another tensor": lambda m: assigned(m.first, "shift", torch.full((3,), 0.75)),
    "passing buffer": lambda m: m.first.passing.mul_(0.5),
    "another passing buffer": lambda m: assigned(m.rest[0], "passing", torch.full((3,), 0.5)),
    "function": lambda m: assigned(m.first, "act", torch.sin),
    "module": lambda m: assigned(m.first, "drop", nn.Sigmoid()),
    "module in a list": lambda m: m.rest.__setitem__(1, nn.Softplus()),
    "modules": lambda m: assigned(m.first, "drop", nn.Sequential(nn.Tanh(), nn.Softplus())),
    "hook": lambda m: m.first.inner.register_forward_hook(twice),
    "hook of another": lambda m: m.rest[2].register_forward_hook(twice),
    "removed hook": removed_hook,
    "hook before": lambda m: m.rest[2].register_forward_pre_hook(halves),
    "hook of the backward pass": lambda m: m.rest[2].register_full_backward_hook(slower),
    "hook with a closure": lambda m: m.norm.register_forward_hook(lambda mod, args, y: y + m.first.inner(args[0])),
    "forward": other_forward,
    "eval": lambda m: m.norm.eval(),
    "train": lambda m: m.train(),
    "momentum": lambda m: assigned(m.norm, "momentum", 0.5),
}
REFUSED: dict[str, tuple[Change, str]] = {
    "buffer filled": (lambda m: m.norm.running_mean.fill_(3.0), "'norm.running_mean'"),
    "buffer assigned": (lambda m: assigned(m.norm, "running_var", torch.full((3,), 4.0)), "'norm.running_var'"),
    "buffer dropped": (lambda m: assigned(m.norm, "running_var", None), "'norm.running_var'"),
    "buffers reset": (lambda m: m.norm.reset_running_stats(), "'norm.(running_mean|num_batches_tracked)'"),
    "buffers loaded": (lambda m: m.norm.load_state_dict(nn.BatchNorm1d(3).state_dict()), "'norm.*(running_mean|weight)'"),
    "weight filled": (lambda m: nn.init.zeros_(m.first.inner.weight), "'first.inner.weight'"),
    "weight filled by data": (lambda m: m.first.inner.weight.data.fill_(0.0), "'first.inner.weight'"),
    "frozen": (lambda m: m.first.inner.requires_grad_(False), "'first.inner.(weight|bias)'.*before fds.functional"),
    "weight assigned": (lambda m: assigned(m.first.inner, "weight", nn.Parameter(torch.ones(3, 3))), "'first.inner.weight'"),
    "weight dropped": (lambda m: assigned(m.first.inner, "bias", None), "'first.inner.bias'.*fds.functional"),
    "new parameter": (lambda m: m.first.register_parameter("b", nn.Parameter(torch.ones(3))), "'first.b'.*fds.functional"),
    "layer replaced": (lambda m: m.rest.__setitem__(2, nn.Linear(3, 2)), "'rest.2.weight'.*fds.functional"),
    "layer removed": (lambda m: m.rest.__delitem__(2), "'rest.2.weight'.*fds.functional"),
    "layer added": (lambda m: m.rest.append(nn.Linear(2, 2)), "'rest.3.weight'.*fds.functional"),
    "norm removed": (lambda m: assigned(m, "norm", nn.Identity()), "'norm.weight'.*fds.functional"),
}


def quietly(change: Change, module: nn.Module) -> None:
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that loading into weights without values does nothing
        change(module)


def plain(changes: dict[int, list[Change]], strategy: str) -> tuple[list[float], dict[str, Tensor]]:
    module = net(strategy)
    optimizer, losses = torch.optim.SGD(module.parameters(), lr=0.1), []
    for index in range(STEPS):
        for change in changes.get(index, ()):
            quietly(change, module)
        loss = module(rows(index)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return losses, {name: x.detach() for name, x in found.items() if "passing" not in name}


def ours(changes: dict[int, list[Change]], strategy: str) -> tuple[list[float], dict[str, Tensor]]:
    apply, params = fds.functional(net(strategy))
    step = fds.compose(*STRATEGIES[strategy]())(fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.sgd(0.1)))
    state, losses = step.init(params), []
    run = fds.jit(step) if strategy.startswith("jit") else step
    for index in range(STEPS):
        for change in changes.get(index, ()):
            quietly(change, apply.module)
        state, metrics = run(state, rows(index))
        losses.append(metrics["loss"].item())
    return losses, {**step.params(state), **step.module_buffers(state)}


def check(changes: dict[int, list[Change]], strategy: str) -> None:
    losses, tensors = plain(changes, strategy)
    ranks = 1 if strategy in ("plain", "jit alone") else 2
    for found, held in comm.simulate(lambda: ours(changes, strategy), world_size=ranks):
        torch.testing.assert_close(found, losses, rtol=1e-4, atol=1e-5)
        for name, expected in tensors.items():
            torch.testing.assert_close(
                held[name], expected, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("name", HOLD)
def test_a_change_holds_from_the_next_call_on(name: str) -> None:
    check({2: [HOLD[name]]}, "plain")


@given(
    st.lists(st.tuples(st.integers(0, STEPS - 1), st.sampled_from(sorted(HOLD))), min_size=1, max_size=4),
    st.sampled_from(sorted(STRATEGIES)),
)
def test_changes_hold_with_every_strategy(changes: list[tuple[int, str]], strategy: str) -> None:
    by_step: dict[int, list[Change]] = {}
    for index, name in changes:
        by_step.setdefault(index, []).append(HOLD[name])
    check(by_step, strategy)


@pytest.mark.parametrize("name", REFUSED)
def test_a_change_that_a_step_cannot_follow_is_refused(name: str) -> None:
    change, says = REFUSED[name]
    with pytest.raises(RuntimeError, match=says):
        ours({2: [change]}, "plain")


@given(st.sampled_from(sorted(REFUSED)), st.sampled_from(sorted(STRATEGIES)), st.integers(1, STEPS - 1))
def test_such_a_change_is_refused_with_every_strategy(name: str, strategy: str, index: int) -> None:
    change, says = REFUSED[name]
    with pytest.raises(RuntimeError, match=says):
        comm.simulate(lambda: ours({index: [change]}, strategy), world_size=2)


class Counts(nn.Module):
    """Reads a number that its own passes set."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.count = nn.Linear(3, 2), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return self.inner(x) * self.count  # type: ignore[no-any-return]


@pytest.mark.parametrize("by_jit", [False, True])
def test_the_advice_for_what_a_state_has_is_right(by_jit: bool) -> None:
    """A state with the user's value goes on from it; one without is refused until then."""
    apply, params = fds.functional(Counts())
    step = fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.sgd(0.0))
    run = fds.jit(step) if by_jit else step
    state, losses = step.init(params), []
    for _ in range(3):
        state, metrics = run(state, rows(0))
        losses.append(metrics["loss"].item())
    apply.module.count = torch.zeros(())
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"'count', which forward sets, was changed.*with_values\({'count': value}\)"):
            run(state, rows(0))
    state = state.put(buffers=state.slots["buffers"].with_values({"count": torch.zeros(())}))
    for expected in losses:
        state, metrics = run(state, rows(0))
        assert metrics["loss"].item() == pytest.approx(expected)
    buffers = state.slots["buffers"]
    with pytest.raises(ValueError, match="'other': the state has no such buffer"):
        buffers.with_values({"other": torch.zeros(())})
    with pytest.raises(ValueError, match=r"values\['count'\] is \(2,\) of torch.float32, and the state's is \(\)"):
        buffers.with_values({"count": torch.zeros(2)})


def test_a_changed_buffer_counts_for_states_that_are_made_later() -> None:
    apply, params = fds.functional(nn.BatchNorm1d(3))
    step = fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.sgd(0.0))
    before = step.init(params)
    apply.module.running_mean.fill_(5.0)
    after = step.init(params)
    assert step.module_buffers(after)["running_mean"].tolist() == [5.0] * 3
    step(after, rows(0))
    with pytest.raises(RuntimeError, match="the buffer 'running_mean' was changed"):
        step(before, rows(0))


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0), nn.Tanh(), nn.Linear(3, 2))


def test_stages_that_were_cut_follow_changes() -> None:
    """A stage runs a trace of the module, which a change makes anew."""

    def program() -> list[float]:
        stages, params = pp.cut(layers(), ["3"], example=rows(0), loss=lambda y, x: y.square().mean())
        step = T.pipeline(pp.one_f_one_b(2, 2), stages)(fds.train_step(stages, fds.sgd(0.0)))
        state, losses = step.init(params), []
        for hooked in (False, True):
            if hooked:
                stages.apply.module[2].register_forward_hook(twice)  # type: ignore[union-attr, index]
            state, metrics = step(state, rows(0))
            losses.append(metrics["loss"].item())
        return losses

    module = layers()
    expected = [module(rows(0)).square().mean().item()]
    module[2].register_forward_hook(twice)  # type: ignore[index]
    expected.append(module(rows(0)).square().mean().item())
    for losses in comm.simulate(program, world_size=2):
        assert losses == pytest.approx(expected)


CHANGES, BUFFERS = "modules.module_changes", "step.state.buffers"
BUGS: list[tuple[Callable[[], Any], Bug]] = [
    (
        lambda: check({2: [HOLD["dict"]]}, "plain"),
        Bug(
            "dicts are not looked into",
            "modules.module_changes:_Snapshot.of",
            "(fields for fields in snapshot._dicts if fields)",
            "()",
        ),
    ),
    (
        lambda: check({2: [HOLD["list"]]}, "plain"),
        Bug("nor lists", "modules.module_changes:_Snapshot._inside", "self._sequences.append(value)", "pass"),
    ),
    (
        lambda: check({2: [HOLD["array"]]}, "plain"),
        Bug("nor arrays", "modules.module_changes:_Snapshot._inside", "self._arrays.append(value)", "pass"),
    ),
    (
        lambda: check({2: [HOLD["hook"]]}, "plain"),
        Bug(
            "empty dicts stay empty",
            "modules.module_changes:_Snapshot._counts",
            "map(len, self._dicts)",
            "()",
        ),
    ),
    (
        lambda: check({2: [HOLD["class of a module"]]}, "plain"),
        Bug("classes are not looked at", "modules.module_changes:_Snapshot._counts", "map(type, self._objects)", "()"),
    ),
    (
        lambda: check({2: [HOLD["number"]]}, "jit alone"),
        Bug("graphs stay", "modules.module_changes:ModuleChanges._note", "self._edits += key != 'training'", "pass"),
    ),
    (
        lambda: test_a_change_that_a_step_cannot_follow_is_refused("buffer filled"),
        Bug(
            "versions are not looked at",
            "modules.module_changes:_Snapshot._counts",
            "map(version_of, self._tensors)",
            "()",
            pytest.fail.Exception,
        ),
    ),
    (
        lambda: test_a_change_that_a_step_cannot_follow_is_refused("frozen"),
        Bug(
            "flags are not looked at",
            "modules.module_changes:_Snapshot._counts",
            "[tensor.requires_grad for tensor in self._tensors]",
            "[]",
            pytest.fail.Exception,
        ),
    ),
    (
        lambda: test_a_change_that_a_step_cannot_follow_is_refused("weight filled by data"),
        Bug(
            "data has its own version",
            "modules.module_changes:BareParameter.data",
            "self.detach()",
            "Tensor.data.__get__(self)",
            pytest.fail.Exception,
        ),
    ),
    (
        test_a_changed_buffer_counts_for_states_that_are_made_later,
        Bug(
            "a state takes what it does not have",
            "step.state.buffer_scope:BufferScope.of",
            "self.buffers.check_changes(module)",
            "pass",
            pytest.fail.Exception,
        ),
    ),
]


@pytest.mark.parametrize(("law", "bug"), [pytest.param(*each, id=each[1].name) for each in BUGS])
def test_a_bug_is_seen(law: Callable[[], Any], bug: Bug) -> None:
    law()
    with planted(bug), pytest.raises(bug.shows):
        law()
