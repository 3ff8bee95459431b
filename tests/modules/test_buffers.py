"""Buffers of modules are state (law 59): read from it, returned with it, and nowhere else."""

import copy
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import functional_ds as fds
from functional_ds import comm, transforms
from functional_ds import pipelining as pp
from functional_ds.testing import assert_same


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def rows(index: int, count: int = 8) -> Tensor:
    return 2 + torch.randn(count, 3, generator=torch.Generator().manual_seed(index))


def plain(batches: list[list[Tensor]], lr: float = 0.1) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """PyTorch's own loop over updates of micro-batches: losses, params, buffers."""
    net, losses = network(), []
    optimizer = torch.optim.SGD(net.parameters(), lr)
    for micro_batches in batches:
        optimizer.zero_grad()
        found = [net(x).square().mean() / len(micro_batches) for x in micro_batches]
        for each in found:
            each.backward()
        optimizer.step()
        losses.append(sum(each.item() for each in found))
    return losses, {n: p.detach() for n, p in net.named_parameters()}, dict(net.named_buffers())


STRATEGIES = {
    "none": (),
    **{f"zero {stage}": (transforms.zero(stage),) for stage in range(4)},
    "remat": (transforms.remat(),),
    "remat of blocks": (transforms.zero(3), transforms.remat("")),
    "offload": (transforms.offload("cpu"), transforms.zero(2)),
}


@pytest.mark.law(59)
@given(strategy=st.sampled_from(sorted(STRATEGIES)), k=st.sampled_from((1, 2)), donate=st.booleans(), steps=st.integers(1, 3))
def test_a_step_is_plain_pytorchs(strategy: str, k: int, donate: bool, steps: int) -> None:
    """BatchNorm on one device, micro-batches in their order: losses, params and running statistics."""
    batches = [list(rows(index).chunk(k)) for index in range(steps)]
    want_losses, want_params, want_buffers = plain(batches)

    def program() -> None:
        apply, params = fds.functional(network())
        step = fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.sgd(0.1))
        step = fds.compose(*STRATEGIES[strategy], transforms.accumulate(k))(step)
        state, losses = step.init(params), []
        for index in range(steps):
            before = step.module_buffers(state)
            copied = {name: buffer.clone() for name, buffer in before.items()}
            state, metrics = step(state, rows(index), donate=donate)
            losses.append(metrics["loss"].item())
            assert_same(before, copied)  # a forward pass writes nothing into the state that it is given
        torch.testing.assert_close(losses, want_losses)
        torch.testing.assert_close(step.params(state), want_params)
        torch.testing.assert_close(step.module_buffers(state), want_buffers)
        assert all(not buffer.any() for name, buffer in apply.buffers.items() if name.endswith(("mean", "tracked")))

    comm.simulate(program, world_size=1)


