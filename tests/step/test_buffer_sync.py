"""Attributes that forward passes set: data-parallel ranks agree on them as on buffers, and a checkpoint has them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from tests.planting import Bug, planted

SETS = ("tensor", "dict", "list", "grown", "int", "float", "shaped", "late", "passing")


class Sets(nn.Module):
    """Keeps statistics of its rows in attributes, and reads them in the next pass."""

    def __init__(self, sets: tuple[str, ...]) -> None:
        super().__init__()
        self.inner, self.sets, self.calls = nn.Linear(3, 3), sets, torch.zeros(())
        self.mean, self.table, self.listed = torch.zeros(()), {"x": torch.zeros(())}, [torch.zeros(())]
        self.grown: list[Tensor] = []
        self.count, self.part, self.shaped, self.late = 0, 0.0, torch.zeros(1), torch.zeros(())
        self.register_buffer("passing", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        mean = y.detach().mean()
        factor = 1 + self.mean + self.table["x"] + self.listed[0] + sum(self.grown) + self.part + self.shaped.sum() + self.late
        self.calls = self.calls + 1
        if "tensor" in self.sets:
            self.mean = self.mean + mean
        if "dict" in self.sets:
            self.table["x"] = self.table["x"] + mean
        if "list" in self.sets:
            self.listed[0].add_(mean)
        if "grown" in self.sets and len(self.grown) < 3:
            self.grown.append(mean)
        if "int" in self.sets:
            self.count += 1 + int(mean > 0)
        if "float" in self.sets:
            self.part += mean.item()
        if "shaped" in self.sets:
            self.shaped = mean * torch.ones(1 + int(mean > 0))
        if "late" in self.sets and self.calls > 2:
            self.late = self.late + mean
        if "passing" in self.sets:
            self.passing = self.passing + mean
        return y * (factor + self.passing) + self.count  # type: ignore[no-any-return]


def rows(index: int, rank: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * index + rank))


def build(sets: tuple[str, ...], stage: int, policy: Any) -> tuple[fds.Step, fds.State]:
    torch.manual_seed(0)
    apply, params = fds.functional(Sets(sets))
    step = T.zero(stage)(fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.sgd(0.01), buffers=policy))
    return step, step.init(params)


def held(step: fds.Step, state: fds.State) -> dict[str, Any]:
    return dict(step.module_buffers(state))


def run(sets: tuple[str, ...], stage: int, policy: str, folder: str = "", steps: int = 5) -> tuple[list[float], dict[str, Any]]:
    (step, state), losses = build(sets, stage, policy), []
    for index in range(steps):
        if folder and index == 3:
            fds.save(state, folder)
            step, state = build(sets, stage, policy)
            state = fds.load(folder, like=state)
        state, metrics = step(state, rows(index, comm.world().rank))
        losses.append(metrics["loss"].item())
    return losses, held(step, state)


def as_one_device(sets: tuple[str, ...], ranks: int, policy: str, steps: int = 5) -> list[float]:
    """Plain PyTorch: the module on each rank's rows in turn; after the step all have what the policy says."""
    torch.manual_seed(0)
    modules = [Sets(sets) for _ in range(ranks)]
    for module in modules[1:]:
        module.inner = modules[0].inner
    optimizer, losses = torch.optim.SGD(modules[0].inner.parameters(), lr=0.01), []
    for index in range(steps):
        optimizer.zero_grad()
        parts = [module(rows(index, rank)).square().mean() / ranks for rank, module in enumerate(modules)]
        torch.stack(parts).sum().backward()
        optimizer.step()
        losses.append(sum(part.item() for part in parts))
        if policy == "own":
            continue
        for key in AGREED:
            everyone = [vars(module)[key] for module in modules]
            agreed = fds.tree.map(lambda *xs: _mean(xs) if policy == "mean" else xs[0], *everyone)
            for module in modules:
                vars(module)[key] = fds.tree.map(lambda x: x.clone() if isinstance(x, Tensor) else x, agreed)
        passing = [module.passing for module in modules]
        for module in modules:
            module.passing = _mean(passing) if policy == "mean" else passing[0].clone()
    return losses


AGREED = ("calls", "mean", "table", "listed", "grown", "count", "part", "shaped", "late")


def _mean(values: Any) -> Any:
    if isinstance(values[0], Tensor):
        return torch.stack([*values]).mean(0) if len({x.shape for x in values}) == 1 else values[0]
    return sum(values) / len(values) if isinstance(values[0], float) else values[0]


