"""Law 28: recomputing, offloading and partitioning activations changes no bit, whatever else a step is made of."""

import weakref
from contextlib import nullcontext
from functools import cache
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import functional_ds as fds
from functional_ds import comm
from functional_ds import pipelining as pp
from functional_ds import transforms as T
from functional_ds.remat.policy import Keep
from functional_ds.testing import assert_same
from tests.transforms.models import CASES, own_rows, run

STAGES = (None, 0, 1, 2, 3)
POLICIES = (
    "recompute",
    "save",
    "offload",
    "partition",
    "recompute,inputs=offload",
    "recompute,inputs=partition",
    "recompute,matmuls=save",
    "recompute,matmuls=offload",
    "recompute,matmuls=partition,inputs=offload",
    "recompute,mid=save",
    "recompute,mid=offload,out=save",
    "recompute,mid=partition,matmuls=save",
    "offload,mid=save,inputs=save",
    "save,mid=offload,out=partition",
)


class Piece(nn.Module):
    """A block with awkward traits: trees in and out, work in place, dropout of both kinds, a tied layer, a frozen one."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.norm, self.shared = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8), shared

    def forward(self, given: dict[str, Any], mask: Tensor, *, key: fds.Key | None = None) -> dict[str, Any]:
        x, (total,) = given["x"], given["total"]
        hidden = F.relu_(self.first(x))
        hidden = fds.checkpoint_name(self.second(hidden), "mid")
        hidden = F.dropout(torch.tanh(hidden), 0.3, self.training) * mask
        hidden = hidden if key is None else key.dropout(hidden, 0.3, "hidden")
        y = x + fds.checkpoint_name(self.shared(self.norm(hidden)), "out")
        y.add_(1.0)
        return {"x": y, "total": (total + y.square().mean(),)}


class Pieces(nn.Module):
    """Such blocks, with a shared layer in each."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(8, 8, bias=False)
        self.inp, self.out = nn.Linear(6, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(Piece(shared) for _ in range(3))
        self.blocks[1].first.requires_grad_(False)

    def forward(self, x: Tensor, key: fds.Key | None = None) -> Tensor:
        given = {"x": self.inp(x), "total": (x.new_zeros(()),)}
        mask = (x[:, :1] > -1).to(given["x"].dtype)
        for block in self.blocks:
            given = block(given, mask, key=key)
        return self.out(given["x"]) + given["total"][0] * self.training  # a mean over the rows, which is not the ranks' mean


@attrs.frozen
class Ranks:
    """Which of the batch's rows a rank has, and with whom it shares them: ``tp`` ranks each."""

    dp: comm.Group
    tp: comm.Group

    @staticmethod
    def now(tp: int) -> "Ranks":
        mesh = comm.mesh(dp=comm.world().size // tp, tp=tp)
        return Ranks(mesh["dp"], mesh["tp"])


def train(
    *parts: "tuple[str, str | None]",
    stage: int | None,
    kind: str = "fp32",
    tp: int = 1,
    steps: int = 2,
    torch_draws: bool = True,
) -> Any:
    """Losses, an evaluation and params of some steps; ``parts`` are policies of blocks."""
    torch.manual_seed(3)
    module = Pieces()
    module.train(torch_draws)
    apply, params = fds.functional(module)
    ranks = Ranks.now(tp)

    def loss(p: Any, batch: Any, key: fds.Key | None) -> Tensor:
        return F.mse_loss(apply(p, batch[0], key).float(), batch[1].float())

    halves = () if kind == "fp32" else (T.mixed_precision("bf16", autocast=kind == "autocast"),)
    zero = () if stage is None else (T.zero(stage, ranks.dp),)
    remats = [T.remat(blocks, policy=p, group=ranks.tp if "partition" in p else None) for p, blocks in parts]
    step = fds.compose(*halves, *zero, *remats)(fds.train_step(loss, fds.adamw(1e-2, eps=1e-4), seed=5))
    state, losses = step.init(params), []
    batch = own_rows(CASES["blocks"].batch(6), ranks.dp)
    torch.manual_seed(11 + ranks.dp.rank)
    for _ in range(steps):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"].item())
    return losses, step.evaluate(state, batch).item(), step.params(state)


@cache
def without(n: int, tp: int, seed: int, stage: int | None, kind: str) -> Any:
    return comm.simulate(lambda: train(stage=stage, kind=kind, tp=tp), world_size=n * tp, seed=seed)


@pytest.mark.law(28)
@settings(max_examples=settings.default.max_examples // 2)
@given(
    policy=st.sampled_from(POLICIES),
    stage=st.sampled_from(STAGES),
    n=st.integers(1, 3),
    kind=st.sampled_from(("fp32", "bf16", "autocast")),
    seed=st.integers(0, 3),
)
def test_no_policy_changes_a_bit(policy: str, stage: int | None, n: int, kind: str, seed: int) -> None:
    """The step with remat = the step without, bit for bit: any policy, stage, n, precision; both kinds of dropout."""
    tp = 2 if "partition" in policy else 1
    found = comm.simulate(lambda: train((policy, "blocks"), stage=stage, kind=kind, tp=tp), world_size=n * tp, seed=seed)
    assert_same(found, without(n, tp, seed, stage, kind))


@pytest.mark.law(28)
@settings(max_examples=max(1, settings.default.max_examples // 4))
@given(
    inner=st.sampled_from(POLICIES),
    outer=st.sampled_from(POLICIES),
    where=st.sampled_from(("blocks.*.first", "blocks.*.second", "blocks.[02]", "blocks")),
    around=st.sampled_from(("blocks", "", None)),
    stage=st.sampled_from(STAGES),
    reports=st.booleans(),
)
def test_remats_nest(inner: str, outer: str, where: str, around: str | None, stage: int | None, reports: bool) -> None:
    """Blocks in blocks, or in the whole function, each with a policy of its own: the step without, bit for bit."""
    inner = inner if "first" not in where and "second" not in where else _nameless(inner)

    def program() -> Any:
        with fds.remat_report() if reports else nullcontext():
            return train((inner, where), (_nameless(outer), around), stage=stage, tp=2)

    assert_same(comm.simulate(program, world_size=2), without(1, 2, 0, stage, "fp32"))


def _nameless(policy: str) -> str:
    """Without what it says of names: an inner remat keeps its names to itself."""
    return ",".join(word for word in policy.split(",") if not word.startswith(("mid", "out")))


@pytest.mark.sample(4)
@pytest.mark.law(28)
@pytest.mark.parametrize("stage", [3])
@pytest.mark.parametrize("name", [name for name in sorted(CASES) if name not in ("odd leaves", "branching", "recurrent")])
def test_every_model(name: str, stage: int) -> None:
    """Law 28 for each model with an awkward trait, torch's own checkpoints among them."""
    for policy in ("offload", "recompute,matmuls=save"):
        found = comm.simulate(lambda policy=policy: run(CASES[name], (T.zero(stage), T.remat(policy=policy))), world_size=2)
        assert_same(found, comm.simulate(lambda: run(CASES[name], (T.zero(stage),)), world_size=2))


class Counting(nn.Module):
    """A block that writes its buffers, each in another way, and computes with them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner = (
            nn.BatchNorm1d(4),
            nn.Sequential(nn.Linear(4, 4), nn.InstanceNorm1d(3, track_running_stats=True)),
        )
        self.narrow = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("mask", torch.ones(4))
        self.register_buffer("large", torch.zeros(40_000))
        self.register_buffer("late", None)
        self.register_buffer("statistics", torch.tensor([[0.0], [1.0]]).repeat(1, 4))
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean((0, 1))
        self.large.data.add_(x.detach().mean())
        self.late = self.mean if self.late is None else 0.5 * (self.late + self.mean)
        if self.runs == 0:
            self.register_buffer("made", self.mean.clone())
        self.runs += 1
        self.made += self.runs * self.mean
        x = self.norm(x.transpose(1, 2)).transpose(1, 2) * self.mask + self.mean + self.large[-1] + self.late * self.made
        x = x + F.batch_norm(x.transpose(1, 2), *self.statistics, training=True).transpose(1, 2) + self.statistics[0]
        return torch.tanh(self.narrow(self.inner(x)))


class Stack(nn.Module):
    """Two such blocks, and a look at what they have written."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counting() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        return self.blocks[1](x * (1 + self.blocks[0].mean)) * (1 + self.blocks[1].mean)


@pytest.mark.law(28)
@settings(max_examples=max(1, settings.default.max_examples // 6))
@given(
    policy=st.sampled_from(("recompute", "recompute,matmuls=save", "offload")),
    around=st.none() | st.sampled_from(("recompute", "save")),
    where=st.sampled_from(("blocks", "blocks.*.inner", "*", "")),
    stage=st.sampled_from((None, 3)),
)
@example(policy="recompute", around="recompute", where="blocks", stage=None)
def test_buffers_are_written_once(policy: str, around: str | None, where: str, stage: int | None) -> None:
    """However often blocks run again, inside of others too: losses, an evaluation, params and buffers of the step without."""

    def program(*remats: fds.Transform) -> Any:
        torch.manual_seed(2)
        apply, params = fds.functional(Stack())
        zero = () if stage is None else (T.zero(stage),)
        step = fds.compose(*zero, T.accumulate(2), *remats)(
            fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.sgd(0.1))
        )
        state, losses = step.init(params), []
        for x in torch.randn(2, 6, 3, 4):
            state, metrics = step(state, x)
            losses.append(metrics["loss"])
        apply.module.eval()
        return losses, step.evaluate(state, x), step.params(state), step.module_buffers(state)

    def compare() -> None:
        outer = () if around is None else (T.remat("", policy=around),)
        assert_same(program(T.remat(where, policy=policy), *outer), program())

    comm.simulate(compare, world_size=1)


def test_a_modules_own_buffers_are_written_once() -> None:
    """``fds.remat(module)``, or of a method."""
    x = torch.randn(5, 3, 4)
    for again in (fds.remat, lambda module: fds.remat(module.forward)):
        torch.manual_seed(0)
        ours, theirs = Counting(), Counting()
        theirs.load_state_dict(ours.state_dict())
        for function in (again(ours), theirs):
            for _ in range(2):
                function(x).square().sum().backward()
        assert_same(dict(ours.named_buffers()), dict(theirs.named_buffers()))
        assert_same([p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()])


def test_buffers_of_an_apply_are_written_once() -> None:
    """Also where the function that runs again is the user's own, and calls the module."""

    def program(again: Any) -> Any:
        torch.manual_seed(2)
        apply, params = fds.functional(Stack())
        step = fds.train_step(lambda p, x: again(lambda x: apply(p, x).tanh())(x).square().mean(), fds.sgd(0.1))
        state = step.init(params)
        for x in torch.randn(2, 6, 3, 4):
            state, _ = step(state, x)
        return step.params(state), step.module_buffers(state)

    assert_same(program(fds.remat), program(lambda function: function))


class InPlace(nn.Module):
    """Writes in place, which all copies of a module see, and computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("runs", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return torch.tanh(self.norm(x)) * self.runs + self.norm.running_mean[:, None]


@pytest.mark.parametrize(("kind", "stepping"), [(Counting, False), (InPlace, False), (InPlace, True)])
def test_buffers_are_written_once_where_another_copy_of_the_module_runs_again(kind: Any, stepping: bool) -> None:
    """Outside of a step each call has its own, and in a step each tree of params."""
    x = torch.randn(2, 6, 3, 4, generator=torch.Generator().manual_seed(1))

    def program(again: Any) -> Any:
        torch.manual_seed(2)
        apply, params = fds.functional(kind())
        loss = again(lambda p, x: apply({name: 1.0 * leaf for name, leaf in p.items()}, x).square().mean())
        if not stepping:
            return [torch.autograd.grad(loss(params, rows), list(params.values())) for rows in x]
        step = fds.train_step(loss, fds.sgd(0.1))
        state = step.init(params)
        for rows in x:
            state, _ = step(state, rows)
        return step.params(state), step.module_buffers(state)

    assert_same(program(fds.remat), program(lambda function: function))


def test_a_star_is_no_whole_module() -> None:
    """Which ``""`` stands for: each block runs twice, not three times."""
    ran: list[int] = []

    class Told(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            ran.append(self.out_features)
            return super().forward(x)

    apply, params = fds.functional(nn.Sequential(Told(4, 3), Told(3, 1)))
    step = T.remat("*")(fds.train_step(lambda p, x: apply(p, x).sum(), fds.sgd(0.1)))
    step(step.init(params), torch.ones(2, 4))
    assert sorted(ran) == [1, 1, 3, 3]


@pytest.mark.law(29)
@settings(max_examples=max(1, settings.default.max_examples // 8))
@given(policy=st.sampled_from(POLICIES), stage=st.sampled_from(STAGES[1:]))
def test_draws_of_a_key_do_not_depend_on_n(policy: str, stage: int) -> None:
    """Dropout by ``Key`` in blocks that are recomputed, on 3 ranks = on one."""
    tp = 2 if "partition" in policy else 1
    (alone,) = comm.simulate(lambda: train(stage=None, torch_draws=False), world_size=1)
    for found in comm.simulate(lambda: train((policy, "blocks"), stage=stage, tp=tp, torch_draws=False), world_size=3 * tp):
        torch.testing.assert_close(found[0], alone[0], rtol=2e-5, atol=2e-5)


@pytest.mark.law(30)
@settings(max_examples=max(1, settings.default.max_examples // 5))
@given(policy=st.sampled_from(POLICIES[:3]), order=st.permutations(range(4)), stage=st.sampled_from((1, 3)))
def test_orders_do_not_matter(policy: str, order: list[int], stage: int) -> None:
    """remat commutes with accumulate, clip and zero."""

    def program(order: list[int]) -> Any:
        chain = (T.remat(policy=policy), T.zero(stage), T.accumulate(2), T.clip(0.5))
        return run(CASES["blocks"], tuple(chain[i] for i in order))

    assert_same(comm.simulate(program, order, world_size=2), comm.simulate(program, sorted(order), world_size=2))


def on_processes() -> Any:
    policies = ("partition", "offload", "recompute,inputs=partition", "recompute,mid=partition,matmuls=save")
    return {policy: train((policy, "blocks"), stage=3, tp=2, steps=1) for policy in policies}


def test_processes_give_the_bits_of_the_simulator() -> None:
    """Law 18 for steps with remat."""
    assert_same(comm.spawn(on_processes, world_size=2), comm.simulate(on_processes, world_size=2))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_offload_on_a_gpu() -> None:
    """Offload through pinned memory on a stream of its own: the gradients without, bit for bit."""
    blocks = [torch.randn(512, 512, device="cuda", requires_grad=True) for _ in range(6)]
    x = torch.randn(4096, 512, device="cuda")

    def loss(policy: str) -> Tensor:
        y = x
        for w in blocks:
            y = fds.remat(lambda y, w=w: torch.tanh(y @ w), policy=policy)(y)
        return y.square().sum()

    expected = torch.autograd.grad(loss("save"), blocks)
    for policy in ("offload", "recompute,inputs=offload", "recompute,matmuls=offload"):
        assert_same(torch.autograd.grad(loss(policy), blocks), expected)


# -- reports ------------------------------------------------------------------------------------------------------------


class Counted:
    """What autograd holds, counted apart from the library: each piece of memory once, that of ``known`` tensors left out."""

    def __init__(self, known: list[Tensor]) -> None:
        self._known = {p.untyped_storage().data_ptr() for p in known}
        self._held: dict[int, weakref.ref[Any]] = {}
        self.bytes = 0

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        before = self._held.get(storage.data_ptr())
        if storage.data_ptr() not in self._known and (before is None or before() is not storage):
            self._held[storage.data_ptr()] = weakref.ref(storage)
            self.bytes += storage.nbytes()
        return tensor.detach()


def count(policy: str | None, stage: int | None = None) -> tuple[int, fds.RematReport]:
    """Bytes that hooks around the whole loss see, and the report of the same step."""
    torch.manual_seed(3)
    apply, params = fds.functional(Pieces())
    seen: list[int] = []

    def forward(inner: Any, step: fds.Step, state: fds.State, function: Any, batch: Any) -> Any:
        counted = Counted(fds.tree.leaves(state.params))
        with saved_tensors_hooks(counted.pack, lambda tensor: tensor):
            found = inner(step, state, function, batch)
        seen.append(counted.bytes)
        return found

    ranks = Ranks.now(comm.world().size)
    zero = () if stage is None else (T.zero(stage, ranks.dp),)
    remats = [T.remat("blocks", policy=policy, group=ranks.tp if "partition" in policy else None)] if policy else []
    step = fds.compose(*zero, *remats, fds.wrap("counted", forward=forward))(
        fds.train_step(lambda p, batch: F.mse_loss(apply(p, batch[0]), batch[1]), fds.sgd(0.1))
    )
    with fds.remat_report() as report:
        step(step.init(params), CASES["blocks"].batch(5))
    return seen[0], report


@cache
def held_alone() -> int:
    """Bytes that autograd alone holds."""
    return count(None)[0]


@pytest.mark.law(28)
@pytest.mark.parametrize(
    ("policy", "more"),
    [
        ("save", 0),
        ("recompute", 12),  # the running total that each block is given, which no backward pass needs but a second run does
        ("recompute,inputs=offload", 12),
        ("recompute,inputs=partition", 12),
        ("offload", 160),  # the last block's result, which the head saves, too: it is held twice
        ("partition", 160),
    ],
)
def test_reports_are_true_to_the_byte(policy: str, more: int) -> None:
    """saved = what hooks around the loss see; saved + recomputed + wholes of the rest = what autograd alone holds, and more."""
    for found, report in comm.simulate(lambda: count(policy), world_size=2 if "partition" in policy else 1):
        away = [row for row in report.rows if row.keep in (Keep.OFFLOAD, Keep.PARTITION)]
        assert report.saved == found
        assert report.saved + report.recomputed + sum(row.whole for row in away) == held_alone() + more
        assert report.offloaded == sum(row.whole for row in away if row.keep is Keep.OFFLOAD)
        assert bool(away) == ("partition" in policy or "offload" in policy)


@pytest.mark.law(28)
@pytest.mark.parametrize("keep", ["save", "offload", "partition"])
@pytest.mark.parametrize("stage", [None, 3])
def test_reports_of_named_values(keep: str, stage: int | None) -> None:
    """Three blocks' values of 5 x 8 floats: 480 bytes; of 3 ranks each holds a third and padding: 14 floats of 40."""
    for _, report in comm.simulate(lambda: count(f"recompute,mid={keep}", stage), world_size=3):
        rows = [row for row in report.rows if row.what == "mid"]
        assert [row.part for row in rows] == ["blocks.0", "blocks.1", "blocks.2"]
        assert {(row.keep.value, row.tensors, row.whole) for row in rows} == {(keep, 1, 160)}
        held = {"save": 480, "offload": 480, "partition": 3 * 14 * 4}[keep]
        assert sum(row.held for row in rows) == held == {"save": 480}.get(keep, report.offloaded + report.partitioned)
        assert f"{report.recomputed:,}" in str(report)


@pytest.mark.parametrize(
    "policy", ["recompute", "offload", "partition", "recompute,inputs=offload", "recompute,inputs=partition"]
)
@pytest.mark.parametrize("stage", [None, 3])
def test_memory_is_given_back(policy: str, stage: int | None) -> None:
    """Between forward and backward nothing is left of the blocks' activations, and of their inputs what the policy says."""

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x: Tensor, seen: dict[str, list[Any]]) -> Tensor:
            hidden = self.inner(x).exp()
            seen["inside"].append(weakref.ref(hidden.untyped_storage()))
            seen["inputs"].append(weakref.ref(x.untyped_storage()))
            return hidden.sin()

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(6, 6), Watched(), Watched()])

        def forward(self, x: Tensor, seen: Any) -> Tensor:
            first, *others = self.layers
            x = first(x)
            for other in others:
                x = other(x, seen)
            return x

    def program() -> None:
        apply, params = fds.functional(Both())

        def loss(p: Any, batch: Any) -> Tensor:
            seen: dict[str, list[weakref.ref[Any]]] = {"inside": [], "inputs": []}
            found = apply(p, batch[0], seen).sum()
            assert [ref() for ref in seen["inside"]] == [None, None]
            assert [ref() is None for ref in seen["inputs"]] == [policy != "recompute"] * 2
            return found

        group = comm.world() if "partition" in policy else None
        zero = () if stage is None else (T.zero(stage),)
        step = fds.compose(*zero, T.remat("layers.[12]", policy=policy, group=group))(fds.train_step(loss, fds.sgd(0.1)))
        step(step.init(params), CASES["blocks"].batch(5))

    comm.simulate(program, world_size=1 if stage is None else 2)


@pytest.mark.law(21)
@settings(max_examples=settings.default.max_examples // 3)
@given(n=st.integers(1, 4), policy=st.sampled_from(("partition", "recompute,inputs=partition", "recompute,mid=partition")))
def test_gathers_are_in_the_ledger(n: int, policy: str) -> None:
    """Each rank sends (n - 1) pieces of 1/n of each divided value, once: the report's held bytes, n - 1 times."""

    def program() -> tuple[int, int, int]:
        apply, params = fds.functional(Pieces().eval())
        group = comm.world()
        step = T.remat("blocks", policy=policy, group=group)(fds.train_step(lambda p, b: apply(p, b[0]).sum(), fds.sgd(0.1)))
        with fds.remat_report() as report, comm.ledger() as book:
            step(step.init(params), CASES["blocks"].batch(5))
        rows = [row for row in book.rows if row.group == "world/remat"]
        return report.partitioned, sum(row.bytes for row in rows), sum(row.calls for row in rows)

    for held, sent, calls in comm.simulate(program, world_size=n):
        assert held > 0
        assert sent == (n - 1) * held
        assert n == 1 or calls == {"recompute,mid=partition": 3}.get(policy, calls)


# -- pipelines, steps that call no module -------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = fds.checkpoint_name(self.inner(self.norm(x)), "mid")
        return x + F.gelu(hidden)


SCHEDULES = {"gpipe": pp.gpipe(2, 4), "1f1b": pp.one_f_one_b(2, 4), "zero bubble": pp.zb_h1(2, 4)}


def piped(schedule: str, stage: int | None, *remats: fds.Transform) -> Any:
    """Two steps of a pipeline of two stages, along the last two of the world's ranks, with ZeRO along the first."""
    torch.manual_seed(2)
    net = nn.Sequential(*(Residual() for _ in range(4)), nn.Linear(6, 3))
    batch = CASES["blocks"].batch(8)
    stages, params = pp.cut(net, 2, loss=lambda y, given: F.mse_loss(y, given[1]), example=batch, blocks="[0-3]")
    mesh = comm.mesh(dp=comm.world().size // 2, pp=2)
    zero = () if stage is None else (T.zero(stage, mesh["dp"]),)
    step = fds.compose(*zero, T.pipeline(SCHEDULES[schedule], stages, mesh["pp"]), *remats)(
        fds.train_step(stages, fds.adamw(1e-2, eps=1e-4))
    )
    state, losses = step.init(params), []
    for _ in range(2):
        state, metrics = step(state, own_rows(batch, mesh["dp"]))
        losses.append(metrics["loss"].item())
    return losses, step.params(state)


@pytest.mark.law(28)
@settings(max_examples=max(1, settings.default.max_examples // 6))
@given(
    policy=st.sampled_from([policy for policy in POLICIES if "partition" not in policy and "out" not in policy]),
    blocks=st.sampled_from(("", "[0-3]", None)),
    schedule=st.sampled_from(sorted(SCHEDULES)),
    stage=st.sampled_from((None, 1, 3)),
)
def test_pipelines(policy: str, blocks: str | None, schedule: str, stage: int | None) -> None:
    """A pipeline's stages, or the blocks in them, with split backward passes too: the pipeline without, bit for bit."""
    policy = policy if blocks == "[0-3]" else _nameless(policy)
    n = 2 if stage is None else 4
    found = comm.simulate(lambda: piped(schedule, stage, T.remat(blocks, policy=policy)), world_size=n)
    assert_same(found, comm.simulate(piped, schedule, stage, world_size=n))


def test_the_whole_function_is_a_part() -> None:
    """blocks='' recomputes a loss without modules, which the blocks' patterns would not find."""

    def program(*strategy: fds.Transform) -> Any:
        params = {"blocks": [torch.eye(3), torch.ones(3, 3)]}
        loss = lambda p, x: torch.tanh(torch.tanh(x @ p["blocks"][0]) @ p["blocks"][1]).square().sum()  # noqa: E731
        step = fds.compose(*strategy)(fds.train_step(loss, fds.sgd(0.1)))
        with fds.remat_report() as report:
            state, metrics = step(step.init(params), torch.ones(2, 3))
        return metrics["loss"], step.params(state), report

    *expected, _ = program()
    *found, report = program(T.remat("", policy="recompute"))
    assert_same(found, expected)
    assert (report.saved, report.recomputed) == (24, 48)  # the batch; what the two tanh gave
    with pytest.raises(ValueError, match=r"runs no fds\.functional module.*T\.remat\(''\)"):
        program(T.remat("blocks", policy="recompute"))


# -- bad input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"policy": "recompte"}, r"'recompte' is unknown; the nearest is 'recompute'"),
        ({"policy": "recompute,mid=of"}, r"'of' is unknown; .*, of save, recompute, offload, partition"),
        ({"policy": "recompute,save"}, r"'save' is not what=word"),
        ({"policy": "recompute,inputs=recompute"}, "cannot be computed again without its inputs"),
        ({"policy": "save,mid=recompute"}, "mid=recompute where the rest is save"),
        ({"policy": "partition"}, "needs group="),
    ],
)
def test_refuses_policies(arguments: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        T.remat("blocks", **arguments)


def test_refuses_groups_and_paths_that_are_none() -> None:
    with pytest.raises(ValueError, match="would change nothing"):
        T.remat("blocks", group=comm.world())
    with pytest.raises(TypeError, match="is not a group"):
        T.remat("blocks", policy="partition", group="tp")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="is not a path"):
        T.remat(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("blocks", "error"),
    [
        ("block", "blocks='block' matches no module; the nearest is 'blocks'"),
        ("blocks.*.frist", "the nearest is 'blocks.[012].first'"),
        ("blocks.3", "the nearest is 'blocks"),
    ],
)
def test_refuses_patterns_that_match_nothing(blocks: str, error: str) -> None:
    """At init, before anything is allocated."""
    with pytest.raises(ValueError, match=error):
        train(("recompute", blocks), stage=3)


def test_refuses_names_that_no_value_has() -> None:
    with pytest.raises(ValueError, match=r"no value is named 'midd'; the nearest is 'mid', of mid, out"):
        train(("recompute,midd=save", "blocks"), stage=None)


def test_refuses_repeated_blocks_where_there_are_none() -> None:
    step = T.remat()(fds.train_step(lambda p, b: p["w"].sum(), fds.sgd(0.1)))
    with pytest.raises(ValueError, match="no path has a number"):
        step.init({"w": torch.ones(2)})


@pytest.mark.parametrize("differ", ["values", "shapes", "control flow"])
def test_refuses_activations_that_are_not_replicated(differ: str) -> None:
    """All ranks raise before the backward pass: there a gather would wait for ever, or mix ranks up."""

    def program() -> None:
        apply, params = fds.functional(nn.Sequential(nn.Linear(3, 3), nn.Tanh()))
        rank = comm.world().rank

        def loss(p: Any, x: Tensor) -> Tensor:
            found = apply(p, x)
            return (apply(p, x) if differ == "control flow" and rank else found).sum()

        step = T.remat(policy="partition", group=comm.world())(fds.train_step(loss, fds.sgd(0.1)))
        rows = torch.ones(2 + (differ == "shapes") * rank, 3) * (1 + (differ == "values") * rank)
        step(step.init(params), rows)

    with pytest.raises(RuntimeError, match=r"partitioned other activations: ranks \[1\] differ from rank 0"):
        comm.simulate(program, world_size=2)
