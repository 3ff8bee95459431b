"""Laws 20, 21, 40 and 55: what ``fds.scaling`` counts is what a run on a few ranks has, sends and computes."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import functional_ds as fds
from functional_ds import comm, memory
from functional_ds import pipelining as pp
from functional_ds import transforms as T
from functional_ds.dry_run.operations import OperationCounter
from functional_ds.scaling import MACHINES, MeshPlan, Transformer, predict_run, rank_share

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import paper_transformer as pt

GPT = Transformer(layers=2, width=16, heads=4, vocabulary=64, length=8, dropout=False)
LLAMA = Transformer(
    layers=3,
    width=16,
    heads=4,
    key_heads=2,
    inner=24,
    vocabulary=64,
    length=8,
    gated=True,
    biased=False,
    learned_positions=False,
    tied=False,
    dropout=False,
)
STATISTICS = 2 * 2 * 2  # bytes that two norms keep for a token beside their input, a mean and a deviation of 16 bits
WHOLE = {"reshard_last_units": True}  # each unit is gathered once in each pass


@pytest.mark.parametrize("model", [GPT, LLAMA])
def test_parameters_are_those_of_the_program(model: Transformer) -> None:
    assert model.parameters == sum(leaf.numel() for leaf in fds.tree.leaves(pt.fresh(model)))


def step_of(model: Transformer, plan: MeshPlan) -> tuple[Mapping[str, int], memory.Memory, int]:
    """What a rank sends in a step by axis, holds, and computes."""
    mesh, sizes = comm.mesh(dp=plan.dp, tp=plan.tp), list[int]()
    chain = [T.mixed_precision("bf16"), T.zero(plan.stage, mesh["dp"], **(WHOLE if plan.stage == 3 else {}))]
    chain += [T.accumulate(plan.micro_batches)] if plan.micro_batches > 1 else []
    chain += [T.tensor_parallel(pt.tensor_plan(model), mesh["tp"]), memory.noted(sizes)]
    step = fds.compose(*chain)(fds.train_step(pt.loss_of(model, recompute=plan.recompute != "none"), fds.adam(1e-3)))
    state, batch = step.init(pt.fresh(model)), pt.batch_of(model, plan)
    for _ in range(3 if plan.stage == 3 else 1):  # stage 3 learns in which order units are used
        state, _ = step(state, batch)
    with comm.ledger() as book, OperationCounter() as counter:
        state, _ = step(state, batch)
    sent = {"tp": 0, "dp": 0}
    for row in book.rows:
        scalars = "control" in row.group or (row.group == "dp" and row.collective == "all_reduce" and plan.stage)
        sent[row.group.partition("/")[0]] += 0 if scalars else row.elements
    return sent, memory.measured(state, gradients=sizes[-1]), int(counter.flops)


@pytest.mark.sample(2)
@pytest.mark.law(55)
@pytest.mark.parametrize(
    ("model", "plan"),
    [
        (GPT, MeshPlan(dp=2, tp=2, stage=1)),
        (GPT, MeshPlan(dp=4, stage=3, recompute="needed")),
        (LLAMA, MeshPlan(dp=2, tp=2, stage=3, micro_batch=2, micro_batches=2, recompute="needed")),
        (LLAMA, MeshPlan(dp=4, tp=2, stage=2, micro_batches=2)),
    ],
)
def test_a_run_sends_holds_and_computes_what_is_counted(model: Transformer, plan: MeshPlan) -> None:
    share = rank_share(model, plan)
    sent, held, flops = comm.symmetric(step_of, model, plan, world_size=plan.ranks, rank=plan.ranks - 1)
    assert sent == {axis: share.sent[axis] for axis in sent}
    assert flops == share.flops
    formulas = memory.by_stage(plan.stage, memory.SIXTEEN if plan.micro_batches == 1 else memory.EIGHTEEN)
    assert held.params == formulas["params"].bytes(share.parameters, plan.dp)
    assert held.masters == formulas["masters"].bytes(share.parameters, plan.dp)
    assert held.optimizer - formulas["optimizer"].bytes(share.parameters, plan.dp) <= 16 * 4 * model.layers  # Adam's counts
    if plan.stage > 1:  # stage 1 has whole gradients only until their reduction
        assert held.gradients == formulas["gradients"].bytes(share.parameters, plan.dp)


@pytest.mark.parametrize("whole", [True, False])
def test_a_whole_recomputation_has_the_last_product_more(whole: bool) -> None:
    """Torch's checkpoints, with and without their early end; a whole one is equation 3's convention."""
    model = attrs.evolve(LLAMA, layers=2)

    def program() -> int:
        layer = pt.layer_of(model)

        def loss(p: Any, batch: dict[str, Tensor]) -> fds.Weighted:
            x = fds.tp.embed(batch["input_ids"], p["embed"])
            for each in p["layers"]:
                x = checkpoint(layer, each, x, use_reentrant=False)
            return fds.tp.cross_entropy(fds.tp.column(x, p["head"]), batch["labels"])

        chain = T.tensor_parallel(pt.tensor_plan(model), comm.world())
        step = chain(fds.train_step(loss, fds.sgd(0.1)))
        state = step.init({name: leaf for name, leaf in pt.fresh(model).items() if name != "norm"})
        with OperationCounter() as counter, set_checkpoint_early_stop(not whole):
            step(state, pt.batch_of(model, MeshPlan()))
        return int(counter.flops)

    plan = MeshPlan(recompute="whole" if whole else "needed")
    assert comm.symmetric(program, world_size=1) == rank_share(model, plan).flops
    assert rank_share(model, MeshPlan(recompute="whole")).flops == model.step_flops(model.length, recompute=True)


@pytest.mark.law(55)
def test_a_pipeline_passes_what_is_counted() -> None:
    """Two ranks, two chunks each, over two data-parallel ranks: an activation on and a gradient back at every boundary."""
    model, plan = attrs.evolve(GPT, layers=4), MeshPlan(dp=2, pp=2, chunks=2, micro_batches=4, stage=1)

    def program() -> dict[str, int]:
        mesh = comm.mesh(dp=plan.dp, pp=plan.pp)

        def last(p: Any, x: Tensor, batch: Any) -> fds.Weighted:
            return fds.Weighted((x * p[0]).sum(), torch.tensor(1.0))

        pieces = [pp.Piece(lambda p, x: x * p[0], uses=(f"w{i}",)) for i in range(3)] + [pp.Piece(last, uses=("w3",))]
        params = {f"w{i}": torch.ones(model.width) for i in range(4)}
        cut = pp.stages(pieces, params, inputs=lambda batch: batch)
        strategy = fds.compose(T.zero(plan.stage, mesh["dp"]), T.pipeline(plan.schedule(), cut, mesh["pp"]))
        step = strategy(fds.train_step(cut, fds.sgd(0.1)))
        state, batch = step.init(params), torch.ones(plan.micro_batches, model.length, model.width)
        state, _ = step(state, batch)
        with comm.ledger() as book:
            step(state, batch)
        passed = sum(row.elements for row in book.rows if max(row.sent_to.values(), default=0) > 4 * model.width)
        rows = [row for row in book.rows if row.collective in ("reduce_scatter", "all_gather") and "control" not in row.group]
        return {"pp": passed, "dp": sum(row.elements for row in rows)}

    for rank, found in enumerate(comm.simulate(program, world_size=4)):
        assert found["pp"] == rank_share(model, plan, rank % 2).sent["pp"]
        assert found["dp"] == memory.elements_sent(1, micro_batches=4) * 2 * model.width // 2  # once a step; two chunks


@pytest.mark.parametrize("model", [GPT, LLAMA])
def test_stage_3_has_the_largest_units_whole(model: Transformer) -> None:
    plan = MeshPlan(dp=4, stage=3)
    report = T.zero(3).cost_report(pt.fresh(model), n=plan.dp, stored_dtype=torch.bfloat16)
    assert predict_run(model, plan, MACHINES["a100-80gb"]).memory.gathered == report.fetched()


# -- activations --------------------------------------------------------------------------------------------------------


def kept_by(layers: int, model: Transformer, tp: int, head: bool = False) -> int:
    """Bytes that layers of equation 2's kernels keep, in 16 bits, on one of tp ranks."""
    rows, s, h, a = 2, model.length, model.width, model.heads // tp

    def dropped(x: Tensor) -> Tensor:
        return torch.native_dropout(x, 0.1, True)[0] if model.dropout else x

    def normed(x: Tensor) -> Tensor:
        return F.layer_norm(x, (h,))  # a fused RMS norm keeps its input, too, but fake tensors know the composite one alone

    def loss(p: dict[str, Tensor], given: Tensor) -> Tensor:
        x, group = given + p["first"], comm.world()
        for _ in range(layers):
            qkv = fds.tp.column(normed(x), [p["q"], p["k"], p["v"]], group=group)
            q, k, v = (each.unflatten(-1, (-1, h // model.heads)).transpose(1, 2).contiguous() for each in qkv)
            k, v = (each.repeat_interleave(a // each.shape[1], 1) if each.shape[1] != a else each for each in (k, v))
            weights = dropped((q @ k.transpose(-1, -2)).softmax(-1))
            attended = (weights @ v).transpose(1, 2).reshape(rows, s, -1)
            x = x + dropped(fds.tp.row(attended, p["o"], group=group))
            ups = fds.tp.column(normed(x), [p["up"], p["gate"]] if model.gated else [p["up"]], group=group)
            hidden = F.silu(ups[1]) * ups[0] if model.gated else F.gelu(ups[0])
            x = x + dropped(fds.tp.row(hidden, p["down"], group=group))
        if head:
            target = torch.zeros(rows * s, dtype=torch.long, device=given.device)
            return F.cross_entropy(F.linear(normed(x), p["head"]).flatten(0, 1).float(), target)
        return x.sum()

    f, kv = model.mlp // tp, model.key_width // tp
    shapes = {"first": (h,), "q": (h // tp, h), "k": (kv, h), "v": (kv, h), "o": (h, h // tp), "up": (f, h), "down": (h, f)}
    shapes |= {"gate": (f, h), "head": (model.vocabulary, h)}
    params = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()}
    batch = torch.empty(rows, s, h, dtype=torch.bfloat16, device="meta")
    return memory.activations(loss, params, batch).kept


@pytest.mark.sample(2)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("model", [attrs.evolve(GPT, dropout=True), attrs.evolve(LLAMA, key_heads=None)])
def test_a_layer_keeps_what_is_counted(model: Transformer, tp: int) -> None:
    """Equation 2 of Korthikanti et al. 2022, exactly, but for the norms' statistics."""
    one, two = (comm.symmetric(kept_by, layers, model, tp, world_size=tp) for layers in (1, 2))
    tokens = 2 * model.length
    assert abs(two - one - model.layer_kept(tokens, tp)) <= 2 * STATISTICS * tokens


def test_the_head_keeps_what_is_counted() -> None:
    model, tokens = GPT, 2 * GPT.length
    with_head, without = (comm.symmetric(kept_by, 1, model, 1, head, world_size=1) for head in (True, False))
    assert abs(with_head - without - model.head_kept(tokens)) <= 2 * STATISTICS * tokens


def test_kernels_move_what_is_counted() -> None:
    """Each kernel of a layer once, in 16 bits: the bytes of what it reads and of what it writes; masks have one byte."""
    model, tp, moved = attrs.evolve(GPT, dropout=True), 2, 0
    s, h, a, f = model.length, model.width, model.heads // tp, model.mlp // tp

    def kernel(reads: list[tuple[int, ...]], writes: list[tuple[int, ...]], masks: tuple[int, ...] = (0,)) -> None:
        nonlocal moved
        moved += sum(torch.empty(shape, dtype=torch.bfloat16, device="meta").nbytes for shape in (*reads, *writes))
        moved += torch.empty(masks, dtype=torch.bool, device="meta").nbytes

    for _ in range(2):
        kernel([(s, h)], [(s, h)])  # a norm
        kernel([(s, h), (s, h)], [(s, h)], (s, h))  # dropout and addition
    kernel([(s, f)], [(s, f)])  # GELU
    kernel([(a, s, s)], [(a, s, s)])  # softmax
    kernel([(a, s, s)], [(a, s, s)], (a, s, s))  # dropout
    assert moved == model.layer_moved(s, tp)
