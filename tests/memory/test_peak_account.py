"""The account of a peak by ``benchmarks/peak.py``: its parts are all of it, and those of tensors are exact bytes."""

import importlib
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from functional_ds import memory
from functional_ds.comm.worlds.gloo_shapes import GlooShapesWorld
from functional_ds.comm.worlds.shapes import rank_on_shapes
from functional_ds.dry_run.dry_run import dry_run, kernels_of
from tests.planting import Bug, planted

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
BLOCK = 4 * (12 * 64**2 + 13 * 64)  # bytes of a block of width 64, which is a unit
NORM = 4 * 2 * 64  # of the last LayerNorm
HELD = {  # by stage: gradients, gathered, exchange
    0: (5 * BLOCK + NORM, 0, BLOCK),  # all reduced, and the last unit's before it is packed
    1: (BLOCK + 4 * BLOCK // 2 + NORM, 0, 2 * BLOCK),  # of the last block, and the sums; two reductions under way
    3: (BLOCK + 2 * BLOCK // 2, 2 * BLOCK, 2 * BLOCK),
}


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("peak")


def small(bench: ModuleType) -> Any:
    return bench.peers.Setup(layers=4, width=64, heads=1, batch=1, context=8, ranks=2, dtype="fp32")


def check_kinds(bench: ModuleType, stage: int) -> None:
    """State as ``memory.measured`` has it, what is gathered and sent in whole blocks, and in all what a dry run has."""
    setup = small(bench)
    tokens = torch.empty(setup.batch, setup.context, dtype=torch.int64, device="meta")

    def program() -> tuple[memory.Memory, int]:
        with torch.device("meta"):
            step, state = bench.trained(setup, stage)
        return memory.measured(state), dry_run(step, state, (tokens, tokens)).peak()

    with kernels_of("cpu", whole=False):
        state, peak = rank_on_shapes(program, world_size=2, rank=0, kind=GlooShapesWorld)
    found = bench.predicted(setup, stage)
    assert sum(found.values()) == peak
    assert (found["params"], found["optimizer"]) == (state.params, state.optimizer)
    assert tuple(found[kind] for kind in ("gradients", "gathered", "exchange")) == HELD[stage]


@pytest.mark.parametrize("stage", HELD)
def test_tensors_are_exact_bytes(bench: ModuleType, stage: int) -> None:
    check_kinds(bench, stage)


def test_bugs_are_seen(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the library, a buffer that is kept after its use; in the account, gradients that nothing names."""
    bug = Bug("packed gradients are kept", "transforms.zero.reduce:Reducer._start", "self.local.pop", "self.local.__getitem__")
    with planted(bug), pytest.raises(bug.shows):
        check_kinds(bench, 1)
    monkeypatch.setattr(bench, "named", nullcontext)
    with pytest.raises(AssertionError):
        check_kinds(bench, 3)


@pytest.mark.sample(0)
def test_the_parts_of_a_process_are_its_peak(bench: ModuleType) -> None:
    row = bench.account(small(bench), 3, steps=2)
    measured, predicted = row["measured"], row["predicted"]
    assert measured["peak"] == sum(measured[part] for part in bench.PARTS) > measured["base"] > 0
    assert sum(measured[kind] for kind in bench.KINDS) == pytest.approx(sum(predicted.values()), rel=0.02)


def test_more_than_the_process_had_is_an_error(bench: ModuleType) -> None:
    assert bench.accounted({"base": 40, "params": 8}, 50) == {"base": 40, "params": 8, "kept": 2, "peak": 50}
    with pytest.raises(ValueError, match="3 bytes more than the process ever had"):
        bench.accounted({"base": 40, "params": 13}, 50)
