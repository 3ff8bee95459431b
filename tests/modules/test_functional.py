"""Modules as users write them, held to plain PyTorch: closures, weak references, hooks, shared memory, writes into weights."""

import functools
import re
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import functional_ds as fds
from functional_ds import comm, transforms


def rows(index: int, count: int = 8) -> Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(index))


def plain(build: Callable[[], nn.Module], steps: int = 3) -> list[float]:
    """PyTorch's own loop."""
    torch.manual_seed(0)
    net, losses = build(), []
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for index in range(steps):
        optimizer.zero_grad()
        loss = net(rows(index)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def ours(
    build: Callable[[], nn.Module], stage: int | None, *more: fds.Transform, ranks: int = 2, steps: int = 3
) -> list[float]:
    def program() -> list[float]:
        torch.manual_seed(0)
        apply, params = fds.functional(build())
        step = fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.sgd(0.1))
        step = fds.compose(*([] if stage is None else [transforms.zero(stage)]), *more)(step)
        state, losses = step.init(params), []
        for index in range(steps):
            state, metrics = step(state, rows(index).chunk(comm.world().size)[comm.world().rank])
            losses.append(metrics["loss"].item())
        return losses

    return comm.simulate(program, world_size=1 if stage is None else 2)[0]


# -- what copies of a module lead to -----------------------------------------------------------------------------------


class Around(nn.Module):
    """Reaches its own layers past its attributes."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 3), nn.Linear(3, 3)
        me, inner, layers, weight = self, self.inner, [self.inner, self.outer], self.inner.weight
        self.how = how
        self.held: dict[str, Any] = {}

        def repeated(x: Tensor, times: int) -> Tensor:
            return x if times == 0 else repeated(inner(x), times - 1)

        ways: dict[str, Any] = {
            "closure": lambda x: me.inner(x) + 0,
            "closure over a layer": lambda x: inner(x) + 0,
            "closure over layers": lambda x: layers[1](layers[0](x)),
            "closure over a weight": lambda x: x @ weight,
            "recursive closure": lambda x: repeated(x, 3),
            "default": lambda x, layer=inner: layer(x),
            "default weight": lambda x, w=weight: x @ w,
            "bound method": inner.forward,
            "partial": functools.partial(torch.nn.functional.linear, weight=weight),
            "partial of a closure": functools.partial(lambda scale, x: scale * inner(x), 2.0),
            "detached": lambda x: inner(x) / (1 + me.inner.weight.detach().norm()),
        }
        self.way = ways.get(how)
        self.weights = [weight] if how == "list" else (weight,)
        self.back = weakref.ref(self)
        if how == "hook":
            self.inner.register_forward_hook(lambda module, args, found: me.held.update(found=found))
        if how == "replaced forward":
            first = self.inner.forward
            self.inner.forward = types.MethodType(lambda self, x: 2 * first(x), self.inner)  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        if self.how in ("list", "tuple"):
            return self.outer(x @ self.weights[0])  # type: ignore[no-any-return]
        if self.how == "weak reference":
            return self.outer(self.back().inner(x))  # type: ignore[no-any-return, union-attr]
        if self.how == "hook":
            self.inner(x)
            return self.outer(self.held["found"])  # type: ignore[no-any-return]
        return self.outer((self.way or self.inner)(x))  # type: ignore[no-any-return]


WAYS = [
    *("closure", "closure over a layer", "closure over layers", "closure over a weight", "recursive closure", "default"),
    *("default weight", "bound method", "partial", "partial of a closure", "detached", "list", "tuple", "weak reference"),
    *("hook", "replaced forward"),
]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("stage", [None, 3])
def test_a_module_that_reaches_itself_past_its_attributes(how: str, stage: int | None) -> None:
    assert ours(lambda: Around(how), stage) == pytest.approx(plain(lambda: Around(how)), rel=1e-4)


def test_the_users_module_stays_as_it_was() -> None:
    torch.manual_seed(0)
    net = Around("hook")
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    apply, params = fds.functional(net)
    apply(params, rows(0))
    assert net.held == {}
    net(rows(0))
    assert net.held.keys() == {"found"}
    assert all(torch.equal(p, before[name]) for name, p in net.named_parameters())


def test_two_trees_in_one_tape_have_closures_of_their_own() -> None:
    apply, params = fds.functional(Around("closure over a weight"))
    doubled = {name: 2 * p.detach() for name, p in params.items()}
    step = fds.train_step(lambda p, x: (apply(p["a"], x) - apply(p["b"], x)).square().mean(), fds.sgd(0.1))
    _, metrics = step(step.init({"a": params, "b": doubled}, modules=apply), rows(0))
    want = (apply(params, rows(0)) - apply(doubled, rows(0))).square().mean()
    torch.testing.assert_close(metrics["loss"], want.detach())


def test_a_hook_writes_into_what_its_writer_holds() -> None:
    found: dict[str, Tensor] = {}
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    net[0].register_forward_hook(lambda module, args, out: found.update(middle=out))
    apply, params = fds.functional(net)
    step = fds.train_step(lambda p, x: apply(p, x).sum() + found["middle"].square().sum(), fds.sgd(0.1))
    state, _ = step(step.init(params), rows(0))
    net(rows(0)).sum().add(found["middle"].square().sum()).backward()
    with torch.no_grad():
        for name, p in net.named_parameters():
            torch.testing.assert_close(step.params(state)[name], p - 0.1 * p.grad)


class Counted(nn.Module):
    """Counts in a buffer that it reaches by another way."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.how = nn.Linear(3, 3), how
        self.register_buffer("count", torch.zeros(()))
        me, count = self, self.count
        self.same = self.count
        self.listed = [self.count]

        def bump() -> None:
            me.count += 1

        ways: dict[str, Callable[[], Any]] = {
            "closure": bump,
            "cell": lambda: count.add_(1),
            "attribute": lambda: me.same.add_(1),
            "list": lambda: me.listed[0].add_(1),
        }
        self.bump = ways.get(how, lambda: None)
        if how == "hook":
            self.inner.register_forward_hook(lambda module, args, found: bump())

    def forward(self, x: Tensor) -> Tensor:
        self.bump()
        if self.how == "assigned":
            self.count = self.count + 1
        return self.inner(x) * (1 + self.count)  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["closure", "cell", "attribute", "list", "hook"])
