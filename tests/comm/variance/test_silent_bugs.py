"""Composition bugs that train on without an error, planted in small programs: each is found, and each clean program passes."""

import re
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.testing import assert_like_one_rank

N, WIDTH, TOKENS, EXPERTS, VOCABULARY = 2, 4, 8, 4, 6


def numbers(name: str, *shape: int) -> Tensor:
    """The same on all ranks."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(name) + 100 * ord(name[0])))


def weight(name: str, *shape: int) -> Tensor:
    return numbers(name, *shape).requires_grad_()


def own(whole: Tensor, dim: int = 0) -> Tensor:
    """This rank's slice, as a leaf of its own."""
    here = comm.world()
    return whole.detach().chunk(here.size, dim)[here.rank].clone().requires_grad_(whole.requires_grad)


def tokens() -> Tensor:
    return own(numbers("tokens", TOKENS, WIDTH))


# -- gradients that nobody sums ----------------------------------------------------------------------------------------


def router(bug: bool) -> Any:
    """Each rank routes its own tokens by a router that all have."""
    w = comm.invariant(weight("router", WIDTH, EXPERTS))
    logits = tokens() @ (w if bug else comm.copy_to(w))
    loss = comm.reduce_from(torch.logsumexp(logits, -1).square().sum())
    return torch.autograd.grad(comm.invariant(loss), w)


def norm(bug: bool) -> Any:
    """A norm under sequence parallelism, whose gradient the program sums itself."""
    w = comm.replicated(weight("norm", WIDTH))
    x = tokens()
    (grad,) = torch.autograd.grad((x / x.norm(dim=-1, keepdim=True) * w).tanh().sum(), w)
    return w - 0.1 * (grad if bug else comm.all_reduce(grad))


def norm_of_equal_tokens(bug: bool) -> Any:
    """The same where bits say nothing: all ranks have the same tokens, by chance."""
    w = comm.replicated(weight("norm", WIDTH))
    (grad,) = torch.autograd.grad((torch.ones(3, WIDTH) * w).sum(), w)
    return w - 0.1 * (grad if bug else comm.all_reduce(grad))


def two_layers(bug: bool) -> Any:
    """The second layer's input has no copy_to, so the first layer's gradients lack the other ranks' part."""
    h = numbers("tokens", TOKENS, WIDTH)
    weights = [own(weight(name, WIDTH, WIDTH), dim) for name, dim in (("a", 1), ("bb", 0), ("ccc", 1), ("dddd", 0))]
    for layer in (0, 1):
        columns, rows = weights[2 * layer], weights[2 * layer + 1]
        seen = h if bug and layer else comm.copy_to(h)
        h = comm.reduce_from(torch.tanh(seen @ columns) @ rows)
    return torch.autograd.grad(h.square().sum(), weights)


# -- sums that are too large -------------------------------------------------------------------------------------------


def norm_of_gradients(bug: bool) -> Any:
    """Slices count once on each rank, and what all ranks have counts once."""
    sliced = comm.varying(own(numbers("sliced", WIDTH, WIDTH)))
    shared = comm.invariant(numbers("shared", WIDTH))
    mine, ours = sliced.square().sum(), shared.square().sum()
    if bug:
        return comm.all_reduce(torch.stack([mine, ours]).sum()).sqrt()
    return (comm.all_reduce(mine) + ours).sqrt()


def balance_over_tp(bug: bool) -> Any:
    """The ranks of one tensor-parallel group compute the same balance loss."""
    w = comm.invariant(weight("router", WIDTH, EXPERTS))
    share = torch.softmax(comm.invariant(numbers("tokens", TOKENS, WIDTH)) @ w, -1).mean(0)
    balance = EXPERTS * share.square().sum()
    return torch.autograd.grad(comm.all_reduce(balance) if bug else balance, w)


def balance_over_cp(bug: bool) -> Any:
    """The balance loss is the whole batch's, and the token losses are each rank's."""
    losses = comm.varying(tokens().square().sum())
    balance = comm.all_reduce(tokens().mean(0)).square().sum()
    return comm.all_reduce(losses + balance) if bug else comm.all_reduce(losses) + balance


def balance_in_a_local_loss(bug: bool) -> Any:
    """The same with a loss that others sum."""
    balance = comm.all_reduce(tokens().mean(0)).square().sum()
    return comm.partial(comm.varying(tokens().square().sum()) + (balance if bug else comm.varying(balance / N)))


