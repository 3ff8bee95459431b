"""Values beside a state are JSON: the same values and types come back, and nothing is unpickled unless it is asked for."""

import argparse
import json
import random
from collections import Counter, OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from functional_ds import comm
from functional_ds.deepspeed.engine.loop.plain_values import decoded, encoded, pickled_paths
from functional_ds.state_dict.errors import CheckpointError, DamagedError
from tests.deepspeed.engine.test_ds_engine_files import drive, engine_of
from tests.planting import Bug, planted

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers(allow_nan=False)
)
KEYS = st.text() | st.integers() | st.sampled_from(["__kind__", "items", "data", (1, 2)])
DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    found = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 9)))) * 9
    return found.to(draw(st.sampled_from(DTYPES)))


ARRAYS = st.builds(
    lambda n, kind: (np.arange(n) * 1.7).astype(kind), st.integers(0, 4), st.sampled_from(["d", "f", "i8", "u1", "?", "F"])
)
LEAVES = (
    SCALARS
    | tensors()
    | ARRAYS
    | st.sampled_from(
        [np.float64(0.1), np.int32(3), np.bool_(True), torch.bfloat16, torch.Size([1, 2]), torch.device("cpu"), Path("a/b")]
    )
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(st.integers(), st.integers()).map(Counter)
        | st.sets(st.integers() | st.text())
        | st.frozensets(st.integers())
        | inner.map(lambda x: argparse.Namespace(a=x))
        | inner.map(lambda x: SimpleNamespace(a=x))
    ),
    max_leaves=8,
)


def same(a: Any, b: Any) -> bool:
    """Equal values of the same types, bit for bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.requires_grad == b.requires_grad and torch.equal(a, b)
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(x, y) for x, y in zip(a.values(), b.values(), strict=True))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, argparse.Namespace | SimpleNamespace):
        return same(vars(a), vars(b))
    return repr(a) == repr(b) if isinstance(a, float) else bool(a == b)


@given(VALUES)
def test_what_is_saved_comes_back(value: Any) -> None:
    found = encoded(value)
    assert pickled_paths(found, "x") == []
    assert same(decoded(json.loads(json.dumps(found)), name="x", allow_pickle=False), value)


@pytest.mark.parametrize(
    "value",
    [
        random.Random(0).getstate(),
        np.random.RandomState(0).get_state(),
        torch.get_rng_state(),
        nn.Parameter(torch.ones(2), requires_grad=False),
        torch.ones(2, 3).t(),
        torch.tensor(True),
        {"a": torch.ones(2, requires_grad=True)},
    ],
    ids=["random", "numpy", "torch", "parameter", "transposed", "flag", "grad"],
)
def test_states_of_generators_and_tensors_need_no_pickle(value: Any) -> None:
    assert same(decoded(json.loads(json.dumps(encoded(value))), name="x", allow_pickle=False), value)


def schedulers() -> dict[str, Any]:
    own = torch.optim.lr_scheduler
    rules = {
        "StepLR": lambda o: own.StepLR(o, 2),
        "MultiStepLR": lambda o: own.MultiStepLR(o, [1, 3, 3]),
        "OneCycleLR": lambda o: own.OneCycleLR(o, 0.1, 10),
        "LambdaLR": lambda o: own.LambdaLR(o, lambda i: 0.9**i),
        "ReduceLROnPlateau": own.ReduceLROnPlateau,
        "CosineAnnealingWarmRestarts": lambda o: own.CosineAnnealingWarmRestarts(o, 3),
        "SequentialLR": lambda o: own.SequentialLR(o, [own.ConstantLR(o), own.ExponentialLR(o, 0.9)], [2]),
        "CyclicLR": lambda o: own.CyclicLR(o, 0.01, 0.1),
    }
    return {name: rule(torch.optim.SGD([torch.ones(2, requires_grad=True)], 0.1, momentum=0.9)) for name, rule in rules.items()}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", schedulers())
def test_torchs_schedulers_need_no_pickle(name: str) -> None:
    state = schedulers()[name].state_dict()
    assert same(decoded(json.loads(json.dumps(encoded(state))), name="x", allow_pickle=False), state)


class Mark:
    """Writes a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_object_is_unpickled_on_request_alone(tmp_path: Path, world_size: int) -> None:
    harm, folder = tmp_path / "harm", tmp_path / "run"

    def program() -> None:
        engine = engine_of(1)
        drive(engine, 0, 1)
        if comm.world().rank == 0:
            with pytest.warns(UserWarning, match=r"client_state\['deep'\]\[0\], a .*Mark, is pickled"):
                engine.save_checkpoint(folder, client_state={"deep": [Mark(str(harm))], "epoch": 1})
        else:
            engine.save_checkpoint(folder, client_state={})
        before = engine.global_steps
        with pytest.raises(CheckpointError, match="pass allow_pickle=True"):
            engine.load_checkpoint(folder)
        assert not harm.exists()
        assert engine.global_steps == before
        comm.barrier()
        engine.load_checkpoint(folder, allow_pickle=True)
        assert harm.exists()

    comm.simulate(program, world_size=world_size) if world_size > 1 else program()


@pytest.mark.parametrize(
    "data",
    [
        {"__kind__": "none"},
        {"__kind__": "tensor", "dtype": "float32", "shape": [1 << 60], "grad": False, "data": ""},
        {"__kind__": "array", "dtype": "|O", "shape": [1], "data": "AAAAAAAAAAA="},
        {"__kind__": "tensor", "dtype": "load", "shape": [], "grad": False, "data": ""},
        {"__kind__": "dict", "items": [1]},
        {"__kind__": []},
    ],
)
def test_what_no_engine_wrote_is_damage(data: Any) -> None:
    with pytest.raises(DamagedError, match="client_state is not what an engine saves"):
        decoded(data, name="client_state", allow_pickle=False)


def test_what_contains_itself_is_named() -> None:
    held: dict[str, Any] = {}
    held["self"] = held
    with pytest.raises(ValueError, match="contains itself"):
        encoded(held)


BUGS = [Bug("pickles are opened", "deepspeed.engine.loop.plain_values:decoded", "pickled and (not allow_pickle)", "False")]


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_planted(tmp_path: Path, bug: Bug) -> None:
    with planted(bug), pytest.raises((AssertionError, pytest.fail.Exception)):
        test_an_object_is_unpickled_on_request_alone(tmp_path, 1)