@pytest.mark.parametrize("stage", [None, 3])
def test_buffers_that_are_reached_by_another_way(how: str, stage: int | None) -> None:
    assert ours(lambda: Counted(how), stage) == pytest.approx(plain(lambda: Counted(how)), rel=1e-4)


@pytest.mark.parametrize("how", ["closure", "cell", "attribute", "list", "hook"])
@pytest.mark.parametrize("blocks", ["", "inner"])
def test_recomputed_buffers_are_reached_by_their_names_alone(how: str, blocks: str) -> None:
    with pytest.raises(RuntimeError, match=r"under remat wrote its buffer 'count', which something else in Counted refers to"):
        ours(lambda: Counted(how), None, transforms.remat(blocks))


def test_a_buffer_with_two_names_is_not_assigned() -> None:
    with pytest.raises(RuntimeError, match="a call assigned its buffer 'count', which something else in Counted refers to"):
        ours(lambda: Counted("assigned"), None)


def test_what_cannot_be_copied_is_named() -> None:
    net = nn.Sequential(nn.Linear(3, 3))
    net[0].stream = (each for each in range(3))  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"Sequential cannot be copied, because the attribute '0.stream' is a generator"):
        fds.functional(net)


# -- hooks on parameters -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_are_refused(which: str) -> None:
    net = nn.Linear(3, 3)
    handle = getattr(net.weight, which)(lambda given: None)
    with pytest.raises(ValueError, match=r"the parameter 'weight' has a hook.*view_as"):
        fds.functional(net)
    handle.remove()
    fds.functional(net)


class Tenth(nn.Module):
    """A gradient hook as the refusal of hooks on parameters advises."""

    def forward(self, weight: Tensor) -> Tensor:
        seen = weight.view_as(weight)
        if seen.requires_grad:
            seen.register_hook(lambda grad: grad / 10)
        return seen


@pytest.mark.parametrize("stage", [None, 3])
def test_a_hook_on_a_view_runs(stage: int | None) -> None:
    def hooked() -> nn.Module:
        net = nn.Linear(3, 3)
        net.weight.register_hook(lambda grad: grad / 10)
        return net

    def advised() -> nn.Module:
        net = nn.Linear(3, 3)
        parametrize.register_parametrization(net, "weight", Tenth())
        return net

    assert ours(advised, stage) == pytest.approx(plain(hooked), rel=1e-4)


# -- writes into weights -----------------------------------------------------------------------------------------------