def tied_head(bug: bool) -> Any:
    """The gradient of a tied head is whole on each rank, since copy_to has summed it."""
    w = comm.invariant(weight("head", VOCABULARY, WIDTH))
    ids = own(torch.arange(TOKENS) % VOCABULARY)
    logits = torch.nn.functional.embedding(ids, comm.copy_to(w)) @ comm.copy_to(w).T
    (grad,) = torch.autograd.grad(comm.reduce_from(logits.logsumexp(-1).sum()), w)
    comm.invariant(grad)
    return comm.all_reduce(grad) if bug else grad


def loss_by_all_reduce(bug: bool) -> Any:
    """Each rank differentiates the whole loss, so its sum must not sum gradients, too."""
    w = comm.varying(own(weight("wide", WIDTH, WIDTH)))
    loss = (comm.all_reduce if bug else comm.reduce_from)(w.square().sum())
    return torch.autograd.grad(comm.invariant(loss), w)


def copied_for_nothing(bug: bool) -> Any:
    """A value that all ranks use alike has the whole gradient already."""
    x, w = (comm.invariant(weight(name, WIDTH)) for name in ("x", "weight"))
    loss = comm.invariant(((comm.copy_to(x) if bug else x) * w).sum())
    return torch.autograd.grad(loss, [x, w])


def bias_before_the_sum(bug: bool) -> Any:
    """Each rank adds the bias of a row-parallel linear."""
    rows, bias = own(numbers("rows", WIDTH, WIDTH)), numbers("bias", WIDTH)
    part = comm.partial(own(numbers("x", 3, WIDTH), 1) @ rows)
    return comm.reduce_from(part + bias) if bug else comm.reduce_from(part) + bias


def bias_by_broadcast(bug: bool) -> Any:
    """The same where nobody says that the product is a term: the sum takes each element as it is."""
    rows, bias = own(numbers("rows", WIDTH, WIDTH)), comm.replicated(numbers("bias", WIDTH))
    part = own(numbers("x", 3, WIDTH), 1) @ rows
    return comm.reduce_from((part + bias).view(3, 2, -1) / 2) if bug else comm.reduce_from(part / 2) + bias / 2


def bias_in_the_product(bug: bool) -> Any:
    """The same in one operator."""
    columns, bias = own(numbers("columns", WIDTH, WIDTH), 1), comm.replicated(numbers("bias", WIDTH))
    x = own(numbers("x", 3, WIDTH), 1)
    if bug:
        return comm.all_reduce(torch.nn.functional.linear(x, columns, bias))
    return comm.all_reduce(torch.nn.functional.linear(x, columns)) + bias


def sum_left_out(bug: bool) -> Any:
    """A row-parallel linear whose terms go into the next layer."""
    part = comm.partial(own(numbers("x", 3, WIDTH), 1) @ own(numbers("rows", WIDTH, WIDTH)))
    return torch.relu(part if bug else comm.reduce_from(part))


# -- slices that take themselves for the whole -------------------------------------------------------------------------


def smoothed(divisor_is_local: bool, sum_is_local: bool) -> Tensor:
    """Vocabulary-parallel cross entropy with label smoothing 0.1."""
    z = own(numbers("zlogits", TOKENS, VOCABULARY), 1)
    first = comm.world().rank * z.shape[1]
    inside = torch.arange(TOKENS) % VOCABULARY - first
    hit = (inside >= 0) & (inside < z.shape[1])
    target = comm.reduce_from(torch.where(hit, z.gather(1, inside.clamp(0, z.shape[1] - 1)[:, None])[:, 0], 0.0))
    normaliser = comm.reduce_from(z.exp().sum(1)).log()
    total = z.sum(1) if sum_is_local else comm.reduce_from(z.sum(1))
    mean = total / (z.shape[1] if divisor_is_local else VOCABULARY)
    return comm.invariant((normaliser - 0.9 * target - 0.1 * mean).mean())


def smoothing_over_the_local_vocabulary(bug: bool) -> Any:
    return smoothed(bug, bug)


def dropout_on_slices(bug: bool) -> Any:
    """The ranks hold other columns, and their generators are in one state."""
    x = comm.varying(own(numbers("wide", 16, 16), 1))
    if not bug:
        torch.manual_seed(comm.world().rank)
    return torch.nn.functional.dropout(x, 0.5)


