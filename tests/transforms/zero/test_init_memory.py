"""``init`` makes what it stores where it stays: beside it there are a few units at a time, and no second copy."""

import weakref
from collections import defaultdict
from typing import Any

import pytest
import torch

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.sharding.layout import Layout
from functional_ds.transforms.zero.collectives import Collectives

UNITS = 12


def _alive(patch: pytest.MonkeyPatch, owner: type, method: str, watched: Any, *transforms: fds.Transform) -> int:
    """The most tensors of those that the calls of a method have had, or given, which are there at once in ``init``."""
    refs, most = defaultdict[int, list[Any]](list), [0]
    real = getattr(owner, method)

    def watching(self: Any, *args: Any, **kwargs: Any) -> Any:
        found, rank = real(self, *args, **kwargs), comm.world().rank
        refs[rank].append(weakref.ref(watched(args, found)))
        most[0] = max(most[0], sum(each() is not None for each in refs[rank]) - 1)
        return found

    def initialised() -> list[float]:
        params = {f"{i}.w": torch.full((4, 4), float(i)) for i in range(UNITS)}
        step = fds.compose(*transforms)(
            fds.train_step(lambda params, x: sum((p * x).sum() for p in params.values()), fds.adam(0.1))
        )
        return [leaf.mean().item() for leaf in step.params(step.init(params)).values()]

    patch.setattr(owner, method, watching)
    assert comm.simulate(initialised, world_size=2) == [[float(i) for i in range(UNITS)]] * 2
    assert all(len(each) >= UNITS for each in refs.values())
    return most[0]


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("precision", [(), (T.mixed_precision("bf16"),)], ids=["fp32", "bf16"])
def test_shards_are_read_one_at_a_time(stage: int, precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _alive(monkeypatch, Layout, "stretch", lambda args, flat: flat, *precision, T.zero(stage)) <= 1


@pytest.mark.parametrize("stage", [1, 2])
def test_shards_go_as_they_are_gathered(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _alive(monkeypatch, Collectives, "gather", lambda args, _: args[1][0], T.zero(stage)) <= 4