class Clipped(nn.Module):
    """Clips its own weight, as critics of GANs do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.other, self.how = nn.Linear(3, 3), nn.Linear(3, 2), how

    def forward(self, x: Tensor) -> Tensor:
        weight = self.inner.weight
        if self.how == "data.copy_":
            weight.data.copy_(weight.data.clamp(-0.1, 0.1))
        elif self.how == "data.clamp_":
            weight.data.clamp_(-0.1, 0.1)
        elif self.how == "data =":
            weight.data = weight.data.clamp(-0.1, 0.1)
        elif self.how == "detach":
            weight.detach().clamp_(-0.1, 0.1)
        elif self.how == "out=":
            torch.clamp(weight.detach(), -0.1, 0.1, out=weight.data)
        else:
            with torch.no_grad():
                weight.clamp_(-0.1, 0.1)
        return self.other(self.inner(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["data.copy_", "data.clamp_", "data =", "detach", "out=", "no_grad"])
@pytest.mark.parametrize("stage", [None, 0, 1, 2, 3])
def test_weights_that_a_forward_pass_writes_are_refused(how: str, stage: int | None) -> None:
    with pytest.raises(RuntimeError, match=r"Clipped wrote into its parameter 'inner.weight' in place .*parametrize"):
        ours(lambda: Clipped(how), stage)


@pytest.mark.parametrize("stage", [None, 3])
def test_an_embedding_that_renormalises_is_refused(stage: int | None) -> None:
    def program() -> None:
        apply, params = fds.functional(nn.Embedding(4, 3, max_norm=0.1))
        step = fds.train_step(lambda p, x: apply(p, x).sum(), fds.sgd(0.1))
        step = step if stage is None else transforms.zero(stage)(step)
        step(step.init(params), torch.arange(4))

    with pytest.raises(RuntimeError, match=r"Embedding wrote into its parameter 'weight'.*max_norm"):
        comm.simulate(program, world_size=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.uint8])
def test_a_reordered_weight_is_a_written_one(dtype: torch.dtype) -> None:
    class Flips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.weight = nn.Parameter(torch.arange(6).view(2, 3).to(dtype), requires_grad=dtype.is_floating_point)

        def forward(self, x: Tensor) -> Tensor:
            self.weight.data.copy_(self.weight.data.flip(0))
            return x * self.scale

    with pytest.raises(RuntimeError, match=r"Flips wrote into its (frozen )?parameter 'weight' in place"):
        ours(Flips, None)


class Doubled(nn.Linear):
    """Code of its own: that of Linear is no longer compiled once other tests have compiled it too often."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.weight, self.bias) * 2


def test_compiled_parts_are_compiled_in_the_first_step() -> None:
    def build() -> nn.Module:
        return nn.Sequential(torch.compile(Doubled(3, 3), backend="eager", fullgraph=True), nn.BatchNorm1d(3))

    assert ours(build, None) == pytest.approx(plain(build), rel=1e-4)


class Late(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: Tensor, clips: bool) -> Tensor:
        if clips:
            with torch.no_grad():
                self.inner.weight.clamp_(-0.1, 0.1)
        return self.inner(x)  # type: ignore[no-any-return]


def test_a_weight_that_is_written_in_a_later_step_is_refused() -> None:
    apply, params = fds.functional(Late())
    step = fds.train_step(lambda p, batch: apply(p, batch[0], bool(batch[1])).sum(), fds.sgd(0.1))
    state, _ = step(step.init(params), (rows(0), torch.tensor(False)))
    with pytest.raises(RuntimeError, match=r"wrote into its parameter 'inner.weight' in place"):
        step(state, (rows(1), torch.tensor(True)))


@pytest.mark.parametrize("stage", [None, 3])
def test_weights_are_clipped_by_a_transform(stage: int | None) -> None:
    """What the refusal advises, against PyTorch's loop of a GAN's critic."""

    def update(inner: Any, step: fds.Step, state: fds.State, grads: Any) -> Any:
        state, metrics = inner(step, state, grads)
        return fds.tree.replace(state, params=fds.tree.map(lambda p: p.clamp(-0.1, 0.1), state.params)), metrics

    torch.manual_seed(0)
    net, want = nn.Linear(3, 3), []
    for index in range(3):
        net.zero_grad()
        loss = net(rows(index)).square().mean()
        loss.backward()
        with torch.no_grad():
            for p in net.parameters():
                p.sub_(0.1 * p.grad).clamp_(-0.1, 0.1)
        want.append(loss.item())
    clipped = fds.wrap("clip weights", update=update)
    found = ours(lambda: nn.Linear(3, 3), None, clipped) if stage is None else None

    def sharded() -> list[float]:
        torch.manual_seed(0)
        apply, params = fds.functional(nn.Linear(3, 3))
        step = fds.compose(clipped, transforms.zero(3))(fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.sgd(0.1)))
        state, losses = step.init(params), []
        for index in range(3):
            state, metrics = step(state, rows(index).chunk(2)[comm.world().rank])
            losses.append(metrics["loss"].item())
        return losses

    assert (found or comm.simulate(sharded, world_size=2)[0]) == pytest.approx(want, rel=1e-4)


# -- shared memory -----------------------------------------------------------------------------------------------------


