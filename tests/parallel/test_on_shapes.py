"""Laws 21, 55: whole steps on shapes only send what they send with values, on any number of ranks: the papers' formulas."""

import os
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import functional_ds as fds
from functional_ds import comm, moe, seq
from functional_ds import pipelining as pp
from functional_ds import transforms as T
from functional_ds.step.axes import axis

RANKS = 1024 if os.environ.get("HYPOTHESIS_PROFILE") == "laws" else 32
ROWS, LENGTH, WIDTH, HEADS, EXPERTS, CHOSEN, INNER = 2, 16, 16, 4, 8, 2, 8
Sent = dict[tuple[str, str], int]  # elements by group and collective
SMALL = {("edp,ep,sp", "all_reduce"), ("edp,ep,sp/control", "all_reduce"), ("edp,ep,sp/control", "broadcast")}  # losses, orders


@attrs.frozen
class Axes:
    """The sizes of a mesh; ep lies within dp."""

    dp: int
    sp: int
    tp: int
    ep: int
    stage: int = 1
    layout: str = "contiguous"

    @property
    def ranks(self) -> int:
        return self.dp * self.sp * self.tp


def loss(p: Any, batch: dict[str, Tensor]) -> fds.Weighted:
    """A layer: attention, and a mixture of experts with even routing; each rank of sp has a part of the positions."""
    qkv = fds.tp.column(batch["x"] * p["scale"], [p["q"], p["k"], p["v"]])
    q, k, v = (each.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in qkv)
    x = fds.tp.row(seq.ring()(q, k, v, causal=True).transpose(1, 2).flatten(2), p["o"])
    weights = (x @ p["router"].T).flatten(0, 1).softmax(-1)[:, :CHOSEN]
    chosen = torch.arange(weights.numel(), device=x.device).view_as(weights) % EXPERTS
    routing = moe.Routing(chosen, weights, EXPERTS)
    x = moe.exchange(moe.mlp(p["up"], p["down"], tp=axis("tp"), activation=F.relu), x, routing=routing)
    return fds.Weighted(x.sum(), torch.tensor(float(x.numel()), device=x.device))


def params(device: str) -> dict[str, Tensor]:
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys("qkvo", (WIDTH, WIDTH))
    shapes |= {"scale": (WIDTH,), "router": (EXPERTS, WIDTH), "up": (EXPERTS, INNER, WIDTH), "down": (EXPERTS, WIDTH, INNER)}
    return {name: torch.full(shape, 0.01, device=device) for name, shape in shapes.items()}


