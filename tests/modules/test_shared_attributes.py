"""A list, dict or tensor that several modules have stays one from step to step, as in plain PyTorch."""

from collections import OrderedDict, deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from tests.planting import Bug, planted

Change = Callable[[Any], Any]
STEPS = 4


class Part(nn.Module):
    def __init__(self, shared: Any, change: Change) -> None:
        super().__init__()
        self.inner, self.shared, self.change = nn.Linear(3, 3), shared, change

    def forward(self, x: Tensor) -> Tensor:
        factor = self.change(self)
        return self.inner(x) * (1.0 if factor is None else factor)  # type: ignore[no-any-return]


class Net(nn.Module):
    """The first part changes what the second one reads."""

    def __init__(self, make: Callable[[], Any], write: Change, read: Change) -> None:
        super().__init__()
        shared = make()
        self.a, self.b = Part(shared, write), Part(shared, read)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))  # type: ignore[no-any-return]


class Losses(nn.Module):
    """Its parts append losses, with their graphs, to one list."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.losses = nn.Linear(3, 3), []  # type: ignore[var-annotated]
        self.a, self.b = (Part(self.losses, self.append) for _ in range(2))

    @staticmethod
    def append(part: Any) -> None:
        part.shared.append(part.inner.weight.square().mean())

    def forward(self, x: Tensor) -> Tensor:
        self.losses.clear()
        y = self.b(self.a(x))
        return y + sum(self.losses)  # type: ignore[no-any-return]


class Linked(nn.Module):
    """Its first pass links two parts."""

    def __init__(self, make: Callable[[], Any], write: Change, read: Change) -> None:
        super().__init__()
        self.make, self.a, self.b = make, Part(None, write), Part(None, read)

    def forward(self, x: Tensor) -> Tensor:
        if self.a.shared is None:
            self.a.shared = self.b.shared = self.make()
        return self.b(self.a(x))  # type: ignore[no-any-return]


class Parted(Net):
    """Its second pass parts them."""

    def forward(self, x: Tensor) -> Tensor:
        if self.a.shared["n"] == 2:
            self.b.shared = {"n": 0.5}
        return super().forward(x)


def counts(part: Any) -> None:
    part.shared["n"] = part.shared["n"] + 1


def appends(part: Any) -> None:
    part.shared.append(1.0)


def adds(part: Any) -> None:
    part.shared.add_(1)


def number(part: Any) -> Any:
    return part.shared["n"]


def length(part: Any) -> int:
    return 1 + len(part.shared)


def itself(part: Any) -> Any:
    return part.shared


KINDS: dict[str, tuple[Callable[[], Any], Change, Change]] = {
    "dict of a number": (lambda: {"n": 1.0}, counts, number),
    "dict of a tensor": (lambda: {"n": torch.ones(())}, counts, number),
    "list": (list, appends, length),
    "deque": (deque, appends, length),
    "tensor": (lambda: torch.ones(()), adds, itself),
}


class Recorded(Net):
    """It keeps what a part has shared in a list, and replaces it from time to time."""

    def __init__(self, make: Callable[[], Any], write: Change, every: int) -> None:
        super().__init__(make, write, lambda part: None)
        self.make, self.every = make, every
        self.table, self.history = {"first": self.a.shared}, []  # type: ignore[var-annotated]

    def forward(self, x: Tensor) -> Tensor:
        if not len(self.history) % self.every:
            self.a.shared = self.make()
            y = super().forward(x)
        else:
            y = self.a.inner(x)
        self.history.append(self.a.shared)
        self.again = self.history[0]
        return y * sum(value(entry) for entry in (*self.history, self.again, self.a.shared))  # type: ignore[no-any-return]


def value(entry: Any) -> Any:
    return entry["n"] if isinstance(entry, dict) else sum(entry) if isinstance(entry, (list, deque)) else entry


BUILDS: dict[str, Callable[[], nn.Module]] = {
    **{f"recorded {name}": (lambda kind=kind: Recorded(*kind[:2], every=2)) for name, kind in KINDS.items()},  # type: ignore[misc]
    **{name: (lambda kind=kind: Net(*kind)) for name, kind in KINDS.items()},  # type: ignore[misc]
    **{f"linked {name}": (lambda kind=kind: Linked(*kind)) for name, kind in KINDS.items()},  # type: ignore[misc]
    "losses": Losses,
    "parted": lambda: Parted(*KINDS["dict of a number"]),
}
STRATEGIES: dict[str, list[fds.Transform]] = {
    "plain": [],
    "zero(3)": [T.zero(3)],
    "accumulate": [T.accumulate(2)],
    "jit": [fds.jit],
    "remat": [T.remat("")],
}


def rows(index: int) -> Tensor:
    return torch.randn(1, 3, generator=torch.Generator().manual_seed(index)).expand(4, 3)  # micro-batches are equal


def plain(build: Callable[[], nn.Module], passes: int) -> list[float]:
    torch.manual_seed(0)
    net, losses = build(), []
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for index in range(STEPS):
        optimizer.zero_grad()
        parts = []
        for _ in range(passes):
            parts.append(net(rows(index)).square().mean() / passes)
            parts[-1].backward()
        optimizer.step()
        losses.append(sum(part.item() for part in parts))
    return losses


def ours(build: Callable[[], nn.Module], strategy: str, folder: Path | None = None) -> list[float]:
    torch.manual_seed(0)
    apply, params = fds.functional(build())
    step = fds.compose(*STRATEGIES[strategy])(fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.sgd(0.1)))
    state, losses = step.init(params), []
    for index in range(STEPS):
        if folder is not None and index == 2:
            fds.save(state, folder)
            state = fds.load(folder, like=step.init(params))
        state, metrics = step(state, rows(index))
        losses.append(metrics["loss"].item())
    return losses


def check(name: str, strategy: str = "plain") -> None:
    expected = plain(BUILDS[name], 2 if strategy == "accumulate" else 1)
    for losses in comm.simulate(ours, BUILDS[name], strategy, world_size=2 if strategy == "zero(3)" else 1):
        assert losses == pytest.approx(expected, rel=1e-4)


def check_saved(folder: Path) -> None:
    assert ours(BUILDS["dict of a number"], "plain", folder) == pytest.approx(plain(BUILDS["dict of a number"], 1), rel=1e-4)


def test_it_stays_one_in_a_state_that_was_loaded(tmp_path: Path) -> None:
    check_saved(tmp_path)


def written_later(name: str) -> None:
    """What is at two places, one inside of another, is two after a pass: a write into it would reach only one."""
    make, write, _ = KINDS[name]

    class Written(Net):
        count = 0

        def forward(self, x: Tensor) -> Tensor:
            if self.count == 0:
                self.history = [self.a.shared]
            elif self.count == 2:
                write(self.a)
            self.count += 1
            return self.a.inner(x)  # type: ignore[no-any-return]

    with pytest.raises(RuntimeError, match=r"'a.shared' and 'history.0' are one "):
        ours(lambda: Written(make, write, itself), "plain")


@pytest.mark.parametrize("name", KINDS)
def test_a_later_write_into_what_a_list_has_too_is_refused(name: str) -> None:
    written_later(name)


class Log:
    """An object of a user's, with slots."""

    __slots__ = ("again", "kept")

    def __init__(self, kept: Any) -> None:
        self.kept, self.again = kept, [kept]

    def write(self, part: Any, change: Change) -> None:
        change(Box(self.again[0]))

    def __call__(self, part: Any) -> None:
        self.again[0].append(1.0)


