"""Bugs planted in the pipeline's executor, one at a time, and the law that each must break."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

import functional_ds as fds
from functional_ds import comm, transforms
from functional_ds import pipelining as pp
from functional_ds.pipelining.execution.split_backward import InFlightMicroBatch, backward_inputs
from tests.pipelining.execution.test_estimate import test_tracing_a_module_is_no_part_of_its_forward
from tests.pipelining.execution.test_recorder import (
    test_buffers_are_no_activations,
    test_gathers_are_no_computing,
    test_memory_of_two_stages_on_one_rank_counts_once,
    timed,
)
from tests.planting import Bug, planted
from tests.transforms.pipeline.test_pipeline import alone, assert_same
from tests.transforms.pipeline.test_pipeline_cases import test_a_norm_is_as_exact_as_the_widest_leaf_of_any_stage
from tests.transforms.staged import on_mesh

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


def sums_have_memory_of_their_own() -> None:
    """Autograd returns one tensor, and views of it, as the gradients of all terms of a sum."""
    x, a, b = (torch.zeros(4, requires_grad=True) for _ in range(3))
    outputs = [(x + a.view(4) + b.view(4)) * 2 for _ in range(2)]
    back = [InFlightMicroBatch.of([x], [output]).backward([torch.ones(4)], [a, b])[0] for output in outputs]
    assert [t.tolist() for t in (a.grad, b.grad)] == [[4.0] * 4] * 2  # type: ignore[union-attr]
    assert back[0].tolist() == back[1].tolist() or back[0] is back[1]


def two_parts_are_the_whole() -> None:
    """A weight that meets the input's path twice, beside another weight."""
    x, w, v = (torch.tensor(float(i), requires_grad=True) for i in (2, 3, 5))
    backward_inputs([x * w * w * v], [torch.tensor(1.0)], [x], [w, v]).run()
    assert [leaf.grad.item() for leaf in (x, w, v)] == [45.0, 60.0, 18.0]  # type: ignore[union-attr]


def possible(*, seconds: list[tuple[float, float]], ahead: float = 0.0) -> pp.Timeline:
    """A run; times that no one clock can have shown break the law."""
    try:
        return timed(pp.one_f_one_b(len(seconds), 4), seconds, ahead=ahead)[0]
    except ValueError as error:
        raise AssertionError from error


def waiting_is_no_computing() -> None:
    """A slow last stage: what the first one waits for is in no cost."""
    assert pp.measured(possible(seconds=[(1.0, 2.0), (10.0, 20.0)])).backward == (2.0, 20.0)


def clocks_are_one() -> None:
    """Ranks whose clocks are 64 and 128 seconds ahead."""
    near, far = (possible(seconds=[(1.0, 2.0)] * 3, ahead=ahead) for ahead in (0.0, 64.0))
    assert near.bubble == pytest.approx(far.bubble)