def dropout_on_what_all_have(bug: bool) -> Any:
    """All ranks hold the same, and their generators are in different states."""
    x = comm.invariant(numbers("wide", 16, 16))
    if bug:
        torch.manual_seed(comm.world().rank)
    return comm.invariant(torch.nn.functional.dropout(x, 0.5))


def masks_by_hand(bug: bool) -> Any:
    """Masks that no generator of torch has drawn."""
    rows = torch.arange(64) + (0 if bug else 64 * comm.world().rank)
    return comm.varying((rows * 7919) % 3 == 0, distinct=True)


@attrs.frozen
class Silent:
    """A program, and what is said of its bug."""

    program: Callable[[bool], Any]
    says: str


SILENT = (
    Silent(router, "the gradient of float32[4, 4], invariant along group 'world' [0, 1], by comm.invariant at"),
    Silent(norm, "adds a value that all ranks have (comm.replicated at"),
    Silent(
        norm_of_equal_tokens, "to a partial sum along group 'world' [0, 1] (partial since as the gradient of comm.replicated"
    ),
    Silent(two_layers, "so put comm.copy_to before that use, which sums their gradients"),
    Silent(norm_of_gradients, "sums what stack at"),
    Silent(balance_over_tp, "sums a value that all ranks of group 'world' [0, 1] have alike (comm.invariant at"),
    Silent(balance_over_cp, "sums what add at"),
    Silent(balance_in_a_local_loss, "comm.partial at"),
    Silent(tied_head, "so it is 2 times too large"),
    Silent(
        loss_by_all_reduce, "sums a gradient that all ranks of group 'world' [0, 1] have alike (as the gradient of comm.inv"
    ),
    Silent(copied_for_nothing, "sums a gradient that all ranks of group 'world' [0, 1] have alike"),
    Silent(bias_before_the_sum, "adds a value that all ranks have to a partial sum along"),
    Silent(bias_by_broadcast, "sums what add at"),
    Silent(bias_in_the_product, "sums what addmm at"),
    Silent(sum_left_out, "relu at"),
    Silent(smoothing_over_the_local_vocabulary, "float32[], invariant along group 'world' [0, 1], by comm.invariant at"),
    Silent(dropout_on_slices, "brings a random draw with equal bits on all ranks of group 'world' [0, 1]"),
    Silent(dropout_on_what_all_have, "float32[16, 16], invariant along group 'world' [0, 1], by comm.invariant at"),
    Silent(masks_by_hand, "is the same on ranks 0 and 1 of group 'world', bit for bit"),
)


@pytest.mark.parametrize("case", SILENT, ids=lambda case: case.program.__name__)
def test_the_clean_program_passes(case: Silent) -> None:
    comm.simulate(case.program, False, world_size=N, variance=True)


@pytest.mark.parametrize("case", SILENT, ids=lambda case: case.program.__name__)
def test_the_bug_is_named(case: Silent) -> None:
    """With this file and a line of it; and without the check nobody notices."""
    comm.simulate(case.program, True, world_size=N)
    with pytest.raises(comm.errors.VarianceError, match=re.escape(case.says)) as caught:
        comm.simulate(case.program, True, world_size=N, variance=True)
    assert re.search(r"test_silent_bugs\.py:\d+", str(caught.value))


# -- factors, which contradict no declaration --------------------------------------------------------------------------


def experts(bug: bool) -> Any:
    """Token t goes to expert t % EXPERTS; the gradient is divided by all ranks' tokens."""
    here, x = comm.world(), tokens()
    local = comm.varying(own(weight("experts", EXPERTS, WIDTH)))
    arrived = comm.all_to_all(x)
    out = torch.tanh(arrived * local.repeat(len(arrived) // len(local), 1))
    loss = comm.partial(comm.all_to_all(out).square().sum())
    (grad,) = torch.autograd.grad(loss, local)
    count = torch.tensor(float(len(x)))
    return comm.all_gather(grad / (count if bug else comm.all_reduce(count)), here)


def smoothing_divided_by_the_local_vocabulary(bug: bool) -> Any:
    return smoothed(bug, False)


@pytest.mark.parametrize("program", [experts, smoothing_divided_by_the_local_vocabulary])
def test_a_wrong_factor_is_found_by_comparing_with_one_rank(program: Callable[[bool], Any]) -> None:
    """Laws 41 and 47: what does not depend on the number of ranks is one rank's."""
    assert_like_one_rank(program, False, world_size=N)
    with pytest.raises(AssertionError, match="rank 0 of 2, the result itself: "):
        assert_like_one_rank(program, True, world_size=N)
