"""Experts that are modules of a list, as one stack: the list's model on any ranks, in any stage, and its names again."""

import tempfile
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm, moe
from functional_ds import transforms as T

EXPERTS, WIDTH, INNER = 4, 4, 6


class Expert(nn.Module):
    """With a bias and a norm, which grouped products do not know."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, INNER), nn.LayerNorm(INNER), nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(torch.relu(self.up(x))))  # type: ignore[no-any-return]


class Listed(nn.Module):
    """A mixture as research repositories write it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), nn.ModuleList(Expert() for _ in range(EXPERTS))

    def chosen(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = self.gate(x).softmax(-1).topk(2, -1)
        return weights, ids

    def forward(self, x: Tensor) -> Tensor:
        (weights, ids), y = self.chosen(x), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            tokens, place = torch.where(ids == number)
            y = y.index_add(0, tokens, expert(x[tokens]) * weights[tokens, place, None])
        return y


class Stacked(Listed):
    """The same with a stack."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = moe.StackedExperts(self.experts)
        del self.experts

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.chosen(x)
        return moe.exchange(self.stack, x, routing=moe.Routing(ids, weights, EXPERTS))


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def rows() -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))


def by_list(params: Any) -> dict[str, Tensor]:
    return {path.replace("stack.", "experts."): leaf.detach().clone() for path, leaf in moe.unstacked(params).items()}


@cache
def plainly() -> tuple[list[float], list[dict[str, Tensor]]]:
    """Plain PyTorch on the list: losses, and params after each update."""
    model, x = made(Listed), rows()
    optimizer, losses, after = torch.optim.Adam(model.parameters(), 0.1, eps=1e-2), [], []
    for _ in range(3):
        optimizer.zero_grad()
        loss = (model(x) - x.flip(1)).square().sum() / len(x)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
        after.append({name: leaf.detach().clone() for name, leaf in model.named_parameters()})
    return losses, after


def program(stage: int, ep: int, folder: str, first: bool, remat: bool = False) -> tuple[list[float], dict[str, Tensor]]:
    """Two steps and a checkpoint, or one more from it."""
    mesh = comm.mesh(dp=comm.world().size).split("dp", edp=comm.world().size // ep, ep=ep)
    dp, (apply, params) = mesh["edp", "ep"], fds.functional(made(Stacked))

    def loss(p: Any, x: Tensor) -> fds.Weighted:
        return fds.Weighted((apply(p, x) - x.flip(1)).square().sum(), len(x))

    chain = [T.zero(stage, dp), T.experts(r"^stack\.", mesh["ep"], edp=mesh["edp"]), *([T.remat("")] if remat else [])]
    step = fds.compose(*chain, T.clip(0.5))(fds.train_step(loss, fds.adam(0.1, eps=1e-2)))
    state, losses = step.init(params), []
    assert ep == 1 or [leaf.shape[0] for path, leaf in fds.tree.named(T.experts(r"^stack\.", mesh["ep"]).cut(params))][-1] < 4
    state = state if first else fds.load(folder, like=state)
    for _ in range(2 if first else 1):
        state, metrics = step(state, rows().chunk(dp.size)[dp.rank])
        losses.append(metrics["loss"].item())
    if first:
        fds.save(state, folder)
    return losses, by_list(step.params(state))


@pytest.mark.law(46)
def test_the_stack_has_the_experts_of_the_list() -> None:
    """Each expert, one without rows among them, gets the list's rows in its order; the choices' sum is as exact."""
    listed, stacked = made(Listed), made(Stacked)
    groups, x = moe.RowGroups.of([3, 0, 1, 4]), rows()
    modules: Any = listed.experts
    alone = torch.cat([expert(piece) for expert, piece in zip(modules, x.split([3, 0, 1, 4]), strict=True)])
    one: Any = stacked.stack
    assert torch.equal(one(x, groups), alone)
    for some in (x, x[:1]):
        torch.testing.assert_close(listed(some), stacked(some), rtol=1e-6, atol=1e-6)
    found, expected = by_list(dict(stacked.named_parameters())), dict(listed.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(leaf, expected[name]) for name, leaf in found.items())


@pytest.mark.law(47)
@pytest.mark.law(50)
@pytest.mark.parametrize(
    ("before", "after", "remat"), [((3, 2, 4), (1, 4, 4), False), ((2, 4, 4), (3, 1, 2), True), ((0, 2, 2), (2, 2, 4), True)]
)
def test_ranks_train_as_the_list_does(before: tuple[int, int, int], after: tuple[int, int, int], remat: bool) -> None:
    """(stage, ep, ranks), and from its checkpoint other ones."""
    losses, params = plainly()
    with tempfile.TemporaryDirectory() as folder:
        for (stage, ep, ranks), first in ((before, True), (after, False)):
            for found, leaves in comm.simulate(program, stage, ep, folder, first, remat, world_size=ranks):
                assert found == pytest.approx(losses[:2] if first else losses[2:], rel=1e-5)
                expected = params[1 if first else 2]
                assert leaves.keys() == expected.keys()
                for name, leaf in leaves.items():
                    torch.testing.assert_close(leaf, expected[name], rtol=1e-4, atol=1e-5, msg=name)


def test_shapes_alone() -> None:
    out = comm.simulate(lambda: made(Stacked).to("meta")(torch.empty(8, WIDTH, device="meta")), world_size=2, shapes_only=True)
    assert [each.shape for each in out] == [(8, WIDTH)] * 2


def test_lists_are_refused_by_name() -> None:
    """A list's leaves are not stacks: cut along dim 0 each would be a part of one expert."""

    def modules() -> None:
        mesh = comm.mesh(dp=2).split("dp", edp=1, ep=2)
        apply, params = fds.functional(made(Listed))
        T.experts("experts", mesh["ep"]).cut(params)
        del apply

    def functions(shape: tuple[int, ...]) -> list[int]:
        mesh = comm.mesh(dp=2).split("dp", edp=1, ep=2)
        tree = {"experts": [{"up": torch.ones(shape), "bias": torch.ones(shape[:2])} for _ in range(2)]}
        return [len(leaf) for leaf in fds.tree.leaves(T.experts("experts", mesh["ep"]).cut(tree))]

    with pytest.raises(ValueError, match=r"'experts\.0.* belongs to an nn\..*make experts .* by fds\.moe\.StackedExp"):
        comm.simulate(modules, world_size=2)
    with pytest.raises(ValueError, match=r"'experts\.0\.bias' of shape \[4, 4\] is one expert's in the list 'experts'"):
        comm.simulate(functions, (4, 4), world_size=2)
    assert comm.simulate(functions, (4, 2, 2), world_size=2) == [[2] * 4] * 2  # layers, with a stack in each


def test_modules_that_make_no_stack() -> None:
    with pytest.raises(ValueError, match="there is none"):
        moe.StackedExperts([])
    with pytest.raises(ValueError, match=r"experts: 1 is a Linear with weight \[3, 2\] .*; all must be alike"):
        moe.StackedExperts([nn.Linear(2, 2), nn.Linear(2, 3)])
    with pytest.raises(ValueError, match="experts: 0 has buffers"):
        moe.StackedExperts([nn.BatchNorm1d(2)])
    with pytest.raises(ValueError, match=r"stacked: the leaf at 'w' has shape \[3\], and the rows come in 2 groups"):
        moe.each_expert(lambda p, x: x, {"w": torch.ones(3)})(torch.ones(2, 1), moe.RowGroups.of([1, 1]))
