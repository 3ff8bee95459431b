"""docs/troubleshooting.md: the errors that its tables quote are raised by the mistakes that these name."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T

PAGE = (Path(__file__).parents[1] / "docs/troubleshooting.md").read_text(encoding="utf-8")

MODULE, X = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), torch.randn(4, 3)
APPLY, PARAMS = fds.functional(MODULE)


def _run(loss: Callable[..., Any], *strategy: fds.Transform, params: Any = PARAMS) -> None:
    step = fds.compose(*strategy)(fds.train_step(loss, fds.sgd(0.1)))
    step(step.init(params), X)


def _one_rank_more() -> Any:
    return comm.all_reduce(torch.ones(2)) if comm.world().rank == 0 else comm.all_gather(torch.ones(2))


MISTAKES: dict[str, Callable[[], Any]] = {
    "params: this is the module": lambda: _run(lambda params, x: x.sum(), params=MODULE),
    "that is not one of the step's params": lambda: _run(lambda params, x: MODULE(x).sum()),
    ", which would be lost": lambda: _run(
        lambda params, x: APPLY(params, x).sum(), params={path: leaf.detach().clone() for path, leaf in PARAMS.items()}
    ),
    "params do not fit the module: missing": lambda: APPLY({}, X),
    "the loss must be a scalar or Weighted(sum, weight)": lambda: _run(APPLY),
    "rows, which do not divide into k micro-batches": lambda: _run(APPLY, T.accumulate(3)),
    "called different collectives": lambda: comm.simulate(_one_rank_more, world_size=2),
}


@pytest.mark.parametrize("text", MISTAKES)
def test_a_quoted_error_is_raised(text: str) -> None:
    assert text in PAGE
    with pytest.raises(Exception, match=re.escape(text).replace("k\\ micro", r"3\ micro")):
        MISTAKES[text]()
