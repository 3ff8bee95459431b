"""Bugs of stacked experts, and of what a loss does with leaves in half precision, each planted alone: a law must break."""

from typing import Any

import pytest
import torch

from functional_ds import comm
from functional_ds import transforms as T
from tests.planting import Bug, planted
from tests.transforms.parallel import test_stacked_experts as stacks
from tests.transforms.zero import test_lazy_tensor as lazy


def a_list_is_refused() -> None:
    def cut() -> bool:
        tree = {"experts": [{"up": torch.ones(4, 4)} for _ in range(2)]}
        try:
            T.experts("experts", comm.mesh(dp=2).split("dp", edp=1, ep=2)["ep"]).cut(tree)
        except ValueError:
            return True
        return False

    assert comm.simulate(cut, world_size=2) == [True, True]


BUGS: dict[tuple[Any, ...], list[Bug]] = {
    (stacks.test_the_stack_has_the_experts_of_the_list,): [
        Bug(
            "all experts are the first",
            "parallel.experts.stacked:StackedExperts.__init__",
            "module.get_parameter",
            "modules[0].get_parameter",
        ),
        Bug(
            "experts have one another's rows",
            "parallel.experts.stacked:each_expert.run",
            "leaf.unbind",
            "leaf.flip(0).unbind",
        ),
        Bug(
            "names of the list are off by one",
            "parallel.experts.stacked:unstacked",
            "enumerate(leaf)",
            "enumerate(leaf, 1)",
        ),
    ],
    (a_list_is_refused,): [
        Bug(
            "each expert of a list is cut",
            "transforms.parallel.experts:Experts.cut",
            "self._check_lists(named)",
            "",
        ),
    ],
    (lazy.test_casts_keep_the_gradient, "type", 0): [
        Bug(
            "a cast of a leaf is taken for a question",
            "transforms.zero.units.lazy_tensor:LazyTensor.__torch_function__",
            "func in _METADATA",
            "func in _METADATA or func is Tensor.type",
            RuntimeError,
        ),
    ],
}


@pytest.mark.parametrize(("case", "bug"), [pytest.param(c, b, id=b.name) for c, bugs in BUGS.items() for b in bugs])
def test_a_bug_breaks_its_law(case: tuple[Any, ...], bug: Bug) -> None:
    law, *rest = case
    law(*rest)
    with planted(bug), pytest.raises(bug.shows):
        law(*rest)
