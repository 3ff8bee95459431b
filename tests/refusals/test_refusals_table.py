"""docs/troubleshooting.md: each of its rows is a program that is refused as the row says, and each record is a row."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import transforms as T
from functional_ds.base import tree
from functional_ds.testing import assert_same
from tests.refusals.modules import Counts, Two
from tests.refusals.refusal import Refusal, made, rows
from tests.refusals.table import AREAS, PAGE, block, table

ALL = [pytest.param(refusal, id=f"{area}: {refusal.what}") for area, found in AREAS.items() for refusal in found]
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


@pytest.mark.parametrize("refusal", ALL)
def test_it_is_refused_by_name(refusal: Refusal) -> None:
    """By this class, and the message says what is wrong, then what would do or where to look."""
    with pytest.raises(refusal.error) as caught:
        refusal.program()
    assert type(caught.value) is refusal.error
    message = str(caught.value)
    for part in (refusal.says, refusal.advises):
        assert part
        assert re.search(part, message, re.DOTALL), message


@pytest.mark.law(61)
@pytest.mark.parametrize("strategy", [(T.zero(1),), (T.zero(3),), (T.mixed_precision("bf16"),)], ids=str)
@pytest.mark.parametrize(
    ("build", "batches"),
    [(lambda: Two("clamp"), [rows()]), (lambda: Counts(assigns=True), [rows()]), (nn.BatchNorm1d, [rows(), rows(1)])],
)
def test_a_refused_step_leaves_the_state_as_it_was(
    build: Callable[..., nn.Module], batches: list[Tensor], strategy: tuple[fds.Transform, ...]
) -> None:
    """Its params and its modules' buffers; the last batch is refused, by the library or by torch."""
    apply, params = fds.functional(build(3) if build is nn.BatchNorm1d else build())
    step = made(*strategy, loss=lambda params, x: apply(params, x).square().mean())
    state = step.init(params)
    for batch in batches[:-1]:
        state, _ = step(state, batch)
    before = tree.map(torch.clone, (step.params(state), step.module_buffers(state)))
    with pytest.raises((RuntimeError, ValueError)):
        step(state, batches[-1])
    assert_same((step.params(state), step.module_buffers(state)), before)


@pytest.mark.parametrize("area", AREAS)
def test_the_page_has_these_tables(area: str) -> None:
    assert block(PAGE.read_text(encoding="utf-8"), area) == table(AREAS[area]), "run `python -m tests.refusals.table --write`"


def test_rows_are_sentences() -> None:
    for refusals in AREAS.values():
        for refusal in refusals:
            for text in (refusal.why, refusal.instead):
                assert text.endswith(".")
                assert "|" not in text + refusal.what
    names = [refusal.what for refusals in AREAS.values() for refusal in refusals]
    assert len(names) == len(set(names))
