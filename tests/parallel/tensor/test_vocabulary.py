"""Law 41: embedding and cross entropy with a vocabulary that is cut are those of the whole one."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import functional_ds as fds
from functional_ds import comm

FEW = settings.default.max_examples


def dense(logits: Tensor, labels: Tensor, smoothing: float, z_loss: float, ignored: int) -> Tensor:
    """PyTorch's, as a sum, with the z-loss."""
    loss = F.cross_entropy(
        logits.flatten(0, -2), labels.flatten(), label_smoothing=smoothing, ignore_index=ignored, reduction="sum"
    )
    kept = labels != ignored
    return loss + z_loss * (logits.logsumexp(-1).square() * kept).sum()


def agrees(n: int, rows: int, tokens: tuple[int, ...], smoothing: float, z_loss: float, ignored: int, scale: float) -> None:
    """Law 41."""
    generator = torch.Generator().manual_seed(1)
    whole = scale * torch.randn(*tokens, n * rows, generator=generator)
    labels = torch.randint(0, n * rows, tokens, generator=generator)
    labels = labels.masked_fill(torch.rand(tokens, generator=generator) < 0.3, ignored)
    logits = whole.double().requires_grad_()
    expected = dense(logits, labels, smoothing, z_loss, ignored)
    (grad,) = torch.autograd.grad(expected, logits)

    def program() -> Any:
        here = comm.world()
        own = whole.chunk(n, -1)[here.rank].clone().requires_grad_()
        with comm.ledger() as sent:
            loss = fds.tp.cross_entropy(own, labels, group=here, label_smoothing=smoothing, z_loss=z_loss, ignore_index=ignored)
            forward = [(row.collective, row.calls, row.elements) for row in sent.rows]
            (found,) = torch.autograd.grad(loss.sum, own)
        assert sent.elements == sum(elements for _, _, elements in forward)  # nothing backward
        return loss.sum.item(), int(loss.weight), comm.all_gather(found, here, dim=-1), forward

    numbers = labels.numel() * (3 + bool(smoothing))  # the largest logit; the mass, the label's logit, all logits
    for loss, count, found, forward in comm.simulate(program, world_size=n):
        assert loss == pytest.approx(expected.item(), rel=1e-4, abs=1e-4)
        assert count == int((labels != ignored).sum())
        torch.testing.assert_close(found.double(), grad, rtol=1e-4, atol=1e-4)
        assert forward[0][:2] == ("all_reduce", 2)
        assert forward[0][2] == pytest.approx(2 * numbers * (n - 1) / n, abs=2 * n)


@pytest.mark.law(41)
@settings(max_examples=2 * FEW)
@given(
    n=st.integers(1, 4),
    rows=st.integers(1, 5),
    tokens=st.sampled_from(((5,), (2, 3), (1,), (0,))),
    smoothing=st.sampled_from((0.0, 0.1, 0.7)),
    z_loss=st.sampled_from((0.0, 1e-2)),
    ignored=st.sampled_from((-100, 0, -1)),
    scale=st.sampled_from((1.0, 80.0)),
)
def test_cross_entropy_is_the_whole_vocabularys(
    n: int, rows: int, tokens: tuple[int, ...], smoothing: float, z_loss: float, ignored: int, scale: float
) -> None:
    """Value and gradient, smoothed over the whole vocabulary; two all-reduces of three or four numbers a token in all."""
    agrees(n, rows, tokens, smoothing, z_loss, ignored, scale)


def test_cross_entropy_keeps_double_precision() -> None:
    """Value and gradient of fp64 logits are fp64."""
    whole, labels = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64), torch.tensor([0, 3, 1])
    logits = whole.clone().requires_grad_()
    expected = dense(logits, labels, 0.1, 0.01, -100)
    (grad,) = torch.autograd.grad(expected, logits)

    def program() -> Any:
        own = whole.chunk(2, -1)[comm.world().rank].clone().requires_grad_()
        loss = fds.tp.cross_entropy(own, labels, group=comm.world(), label_smoothing=0.1, z_loss=0.01).sum
        return loss.detach(), comm.all_gather(torch.autograd.grad(loss, own)[0], dim=-1)

    for loss, found in comm.simulate(program, world_size=2):
        torch.testing.assert_close(loss, expected.detach())
        torch.testing.assert_close(found, grad)


def lookups_agree(n: int, rows: int, padding: int | None, sequence: bool) -> None:
    """The embedding's law, bitwise."""
    generator = torch.Generator().manual_seed(2)
    whole = torch.randint(-3, 4, (n * rows, 3), generator=generator).float()
    ids = torch.randint(0, n * rows, (2, 2 * n), generator=generator)
    weights = torch.randint(-3, 4, (2, 2 * n, 3), generator=generator).float()
    leaf = whole.clone().requires_grad_()
    expected = F.embedding(ids, leaf, padding)
    (grad,) = torch.autograd.grad((expected * weights).sum(), leaf)

    def program() -> Any:
        here = comm.world()
        own = whole.chunk(n)[here.rank].clone().requires_grad_()
        found = fds.tp.embed(ids, own, padding=padding, group=here, sequence_dim=1 if sequence else None)
        part = weights.chunk(n, 1)[here.rank] if sequence else weights
        (back,) = torch.autograd.grad((found * part).sum(), own)
        return comm.all_gather(found.detach(), here, dim=1) if sequence else found, comm.all_gather(back, here)

    for found, back in comm.simulate(program, world_size=n):
        assert torch.equal(found, expected)
        assert torch.equal(back, grad)


@settings(max_examples=FEW)
@given(n=st.integers(1, 4), rows=st.integers(1, 3), padding=st.sampled_from((None, 0, 1)), sequence=st.booleans())
def test_an_embedding_is_the_whole_vocabularys(n: int, rows: int, padding: int | None, sequence: bool) -> None:
    """Value and gradient, bitwise; with the sequence cut, this rank's part."""
    lookups_agree(n, rows, padding if padding is None or padding < n * rows else None, sequence)


def test_bad_input_is_refused() -> None:
    """Ids and labels that are none, shapes and shares."""
    here, logits = comm.world(), torch.zeros(2, 4)
    for labels, words in (
        (torch.tensor([0, 4]), "the label 4 is not one of the vocabulary's 4"),
        (torch.zeros(3).long(), "labels of shape"),
    ):
        with pytest.raises(ValueError, match=words):
            fds.tp.cross_entropy(logits, labels, group=here)
    with pytest.raises(ValueError, match=r"label_smoothing=1.5 must be in \[0, 1\)"):
        fds.tp.cross_entropy(logits, torch.zeros(2).long(), group=here, label_smoothing=1.5)
    for dim in (1, -2):
        with pytest.raises(ValueError, match=rf"tp.embed: sequence_dim={dim} is not a dim of ids, of shape \[1\]"):
            fds.tp.embed(torch.tensor([0]), torch.ones(4, 2), group=here, sequence_dim=dim)
    for wrong in (4, -1):
        with pytest.raises(IndexError):
            fds.tp.embed(torch.tensor([wrong]), torch.ones(4, 2), group=here)