def as_ddp(steps: int, ranks: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """DistributedDataParallel: gradients are means, and rank 0's buffers count."""
    nets = [network() for _ in range(ranks)]
    for index in range(steps):
        for net, x in zip(nets, rows(index).chunk(ranks), strict=True):
            net.zero_grad()
            net(x).square().mean().backward()
        mean = [torch.stack([p.grad for p in ps]).mean(0) for ps in zip(*(net.parameters() for net in nets), strict=True)]
        with torch.no_grad():
            for net in nets:
                for parameter, grad in zip(net.parameters(), mean, strict=True):
                    parameter.sub_(0.1 * grad)
                for buffer, first in zip(net.buffers(), nets[0].buffers(), strict=True):
                    buffer.copy_(first)
    return dict(nets[0].named_parameters()), dict(nets[0].named_buffers())


@pytest.mark.law(19)
@pytest.mark.parametrize("stage", [0, 1, 2, 3, "local"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_are_distributed_data_parallel(stage: Any, ranks: int) -> None:
    params_of_ddp, buffers_of_ddp = as_ddp(3, ranks)

    def program() -> Any:
        apply, params = fds.functional(network())
        made = transforms.compressed_gradients(comm.codecs.Cast(torch.float32)) if stage == "local" else transforms.zero(stage)
        step = made(fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.sgd(0.1)))
        state = step.init(params)
        for index in range(3):
            state, _ = step(state, rows(index).chunk(ranks)[comm.world().rank])
        return step.params(state), step.module_buffers(state)

    for params, buffers in comm.simulate(program, world_size=ranks):
        torch.testing.assert_close(params, {n: p.detach() for n, p in params_of_ddp.items()})
        torch.testing.assert_close(buffers, buffers_of_ddp)


@pytest.mark.parametrize("policy", ["first", "mean", "own"])
def test_whose_buffers_are_kept(policy: str) -> None:
    def program() -> Any:
        apply, params = fds.functional(nn.BatchNorm1d(1, momentum=1.0))
        step = fds.train_step(lambda p, x: apply(p, x).sum(), fds.sgd(0.0), buffers=policy)
        step = transforms.zero(1)(step)
        state, _ = step(step.init(params), torch.full((2, 1), float(comm.world().rank)))
        return step.module_buffers(state)["running_mean"].item()

    want = {"first": [0.0, 0.0, 0.0], "mean": [1.0, 1.0, 1.0], "own": [0.0, 1.0, 2.0]}
    assert comm.simulate(program, world_size=3) == want[policy]


@pytest.mark.sample(3)
@pytest.mark.law(59)
@pytest.mark.parametrize("schedule", [pp.gpipe(2, 2), pp.one_f_one_b(2, 4), pp.interleaved_one_f_one_b(2, 2)])
@pytest.mark.parametrize("stage", [None, 1, 3])
def test_pipelines_see_buffers_in_order(schedule: pp.Schedule, stage: int | None) -> None:
    """Every rank has all stages' buffers after a step, and micro-batches see them in their order."""
    _, want_params, want_buffers = plain([list(rows(index).chunk(schedule.microbatches)) for index in range(2)])

    def program() -> None:
        batch = (rows(0),)
        stages, params = pp.cut(network(), schedule.stages, loss=lambda y, batch: y.square().mean(), example=batch)
        mesh = comm.mesh(dp=1, pp=2)
        step = fds.train_step(stages, fds.sgd(0.1))
        strategy = () if stage is None else (transforms.zero(stage, mesh["dp"]),)
        step = fds.compose(*strategy, transforms.pipeline(schedule, stages, mesh["pp"]))(step)
        state = step.init(params)
        for index in range(2):
            state, _ = step(state, (rows(index),))
        torch.testing.assert_close(step.params(state), want_params)
        torch.testing.assert_close(step.module_buffers(state), want_buffers)

    comm.simulate(program, world_size=2)


@pytest.mark.law(37)
@pytest.mark.parametrize(("saved", "found"), [(2, 2), (3, 2), (1, 3)])
def test_a_checkpoint_has_them(tmp_path: Path, saved: int, found: int) -> None:
    def build() -> tuple[fds.Step, fds.State]:
        apply, params = fds.functional(network())
        step = transforms.zero(2)(fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.sgd(0.1)))
        return step, step.init(params)

    def save() -> Any:
        step, state = build()
        for index in range(2):
            state, _ = step(state, rows(index, 12).chunk(comm.world().size)[comm.world().rank])
        fds.save(state, tmp_path / "run")
        return step.module_buffers(state)

    def load() -> Any:
        step, state = build()
        return step.module_buffers(fds.load(tmp_path / "run", like=state))

    want = comm.simulate(save, world_size=saved)[0]
    for buffers in comm.simulate(load, world_size=found):
        assert_same(buffers, want)


def test_an_evaluation_reads_them_and_keeps_nothing() -> None:
    apply, params = fds.functional(network())
    step = fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.sgd(0.1))
    state, _ = step(step.init(params), rows(0))
    before = copy.deepcopy(step.module_buffers(state))
    step.evaluate(state, rows(1))
    assert_same(step.module_buffers(state), before)
    apply.module.eval()
    with torch.no_grad():
        want = apply(step.params(state) | step.module_buffers(state), rows(1)).square().mean()
    assert torch.equal(step.evaluate(state, rows(1)), want)


@pytest.mark.parametrize("how", ["child", "whole", "attribute"])
def test_what_is_set_on_the_module_holds(how: str) -> None:
    """Modes and attributes of any module inside, from the next call on, within steps and outside."""
    apply, params = fds.functional(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)))
    step = fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.sgd(0.0))
    state, _ = step(step.init(params), rows(0))
    assert not torch.equal(apply(params, rows(0)), apply(params, rows(0)))
    if how == "child":
        apply.module[1].eval()
    elif how == "whole":
        apply.module.eval()
    else:
        apply.module[1].p = 0.0
    assert torch.equal(apply(params, rows(0)), apply(params, rows(0)))
    want = apply(params, rows(0)).square().mean()
    state, metrics = step(state, rows(0))
    assert torch.equal(metrics["loss"], want)