class Shares(nn.Module):
    """Two tensors in the same memory."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.a, self.b, self.what = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), what
        flat = torch.randn(18)
        if what == "tied by data":
            self.b.weight.data = self.a.weight.data
        elif what == "parameter of a parameter":
            self.b.weight = nn.Parameter(self.a.weight)
        elif what == "frozen":
            self.b.weight = nn.Parameter(self.a.weight.data, requires_grad=False)
        elif what == "overlap":
            self.a.weight.data, self.b.weight.data = flat[:9].view(3, 3), flat[3:12].view(3, 3)
        elif what == "beside":
            self.a.weight.data, self.b.weight.data = flat[:9].view(3, 3), flat[9:].view(3, 3)
        elif what == "interleaved":
            self.a.weight.data, self.b.weight.data = flat.view(3, 6)[:, :3], flat.view(3, 6)[:, 3:]
        elif what == "attribute":
            self.kept = self.a.weight.data
        elif what == "view":
            self.kept = self.a.weight.detach()[:]
        elif what == "listed":
            self.kept = [self.a.weight.data]
        elif what == "graph":
            self.kept = self.a.weight.t()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(torch.tanh(self.a(x)))
        if not hasattr(self, "kept"):
            return y
        return y + x @ (self.kept[0] if isinstance(self.kept, list) else self.kept)


@pytest.mark.parametrize("what", ["tied by data", "parameter of a parameter", "frozen", "overlap"])
def test_parameters_in_shared_memory_are_refused(what: str) -> None:
    with pytest.raises(ValueError, match=r"the parameters '[ab].weight' and '[ab].weight' share memory.*b.weight = a.weight"):
        fds.functional(Shares(what))


def test_ties_by_data_are_refused_without_values() -> None:
    with pytest.raises(ValueError, match=r"'a.weight' and 'b.weight' share memory"):
        fds.deferred(lambda: Shares("tied by data"))
    fds.deferred(lambda: Shares("beside"))


@pytest.mark.parametrize("what", ["beside", "interleaved"])
@pytest.mark.parametrize("stage", [None, 2])
def test_parameters_side_by_side_in_one_storage(what: str, stage: int | None) -> None:
    assert ours(lambda: Shares(what), stage) == pytest.approx(plain(lambda: Shares(what)), rel=1e-4)


@pytest.mark.parametrize("what", ["attribute", "view", "listed", "graph"])
@pytest.mark.parametrize("stage", [None, 3])
def test_attributes_that_would_not_follow_training_are_refused(what: str, stage: int | None) -> None:
    message = "computed, with a graph, before" if what == "graph" else "shared memory with the parameter 'a.weight'"
    with pytest.raises(RuntimeError, match=rf"the attribute 'kept(\.0)?' (was )?{re.escape(message)}"):
        ours(lambda: Shares(what), stage)


def pruned() -> nn.Module:
    return prune.l1_unstructured(nn.Linear(3, 3), "weight", 0.5)  # type: ignore[no-any-return]


COMPUTED: dict[str, Callable[[], nn.Module]] = {
    "pruned": pruned,
    "weight_norm": lambda: nn.utils.weight_norm(nn.Linear(3, 3)),
    "spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(3, 3)),
    "parametrized weight_norm": lambda: parametrizations.weight_norm(nn.Linear(3, 3)),
    "parametrized spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(3, 3)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(3, 3)),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("name", COMPUTED)
@pytest.mark.parametrize("stage", [None, 1, 3])
def test_weights_that_are_computed_in_each_forward_pass(name: str, stage: int | None) -> None:
    assert ours(COMPUTED[name], stage) == pytest.approx(plain(COMPUTED[name]), rel=1e-4)


# -- lazy, scripted ----------------------------------------------------------------------------------------------------


def test_lazy_modules_are_refused_until_they_have_shapes() -> None:
    net = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d())
    with pytest.raises(ValueError, match=r"'0.weight' has no shape yet, as its module is lazy; call the module once"):
        fds.functional(net)
    net(rows(0))
    fds.functional(net)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("how", ["script", "trace", "inside"])
def test_scripted_modules(how: str) -> None:
    """They run as they are; lazy params, which are no tensors for C++, are refused."""

    def build() -> nn.Module:
        net = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
        if how == "inside":
            return nn.Sequential(torch.jit.script(net), nn.Linear(3, 1))
        return torch.jit.script(net) if how == "script" else torch.jit.trace(net, rows(0))  # type: ignore[no-any-return]

    assert ours(build, None) == pytest.approx(plain(build), rel=1e-4)
    with pytest.raises(RuntimeError, match=r"went straight into a custom autograd.Function.* a compiled function"):
        ours(build, 3)