BUGS: dict[tuple[Any, ...], list[Bug]] = {
    (one_device, plain, None): [
        Bug(
            "shared gradients are not exchanged", "pipelining.execution.gradients:_exchanged", "not others or not grads", "True"
        ),
        Bug(
            "shared leaves count twice in norms",
            "pipelining.execution.placement:Placement.copies",
            "part.ranks[0] != rank",
            "False",
        ),
        Bug(
            "draws do not move with the rows",
            "pipelining.execution.gradients:_runner",
            "state.key.at(step=state.key.step, rows=first)",
            "state.key.at(step=state.key.step, rows=0)",
        ),
        Bug(
            "only the first micro-batch counts",
            "pipelining.execution.split_backward:InFlightMicroBatch.backward",
            "[*self.inputs, *weights]",
            "[*self.inputs, *new]",
        ),
        Bug(
            "the last stage's loss is one micro-batch's",
            "pipelining.execution.gradients:_metrics",
            "tree.map(lambda *parts: reduce(torch.add, parts), *losses)",
            "losses[0]",
        ),
    ],
    (one_device, vee, 1): [
        Bug(
            "a shared leaf gets one stage's gradient",
            "pipelining.execution.gradients:_sum",
            "grads[1:]",
            "()",
        ),
        Bug(
            "a reduction leaves out what is split",
            "pipelining.execution.runner:Runner.backward_weights",
            "self._in_flight.pop((stage, j)).backward_weights()",
            "self._in_flight.pop((stage, j))",
        ),
    ],
    (one_device, looped, 3, 1): [
        Bug(
            "what was let go is not fetched again",
            "pipelining.execution.gathered:GatheredParams._regather",
            "leaf.untyped_storage().copy_(fresh, non_blocking=False)",
            "leaf.untyped_storage().fill_(0)",
        ),
    ],
    (one_device, looped, 2, None, 2): [
        Bug(
            "earlier batches' gradients are lost",
            "pipelining.execution.gradients:gradients",
            "None if carry is None else [carry.sum[place] for place in held.places]",
            "None if True else [carry.sum[place] for place in held.places]",
        ),
    ],
    (means_weigh_by_rows,): [
        Bug(
            "means weigh alike",
            "pipelining.execution.gradients:_runner",
            "None if share == 1 else share",
            "None",
        ),
    ],
    (sums_have_memory_of_their_own,): [
        Bug(
            "gradients are added into each other's memory",
            "pipelining.execution.split_backward:InFlightMicroBatch._separate",
            "storage_id(weight.grad) in taken",
            "False",
        ),
    ],
    (waiting_is_no_computing,): [
        Bug(
            "waiting counts as computing",
            "pipelining.execution.runner:Mailbox._waited",
            "self.recorder is None",
            "True",
        ),
        Bug(
            "an action begins before its wait is over",
            "pipelining.execution.recorder:Recorder.waiting",
            "self._began = self._now()",
            "self._now()",
        ),
    ],
    (test_gathers_are_no_computing,): [
        Bug(
            "a gather is part of the forward",
            "pipelining.execution.runner:Runner.params",
            "self.recorder is None",
            "True",
        ),
    ],
    (clocks_are_one,): [
        Bug(
            "clocks of other ranks are not moved",
            "pipelining.execution.recorder:Recorder.run",
            "(start + more, end + more)",
            "(start, end)",
        ),
        Bug(
            "an offset has the wrong sign",
            "comm.debug.clock:_ask",
            "(began + ended) / 2 - there",
            "there - (began + ended) / 2",
        ),
    ],
    (test_memory_of_two_stages_on_one_rank_counts_once,): [
        Bug(
            "what neighbours share is counted twice",
            "pipelining.planning.timeline:Timeline._changes",
            "self.costs.of('activations', count) - shared",
            "self.costs.of('activations', count)",
        ),
        Bug(
            "what neighbours share is never freed",
            "pipelining.planning.timeline:Timeline._changes",
            "shared[later]",
            "2 * shared[later]",
        ),
        Bug(
            "an estimate takes what came as what is new",
            "pipelining.execution.estimate:_run",
            "_storage(leaf) in saved.sizes",
            "False",
        ),
    ],
    (test_buffers_are_no_activations,): [
        Bug(
            "buffers are activations of a run",
            "pipelining.execution.recorder:Recorder.end",
            "not storage.expired()",
            "False",
        ),
        Bug(
            "buffers are activations of an estimate",
            "dry_run.events:FakeRecorder.__torch_dispatch__",
            "self.keep_apart([fakes.from_tensor(x) for x in bare])",
            "pass",
        ),
    ],
    (test_tracing_a_module_is_no_part_of_its_forward,): [
        Bug(
            "tracing is seen by modes around it",
            "pipelining.tracing.cut:ProgramCache.trace",
            "with disable_dispatch_modes(), forked_rng(), for_shapes():\n    ...",
            "with forked_rng(), for_shapes():\n    ...",
        ),
    ],
    (test_a_norm_is_as_exact_as_the_widest_leaf_of_any_stage,): [
        Bug("norms in fp32", "pipelining.execution.placement:Placement.of", "widest([*trained.values()])", "torch.float32"),
    ],
    (two_parts_are_the_whole,): [
        Bug(
            "a weight that comes in twice is counted once",
            "pipelining.execution.split_backward:_junctions",
            "times[i] == 1",
            "times[i] >= 1",
        ),
    ],
}


@cache
def holds(law: Callable[..., None], *case: Any) -> bool:
    """Checks a law in the unchanged library, once."""
    law(*case)
    return True


@pytest.mark.sample(6)
@pytest.mark.parametrize(("case", "bug"), [pytest.param(c, b, id=b.name) for c, bugs in BUGS.items() for b in bugs])
def test_a_bug_breaks_its_law(case: tuple[Any, ...], bug: Bug) -> None:
    law, *rest = case
    assert holds(*case)
    with planted(bug), pytest.raises((AssertionError, RuntimeError)):
        law(*rest)