def test_a_module_that_the_state_does_not_know() -> None:
    """What it writes would be lost: it is refused, and ``modules`` is what would do."""
    apply, params = fds.functional(network())
    copied = {name: p.detach().clone() for name, p in params.items()}
    step = fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.sgd(0.1))
    with pytest.raises(RuntimeError, match=r"wrote '1.num_batches_tracked'.*step.init\(params, modules=apply\)"):
        step(step.init(copied), rows(0))
    state, _ = step(step.init(copied, modules=apply), rows(0))
    assert step.module_buffers(state)["1.num_batches_tracked"] == 1
    with pytest.raises(TypeError, match="modules=BatchNorm1d is not an apply"):
        step.init(copied, modules=nn.BatchNorm1d(2))
    apply.module.eval()
    step(step.init(copied), rows(0))


def test_several_modules_and_trees_of_them() -> None:
    actor, actor_params = fds.functional(nn.BatchNorm1d(3))
    critic, critic_params = fds.functional(nn.BatchNorm1d(3))

    def loss(params: Any, x: Tensor) -> Tensor:
        return (actor(params["actor"], x) * critic(params["nets"]["critic"], 2 * x)).sum()

    step = fds.train_step(loss, fds.sgd(0.1))
    state = step.init({"actor": actor_params, "nets": {"critic": critic_params}})
    state, _ = step(state, rows(0))
    found = step.module_buffers(state)
    assert sorted(found) == ["actor", "nets.critic"]
    torch.testing.assert_close(2 * found["actor"]["running_mean"], found["nets.critic"]["running_mean"])


class Large(nn.Module):
    """Writes into a large buffer, but not at first."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.store = nn.Module()
        self.store.register_buffer("memory", torch.zeros(50_000))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        if self.count > 1:
            self.store.memory.add_(1)
        y: Tensor = self.inner(x)
        return y


def test_a_large_buffer_that_is_written_late_is_refused() -> None:
    """It is not copied in each pass, so writing into it would change the state before."""
    apply, params = fds.functional(Large())
    step = fds.train_step(lambda p, x: apply(p, x).sum(), fds.sgd(0.1))
    state, _ = step(step.init(params), rows(0))
    with pytest.raises(
        RuntimeError, match=r"'store.memory' was written in place, and was not in the first step.*self.memory = "
    ):
        step(state, rows(0))


class Lazy(nn.Module):
    """Makes a buffer as it goes, sets one that was none, lets one grow, and counts in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 1)
        self.register_buffer("mean", None)
        self.register_buffer("seen", torch.zeros(1))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            self.register_buffer("table", torch.zeros(2))
        self.calls += 1
        self.table = self.table + x.detach().sum()
        self.mean = x.detach().mean(0) if self.mean is None else 0.5 * (self.mean + x.detach().mean(0))
        self.seen = torch.cat([self.seen, x.detach().sum().view(1)])
        y: Tensor = self.inner(x * self.mean) + self.seen.sum() + self.table.sum() * self.calls
        return y


@pytest.mark.law(37)
@pytest.mark.parametrize("ranks", [1, 2])
def test_buffers_and_attributes_that_are_made_as_a_module_goes(tmp_path: Path, ranks: int) -> None:
    """A resumed run has them, although its fresh state has not."""

    def go(steps: int, *, resumes: bool) -> Any:
        torch.manual_seed(0)
        apply, params = fds.functional(Lazy())
        step = transforms.zero(1)(fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.sgd(1e-4)))
        state = step.init(params)
        if resumes:
            state = fds.load(tmp_path / "run", like=state)
        for index in range(int(state.step), steps):
            state, _ = step(state, rows(index).chunk(ranks)[comm.world().rank])
        fds.save(state, tmp_path / "run")
        return step.params(state), step.module_buffers(state)

    want = comm.simulate(lambda: go(5, resumes=False), world_size=ranks)
    comm.simulate(lambda: go(3, resumes=False), world_size=ranks)
    found = comm.simulate(lambda: go(5, resumes=True), world_size=ranks)
    assert_same(found, want)
    assert found[0][1]["calls"] == 5


