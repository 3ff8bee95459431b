"""Steps and states to save, and what a state holds, whatever the ranks, stages and units."""

import math
from typing import Any

import torch
from torch import Tensor

import functional_ds as fds
from functional_ds import comm, transforms
from functional_ds.sharding.leaf_region import LeafRegion
from functional_ds.state_dict.describe import as_tensors, describe
from tests.transforms.rules import ROWS, RULES, fresh, linear


def each_leaf(path: str) -> str:
    return path


def everything(path: str) -> str:
    return "all"


UNITS = {"blocks": None, "leaves": each_leaf, "one": everything}
POLICIES = ("none", "bf16", "fp16", "bf16 states", "bf16 alone")


def precision(policy: str) -> list[fds.Transform]:
    if policy == "none":
        return []
    if policy == "bf16 states":
        return [transforms.mixed_precision("bf16", states=torch.bfloat16)]
    if policy == "bf16 alone":
        return [transforms.mixed_precision("params=bf16,compute=bf16", stochastic=True)]
    return [transforms.mixed_precision(policy, 4.0 if policy == "fp16" else None)]


def make(rule: str, *strategy: fds.Transform) -> fds.Step:
    return fds.compose(*strategy)(fds.train_step(linear, RULES[rule]))


def stage_of(stage: int | None, units: str, group: comm.Group | None = None) -> list[fds.Transform]:
    return [] if stage is None else [transforms.zero(stage, group, unit_of=UNITS[units])]


def rows_of_step(count: int) -> Tensor:
    here = comm.world()
    return (torch.arange(ROWS) * (count + 1) + 7 * count).tensor_split(here.size)[here.rank]


def run(step: fds.Step, state: fds.State, start: int, stop: int) -> fds.State:
    for count in range(start, stop):
        state, _ = step(state, rows_of_step(count))
    return state


def trained(step: fds.Step, steps: int = 2) -> fds.State:
    return run(step, step.init(fresh()), 0, steps)


def contents(state: fds.State, group: comm.Group | None = None) -> dict[str, Tensor]:
    """All global tensors by name, put together from all ranks' pieces; copies must agree. Counts of empty leaves aside."""
    own = [(h.name, h.region, h.offset, h.view.clone()) for h in describe(as_tensors(state))]
    whole: dict[str, Tensor] = {}
    filled: dict[str, Tensor] = {}
    for pieces in comm.all_gather_object(own, group):
        for name, region, offset, view in pieces:
            flat = whole.setdefault(name, torch.zeros(math.prod(region.shape), dtype=view.dtype))
            done = filled.setdefault(name, torch.zeros(math.prod(region.shape), dtype=torch.bool))
            where = places_of(region)[offset : offset + view.numel()]
            before = done[where]
            bits, there = view[before].view(torch.uint8), flat[where][before].view(torch.uint8)
            assert torch.equal(bits, there), name
            flat[where], done[where] = view, True
    assert all(done.all() for done in filled.values())
    empty = {name.partition("/")[2] for name, flat in whole.items() if name.startswith("params/") and not flat.numel()}
    return {name: flat for name, flat in whole.items() if name.partition("/")[2] not in empty}


def places_of(region: LeafRegion) -> Tensor:
    """Where a slice's elements lie in the flattened whole tensor."""
    found = torch.arange(math.prod(region.shape)).view(region.shape)
    for dim, ranges in region.ranges:
        found = torch.cat([found.narrow(dim, start, stop - start) for start, stop in ranges], dim)
    return found.reshape(-1)


def assert_same_contents(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, flat in found.items():
        assert flat.dtype == expected[name].dtype, name
        assert torch.equal(flat.view(torch.uint8), expected[name].view(torch.uint8)), name


def saved(folder: Any, step: fds.Step, **options: Any) -> tuple[dict[str, Tensor], Any]:
    """Trains a little and saves; what is in the state then, and its params."""
    state = trained(step)
    fds.save(state, folder, **options)
    return contents(state), step.params(state)
