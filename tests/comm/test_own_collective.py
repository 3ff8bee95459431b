"""A collective that is none of the table's: its row and its function, written in the docs, are all that it takes."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import functional_ds as fds
from functional_ds import comm

from . import nccl_over_gloo

PAGE = Path(__file__).parents[2] / "docs" / "own-collective.md"


def names() -> dict[str, Any]:
    """What the page's example defines."""
    (text,) = [
        block for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S) if "SCAN =" in block
    ]
    found: dict[str, Any] = {"comm": comm, "torch": torch}
    exec(text, found)
    return found


def program(nccl: bool = False) -> list[Any]:
    if nccl:
        nccl_over_gloo.install()
    scan, rank = names()["scan"], comm.world().rank
    x = {"a": torch.arange(6.0).view(2, 3) * (rank + 1), "b": torch.tensor(rank, dtype=torch.int64)}
    leaf = torch.tensor([1.0, 2.0], requires_grad=True)
    with comm.ledger() as sent:
        pending = comm.start(scan, x, down=True)
        found = [scan(x), pending.wait()]
    (grad,) = torch.autograd.grad((scan(leaf) * (rank + 1)).sum(), leaf)
    return [found, grad.tolist(), sent.calls, sent.bytes]


@pytest.mark.parametrize("nccl", [False, True])
def test_processes_give_what_the_simulator_gives(nccl: bool) -> None:
    simulated, spawned = comm.simulate(program, world_size=3), comm.spawn(program, nccl, world_size=3)
    assert str(simulated) == str(spawned)
    assert [grad for _, grad, _, _ in simulated] == [[6.0, 6.0], [5.0, 5.0], [3.0, 3.0]]
    assert simulated[2][0][0]["a"].tolist() == (6 * torch.arange(6.0).view(2, 3)).tolist()
    assert [sent for *_, sent in simulated] == [2 * 32] * 3  # up and down: to n - 1 ranks in all


def test_it_runs_on_shapes_and_in_a_graph() -> None:
    scan = names()["scan"]
    shape = comm.simulate(lambda: scan(torch.empty(2, 5, device="meta")).shape, world_size=100, shapes_only=True)[7]
    assert shape == (2, 5)

    def trained(transform: Any) -> Any:
        step = transform(fds.train_step(lambda w, x: (scan(w) * x).sum(), fds.sgd(0.1)))
        state, _ = step(step.init(torch.ones(3)), torch.arange(3.0))
        state, _ = step(state, torch.arange(3.0))  # the first step is never a graph
        return state.params.tolist(), getattr(step, "reasons", [])

    assert comm.simulate(trained, fds.jit, world_size=2) == comm.simulate(trained, lambda step: step, world_size=2)


def test_a_mismatch_names_it() -> None:
    scan = names()["scan"]
    with pytest.raises(comm.errors.MismatchError, match=r"rank 1 called scan\(down=True\).*rank 0 called scan\(down=False\)"):
        comm.simulate(lambda: scan(torch.ones(1), down=bool(comm.world().rank)), world_size=2)


def test_what_is_no_collective_does_not_start() -> None:
    with pytest.raises(TypeError, match=r"<function .*> is not a collective: pass comm.all_gather or its like"):
        comm.start(lambda x: x, torch.ones(1))