def bn_program() -> Any:
    """For processes."""
    apply, params = fds.functional(network())
    step = transforms.zero(3)(fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.sgd(0.1)))
    state = step.init(params)
    for index in range(2):
        state, _ = step(state, rows(index).chunk(2)[comm.world().rank])
    return step.params(state), step.module_buffers(state)


@pytest.mark.law(59)
def test_processes_keep_the_same() -> None:
    for found, want in zip(comm.spawn(bn_program, world_size=2), comm.simulate(bn_program, world_size=2), strict=True):
        assert_same(found, want)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.law(59)
def test_on_a_gpu() -> None:
    net = network().cuda()
    apply, params = fds.functional(net)
    step = transforms.remat()(fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.sgd(0.1)))
    state, _ = step(step.init(params), rows(0).cuda())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    net(rows(0).cuda()).square().mean().backward()
    optimizer.step()
    torch.testing.assert_close(step.module_buffers(state), dict(net.named_buffers()))


class Counting(nn.Module):
    """Counts its calls in a buffer that each call replaces, and keeps what it computed once."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = torch.arange(3.0)
        self.calls = self.calls + 1
        y: Tensor = self.inner(x) + self.cache
        return y


def test_params_of_two_trees_share_buffers() -> None:
    apply, params = fds.functional(Counting())
    trees = {"one": params, "other": {name: 2 * p for name, p in params.items()}}
    step = fds.train_step(lambda p, x: (apply(p["one"], x) * apply(p["other"], x)).mean(), fds.sgd(0.1))
    state = step.init(trees)
    for count in (2, 4, 6):
        state, _ = step(state, torch.ones(2, 3))
        assert step.module_buffers(state)["one"]["calls"] == count


def test_a_trial_without_values_leaves_nothing() -> None:
    """Neither in buffers nor in what a module keeps for itself."""
    apply, params = fds.functional(Counting())
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        apply({name: mode.from_tensor(p) for name, p in params.items()}, torch.empty(2, 3))
    assert apply.buffers["calls"] == 0
    found, buffers = apply.with_buffers(params, torch.ones(2, 3))
    assert found.isfinite().all()
    assert buffers["calls"] == 1


def test_modules_that_keep_what_they_computed_run_in_pipelines() -> None:
    net = nn.Sequential(Counting(), Counting())
    batch = (torch.randn(4, 3),)
    stages, params = pp.cut(net, 2, loss=lambda y, batch: y.square().mean(), example=batch)

    def program() -> Any:
        step = transforms.pipeline(pp.gpipe(2, 2), stages)(fds.train_step(stages, fds.sgd(0.1)))
        return step.params(step(step.init(params), batch)[0])

    step = fds.train_step(stages, fds.sgd(0.1))
    want = step.params(step(step.init(params), batch)[0])
    for found in comm.simulate(program, world_size=2):
        torch.testing.assert_close(found, want)


def test_a_first_call_in_inference_mode_does_not_spoil_training() -> None:
    apply, params = fds.functional(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    with torch.inference_mode():
        apply(params, torch.ones(2, 3))
    step = fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.sgd(0.1))
    state, _ = step(step.init(params), torch.randn(4, 3))
    assert step.module_buffers(state)["1.num_batches_tracked"] == 1


class Tables(nn.Module):
    """Makes a table at its first call, and replaces a mean at each."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_buffer("table", None)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.cos(torch.arange(3.0))
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        y: Tensor = self.inner(x) * self.table + self.mean
        return y


@pytest.mark.parametrize("more", [(), (transforms.remat(""),)])
def test_what_a_call_makes_in_inference_mode_is_plain(more: tuple[fds.Transform, ...]) -> None:
    apply, params = fds.functional(Tables())
    step = fds.compose(*more)(fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.sgd(0.1)))
    state = step.init(params)
    with torch.inference_mode():
        step.evaluate(state, torch.ones(2, 3))
    state, _ = step(state, torch.ones(2, 3))
    found = step.module_buffers(state)
    assert_same(found, {"mean": 0.1 * torch.ones(3), "table": torch.cos(torch.arange(3.0))})
    assert not any(buffer.is_inference() for buffer in found.values())


