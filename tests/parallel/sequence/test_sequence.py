"""``T.sequence``: a step whose sequences are cut among ranks is the step on one device (laws 44, 49 and 53)."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import functional_ds as fds
from functional_ds import comm, seq
from functional_ds import transforms as T
from functional_ds.step.axes import axis
from tests.parallel.sequence.causal_models import (
    VOCABULARY,
    batch_of,
    model_loss,
    model_params,
    plain_attention,
    shifted,
)

Outcome = tuple[list[float], list[float], float, list[Tensor]]


def trained(loss: Callable[..., Any], batches: Sequence[Any], *strategy: Any) -> Outcome:
    """Losses, hits, an evaluation of the first batch before training, and the params after it."""
    step = fds.compose(*strategy)(fds.train_step(loss, fds.adamw(0.05), seed=3))
    state = step.init(model_params())
    before = step.evaluate(state, batches[0]).item()
    losses, hits = [], []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(metrics["loss"].item())
        hits.append(metrics["hits"].item() if "hits" in metrics else 0.0)
    return losses, hits, before, fds.tree.leaves(step.params(state))


def on_one_device(batches: Sequence[dict[str, Tensor]], dropout: float, causal: bool, *strategy: Any) -> Outcome:
    """Torch's attention on whole sequences, with labels that were shifted by hand, and no T.sequence."""
    plain, documents = zip(*map(shifted, batches), strict=True)
    with_documents = [{**batch, "numbers": number} for batch, number in zip(plain, documents, strict=True)]

    def loss(params: Any, batch: dict[str, Any], key: fds.Key | None) -> Any:
        attend = functools.partial(plain_attention, documents=batch["numbers"])
        return model_loss(attend, causal=causal, dropout=dropout)(params, batch, key)

    return trained(loss, with_documents, *strategy)


def assert_same(found: Outcome, expected: Outcome) -> None:
    """All of it, within the rounding of fp64."""
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@given(
    dp=st.sampled_from([1, 2]),
    sp=st.sampled_from([1, 2, 4]),
    layout=st.sampled_from(["contiguous", "zigzag", "striped"]),
    stage=st.integers(0, 3),
    k=st.sampled_from([1, 2]),
    padding=st.sampled_from([None, "right", "left", "packed"]),
    dropout=st.sampled_from([0.0, 0.3]),
    causal=st.booleans(),
    data=st.data(),
)
@settings(max_examples=12)
def test_a_step_over_sequences_is_the_step_on_one_device(
    dp: int, sp: int, layout: str, stage: int, k: int, padding: str | None, dropout: float, causal: bool, data: st.DataObject
) -> None:
    """Losses, metrics, an evaluation and the params after three steps, for any mesh, layout, stage, padding and accumulation.

    Dropout draws at global positions; ranks differ in how many tokens count.
    """
    length = 8 * data.draw(st.integers(1, 2))
    batches = [batch_of(2 * dp * k, length, seed, padding) for seed in range(3)]
    expected = on_one_device(batches, dropout, causal)
    first = data.draw(st.booleans(), "T.sequence first")

    def program() -> Outcome:
        mesh = comm.mesh(dp=dp, sp=sp)
        cut = T.sequence(mesh["sp"], layout=layout)
        strategy = [T.zero(stage, mesh["dp", "sp"]), *([T.accumulate(k)] if k > 1 else [])]
        strategy.insert(0 if first else len(strategy), cut)
        here = mesh["dp"]
        own = [{name: leaf.chunk(here.size)[here.rank] for name, leaf in batch.items()} for batch in batches]
        return trained(model_loss(seq.ring(), causal=causal, dropout=dropout), own, *strategy)

    for found in comm.simulate(program, world_size=dp * sp):
        assert_same(found, expected)