@given(
    st.sets(st.sampled_from(SETS), min_size=1, max_size=4).map(lambda found: tuple(sorted(found))),
    st.sampled_from([0, 1, 3]),
    st.sampled_from(["first", "mean", "own"]),
    st.integers(1, 3),
)
def test_ranks_keep_what_the_policy_says(sets: tuple[str, ...], stage: int, policy: str, ranks: int) -> None:
    expected = as_one_device(sets, ranks, policy)
    found = comm.simulate(lambda: run(sets, stage, policy), world_size=ranks)
    for losses, kept in found:
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
        if policy != "own":
            torch.testing.assert_close(kept, found[0][1], rtol=0, atol=0)


@given(
    st.sets(st.sampled_from([name for name in SETS if name != "shaped"]), min_size=1, max_size=4).map(tuple),
    st.sampled_from([0, 3]),
    st.sampled_from(["first", "mean", "own"]),
    st.integers(1, 3),
)
def test_a_resumed_run_goes_on_as_one_without_a_break(
    tmp_path_factory: pytest.TempPathFactory, sets: tuple[str, ...], stage: int, policy: str, ranks: int
) -> None:
    folder = str(tmp_path_factory.mktemp("run"))
    resumed = comm.simulate(lambda: run(sets, stage, policy, folder), world_size=ranks)
    whole = comm.simulate(lambda: run(sets, stage, policy), world_size=ranks)
    for (losses, kept), (expected, its) in zip(resumed, whole, strict=True):
        torch.testing.assert_close(losses, expected, rtol=0, atol=0)
        torch.testing.assert_close(kept, its, rtol=0, atol=0)


def test_what_each_rank_has_of_its_own_is_not_loaded_by_other_ranks(tmp_path: Path) -> None:
    def save() -> None:
        step, state = build(("tensor",), 0, "own")
        state, _ = step(state, rows(0, comm.world().rank))
        fds.save(state, tmp_path)

    comm.simulate(save, world_size=2)
    with pytest.raises(
        fds.checkpointing.StructureError, match=r"attributes\.mean \(each rank had its own, and there are other"
    ):
        comm.simulate(lambda: fds.load(tmp_path, like=build(("tensor",), 0, "own")[1]), world_size=3)


def process() -> tuple[list[float], dict[str, Any]]:
    return run(("tensor", "list", "int", "float"), 1, "first", steps=3)


def test_processes_keep_the_same() -> None:
    expected = as_one_device(("tensor", "list", "int", "float"), 2, "first", steps=3)
    for losses, _ in comm.spawn(process, world_size=2):
        torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)


SYNC = "step.state.buffer_sync"
BUGS: list[tuple[str, Bug]] = [
    (
        "first",
        Bug(
            "ranks keep their own",
            f"{SYNC}:synchronized",
            "tree.replace(buffers, values=values, attributes=_exchanged_attributes(buffers, agreed, group, policy))",
            "tree.replace(buffers, values=values)",
        ),
    ),
    (
        "mean",
        Bug("the mean is the first rank's", f"{SYNC}:_exchanged_attributes.is_mean", "policy == 'mean'", "False"),
    ),
    (
        "first",
        Bug(
            "numbers are not sent",
            f"{SYNC}:_exchanged_attributes",
            "numbers and not recorder().records",
            "False",
        ),
    ),
]


@pytest.mark.parametrize(("policy", "bug"), [pytest.param(*each, id=each[1].name) for each in BUGS])
def test_a_bug_is_seen(policy: str, bug: Bug) -> None:
    expected = as_one_device(("dict", "float"), 2, policy)
    with planted(bug):
        (losses, _), *_ = comm.simulate(lambda: run(("dict", "float"), 0, policy), world_size=2)
    assert losses != pytest.approx(expected, rel=1e-4)


def test_a_load_that_takes_ranks_for_names_is_seen(tmp_path: Path) -> None:
    bug = Bug("ranks are parts of names", "state_dict.matching:without_rank", "at and rank.isdecimal()", "False")
    resumed = comm.simulate(lambda: run(("tensor",), 0, "own", str(tmp_path / "a")), world_size=2)
    with planted(bug):
        broken = comm.simulate(lambda: run(("tensor",), 0, "own", str(tmp_path / "b")), world_size=2)
    assert broken[0][0] != resumed[0][0]