class Ready(nn.Module):
    """Sets itself up by the first values that it sees."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.register_buffer("shift", torch.zeros(width))
        self.ready = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        if not self.ready:
            self.shift, self.ready = y.detach().mean(0), True
        return torch.tanh(y - self.shift)


def test_stages_of_a_rank_keep_their_own_copies() -> None:
    """From step to step: what else a module keeps fits its buffers."""
    torch.manual_seed(0)
    net, batch = nn.Sequential(*(Ready(3) for _ in range(4))), (torch.randn(4, 3),)

    def run(schedule: pp.Schedule, world_size: int) -> Any:
        stages, params = pp.cut(net, 4, loss=lambda y, batch: y.square().mean(), example=batch)

        def program() -> Any:
            step = transforms.pipeline(schedule, stages)(fds.train_step(stages, fds.sgd(0.1)))
            state = step.init(params)
            for _ in range(3):
                state, _ = step(state, batch)
            return step.params(state)

        return comm.simulate(program, world_size=world_size)[0]

    found, want = run(pp.interleaved_one_f_one_b(2, 2), 2), run(pp.gpipe(4, 2), 4)
    for path, leaf in found.items():
        torch.testing.assert_close(leaf, want[path])


@pytest.mark.parametrize("again", [fds.remat, lambda function: function])
def test_a_backward_in_its_own_thread_finds_the_buffers(again: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the engine has one for each GPU: what is recomputed there reads what this thread has learned."""
    own = torch.autograd.grad

    def elsewhere(*args: Any, **kwargs: Any) -> Any:
        found: list[Any] = []
        worker = threading.Thread(target=lambda: found.append(own(*args, **kwargs)))
        worker.start()
        worker.join()
        return found[0]

    def run() -> Any:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh())
        net.load_state_dict({"1.running_mean": torch.ones(3), "1.running_var": torch.full((3,), 4.0)}, strict=False)
        apply, params = fds.functional(net)
        apply.module[1].momentum = 0.5
        step = fds.train_step(lambda p, x: again(lambda x: apply(p, x))(x).square().mean(), fds.sgd(0.1))
        state = step.init(params)
        for _ in range(3):
            state, _ = step(state, torch.ones(4, 3))
        return step.params(state), step.module_buffers(state)

    want = run()
    monkeypatch.setattr(torch.autograd, "grad", elsewhere)
    assert_same(run(), want)


class Graph(nn.Module):
    """Has a sparse buffer, and a plain attribute that its caller sets."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.factor = 1
        self.register_buffer("adjacency", torch.eye(4).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.adjacency @ self.inner(x) * self.factor
        return y


class Repeated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Graph()])

    def forward(self, x: Tensor) -> Tensor:
        for factor in (1, 2, 3):
            self.blocks[0].factor = factor
            x = torch.tanh(self.blocks[0](x))
        return x


def test_sparse_buffers_and_attributes_that_callers_set() -> None:
    def run(*more: fds.Transform) -> Any:
        torch.manual_seed(0)
        apply, params = fds.functional(Repeated())
        step = fds.compose(*more)(fds.train_step(lambda p, x: apply(p, x).sum(), fds.sgd(0.1)))
        return step.params(fds.fit(step, step.init(params), lambda index: torch.ones(4, 3), steps=2))

    assert_same(run(transforms.remat()), run())
    assert_same(run(transforms.remat("")), run())


class Keeping(nn.Module):
    """Keeps numbers and tensors in structures of its own, which calls change in place, assign to, or let grow."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = nn.Linear(3, 3), kind
        self.calls: list[float] = []
        self.means: list[Tensor] = []
        self.held: dict[str, Any] = {"count": 0, "mean": torch.zeros(3)}
        self.last = torch.zeros(3)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        y: Tensor = self.inner(x)
        if self.kind == "numbers":
            self.calls.append(1.0)
            return y * sum(self.calls)
        if self.kind == "tensors":
            self.means.append(mean)
            return y + sum(self.means)
        if self.kind == "dict":
            self.held["count"] += 1
            self.held["mean"] = self.held["mean"] + mean
            return y * self.held["count"] + self.held["mean"]
        self.last = self.last + mean
        return y * self.last


