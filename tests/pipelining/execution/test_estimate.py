"""Costs from shapes alone, of stages that were cut from a module."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import functional_ds as fds
from functional_ds import memory
from functional_ds import pipelining as pp
from functional_ds.dry_run.operations import OperationCounter

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


@pytest.mark.parametrize("function", ["attention", "math", "mv", "dot", "addr", "addbmm", "grouped"])
def test_every_product_counts(function: str) -> None:
    """Two operations for each multiplication: whatever kernel computes it, forward and backward."""

    def leaf(*shape: int) -> torch.Tensor:
        return torch.ones(*shape, requires_grad=True)

    q, k, v = (leaf(2, 3, 8, 16) for _ in range(3))
    weights = q @ k.mT
    with OperationCounter() as forward:
        if function == "attention":
            y, count = F.scaled_dot_product_attention(q, k, v, is_causal=True), 2 * 2 * (2 * 3) * 8 * 8 * 16
        elif function == "math":
            y, count = weights.softmax(-1) @ v, 2 * (2 * 3) * 8 * 8 * 16
        elif function == "mv":
            y, count = leaf(4, 5) @ leaf(5), 2 * 4 * 5
        elif function == "dot":
            y, count = leaf(5) @ leaf(5), 2 * 5
        elif function == "addr":
            y, count = torch.addr(leaf(3, 4), leaf(3), leaf(4)), 2 * 3 * 4
        elif function == "addbmm":
            y, count = torch.addbmm(leaf(3, 4), leaf(2, 3, 5), leaf(2, 5, 4)), 2 * 2 * 3 * 5 * 4
        else:
            ends = torch.tensor([2, 8], dtype=torch.int32)
            y, count = F.grouped_mm(leaf(8, 16), leaf(2, 16, 32), offs=ends), 2 * 8 * 16 * 32
    assert forward.flops == count
    with OperationCounter() as backward:
        (y * torch.ones(y.shape)).sum().backward()
    if function in ("math", "grouped", "addbmm"):
        assert backward.flops == 2 * count + (function == "math") * 2 * 2 * (2 * 3) * 8 * 8 * 16
    elif function == "attention":
        assert backward.flops == 5 * count // 2  # its two products' gradients, and the scores anew
