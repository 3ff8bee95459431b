"""Laws 19 to 36 together: any model, mesh and composition of transforms is the single-device step.

A composition is drawn as data and built twice: on a mesh with everything in it, and on one device with only what changes
the mathematics (precision, clipping, schedules, means).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm, transforms
from functional_ds import pipelining as pp
from tests.transforms.models import Blocks, Tied
from tests.transforms.rules import assert_close

LAWS = settings.default.max_examples > 100
FP32, BF16 = 5e-5, 6e-2  # some hundred fp32 additions in other orders through two updates; bf16 has 8 bits
ROWS = 24


class Gated(nn.Module):
    """Blocks with a residual, a gate that all blocks share, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(4))
        self.gate = nn.Linear(8, 8)
        self.out = nn.Linear(8, 3)
        self.blocks[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = x + block(x) * torch.sigmoid(self.gate(x))
        return self.out(x)


def longer(build: Callable[[], Any], block: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A module with one more block, so that four stages have one each."""

    def make() -> nn.Module:
        module = build()
        module.blocks.append(block())
        return module

    return make


def _regression(y: Tensor, batch: Any) -> Tensor:
    return F.mse_loss(y.float(), batch[1].float())


def _tokens(y: Tensor, batch: Any) -> fds.Weighted:
    kept = (batch[1] > 2).float()
    losses = F.cross_entropy(y.float().flatten(0, 1), batch[1].flatten(), reduction="none")
    return fds.Weighted((losses * kept.flatten()).sum(), kept.sum())


def _rows() -> Any:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(ROWS, 6, generator=generator), torch.randn(ROWS, 3, generator=generator)


def _ids() -> Any:
    generator = torch.Generator().manual_seed(6)
    return tuple(torch.randint(0, 11, (2, ROWS, 5), generator=generator))


MODELS: dict[str, tuple[Callable[[], nn.Module], Any, Callable[[], Any]]] = {
    "blocks": (longer(Blocks, lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8))), _regression, _rows),
    "gated": (Gated, _regression, _rows),
    "tied": (longer(Tied, lambda: nn.Linear(8, 8)), _tokens, _ids),
}
RULES: dict[str, Callable[[], Any]] = {
    "adamw": lambda: fds.adamw(1e-2, eps=1e-3),
    "adamw, by path": lambda: fds.adamw(1e-2, eps=1e-3, weight_decay=0.1, decay="weight"),
    "sgd": lambda: fds.sgd(1e-2, momentum=0.9),
    "lamb": lambda: fds.lamb(1e-2, eps=1e-3),
}
PRECISION: dict[str, Callable[[], fds.Transform] | None] = {
    "fp32": None,
    "bf16": lambda: transforms.mixed_precision("bf16"),
    "fp16": lambda: transforms.mixed_precision("fp16", 2.0**8),
}


@attrs.frozen
class Composition:
    """What is composed, as data."""

    model: str
    rule: str
    precision: str
    zero: int | None
    options: tuple[tuple[str, Any], ...]
    dp: int
    nodes: int
    between: str  # what is done between nodes: they replicate shards, or cut them, too, with or without hpZ
    schedule: pp.Schedule | None
    accumulate: int
    remat: str | None
    offload: str | None
    clip: bool
    paced: bool
    ema: bool
    late: tuple[int, ...]  # where what commutes with everything is put

    @property
    def ranks(self) -> int:
        return self.dp * self.nodes * (1 if self.schedule is None else self.schedule.ranks)


OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "unit_of": st.sampled_from([lambda path: path, lambda path: "all"]),
        "prefetch": st.integers(0, 3),
        "max_live_units": st.integers(1, 3),
        "persistence_threshold": st.sampled_from([0, 9]),
        "aggregate": st.sampled_from(["reduce_scatter", "all_reduce", "owner"]),
        "gradient_predivide_factor": st.sampled_from([1.0, 4.0]),
        "reshard_last_units": st.booleans(),
    },
)
FOR_STAGE = {
    0: {"unit_of", "gradient_predivide_factor"},
    1: {"unit_of", "aggregate", "gradient_predivide_factor"},
    2: {"unit_of", "aggregate", "gradient_predivide_factor"},
    3: {
        *("unit_of", "prefetch", "max_live_units", "persistence_threshold", "aggregate"),
        *("gradient_predivide_factor", "reshard_last_units"),
    },
}
SCHEDULES = [pp.one_f_one_b(2, 2), pp.gpipe(3, 3), pp.interleaved_one_f_one_b(2, 3), pp.zbv(2, 2), pp.zb_h1(2, 3)]


@st.composite
def compositions(draw: st.DrawFn) -> Composition:
    zero = draw(st.sampled_from([None, 0, 1, 2, 3, 3]))
    options = {} if zero is None else {k: v for k, v in draw(OPTIONS).items() if k in FOR_STAGE[zero]}
    schedule = draw(st.sampled_from([None, None, *SCHEDULES]))
    several = zero is not None
    nodes = draw(st.sampled_from([1, 1, 2])) if several and (schedule is None or schedule.ranks == 2) else 1
    between = draw(st.sampled_from(["replicate", "intra_node", "hpz"][: zero or 1])) if nodes > 1 else "replicate"
    if between != "replicate" and options.get("aggregate") == "owner":
        del options["aggregate"]  # it is refused
    return Composition(
        model=draw(st.sampled_from(sorted(MODELS))),
        rule=draw(st.sampled_from(sorted(RULES))),
        precision=draw(st.sampled_from(["fp32", "fp32", "bf16", "fp16"])),
        zero=zero,
        options=tuple(sorted(options.items())),
        dp=draw(st.sampled_from([1, 2, 3] if schedule is None else [1, 2])) if several else 1,
        nodes=nodes,
        between=between,
        schedule=schedule,
        accumulate=draw(st.sampled_from([1, 2])),
        remat=draw(st.sampled_from([None, None, "recompute", "offload", "recompute,inputs=offload", "recompute,matmuls=save"])),
        offload=draw(st.sampled_from([None, None, "cpu", "disk"])),
        clip=draw(st.booleans()),
        paced=draw(st.booleans()),
        ema=draw(st.booleans()),
        late=tuple(draw(st.lists(st.integers(0, 9), min_size=3, max_size=3))),
    )


@cache
def staged(model: str, stages: int) -> tuple[pp.Stages, Any, Any]:
    """The model in stages, its params and the whole batch."""
    build, loss, batch = MODELS[model]
    torch.manual_seed(3)
    whole = batch()
    made, params = pp.cut(build(), stages, loss=loss, example=whole)
    return made, params, whole


def alone(drawn: Composition) -> list[fds.Transform]:
    """What changes the mathematics."""
    precision = PRECISION[drawn.precision]
    return [
        *([transforms.ema(0.9)] if drawn.ema else []),
        *([] if precision is None else [precision()]),
        *([transforms.clip(0.05)] if drawn.clip else []),
        *([transforms.schedule(transforms.warmup(2))] if drawn.paced else []),
    ]


def together(drawn: Composition, made: pp.Stages, path: str) -> tuple[list[fds.Transform], tuple[int, int]]:
    """All of it, on this rank of the mesh, and which part of the batch is its own."""
    mesh = comm.mesh(nodes=drawn.nodes, dp=drawn.dp, pp=1 if drawn.schedule is None else drawn.schedule.ranks)
    precision = PRECISION[drawn.precision]
    fixed: list[fds.Transform] = []
    if drawn.ema:
        fixed.append(transforms.ema(0.9))
    if precision is not None:
        fixed.append(precision())
    if drawn.offload is not None:
        fixed.append(transforms.offload(optimizer=drawn.offload, **({"path": path} if drawn.offload == "disk" else {})))
    if drawn.zero is not None:
        more: dict[str, Any] = {"group": mesh["dp"]}
        if drawn.nodes > 1 and drawn.between == "replicate":
            more["replicate"] = mesh["nodes"]
        elif drawn.nodes > 1:
            more = {"group": mesh["nodes", "dp"], "intra_node": mesh["dp"]}
            more |= {"hpz": True} if drawn.between == "hpz" else {}
        fixed.append(transforms.zero(drawn.zero, **dict(drawn.options), **more))
    if drawn.schedule is not None:
        fixed.append(transforms.pipeline(drawn.schedule, made, mesh["pp"]))
    if drawn.accumulate > 1:
        fixed.append(transforms.accumulate(drawn.accumulate))
    free: list[fds.Transform] = []
    if drawn.remat is not None:
        free.append(transforms.remat(policy=drawn.remat))
    if drawn.clip:
        free.append(transforms.clip(0.05))
    if drawn.paced:
        free.append(transforms.schedule(transforms.warmup(2)))
    first = next((i for i, _ in enumerate(fixed) if drawn.offload and i), 0)
    for transform, place in zip(free, drawn.late, strict=False):
        fixed.insert(max(first, min(place, len(fixed))), transform)
    index = mesh["nodes"].rank * drawn.dp + mesh["dp"].rank
    return fixed, (index, drawn.dp * drawn.nodes)


def trained(drawn: Composition, made: pp.Stages, params: Any, batch: Any, strategy: list[fds.Transform]) -> Any:
    step = fds.compose(*strategy)(fds.train_step(made, RULES[drawn.rule]()))
    state, losses = step.init(params), []
    for _ in range(2):
        state, metrics = step(state, batch)
        losses.append([metrics["loss"].item(), *([metrics["grad_norm"].item()] if drawn.clip else [])])
    return losses, step.evaluate(state, batch).item(), step.params(state)


@contextmanager
def folder(drawn: Composition) -> Iterator[str]:
    """Where files may lie."""
    with TemporaryDirectory() as path:
        for rank in range(drawn.ranks):
            (Path(path) / str(rank)).mkdir()
        yield path


@pytest.mark.law(36)
@pytest.mark.parametrize("part", range(8 if LAWS else 1))  # of the examples: workers share them
@settings(max_examples=250 if LAWS else 9)
@given(drawn=compositions(), seed=st.integers(0, 99))
def test_any_composition_is_the_single_device_step(drawn: Composition, seed: int, part: int) -> None:
    """ZeRO with its options × pipeline × accumulation × recomputation × offload, in any allowed order, change nothing."""
    event(f"zero {drawn.zero}, {'a pipeline' if drawn.schedule else 'no pipeline'}")
    event(f"{drawn.nodes} nodes, {drawn.between}")
    count = 1 if drawn.schedule is None else drawn.schedule.stages
    made, params, whole = staged(drawn.model, count)
    expected = trained(drawn, made, params, whole, alone(drawn))
    with folder(drawn) as path:

        def program() -> Any:
            strategy, (index, of) = together(drawn, made, str(Path(path) / str(comm.world().rank)))
            own = tuple(x.tensor_split(of)[index] for x in whole)
            return trained(drawn, made, params, own, strategy)

        found = comm.simulate(program, world_size=drawn.ranks, seed=seed)
    tolerance = FP32 if drawn.precision == "fp32" else BF16
    for losses, evaluated, after in found:
        torch.testing.assert_close(losses, expected[0], rtol=tolerance, atol=tolerance)
        assert evaluated == pytest.approx(expected[1], rel=tolerance, abs=tolerance)
        assert_close(after, expected[2], tolerance)