@pytest.mark.law(59)
@pytest.mark.parametrize("kind", ["numbers", "tensors", "dict", "tensor"])
@pytest.mark.parametrize("how", ["twice", "saved", "recomputed"])
def test_structures_of_numbers_and_tensors_are_state(kind: str, how: str, tmp_path: Path) -> None:
    """A step is pure in them, a checkpoint has them, and a recomputation finds them as they were."""
    net = Keeping(kind)
    optimizer, want, found = torch.optim.SGD(net.parameters(), 0.01), [], []

    def build() -> tuple[fds.Step, fds.State]:
        apply, params = fds.functional(copy.deepcopy(start))
        step = fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.sgd(0.01))
        step = fds.compose(*([transforms.remat("")] if how == "recomputed" else []))(step)
        return step, step.init(params)

    start = copy.deepcopy(net)
    step, state = build()
    for index in range(4):
        optimizer.zero_grad()
        loss = net(rows(index)).square().mean()
        loss.backward()
        optimizer.step()
        want.append(loss.item())
        if how == "twice":
            step(state, rows(index), donate=False)
        if how == "saved" and index == 2:
            fds.save(state, tmp_path)
            step, state = build()
            state = fds.load(tmp_path, like=state)
        state, metrics = step(state, rows(index))
        found.append(metrics["loss"].item())
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


class Skipping(nn.Module):
    """Runs its norms now and then, on each rank in its own steps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.one, self.other = nn.Linear(3, width), nn.BatchNorm1d(width), nn.BatchNorm1d(width)

    def forward(self, x: Tensor, index: int) -> Tensor:
        y = self.inner(x)
        norms = {0: self.one, 1: self.other}
        return norms[index](y) if index in norms else y  # type: ignore[no-any-return]


def test_a_large_norm_that_runs_late_is_refused() -> None:
    """Its kernel leaves no trace but in its counter."""
    apply, params = fds.functional(Skipping(20_000))
    step = fds.train_step(lambda p, batch: apply(p, batch[0], int(batch[1])).square().mean(), fds.sgd(0.1))
    state, _ = step(step.init(params), (rows(0), torch.tensor(2)))
    with pytest.raises(RuntimeError, match=r"'one.running_mean' was written in place, and was not in the first step"):
        step(state, (rows(0), torch.tensor(0)))


def test_ranks_may_write_known_buffers_in_other_steps() -> None:
    def program() -> Any:
        apply, params = fds.functional(Skipping(3))
        step = transforms.zero(0)(
            fds.train_step(lambda p, batch: apply(p, batch[0], int(batch[1][0])).square().mean(), fds.sgd(0.1))
        )
        state = step.init(params)
        for index in range(6):
            state, _ = step(state, (rows(index), torch.full((8,), (index + comm.world().rank) % 3)))
        return step.module_buffers(state)

    one, other = comm.simulate(program, world_size=2)
    assert_same(one, other)


@pytest.mark.parametrize("stage", [0, 3, "local"])
@pytest.mark.parametrize("policy", ["first", "mean"])
def test_one_rank_may_be_the_first_to_write(stage: Any, policy: str) -> None:
    """The ranks agree again, in the step in which any of them writes what none has written before."""

    def program() -> Any:
        apply, params = fds.functional(Skipping(3))
        made = transforms.compressed_gradients(comm.codecs.Cast(torch.float32)) if stage == "local" else transforms.zero(stage)
        loss = lambda p, batch: apply(p, batch[0], int(batch[1][0])).square().mean()  # noqa: E731
        step = made(fds.train_step(loss, fds.sgd(0.1), buffers=policy))
        state, found = step.init(params), []
        for index in range(4):
            which = {1: 0, 2: 1}.get(index, 2) if comm.world().rank == 1 else 2
            state, _ = step(state, (rows(index), torch.full((8,), which)))
            found.append({name: buffer.clone() for name, buffer in step.module_buffers(state).items()})
        return found

    one, other = comm.simulate(program, world_size=2)
    assert_same(one, other)
    counts = [found["one.running_mean"].any().item() for found in one]
    assert counts == ([False] * 4 if policy == "first" else [False, True, True, True])


def first_writer_program() -> Any:
    """For processes."""
    torch.manual_seed(0)
    apply, params = fds.functional(Skipping(3))
    loss = lambda p, batch: apply(p, batch[0], int(batch[1][0])).square().mean()  # noqa: E731
    step = transforms.zero(1)(fds.train_step(loss, fds.sgd(0.1), buffers="mean"))
    state = step.init(params)
    for index in range(3):
        state, _ = step(state, (rows(index), torch.full((8,), 0 if index == comm.world().rank == 1 else 2)))
    return step.module_buffers(state)


def test_one_process_may_be_the_first_to_write() -> None:
    for found, want in zip(
        comm.spawn(first_writer_program, world_size=2), comm.simulate(first_writer_program, world_size=2), strict=True
    ):
        assert_same(found, want)


def test_a_state_out_of_a_pickle_has_no_modules() -> None:
    """It is refused, and both ways that the message names continue the run."""

    def build() -> tuple[fds.Step, fds.State]:
        apply, params = fds.functional(network())
        step = fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.sgd(0.1))
        return step, step.init(params)

    step, state = build()
    state, _ = step(state, rows(0))
    again = pickle.loads(pickle.dumps(state))
    want, _ = step(state, rows(1), donate=False)
    step, fresh = build()
    with pytest.raises(RuntimeError, match=r"the state was pickled, which parts it from its modules: use fds.save"):
        step(again, rows(1))
    carried = fds.tree.unflatten(fds.tree.structure(fresh), fds.tree.leaves(again))
    found, _ = step(carried, rows(1))
    assert_same(step.module_buffers(found), step.module_buffers(want))
    assert_same(step.params(found), step.params(want))


def test_only_the_buffers_are_loaded(tmp_path: Path) -> None:
    apply, params = fds.functional(network())
    step = fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.sgd(0.1))
    trained, _ = step(step.init(params), rows(0))
    fds.save(trained, tmp_path)
    fresh = step.init(params)
    found = fds.load(tmp_path, like=fresh, only="buffers")
    assert_same(step.module_buffers(found), step.module_buffers(trained))
    assert_same(step.params(found), step.params(step.init(params)))


def test_two_modules_in_one_dict_are_refused() -> None:
    """The buffers of one would be no part of the state."""
    one, params = fds.functional(nn.Sequential(nn.BatchNorm1d(3)))
    other, more = fds.functional(nn.Sequential(nn.Identity(), nn.BatchNorm1d(3)))
    step = fds.train_step(lambda p, x: x.sum(), fds.sgd(0.1))
    with pytest.raises(ValueError, match="the params at '' are two modules'"):
        step.init(params | more)
    state = step.init(params | more, modules={"one": one, "other": other})
    assert sorted(step.module_buffers(state)) == ["one", "other"]


class Aliased(nn.Module):
    """A buffer, and something else in the same memory."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))
        if what == "parameter":
            self.register_buffer("other", self.inner.weight.detach()[1:])
        elif what == "buffer":
            self.register_buffer("other", self.mean[1:])
        else:
            self.other = self.mean[:] if what == "view" else self.mean

    def forward(self, x: Tensor) -> Tensor:
        self.mean.add_(x.detach().mean(0))
        return self.inner(x) + self.other.sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("what", ["parameter", "buffer", "view"])