class Box:
    def __init__(self, shared: Any) -> None:
        self.shared = shared


def by_closure(shared: Any, change: Change) -> Change:
    return lambda part: change(Box(shared))


def by_default(shared: Any, change: Change) -> Change:
    def write(part: Any, shared: Any = (shared,)) -> None:
        change(Box(shared[0]))

    return write


def by_partial(shared: Any, change: Change) -> Change:
    return partial(lambda part, shared: change(Box(shared)), shared=shared)


def by_object(shared: Any, change: Change) -> Change:
    return Log(shared) if isinstance(shared, (list, deque)) else by_method(shared, change)


def by_method(shared: Any, change: Change) -> Change:
    return partial(Log(shared).write, change=change)


REFERENCES = {"closure": by_closure, "default": by_default, "partial": by_partial, "object": by_object, "method": by_method}


class Referred(nn.Module):
    """What its part has is written by a function that refers to it otherwise."""

    def __init__(self, make: Callable[[], Any], refer: Callable[[Any, Change], Change], write: Change, read: Change) -> None:
        super().__init__()
        shared = make()
        self.read, self.write = Part(shared, read), refer(shared, write)

    def forward(self, x: Tensor) -> Tensor:
        self.write(self)
        return self.read(x)  # type: ignore[no-any-return]


BUILDS |= {
    f"{name} by {way}": (lambda kind=kind, refer=refer: Referred(kind[0], refer, *kind[1:]))  # type: ignore[misc]
    for name, kind in KINDS.items()
    for way, refer in REFERENCES.items()
}


class Replaced(Referred):
    def forward(self, x: Tensor) -> Tensor:
        self.read.shared = [*self.read.shared]
        return super().forward(x)


@pytest.mark.parametrize("way", REFERENCES)
def test_an_attribute_that_something_else_refers_to_is_not_replaced(way: str) -> None:
    with pytest.raises(RuntimeError, match=r"its attribute 'read.shared' is another list, and something else in it refers"):
        ours(lambda: Replaced(list, REFERENCES[way], appends, length), "plain")


