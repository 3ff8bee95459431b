"""Costs from shapes alone, of stages that were cut from a module."""

import torch
import torch.nn.functional as F
from torch import nn

import functional_ds as fds
from functional_ds import memory
from functional_ds import pipelining as pp

NET = nn.Sequential(nn.Linear(16, 16, bias=False), nn.Tanh(), nn.Linear(16, 16, bias=False))


def mse(y: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.mse_loss(y, batch[1])


def rows(count: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(count, 16, device=device), torch.ones(count, 16, device=device)


def test_tracing_a_module_is_no_part_of_its_forward() -> None:
    """2 · 8 · 16 · 16 operations a stage, also when such a batch comes for the first time."""
    stages, params = pp.cut(NET, ["2"], example=rows(3), loss=mse)
    first, second = (pp.estimated(stages, params, rows(8), flops=1.0) for _ in range(2))
    assert first == second
    assert first.forward == (4096.0, 4096.0)
    assert (first.inputs, first.weights) == ((0.0, 4096.0), (4096.0, 4096.0))


def test_tracing_a_module_leaves_no_activations() -> None:
    """``memory.activations`` of stages is the module's, on the first call, too."""
    stages, params = pp.cut(NET, ["2"], example=rows(3), loss=mse)
    apply, whole = fds.functional(NET)
    expected = memory.activations(lambda params, batch: mse(apply(params, batch[0]), batch), whole, rows(8))
    first, second = (memory.activations(stages, params, rows(8)) for _ in range(2))
    assert first == second
    assert first.kept == expected.kept


def test_tensors_without_values_will_do() -> None:
    """Params, a batch, or both, on the device "meta"."""
    stages, params = pp.cut(NET, ["2"], example=rows(3), loss=mse)
    expected = pp.estimated(stages, params, rows(8), flops=1.0)
    bare = fds.tree.map(lambda leaf: leaf.to("meta"), params)
    for held, batch in ((bare, rows(8)), (params, rows(8, "meta")), (bare, rows(8, "meta"))):
        assert pp.estimated(stages, held, batch, flops=1.0) == expected
        assert [x.shape for x in stages.check(held, batch)[0]] == [(8, 16)]