def test_buffers_in_shared_memory_are_refused(what: str) -> None:
    """Once one of the tensors is written, as they are apart in a state."""
    if what == "parameter":
        with pytest.raises(ValueError, match=r"'inner.weight' and 'other' share memory, and training"):
            fds.functional(Aliased(what))
        return
    apply, params = fds.functional(Aliased(what))
    step = fds.train_step(lambda p, x: apply(p, x).sum(), fds.sgd(0.1))
    with pytest.raises(RuntimeError, match="wrote the buffer 'mean', which shares memory with its 'other'"):
        step(step.init(params), rows(0))
    fds.functional(nn.utils.spectral_norm(nn.Linear(3, 3)))


class Teacher(nn.Module):
    """Follows its own weights with a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.mean = nn.Parameter(torch.zeros(3, 3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(self.inner.weight, 0.5)
        return self.inner(x) + x @ self.mean  # type: ignore[no-any-return]


@pytest.mark.parametrize("donate", [False, True])
def test_a_forward_pass_that_writes_parameters_is_refused(donate: bool) -> None:
    apply, params = fds.functional(Teacher())
    step = fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.sgd(0.1))
    with pytest.raises(RuntimeError, match="wrote into its frozen parameter 'mean' in place"):
        step(step.init(params), rows(0), donate=donate)