class Newest(nn.Module):
    """It moves the entry that was read to the end of a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.cache = nn.Linear(3, 3), {"a": 1.0, "b": 2.0, "c": 3.0}

    def forward(self, x: Tensor) -> Tensor:
        name = next(iter(self.cache))
        self.cache[name] = factor = self.cache.pop(name)
        return self.inner(x) * factor  # type: ignore[no-any-return]


class Moved(Newest):
    """It does so with a method of ordered dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = OrderedDict(self.cache)

    def forward(self, x: Tensor) -> Tensor:
        name = next(iter(self.cache))
        self.cache.move_to_end(name)  # type: ignore[attr-defined]
        return self.inner(x) * self.cache[name]  # type: ignore[no-any-return]


class Report(Net):
    """Each pass makes a new record of what it writes."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.last = [y.detach(), self.a.shared]
        return y  # type: ignore[no-any-return]


BUILDS |= {"order of keys": Newest, "order of moved keys": Moved}
BUILDS |= {f"report of a {name}": (lambda kind=kind: Report(*kind)) for name, kind in KINDS.items()}  # type: ignore[misc]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("way", REFERENCES)
def test_a_recomputation_of_what_is_written_through_a_reference_is_refused(name: str, way: str) -> None:
    make, *change = KINDS[name]
    with pytest.raises(RuntimeError, match=r"under remat wrote its attribute 'read.shared', which something else in Referred"):
        ours(lambda: Referred(make, REFERENCES[way], *change), "remat")


@pytest.mark.filterwarnings("ignore:fds.jit. the step runs eagerly")
@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "remat"])
@pytest.mark.parametrize("name", BUILDS)
def test_what_modules_share_stays_one(name: str, strategy: str) -> None:
    check(name, strategy)


def with_a_value() -> None:
    """A value that a user gives to one of the names is that of all."""
    apply, params = fds.functional(Net(*KINDS["dict of a number"]))
    step = fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.sgd(0.0))
    state, first = step(step.init(params), rows(0))
    state = state.put(buffers=state.slots["buffers"].with_values({"b.shared": {"n": 1.0}}))
    assert step(state, rows(0))[1]["loss"].item() == pytest.approx(first["loss"].item())


def test_a_value_that_is_given_to_one_name_is_that_of_all() -> None:
    with_a_value()


SHARED, NOTED = "modules.shared_memory:shared_paths", "modules.shared_memory:noted"
VISIT = "modules.deep_copy:_PlaceSearch.visit"
COVERS = "step.state.buffer_sync:Agreement.covers"
SETTLE, LEASE, CHECK = (f"modules.skeleton:Skeleton.{name}" for name in ("settle", "lease", "_check_shared"))


@pytest.mark.parametrize(
    ("law", "bug"),
    [
        (
            lambda folder: check("dict of a number", "plain"),
            Bug("each has its own", LEASE, "same.get((name,), (name,))", "(name,)"),
        ),
        (lambda folder: check("losses", "plain"), Bug("none is known", SHARED, "same[path] = first", "pass")),
        (lambda folder: check("linked list", "plain"), Bug("nor after a link", SHARED, "same[path] = first", "pass")),
        (lambda folder: check("list by closure"), Bug("references have their own", LEASE, "put(copy)", "pass")),
        (
            lambda folder: check("list by method"),
            Bug("nor do methods", VISIT, "self.visit(value.__self__, _put_nowhere)", "..."),
        ),
        (
            lambda folder: check("order of keys", "jit"),
            Bug("one graph for all orders", "step.state.buffers:Buffers.links", "list(part)", "len(part)"),
        ),
        (
            lambda folder: check("order of keys", "zero(3)"),
            Bug("ranks have the first order", COVERS, "repr(sorted(forms.items()))", "forms"),
        ),
        (
            lambda folder: check("order of keys"),
            Bug("keys have no order", NOTED, "list(part)", "len(part)"),
        ),
        (
            lambda folder: written_later("list"),
            Bug("what was one is known for one pass", SETTLE, "id(first)", "id(copy)", shows=pytest.fail.Exception),
        ),
        (
            lambda folder: written_later("list"),
            Bug("two copies are written", CHECK, "is_written(*copy)", "False", shows=pytest.fail.Exception),
        ),
        (
            check_saved,
            Bug("what was built is forgotten", LEASE, "self.same if held.same is None else held.same", "held.same or {}"),
        ),
        (
            lambda folder: with_a_value(),
            Bug("one name alone", "step.state.buffers:Buffers.with_values", "(name, first)", "(name,)"),
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Bug) else "",
)
def test_planted_bugs_of_what_modules_share_are_found(law: Callable[[Path], None], bug: Bug, tmp_path: Path) -> None:
    with planted(bug), pytest.raises(bug.shows):
        law(tmp_path)
