"""Attention over cut sequences under torch.autocast: in its dtype, as torch's own attention there."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import functional_ds as fds
from functional_ds import comm, seq
from functional_ds import transforms as T
from tests.parallel import whole_models as wm

WIDE = torch.float32
WAYS = {
    "ring": lambda: seq.ring(comm.world()),
    "ulysses": lambda: seq.ulysses(None, comm.world()),
    "ulysses of torch's": lambda: seq.ulysses(F.scaled_dot_product_attention, comm.world()),
    "gathered": lambda: seq.gathered(comm.world()),
}


@pytest.mark.law(43)
@pytest.mark.parametrize("way", ["ring", "ulysses", "ulysses of torch's", "gathered"])
@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.bfloat16), (torch.float32, torch.float32), (torch.float64,) * 2], ids=str
)
def test_as_torchs_attention(way: str, dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Rotary embeddings leave q and k wide, and v comes from a product in half precision."""
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randn(2, 4, 8, 4, generator=generator) for _ in range(4)]
    q, k, v, grad = draws[0].to(dtypes[0]), draws[1].to(dtypes[0]), draws[2].to(dtypes[1]), draws[3]

    def results(attend: Any, *leaves: Tensor) -> tuple[Tensor, ...]:
        leaves = tuple(leaf.clone().requires_grad_() for leaf in leaves)
        with torch.autocast("cpu", torch.bfloat16):
            o = attend(*leaves)
        part = grad.chunk(8 // o.shape[2], 2)[comm.world().rank if o.shape[2] < 8 else 0]
        return o.detach(), *torch.autograd.grad((o * part).sum(), leaves)

    def program() -> tuple[Tensor, ...]:
        here = comm.world()
        return results(WAYS[way](), *(leaf.chunk(here.size, 2)[here.rank] for leaf in (q, k, v)))

    expected = results(F.scaled_dot_product_attention, q, k, v)
    for rank, found in enumerate(comm.simulate(program, world_size=2)):
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.dtype == theirs.dtype
            torch.testing.assert_close(
                mine, theirs.chunk(2, 2)[rank], rtol=0.05, atol=0.05 if dtypes[0] != torch.float64 else 1e-6
            )


@pytest.mark.law(56)
def test_unmodified_models() -> None:
    """A Llama over cut sequences under autocast is near the same on one device."""
    pytest.importorskip("transformers")
    seq.register_attention()

    def program(ranks: int) -> list[float]:
        apply, params = fds.functional(wm.hugging_face("llama kv2", "fds_ring" if ranks > 1 else "sdpa").float())

        def loss(p: Any, batch: Any) -> fds.Weighted:
            with torch.autocast("cpu", torch.bfloat16):
                logits = apply(p, **wm.inputs_of(batch)).logits
            labels = batch["shift_labels"]
            total = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
            return fds.Weighted(total, (labels != -100).sum())

        chain = [T.zero(2), *([T.sequence()] if ranks > 1 else [])]
        step = fds.compose(*chain)(fds.train_step(loss, fds.adamw(1e-2, eps=1e-3)))
        state, found = step.init(params), []
        for index in range(2):
            state, metrics = step(state, wm.batch_of(index))
            found.append(metrics["loss"].item())
        return found

    (expected,) = comm.simulate(program, 1, world_size=1)
    for found in comm.simulate(program, 2, world_size=2):
        assert found == pytest.approx(expected, rel=0.02)
