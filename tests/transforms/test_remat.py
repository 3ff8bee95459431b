"""Law 28: recomputing, offloading and partitioning activations changes no bit, whatever else a step is made of."""

import gc
import weakref
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
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
        return self.out(given["x"]) + given["total"][0]


def train(*strategy: fds.Transform, group: bool = False, steps: int = 2, draws: str = "both") -> Any:
    """Losses, an evaluation and params; with ``group`` all ranks see the same rows."""
    torch.manual_seed(3)
    module = Pieces()
    if draws == "key":
        module.eval()
    apply, params = fds.functional(module)

    def loss(p: Any, batch: Any, key: fds.Key | None) -> Tensor:
        return F.mse_loss(apply(p, batch[0], key).float(), batch[1].float())

    step = fds.compose(*strategy)(fds.train_step(loss, fds.adamw(1e-2, eps=1e-4), seed=5))
    state, losses = step.init(params), []
    batch = CASES["blocks"].batch(6)
    batch = batch if group else own_rows(batch, comm.world())
    torch.manual_seed(11 if group else 11 + comm.world().rank)
    for _ in range(steps):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"].item())
    return losses, step.evaluate(state, batch).item(), step.params(state)


def precision(kind: str) -> tuple[fds.Transform, ...]:
    if kind == "fp32":
        return ()
    return (T.mixed_precision("bf16", autocast=kind == "autocast"),)


def zero(stage: int | None) -> tuple[fds.Transform, ...]:
    return () if stage is None else (T.zero(stage),)


@cache
def without(n: int, seed: int, stage: int | None, kind: str, group: bool) -> Any:
    return comm.simulate(lambda: train(*precision(kind), *zero(stage), group=group), world_size=n, seed=seed)


def remat_of(policy: str, blocks: str | None = "blocks") -> fds.Transform:
    partitions = "partition" in policy
    return T.remat(blocks, policy=policy, group=comm.world() if partitions else None)


@pytest.mark.law(28)
@given(
    policy=st.sampled_from(POLICIES),
    stage=st.sampled_from(STAGES),
    n=st.integers(1, 3),
    kind=st.sampled_from(("fp32", "bf16", "autocast")),
    seed=st.integers(0, 3),
)
def test_no_policy_changes_a_bit(policy: str, stage: int | None, n: int, kind: str, seed: int) -> None:
    """The step with remat = the step without, bit for bit: any policy, stage, n, precision; both kinds of dropout."""
    group = "partition" in policy
    found = comm.simulate(
        lambda: train(*precision(kind), *zero(stage), remat_of(policy), group=group), world_size=n, seed=seed
    )
    assert_same(found, without(n, seed, stage, kind, group))


@pytest.mark.law(28)
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
    inner = inner if where.startswith("blocks.[") or where == "blocks" else ",".join(w for w in inner.split(",") if "mid" not in w)

    def program() -> Any:
        strategy = (remat_of(inner, where), remat_of(outer, around))
        if not reports:
            return train(*zero(stage), *strategy, group=True)
        with fds.remat_report():
            return train(*zero(stage), *strategy, group=True)

    try:
        found = comm.simulate(program, world_size=2)
    except ValueError as error:  # the inner one keeps its names to itself
        assert "no value is named" in str(error) and ("mid" in outer or "out" in outer)
        return
    assert_same(found, without(2, 0, stage, "fp32", True))


@pytest.mark.law(28)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", [name for name in sorted(CASES) if name not in ("odd leaves", "branching", "recurrent")])
def test_every_model(name: str, stage: int) -> None:
    """Law 28 for each model with an awkward trait, torch's own checkpoints among them."""
    for policy in ("recompute", "offload", "recompute,matmuls=save"):
        found = comm.simulate(lambda policy=policy: run(CASES[name], (T.zero(stage), T.remat(policy=policy))), world_size=2)
        assert_same(found, comm.simulate(lambda: run(CASES[name], (T.zero(stage),)), world_size=2))


