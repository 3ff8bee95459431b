"""Guards refuse and change nothing (law 66)."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.step.guards import GUARDS
from functional_ds.step.pass_scope import current_pass

PLAN = {"up": "colwise", "down": "rowwise"}


def model() -> tuple[fds.Apply, dict[str, Tensor]]:
    torch.manual_seed(0)
    layers = {"up": torch.nn.Linear(4, 8), "act": torch.nn.Tanh(), "down": torch.nn.Linear(8, 4)}
    return fds.functional(torch.nn.Sequential(*layers.values()))


def run(strategy: Any, guarded: bool, steps: int = 3) -> tuple[list[Tensor], list[Any]]:
    """The params after some steps, and what each step has sent."""
    mesh = comm.mesh(dp=2, tp=2) if strategy is tensor else None
    apply, params = model()
    group = comm.world() if mesh is None else mesh["dp"]
    step = fds.compose(*strategy(mesh))(fds.train_step(lambda p, b: F.mse_loss(apply(p, b[0]), b[1]), fds.adamw(0.1)))
    step = step if guarded else step.without_guards()
    state, sent = step.init(params), []
    for number in range(steps):
        torch.manual_seed(number)
        x, y = torch.randn(2 * group.size, 4), torch.randn(2 * group.size, 4)
        mine = slice(2 * group.rank, 2 * group.rank + 2)
        with comm.ledger() as book:
            state, _ = step(state, (x[mine], y[mine]))
        sent.append([(row.collective, row.group, row.calls, row.bytes) for row in book.rows])
    return fds.tree.leaves(step.params(state)), sent


def alone(mesh: Any) -> list[fds.Transform]:
    return [T.clip(1.0)]


def zero(stage: int) -> Any:
    return lambda mesh: [T.zero(stage), T.clip(1.0)]


def tensor(mesh: Any) -> list[fds.Transform]:
    return [T.zero(1, mesh["dp"]), T.tensor_parallel({"0": "colwise", "2": "rowwise"}, mesh["tp"])]


STRATEGIES = {"alone": alone, **{f"zero {stage}": zero(stage) for stage in range(4)}, "tensor": tensor}


@pytest.mark.law(66)
@pytest.mark.parametrize("strategy", [*STRATEGIES.values()], ids=[*STRATEGIES])
def test_a_step_without_guards_is_the_step(strategy: Any) -> None:
    """Equal bits; and what guards compare between ranks they compare in the first step alone."""
    n = 1 if strategy is alone else 4 if strategy is tensor else 2
    both = [comm.simulate(lambda guarded=guarded: run(strategy, guarded), world_size=n) for guarded in (True, False)]
    for (one, sent), (other, without) in zip(*both, strict=True):
        assert all(map(torch.equal, one, other))
        assert sent[1:] == without[1:]


def test_a_step_lists_its_guards() -> None:
    step = fds.compose(T.zero(1), T.tensor_parallel(PLAN))(fds.train_step(lambda p, b: b.sum(), fds.sgd(0.1)))
    listed = step.guards()
    assert listed.keys() > GUARDS.keys()
    assert all(line.startswith("Refuses") for lines in listed.values() for line in lines)
    assert [name for name in listed if "tensor_parallel" in name]


def test_without_guards_nothing_is_refused() -> None:
    """What the guard of batches refuses goes on; what cannot be computed still raises."""
    step = fds.train_step(lambda p, b: (p["w"] * next(iter(b.values()))).sum(), fds.sgd(0.1))
    state = step.init({"w": torch.ones(2)})
    state, _ = step(state, {"x": torch.ones(2)})
    with pytest.raises(ValueError, match="one structure"):
        step(state, {"y": torch.ones(2)})
    step.without_guards()(state, {"y": torch.ones(2)})


def test_a_guard_of_ones_own() -> None:
    """It runs around the transform's function, in its place, and not at all in a step without guards."""
    seen: list[str] = []

    def rate(inner: Any, step: Any, state: Any) -> Any:
        seen.append("phase")
        return inner(step, state)

    def guard(inner: Any, step: Any, state: Any) -> Any:
        """Refuses nothing."""
        seen.append("guard")
        return inner(step, state)

    step = fds.wrap("mine", rate=fds.innermost(rate), guards={"rate": guard})(fds.train_step(lambda p, b: b, fds.sgd(0.1)))
    state = step.init({"w": torch.ones(1)})
    step.rate(state)
    assert seen == ["guard", "phase"]
    step.without_guards().rate(state)
    assert seen == ["guard", "phase", "phase"]
    with pytest.raises(ValueError, match="not phases"):
        fds.wrap("mine", guards={"other": guard})
    assert current_pass() is None
