"""Batches of the containers that users have are the batches of their tensors."""

import dataclasses
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import pytest
import torch
import torch.utils._pytree as torch_pytree
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm, transforms
from functional_ds import pipelining as pp


@dataclasses.dataclass
class Data:
    x: Tensor
    y: Tensor
    note: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    y: Tensor
    x: Tensor


class Checked(Frozen):
    """Has no place for leaves that are no tensors in its constructor."""

    def __init__(self, y: Tensor, x: Tensor) -> None:
        if not isinstance(x, Tensor):
            raise TypeError(x)
        super().__init__(y, x)


@attrs.frozen
class Attrs:
    y: Tensor
    x: Tensor
    _note: str = "private"


class Known:
    """Known to torch's pytrees alone."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


torch_pytree.register_pytree_node(Known, lambda k: ([k.x, k.y], ["unhashable"]), lambda found, context: Known(*found))


class Map(Mapping[str, Tensor]):
    def __init__(self, data: Mapping[str, Tensor]) -> None:
        self._data = data

    def __getitem__(self, key: str) -> Tensor:
        return self._data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)


class Dict(dict[str, Tensor]):
    pass


Pair = namedtuple("Pair", ["x", "y"])

KINDS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "dataclass": Data,
    "frozen dataclass": lambda x, y: Frozen(x=x, y=y),
    "dataclass with checks": lambda x, y: Checked(x=x, y=y),
    "attrs class": lambda x, y: Attrs(x=x, y=y),
    "torch's": Known,
    "mapping": lambda x, y: Map({"x": x, "y": y}),
    "dict's child": lambda x, y: Dict(y=y, x=x),
    "UserDict": lambda x, y: UserDict(x=x, y=y),
    "OrderedDict": lambda x, y: OrderedDict(y=y, x=x),
    "namedtuple": Pair,
    "nested": lambda x, y: UserDict(x=x, y=Data(x=y, y=y)),
}
HUGGING_FACE = ["BatchEncoding", "BatchFeature", "ModelOutput"]


def kind(name: str) -> Callable[[Tensor, Tensor], Any]:
    if name in KINDS:
        return KINDS[name]
    transformers = pytest.importorskip("transformers")
    if name == "ModelOutput":
        return lambda x, y: transformers.modeling_outputs.BaseModelOutput(last_hidden_state=x, hidden_states=(y,))
    return lambda x, y: getattr(transformers, name)({"x": x, "y": y})


def pair(batch: Any) -> tuple[Tensor, Tensor]:
    """What a user's loss takes from the batch, by the names that its class has."""
    if hasattr(batch, "last_hidden_state"):
        return batch.last_hidden_state, batch.hidden_states[0]
    if isinstance(batch, Mapping):
        return batch["x"], batch["y"].y if isinstance(batch["y"], Data) else batch["y"]
    return batch.x, batch.y


STRATEGIES: dict[str, tuple[int, tuple[fds.Transform, ...]]] = {
    "none": (1, ()),
    "accumulate": (1, (transforms.accumulate(2),)),
    "zero": (2, (transforms.zero(2), transforms.accumulate(2))),
    "data-parallel checks": (2, (transforms.compressed_gradients(comm.codecs.Cast(torch.float32)),)),
    "bf16": (1, (transforms.mixed_precision("bf16"),)),
    "remat": (1, (transforms.remat(""),)),
}


@pytest.mark.parametrize("name", [*KINDS, *HUGGING_FACE])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_batch_is_its_tensors(name: str, strategy: str) -> None:
    """Training and evaluation, against the batch as a tuple; the loss gets the class that the user gave."""
    make = kind(name)
    ranks, more = STRATEGIES[strategy]
    x, y = torch.randn(8, 3), torch.randn(8, 1)
    seen: set[type] = set()

    def run(make: Callable[[Tensor, Tensor], Any], take: Callable[[Any], tuple[Tensor, Tensor]]) -> list[float]:
        torch.manual_seed(0)
        apply, params = fds.functional(nn.Linear(3, 1))

        def loss(p: Any, batch: Any) -> Tensor:
            seen.add(type(batch))
            one, other = take(batch)
            return (apply(p, one) - other).square().mean()

        step = fds.compose(*more)(fds.train_step(loss, fds.sgd(0.1)))
        rank = comm.world().rank
        mine = make(x.chunk(ranks)[rank], y.chunk(ranks)[rank])
        state = step.init(params)
        found = [step.evaluate(state, mine).item()]
        for _ in range(2):
            state, metrics = step(state, mine)
            found.append(metrics["loss"].item())
        return found

    want = comm.simulate(run, lambda x, y: (x, y), lambda batch: batch, world_size=ranks)
    seen.clear()
    assert comm.simulate(run, make, pair, world_size=ranks) == want
    assert seen == {type(make(x, y))}


@pytest.mark.parametrize("name", ["dataclass", "UserDict", "BatchEncoding"])
def test_pipelines_and_fit_take_them(name: str) -> None:
    make = kind(name)
    x, y = torch.randn(8, 3), torch.randn(8, 1)

    def run(make: Callable[[Tensor, Tensor], Any], take: Callable[[Any], tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        stages, params = pp.cut(
            net,
            ["2"],
            inputs=lambda batch: take(batch)[0],
            loss=lambda found, batch: (found - take(batch)[1]).square().mean(),
            example=make(x, y),
        )
        step = transforms.pipeline(pp.one_f_one_b(2, 4), stages, comm.world())(fds.train_step(stages, fds.sgd(0.1)))
        return step.params(fds.fit(step, step.init(params), lambda index: make(x, y), steps=2))  # type: ignore[no-any-return]

    want = comm.simulate(run, lambda x, y: (x, y), lambda batch: batch, world_size=2)
    for found, expected in zip(comm.simulate(run, make, pair, world_size=2), want, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_order_of_a_mappings_keys_is_no_structure() -> None:
    step = fds.train_step(lambda p, batch: (p["w"] * batch["x"]).sum() + batch["y"].sum(), fds.sgd(0.1))
    one, other = torch.ones(2), torch.zeros(2)
    state, _ = step(step.init({"w": torch.ones(2)}), UserDict(x=one, y=other))
    state, _ = step(state, UserDict(y=other, x=one))
    torch.testing.assert_close(step.params(state)["w"], torch.full((2,), 0.8))
