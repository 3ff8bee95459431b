"""``mutants``: bugs that laws can notice are noticed, and the others are named."""

from functools import partial
from typing import Any

import pytest
import torch

import functional_ds as fds
from functional_ds import comm, testing
from functional_ds import transforms as T
from tests.testing.methods import at_every_second, trained_apart


def shortened(limit: float = 0.1) -> fds.Transform:
    """Clips as ``T.clip`` does."""

    def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
        norm = step.norm(state, grads.sum) / grads.weight
        return inner(step, state, fds.Weighted(grads.sum, grads.weight * torch.clamp(norm / limit, min=1.0)))

    return fds.wrap("shortened", update=update)


def by_clip(params: Any, batches: list[Any]) -> Any:
    """The oracle: ``T.clip`` on one device."""
    step = T.clip(0.1)(fds.train_step(testing.Problem().loss, fds.sgd(0.1, momentum=0.5)))
    state = step.init(params)
    for batch in batches:
        state, _ = step(state, batch)
    return step.params(state)


def test_bugs_of_one_rank_are_noticed_and_others_need_an_oracle() -> None:
    found = {(bug.old, bug.words): bug.caught for bug in testing.mutants(shortened, only=["accumulate before"]).rows}
    assert found["step.norm(state, grads.sum)", "this rank's norm"] == "accumulate before"
    assert found["norm / limit", "the inverse factor"] == ""
    with_oracle = testing.mutants(shortened, only=["accumulate before", "oracle"], oracle=by_clip)
    assert {bug.caught for bug in with_oracle.rows} == {"accumulate before", "oracle"}
    assert with_oracle.survivors == []
    assert "0 of" in str(with_oracle)


def averaged(group: comm.Group) -> fds.Transform:
    """Local SGD of models of several ranks."""

    def average(step: fds.Step, state: fds.State) -> fds.State:
        leaves, spec = fds.tree.flatten(state.params)
        sums = comm.all_reduce([leaf.clone() for leaf in leaves], group)
        return fds.tree.replace(state, params=fds.tree.unflatten(spec, [x / group.size for x in sums]))

    return T.every(2, average)


def test_bugs_of_a_method_over_an_outer_axis() -> None:
    """Params grow with the number of models, whatever ranks they have; the oracle notices."""
    oracle = partial(trained_apart, meet=at_every_second)
    found = testing.mutants(averaged, axis="outer", by_ranks=oracle, only=["ranks", "donation"])
    assert [(bug.old, bug.new, bug.caught) for bug in found.rows] == [("x / group.size", "x * group.size", "ranks")]


def summed() -> fds.Transform:
    def reduce(grads: Any, memory: Any, group: comm.Group) -> Any:
        return [x / group.size for x in comm.all_reduce(grads, group)], memory

    return T.replicated(reduce=reduce)


def test_bugs_of_a_method_that_reduces_gradients_itself() -> None:
    found = testing.mutants(summed, only=["stages"])
    assert [(bug.old, bug.caught) for bug in found.rows] == [("x / group.size", "stages")]


def test_the_method_itself_is_not_changed() -> None:
    code = shortened.__code__
    testing.mutants(partial(shortened, limit=0.2), most=2, only=["donation"])
    assert shortened.__code__ is code


def test_closures_keep_their_variables() -> None:
    limit = 0.1

    def make() -> fds.Transform:
        def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
            return inner(step, state, fds.Weighted(grads.sum, grads.weight * limit))

        return fds.wrap("scaled", update=update)

    table = testing.mutants(make, only=["clip after"])
    assert [(bug.old, bug.caught) for bug in table.rows] == [("grads.weight * limit", ""), ("grads.weight", "clip after")]
    assert table.rows[0].line == make.__code__.co_firstlineno + 2


def wrong() -> fds.Transform:
    return fds.wrap("wrong", update=lambda inner, step, state, grads: inner(step, state, fds.Weighted(grads.sum, 0.1)))


@pytest.mark.parametrize(
    ("transform", "error", "words"),
    [
        (T.clip(0.1), TypeError, "bugs are planted into a Python function"),
        (eval("lambda: fds.compose()", {"fds": fds}), ValueError, "the source of <lambda> cannot be read"),
        (wrong, ValueError, r"wrong\(\) itself passes no law"),
    ],
)
def test_what_has_no_source_is_refused(transform: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        testing.mutants(transform, only=["stages"])
