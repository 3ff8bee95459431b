"""The leaf map: one order of leaves with every strategy, and where each of them lies."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_ds as fds
from functional_ds import comm, testing
from functional_ds import pipelining as pp
from functional_ds import transforms as T
from functional_ds.base import tree
from functional_ds.base.marks import trainable
from functional_ds.step.phases import Trait
from tests.planting import Bug, planted

DTYPES = (torch.float32, torch.float64, torch.int64, torch.complex64)
CHAINS: dict[str, Any] = {
    "alone": list,
    "zero(0)": lambda: [T.zero(0)],
    "zero(1), units": lambda: [T.zero(1, unit_of=lambda path: path[-1:])],
    "zero(2)": lambda: [T.clip(1.0), T.zero(2)],
    "zero(3), owners": lambda: [T.zero(3, aggregate="owner")],
    "zero(3), bf16": lambda: [T.mixed_precision("bf16"), T.zero(3)],
    "offload": lambda: [T.offload("cpu"), T.zero(1)],
}


def wide_tree(values: Sequence[Tensor]) -> Any:
    """Leaves whose order as text, as written and flattened are three."""
    found = {"b": [*values[:11]], "a-b": {"z": values[11], "c": [*values[12:]]}}
    return {**found, "a": {"k": values[0] + 1}}


@st.composite
def params_trees(draw: st.DrawFn) -> Any:
    if draw(st.booleans()):
        return wide_tree([torch.randn(3).to(draw(st.sampled_from(DTYPES))) for _ in range(15)])
    leaf = testing.leaves(DTYPES).map(lambda leaf: leaf.fill(0))
    return draw(testing.trees(leaf, max_leaves=8).filter(lambda t: len(tree.leaves(t)) > 1))


def check(params: Any, strategy: Sequence[Any], loss: Any = lambda params, batch: batch.sum()) -> list[str]:
    """The order is the tree's, and each shard is where the map says."""
    step = fds.compose(*strategy)(fds.train_step(loss, fds.sgd(0.1)))
    state = step.init(params)
    found = step.leaf_map(state)
    leaves = dict(tree.named(params))
    if not step.has(Trait.OFFLOADS):
        held = trainable(step.scatter(state).params)
        for shard, view in zip(found.shards, found.views(held), strict=True):
            leaf = leaves[found.leaves[shard.leaf].path]
            assert torch.equal(view, leaf.reshape(-1)[shard.offset : shard.offset + shard.numel])
    return [leaf.path for leaf in found.leaves]


def order(params: Any) -> list[str]:
    return [path for path, leaf in tree.named(params) if leaf.is_floating_point() or leaf.is_complex()]


def check_on_ranks(params: Any, chain: str, n: int) -> None:
    for found in comm.simulate(lambda: check(params, CHAINS[chain]()), world_size=n):
        assert found == order(params)


def stages(params: Any, end: int) -> pp.Stages:
    paths = [path for path, _ in tree.named(params)]
    pieces = [pp.Piece(lambda p, x: x, uses=tuple(uses)) for uses in (paths[:end], paths[end:])]
    return pp.stages(pieces, params, loss=lambda y, batch: y.mean())


def check_in_pipeline(params: Any, stage: int | None, end: int) -> None:
    """A rank has its leaves in the order of the tree, too."""

    def program() -> list[str]:
        mesh = comm.mesh(dp=1 if stage is None else 2, pp=2)
        model = stages(params, end)
        zero = [] if stage is None else [T.zero(stage, mesh["dp"])]
        return check(params, [*zero, T.pipeline(pp.one_f_one_b(2, 2), model, mesh["pp"])], model)

    wanted = order(params)
    found = comm.simulate(program, world_size=2 if stage is None else 4)
    for own in found:
        assert own == [path for path in wanted if path in own]
    assert {path for own in found for path in own} == {*wanted}


def check_unused(params: Any) -> None:
    """What the loss does not use stays, with weight decay too: places in the layout are others than in the leaf map."""

    def program() -> Any:
        step = T.zero(1)(fds.train_step(lambda p, x: (p["z"] * x).sum(), fds.adamw(0.1, weight_decay=0.5)))
        state, _ = step(step.init({"z": torch.ones(3), "a": torch.ones(3)}), torch.ones(3))
        return step.params(state)

    for found in comm.simulate(program, world_size=2):
        assert torch.equal(found["a"], torch.ones(3))
        assert not torch.equal(found["z"], torch.ones(3))


BUGS = [
    (
        Bug(
            "unused leaves by their places in the layout",
            "transforms.zero.reduce:Reducer.unused",
            "sorted(used)",
            "used",
        ),
        check_unused,
    ),
    (
        Bug(
            "the order of segments",
            "sharding.leaf_map:LeafMap.of_layout",
            "LeafMap(leaves, tuple(map(tuple, ranks)), group, group.rank, flat=True).ordered(layout.paths)",
            "LeafMap(leaves, tuple(map(tuple, ranks)), group, group.rank, flat=True)",
        ),
        lambda params: check_on_ranks(params, "zero(1), units", 2),
    ),
    (
        Bug(
            "whole segments",
            "sharding.leaf_map:LeafMap.of_layout",
            "LeafMap(leaves, (shards,), flat=True).ordered(layout.paths)",
            "LeafMap(leaves, (shards,), flat=True)",
        ),
        lambda params: check_on_ranks(params, "zero(0)", 2),
    ),
    (
        Bug("shards keep their numbers", "sharding.leaf_map:LeafMap.ordered", "number[s.leaf]", "s.leaf"),
        lambda params: check_on_ranks(params, "zero(1), units", 2),
    ),
    (
        Bug(
            "paths as text", "pipelining.execution.placement:Placement.elsewhere", "leaf_map.ordered(self.trained)", "leaf_map"
        ),
        lambda params: check_in_pipeline(params, 1, 4),
    ),
]


@pytest.mark.parametrize("chain", CHAINS)
@given(params=params_trees(), n=testing.world_sizes(3))
def test_the_order_of_leaves_is_that_of_the_tree(chain: str, params: Any, n: int) -> None:
    check_on_ranks(params, chain, n)


@pytest.mark.parametrize("stage", [None, 1, 3])
@given(data=st.data())
def test_in_a_pipeline_too(stage: int | None, data: st.DataObject) -> None:
    params = data.draw(params_trees())
    check_in_pipeline(params, stage, data.draw(st.integers(0, len(tree.leaves(params)))))


@pytest.mark.parametrize(("bug", "law"), BUGS, ids=lambda given: getattr(given, "name", ""))
def test_a_planted_bug_breaks_the_law(bug: Bug, law: Any) -> None:
    params = wide_tree([torch.randn(3) for _ in range(15)])
    law(params)
    with planted(bug), pytest.raises(bug.shows):
        law(params)


def test_a_notebook_shows_where_leaves_lie() -> None:
    def program() -> fds.LeafMap:
        step = T.zero(3)(fds.train_step(lambda params, x: (params["a"].sum() * params["b"].sum() * x).sum(), fds.sgd(0.1)))
        return step.leaf_map(step.init({"a": torch.ones(45), "b": torch.ones(20)}))

    for found in comm.simulate(program, world_size=2):
        shown = found._repr_html_()
        shards = [(rank, shard) for rank, shards in enumerate(found.shards_by_rank) for shard in shards]
        assert shown.count("<rect") == len(shards) == 3  # the border between the ranks cuts a leaf
        for rank, shard in shards:
            assert f"{found.leaves[shard.leaf].path}: {shard.numel} elements, from element {shard.offset}" in shown
            assert f"rank {rank}, tensor {shard.tensor}" in shown
