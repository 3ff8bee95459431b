"""A loss over cut sequences is a sum over tokens, or sums over the ranks itself; another one is refused in the first step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.parallel.sequence.axis import sequence_axis
from tests.planting import Bug, planted

WORDS, WIDTH = 12, 8
TOKENS = torch.randint(WORDS, (2, 12), generator=torch.Generator().manual_seed(0))
Loss = Callable[[Tensor, Tensor], fds.Weighted]  # of each token's cross entropy, and the number of labels that count


def program(of_tokens: Loss) -> float:
    def loss(params: dict[str, Tensor], batch: dict[str, Tensor]) -> fds.Weighted:
        logits = params["words"][batch["input_ids"]] @ params["words"].T
        labels = batch["shift_labels"]
        return of_tokens(F.cross_entropy(logits.mT, labels, reduction="none"), (labels != -100).sum())

    params = {"words": torch.randn(WORDS, WIDTH, generator=torch.Generator().manual_seed(0))}
    step = fds.compose(T.zero(1), T.sequence(tokenwise=True))(fds.train_step(loss, fds.sgd(0.01)))
    return step(step.init(params), {"input_ids": TOKENS, "labels": TOKENS})[1]["loss"].item()


OTHERS: dict[str, Loss] = {
    "a function of a row's sum": lambda each, count: fds.Weighted(F.softplus(each.sum(1) / 30).sum(), len(each)),
    "a mean over positions": lambda each, count: fds.Weighted(each.mean(1).square().sum(), len(each)),
    "a product": lambda each, count: fds.Weighted(each.sum() * each.exp().sum(), count),
}


def refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"the loss is not a sum over tokens.*sum over the ranks what goes into it"):
        comm.simulate(program, OTHERS[name], world_size=2)


@pytest.mark.law(53)
@pytest.mark.parametrize("name", OTHERS)
def test_other_losses_are_refused(name: str) -> None:
    """Each would be another loss on each number of ranks."""
    refused(name)


def _of_whole_rows(each: Tensor, count: Any) -> fds.Weighted:
    group = sequence_axis("a test").group
    return fds.Weighted(F.softplus(comm.all_reduce(each.sum(1), group) / 30).sum(), len(each))


@pytest.mark.law(53)
@pytest.mark.parametrize("of_tokens", [_of_whole_rows, lambda each, count: fds.Weighted(each.square().sum(), count)])
def test_sums_are_one_devices(of_tokens: Loss) -> None:
    """Of any function of a token; or of whole rows, summed over the ranks before. Three tokens a rank are an odd number."""
    (alone,) = comm.simulate(program, of_tokens, world_size=1)
    assert comm.simulate(program, of_tokens, world_size=4) == [pytest.approx(alone)] * 4


def test_ranks_with_one_token_take_part() -> None:
    """In stage 3 they hold parts of what the others compare with."""

    def loss(params: dict[str, Tensor], batch: dict[str, Tensor]) -> fds.Weighted:
        logits = params["words"][batch["input_ids"]] @ params["words"].T
        each = F.cross_entropy(logits.mT, batch["shift_labels"], reduction="none")
        return fds.Weighted(each.sum(), (batch["shift_labels"] != -100).sum())

    def long_and_short() -> float:
        mesh = comm.mesh(dp=2, sp=2)
        step = fds.compose(T.zero(3, mesh["dp", "sp"]), T.sequence(mesh["sp"], tokenwise=True))(
            fds.train_step(loss, fds.sgd(0.01))
        )
        params = {"words": torch.randn(WORDS, WIDTH, generator=torch.Generator().manual_seed(0))}
        own = TOKENS[:, :2] if mesh["dp"].rank else TOKENS
        return step(step.init(params), {"input_ids": own, "labels": own})[1]["loss"].item()

    assert len(set(comm.simulate(long_and_short, world_size=4))) == 1


def test_without_the_check_losses_differ_in_silence() -> None:
    bug = Bug(
        "it is not compared",
        "transforms.parallel.sequence:_SequenceParallel.guard_gradients",
        "check_sum(str(self), step, tree.replace(state, key=key), piece, dims, stages)",
        "pass",
    )
    with planted(bug):
        (alone,), (there, _) = (comm.simulate(program, OTHERS["a mean over positions"], world_size=n) for n in (1, 2))
    assert abs(alone - there) > 0.01 * alone
