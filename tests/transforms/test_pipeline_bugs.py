"""A law that no bug breaks is no law: bugs in the pipeline's executor, each planted alone, and the law that must break."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

import functional_ds as fds
from functional_ds import comm, transforms
from functional_ds import pipelining as pp
from functional_ds.pipelining.flight import Sums
from functional_ds.pipelining.splitting import backward_inputs
from tests.planting import Bug, planted
from tests.transforms.staged import on_mesh
from tests.transforms.test_pipeline import alone, assert_same

pytestmark = pytest.mark.timeout(60)


def one_device(make: Callable[[], pp.Schedule], zero: int | None, resident: int | None = None, k: int = 1) -> None:
    """Law 36, on one case."""
    schedule, dp = make(), 1 if zero is None else 2
    rows = 6 * dp * k
    found = comm.simulate(
        lambda: on_mesh(schedule, rows, zero=zero, dp=dp, resident=resident, accumulate=k), world_size=schedule.ranks * dp
    )
    for each in found:
        assert_same(each, alone(schedule.stages, rows))
        assert all(map(torch.equal, fds.tree.leaves(each[2]), fds.tree.leaves(found[0][2])))


def plain() -> pp.Schedule:
    return pp.one_f_one_b(2, 4)


def vee() -> pp.Schedule:
    return pp.zbv(2, 3)


def looped() -> pp.Schedule:
    return pp.interleaved_one_f_one_b(2, 2)


def means_weigh_by_rows() -> None:
    """A plain mean over micro-batches of 3, 3 and 2 rows is the mean over the batch."""

    def program(schedule: pp.Schedule) -> Any:

        params = [{"w": torch.tensor(1.0)} for _ in range(2)]
        model = pp.stages([lambda p, x: x * p["w"]] * 2, params, loss=lambda y, batch: y.mean())
        step = transforms.pipeline(schedule, model)(fds.train_step(model, fds.sgd(1.0)))
        state, metrics = step(step.init(params), (torch.arange(8.0),))
        return metrics["loss"].item(), step.params(state)[0]["w"].item()

    assert comm.simulate(program, pp.gpipe(2, 3), world_size=2)[0] == pytest.approx((3.5, -2.5), rel=1e-6)


def sums_write_to_their_own() -> None:
    """What autograd gave may be somebody else's, too."""
    first, second = torch.ones(2), torch.ones(2)
    sums = Sums(2)
    sums.add([first])
    sums.add([second])
    assert (first.tolist(), second.tolist(), sums.grads[0].tolist()) == ([1, 1], [1, 1], [2, 2])  # type: ignore[union-attr]


def two_parts_are_the_whole() -> None:
    """A tied weight beside another."""
    x, w, v = (torch.tensor(float(i), requires_grad=True) for i in (2, 3, 5))
    grads, rest = backward_inputs([x * w * v + x * w], [torch.tensor(1.0)], [x], [w, v])
    assert [grad.item() for grad in (*grads, *rest.run()) if grad is not None] == [18.0, 12.0, 6.0]


BUGS: dict[tuple[Any, ...], list[Bug]] = {
    (one_device, plain, None): [
        Bug("shared gradients are not exchanged", "pipelining.running", "if not others or not own:", "if True:"),
        Bug("shared leaves count twice in norms", "pipelining.placing", "part.ranks[0] != rank for", "False for"),
        Bug("draws do not move with the rows", "pipelining.running", "rows=first)", "rows=0)"),
        Bug(
            "only the first micro-batch counts",
            "pipelining.flight",
            "for (i, _, _), total in zip(shared, sums",
            "for (i, _, _), total in zip((), ()",
        ),
        Bug(
            "the last stage's loss is one micro-batch's",
            "pipelining.running",
            "for loss, metrics in found[1:]:",
            "for loss, metrics in ():",
        ),
    ],
    (one_device, vee, 1): [
        Bug("a shared leaf gets one stage's gradient", "pipelining.running", "for grad in grads[1:]:", "for grad in ():"),
        Bug(
            "a reduction leaves out what is split",
            "pipelining.runner",
            "self._add(stage, self._flights.pop((stage, j)).backward_weights())",
            "self._flights.pop((stage, j)).backward_weights()",
        ),
    ],
    (one_device, looped, 3, 1): [
        Bug(
            "what was let go is not fetched again",
            "pipelining.room",
            "leaf.untyped_storage().copy_(fresh, non_blocking=False)",
            "leaf.untyped_storage().fill_(0)",
        ),
    ],
    (one_device, looped, 2, None, 2): [
        Bug(
            "earlier batches' gradients are lost",
            "pipelining.running",
            "own = None if carry is None else",
            "own = None if True else",
        ),
    ],
    (means_weigh_by_rows,): [
        Bug(
            "means weigh alike",
            "pipelining.running",
            "None if equal else rows * len(sizes) / sum(sizes)",
            "None",
        ),
    ],
    (sums_write_to_their_own,): [
        Bug(
            "gradients are written into what autograd gave",
            "pipelining.flight",
            "elif i in self._owned:",
            "elif True:",
        ),
    ],
    (two_parts_are_the_whole,): [
        Bug("a weight that comes in twice is counted once", "pipelining.splitting", "if times[i] == 1", "if times[i] >= 1"),
    ],
}


@cache
def holds(law: Callable[..., None], *case: Any) -> bool:
    """Checks a law in the library as it is, once."""
    law(*case)
    return True


@pytest.mark.parametrize(("case", "bug"), [pytest.param(c, b, id=b.name) for c, bugs in BUGS.items() for b in bugs])
def test_a_bug_breaks_its_law(case: tuple[Any, ...], bug: Bug) -> None:
    law, *rest = case
    assert holds(*case)
    with planted(bug), pytest.raises((AssertionError, RuntimeError)):
        law(*rest)