def program(axes: Axes, device: str, steps: int = 1) -> Sent:
    """What the last step sends."""
    mesh = comm.mesh(dp=axes.dp, sp=axes.sp, tp=axes.tp).split("dp", edp=axes.dp // axes.ep, ep=axes.ep)
    plan = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise", "up": 1, "down": 2}
    chain = [
        T.zero(axes.stage, mesh["edp", "ep", "sp"]),
        T.sequence(mesh["sp"], layout=axes.layout, dims={"x": 1}),
        T.experts("up|down", mesh["ep"], edp=mesh["edp", "sp"]),
        T.tensor_parallel(plan, mesh["tp"]),
    ]
    step = fds.compose(*chain)(fds.train_step(loss, fds.sgd(0.1)))
    state = step.init(params(device))
    for _ in range(steps):
        with comm.ledger() as book:
            state, _ = step(state, {"x": torch.ones(ROWS, LENGTH, WIDTH, device=device)})
    sent: Sent = {}
    for row in book.rows:
        sent[row.group, row.collective] = sent.get((row.group, row.collective), 0) + row.elements
    return sent


def sums(found: list[Sent]) -> Sent:
    """Over all ranks."""
    return {kind: sum(each.get(kind, 0) for each in found) for kind in sorted({kind for each in found for kind in each})}


@pytest.mark.law(55)
@pytest.mark.parametrize("axes", [Axes(2, 2, 2, 1, 3, "zigzag"), Axes(4, 1, 1, 2, 2), Axes(1, 4, 1, 1)])
def test_shapes_send_what_values_do(axes: Axes) -> None:
    """Every rank, each collective of each group, in a step after the first, which also compares what ranks have."""
    with_values = comm.simulate(program, axes, "cpu", 2, world_size=axes.ranks)
    assert comm.simulate(program, axes, "meta", 2, world_size=axes.ranks, shapes_only=True) == with_values


@pytest.mark.law(55)
def test_axes_send_their_formulas() -> None:
    """dp x sp x tp x ep: 32 ranks, and 1,024 under the profile laws, send what the papers say, at even routing."""
    axes = Axes(RANKS // 4, 2, 2, 4)
    ranks, sp, tp, ep = axes.ranks, axes.sp, axes.tp, axes.ep
    dp_sp, edp_sp = axes.dp * sp, axes.dp // ep * sp
    sent = sums(comm.simulate(program, axes, "meta", world_size=ranks, shapes_only=True))
    activation, rows = ROWS * LENGTH // sp * WIDTH, ROWS * LENGTH // sp * CHOSEN * WIDTH
    dense = WIDTH + EXPERTS * WIDTH + 4 * WIDTH**2 // tp
    dense += -dense % dp_sp  # padding
    experts = 2 * EXPERTS * INNER * WIDTH // tp // ep
    experts += -experts % edp_sp
    assert {kind: total for kind, total in sent.items() if kind not in SMALL} == {
        ("tp", "all_reduce"): ranks * 2 * 2 * activation * (tp - 1) // tp,  # one forward, one backward
        ("tp", "reduce_from"): ranks * 2 * 2 * rows * (tp - 1) // tp,  # of the experts, as above
        ("sp", "permute"): ranks * 3 * (sp - 1) * 2 * activation // tp,  # K and V: P - 1 forward, 2 P - 2 backward
        ("ep", "all_to_all"): ranks * (4 * rows + EXPERTS) * (ep - 1) // ep,  # there and back, twice; and counts
        ("edp,ep,sp/reduce", "reduce_scatter"): tp * dense * (dp_sp - 1),
        ("edp,ep,sp", "all_gather"): tp * dense * (dp_sp - 1),
        ("edp,ep,sp:sharers/reduce", "reduce_scatter"): tp * ep * experts * (edp_sp - 1),
        ("edp,ep,sp:sharers", "all_gather"): tp * ep * experts * (edp_sp - 1),
    }


def test_ranks_that_disagree_are_found() -> None:
    """Other params on one rank: what ranks with values say at once, ranks on shapes say after the run."""

    def differs() -> None:
        rank = comm.world().rank
        T.zero(1)(fds.train_step(loss, fds.sgd(0.1))).init({"w": torch.empty(4 + (rank == 2), device="meta")})

    with pytest.raises(
        comm.errors.MismatchError, match=r"group 'world/control' .*rank 0 called agree\(what='params'\) .*, rank 2 "
    ):
        comm.simulate(differs, world_size=4, shapes_only=True)


# -- pipelines ----------------------------------------------------------------------------------------------------------


@attrs.frozen
class Piped:
    """The sizes of a mesh with a pipeline, and its schedule; more than one stage lies on a rank where it has more."""

    dp: int
    sp: int
    tp: int
    schedule: pp.Schedule
    stage: int = 1
    half: bool = False
    tied: bool = False

    @property
    def ranks(self) -> int:
        return self.dp * self.schedule.ranks * self.sp * self.tp


def dense(p: Any, x: Tensor) -> Tensor:
    """A layer with attention; activations between the layers are whole."""
    qkv = fds.tp.column(x * p["scale"], [p["q"], p["k"], p["v"]])
    q, k, v = (each.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in qkv)
    return x + fds.tp.row(seq.ring()(q, k, v, causal=True).transpose(1, 2).flatten(2), p["o"])


def piped_program(piped: Piped, device: str, steps: int = 1) -> Sent:
    """What the last step sends."""
    schedule, stages = piped.schedule, piped.schedule.stages
    mesh = comm.mesh(dp=piped.dp, pp=schedule.ranks, sp=piped.sp, tp=piped.tp)
    names = ("q", "k", "v", "o", "scale")
    tree = {str(i): {name: leaf for name, leaf in params(device).items() if name in names} for i in range(stages)}
    if piped.tied:
        tree["table"] = torch.full((8, WIDTH), 0.01, device=device)

    def layer(i: int) -> Any:
        first, last = piped.tied and i == 0, piped.tied and i == stages - 1
        given, of = (pp.Piece, (str(i), "table")) if first or last else (pp.Piece, (str(i),))

        def run(p: Any, x: Tensor, batch: Any) -> Any:
            own, table = p if first or last else (p, None)
            x = dense(own, x @ table.T @ table if first else x)
            x = x @ table.T if last else x
            return fds.Weighted(x.sum(), torch.tensor(float(x.numel()), device=x.device)) if i == stages - 1 else x

        return given(run, uses=of if len(of) > 1 else of[0])

    model = pp.stages([layer(i) for i in range(stages)], tree, inputs=lambda batch: batch["x"])
    chain = [
        *([T.mixed_precision("bf16")] if piped.half else []),
        T.zero(piped.stage, mesh["dp", "sp"]),
        T.pipeline(schedule, model, mesh["pp"]),
        T.sequence(mesh["sp"], dims={"x": 1}),
        T.tensor_parallel({"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}, mesh["tp"]),
        T.clip(1.0),
    ]
    step = fds.compose(*chain)(fds.train_step(model, fds.sgd(0.1)))
    state = step.init(tree)
    for _ in range(steps):
        with comm.ledger() as book:
            state, _ = step(state, {"x": torch.ones(schedule.microbatches, LENGTH, WIDTH, device=device)})
    sent: Sent = {}
    for row in book.rows:
        sent[row.group, row.collective] = sent.get((row.group, row.collective), 0) + row.elements
    return sent


@pytest.mark.law(55)
@pytest.mark.parametrize(
    "piped",
    [
        Piped(1, 1, 2, pp.one_f_one_b(2, 2), 3, tied=True),
        Piped(2, 1, 1, pp.interleaved_one_f_one_b(2, 2), 2, half=True),
        Piped(1, 2, 1, pp.zbv(2, 3), tied=True),
    ],
    ids=["ZeRO-3 and a tied head", "interleaved in bf16", "a vee"],
)
def test_pipelines_send_on_shapes_what_they_do_with_values(piped: Piped) -> None:
    with_values = comm.simulate(piped_program, piped, "cpu", 2, world_size=piped.ranks)
    assert comm.simulate(piped_program, piped, "meta", 2, world_size=piped.ranks, shapes_only=True) == with_values


@pytest.mark.law(55)
def test_a_pipeline_sends_its_formula() -> None:
    """2 N at each boundary for each micro-batch, on dp x pp x sp x tp: 8 ranks, and 256 under the profile laws."""
    piped = Piped(RANKS // 32, 2, 2, pp.one_f_one_b(2, 3))
    sent = sums(comm.simulate(piped_program, piped, "meta", world_size=piped.ranks, shapes_only=True))
    lines, activation = piped.ranks // 2, LENGTH // piped.sp * WIDTH  # pipelines; of a micro-batch of one row
    assert sent["pp", "send"] == lines * 1 * 3 * 2 * activation
    assert sent["sp", "permute"] == piped.ranks * 3 * 3 * (piped.sp - 1) * 2 * activation // piped.tp
    assert sent["tp", "all_reduce"] >= piped.ranks * 3 * 2 * 2 * activation * (piped.tp - 1) // piped.tp