@pytest.mark.law(29)
@given(policy=st.sampled_from(POLICIES), stage=st.sampled_from(STAGES[1:]))
def test_draws_of_a_key_do_not_depend_on_n(policy: str, stage: int) -> None:
    """Dropout by ``Key`` in recomputed blocks on 3 ranks = on one."""
    if "partition" in policy:
        policy = policy.replace("partition", "offload")  # ranks have other rows
    alone = train(draws="key", steps=1)[0]
    for found in comm.simulate(lambda: train(T.zero(stage), remat_of(policy), draws="key", steps=1), world_size=3):
        assert sum(found[0]) == pytest.approx(alone[0], rel=1e-4) or stage is None


@pytest.mark.law(30)
@given(policy=st.sampled_from(POLICIES), order=st.permutations(range(4)), stage=st.sampled_from((1, 3)))
def test_orders_do_not_matter(policy: str, order: list[int], stage: int) -> None:
    """remat commutes with accumulate, clip and zero."""

    def program(order: list[int]) -> Any:
        chain = (remat_of(policy), T.zero(stage), T.accumulate(2), T.clip(0.5))
        return train(*(chain[i] for i in order), group=True)

    assert_same(
        comm.simulate(program, order, world_size=2),
        comm.simulate(program, sorted(order), world_size=2),
    )


def on_processes() -> Any:
    return {policy: train(T.zero(3), remat_of(policy), group=True, draws="key") for policy in POLICIES}


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
    """What autograd holds, counted apart from the library: each piece of memory once, params left out."""

    def __init__(self, params: list[Tensor]) -> None:
        self._params = {p.untyped_storage().data_ptr() for p in params}
        self._held: dict[int, weakref.ref[Any]] = {}
        self.bytes = 0

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        known = self._held.get(storage.data_ptr())
        if storage.data_ptr() not in self._params and (known is None or known() is not storage):
            self._held[storage.data_ptr()] = weakref.ref(storage)
            self.bytes += storage.nbytes()
        return tensor.detach()


def count(policy: str, *, given_apart: int = 0) -> tuple[int, fds.RematReport]:
    """What hooks around the whole loss see, and the report of the same step."""
    torch.manual_seed(3)
    apply, params = fds.functional(Pieces())
    seen = []

    def loss(p: Any, batch: Any) -> Tensor:
        counted = Counted(list(p.values()))
        with saved_tensors_hooks(counted.pack, lambda tensor: tensor):
            found = F.mse_loss(apply(p, batch[0]), batch[1])
        seen.append(counted.bytes)
        return found

    step = remat_of(policy)(fds.train_step(loss, fds.sgd(0.1)))
    with fds.remat_report() as report:
        step(step.init(params), CASES["blocks"].batch(5))
    return seen[0], report


@pytest.mark.law(28)
@pytest.mark.parametrize("policy", POLICIES)
def test_reports_are_true_to_the_byte(policy: str) -> None:
    """Saved bytes are what hooks around the loss see, and all of it together is what autograd alone would hold."""

    def program() -> tuple[int, fds.RematReport]:
        return count(policy)

    plain, _ = count("save")
    (found, report), *_ = comm.simulate(program, world_size=2)
    kept_inside = sum(row.held for row in report.rows if row.keep is fds.saving.Keep.SAVE and row.what not in ("inputs", "inside"))
    away = sum(row.whole for row in report.rows if row.keep.value in ("offload", "partition"))
    batch = 5 * 6 * 4 + 5 * 3 * 4  # what is given to the loss is held, too, but made by nobody
    hidden = kept_inside if policy.startswith("recompute") else 0  # torch's checkpoint keeps them, where hooks do not see it
    assert found <= report.saved - hidden + batch
    if policy in ("recompute", "save"):
        assert report.saved + report.recomputed + away == count("save")[1].saved
    assert report.offloaded == sum(row.whole for row in report.rows if row.keep.value == "offload")
