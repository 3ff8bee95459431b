"""Plans a training run on paper: a model of 70 B parameters on 1,024 ranks, on a laptop, in under a minute.

    python examples/on_paper.py                                   Llama's 70 B on 1,024 H100s, 1,024 rows of 4,096 tokens a step
    python examples/on_paper.py --ranks 4096 --machine a100-80gb     other ranks, other devices
    python examples/on_paper.py --most 1024                       the pictures end at 1,024 ranks; by default at 65,536

Three things, each of which needs neither a GPU nor a network:

1. every mesh dp x pp x tp of these ranks is priced by ``fds.scaling.predict_run``, and the fastest ones that fit are listed;
2. one rank of a mesh runs a whole step of the library without values (``comm.symmetric`` on the meta device), and what it
   holds, sends and computes is compared with the prediction, number by number;
3. pictures, into out/on-paper: meshes.png, where the seconds of the best meshes go; ranks.png, the best mesh of 2 to 65,536
   ranks; memory.png, the bytes of a rank in each stage of ZeRO.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import paper_transformer as program
from matplotlib.figure import Figure

import functional_ds as fds
from functional_ds import comm, memory
from functional_ds import transforms as T
from functional_ds.dry_run.operations import OperationCounter
from functional_ds.scaling import MACHINES, Machine, MeshPlan, PredictedRun, Transformer, predict_run, rank_share

# Touvron et al. 2023, Llama 2, 70 B; dropout and attention's weights are kept nowhere.
LLAMA_70B = Transformer(
    layers=80,
    width=8192,
    heads=64,
    key_heads=8,
    inner=28672,
    vocabulary=32000,
    length=4096,
    gated=True,
    biased=False,
    learned_positions=False,
    tied=False,
    dropout=False,
    flash=True,
)
EFFICIENCY = 0.585  # of products: fitted to the smallest run of docs/on-paper.md's table
KINDS = {"products": "C0", "kernels": "C9", "tensor": "C1", "pipeline": "C3", "data": "C2", "update": "C7"}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--machine", default="h100", choices=MACHINES)
    parser.add_argument("--rows", type=int, default=1024, help="of a step, on all ranks; each of 4,096 tokens")
    parser.add_argument("--layers", type=int, default=LLAMA_70B.layers)
    parser.add_argument("--most", type=int, default=65536, help="ranks in the pictures")
    parser.add_argument("--shown", type=int, default=8, help="meshes that are listed")
    parser.add_argument("--out", type=Path, default=Path("out/on-paper"))
    return parser.parse_args(argv)


# -- the search ---------------------------------------------------------------------------------------------------------


def plans(model: Transformer, ranks: int, rows: int) -> Iterator[MeshPlan]:
    """All meshes of these ranks whose sizes divide the model, with each stage of ZeRO and each way to recompute."""
    for tp, pp, stage, micro in itertools.product((1, 2, 4, 8), (1, 2, 4, 8, 16), (1, 3), (1, 2, 4)):
        dp, rest = divmod(ranks, tp * pp)
        if rest or dp < 1 or rows % (dp * micro) or model.layers % pp or (stage == 3 and pp > 1):
            continue
        for chunks, recompute in itertools.product((1, 5) if pp > 1 else (1,), ("none", "needed")):
            if model.layers % (pp * chunks) == 0:
                sizes = {"dp": dp, "tp": tp, "pp": pp, "chunks": chunks, "stage": stage}
                yield MeshPlan(**sizes, micro_batch=micro, micro_batches=rows // dp // micro, recompute=recompute)


def states(model: Transformer, plan: MeshPlan) -> float:
    """Bytes of params, masters, moments and gradients on a rank of the first stage: what rules most meshes out at once."""
    psi = rank_share(model, plan).parameters
    return sum(formula.bytes(psi, plan.dp) for formula in memory.by_stage(plan.stage).values())


def ranked(model: Transformer, ranks: int, rows: int, machine: Machine) -> list[PredictedRun]:
    """All that fit, the fastest first."""
    able = (plan for plan in plans(model, ranks, rows) if states(model, plan) <= machine.memory)
    runs = (predict_run(model, plan, machine) for plan in able)
    return sorted((run for run in runs if run.fits), key=lambda run: run.step_seconds)


def name_of(plan: MeshPlan) -> str:
    """A mesh in a line."""
    mesh = f"dp {plan.dp} x pp {plan.pp}" + f" x {plan.chunks} chunks" * (plan.chunks > 1) + f" x tp {plan.tp}"
    recompute = ", recompute" * (plan.recompute != "none")
    return f"{mesh}, ZeRO-{plan.stage}, {plan.micro_batches} x {plan.micro_batch} rows{recompute}"


def table(runs: Sequence[PredictedRun]) -> str:
    """A line for each run."""
    lines = [f"{'mesh':<66}{'s a step':>9}{'MFU':>7}{'bubble':>8}{'GB':>6}"]
    for run in runs:
        numbers = f"{run.step_seconds:>9.2f}{run.utilisation():>7.1%}{run.bubble:>8.1%}{run.memory.total / 1e9:>6.0f}"
        lines.append(f"{name_of(run.plan):<66}{numbers}")
    return "\n".join(lines)


# -- a rank, executed ---------------------------------------------------------------------------------------------------


def executed(model: Transformer, plan: MeshPlan) -> dict[str, float]:
    """What one rank's step holds, sends and computes: a step of the library without values."""

    def rank() -> dict[str, float]:
        mesh = comm.mesh(dp=plan.dp, tp=plan.tp)
        chain = [T.mixed_precision("bf16"), T.zero(plan.stage, mesh["dp"])]
        chain += [T.tensor_parallel(program.tensor_plan(model), mesh["tp"])]
        loss = program.loss_of(model, recompute=plan.recompute != "none")
        step = fds.compose(*chain)(fds.train_step(loss, fds.adam(1e-4)))
        state, batch = step.init(program.fresh(model)), program.batch_of(model, plan)
        with comm.ledger() as book, OperationCounter() as counter:
            state, _ = step(state, batch)
        rows = [row for row in book.rows if "control" not in row.group]
        sent = {axis: sum(row.elements for row in rows if row.group.partition("/")[0] == axis) for axis in ("tp", "dp")}
        held = memory.measured(state)
        return {"params": held.params, "masters": held.masters, "optimizer": held.optimizer, **sent, "FLOPs": counter.flops}

    found: dict[str, float] = comm.symmetric(rank, world_size=plan.ranks, rank=plan.ranks - 1)
    return found


def compared(run: PredictedRun) -> str:
    """The prediction beside what a rank's step without values had; one micro-batch of ZeRO-1, without a pipeline."""
    found, held, share = executed(run.model, run.plan), run.memory, run.shares[0]
    expected = {"params": held.params, "masters": held.masters, "optimizer": held.optimizer}
    expected |= {"tp": share.sent["tp"], "dp": share.sent["dp"], "FLOPs": share.flops}
    units = dict.fromkeys(("params", "masters", "optimizer"), "bytes") | dict.fromkeys(("tp", "dp"), "elements sent")
    lines = [f"{'':<26}{'predicted':>26}{'executed':>26}"]
    for name, number in expected.items():
        label = f"{name} {units.get(name, '')}".strip()
        lines.append(f"{label:<26}{number:>26,.0f}{found[name]:>26,.0f}{found[name] / number - 1:>+10.4%}")
    return "\n".join(lines)


# -- pictures -----------------------------------------------------------------------------------------------------------


def of_meshes(runs: Sequence[PredictedRun]) -> Figure:
    """Where the seconds of a step go, a bar for each mesh."""
    figure = Figure(figsize=(9, 0.8 + 0.45 * len(runs)), layout="constrained")
    axes, left = figure.subplots(), [0.0] * len(runs)
    for kind, colour in KINDS.items():
        spent = [run.seconds[kind] for run in runs]
        axes.barh([name_of(run.plan) for run in runs], spent, left=left, color=colour, label=kind)
        left = [a + b for a, b in zip(left, spent, strict=True)]
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=7)
    axes.set(xlabel="seconds of a step")
    figure.legend(fontsize=7, ncols=len(KINDS), loc="outside upper center")
    return figure


def of_ranks(model: Transformer, counts: Sequence[int], rows: int, machine: Machine) -> Figure:
    """The best mesh of each number of ranks, the rows of a step the same: what part of the devices' rate the model needs."""
    best = {ranks: ranked(model, ranks, rows, machine)[:1] for ranks in counts}
    there = [ranks for ranks in counts if best[ranks]]
    figure = Figure(figsize=(11, 4), layout="constrained")
    rate, parts = figure.subplots(1, 2)
    rate.plot(there, [best[ranks][0].utilisation() for ranks in there], "o-")
    for ranks in there:
        plan = best[ranks][0].plan
        rate.annotate(f"{plan.dp}·{plan.pp}·{plan.tp}", (ranks, best[ranks][0].utilisation()), fontsize=6, rotation=45)
    rate.set(xlabel="ranks", ylabel="MFU", ylim=(0, 0.7), title=f"the best mesh dp·pp·tp that fits, {rows:,} rows a step")
    for kind, colour in KINDS.items():
        shares = [best[ranks][0].seconds[kind] / best[ranks][0].step_seconds for ranks in there]
        parts.plot(there, shares, "o-", color=colour, label=kind, markersize=3)
    parts.set(xlabel="ranks", ylabel="of a step's time", title="what the time goes into")
    parts.legend(fontsize=7)
    for each in (rate, parts):
        each.set_xscale("log", base=2)
        each.grid(alpha=0.3)
        each.set_xlim(counts[0] / 1.5, counts[-1] * 1.5)
    return figure


def of_memory(model: Transformer, counts: Sequence[int], machine: Machine) -> Figure:
    """The bytes of a rank against the ranks, without tensor parallelism and pipelines, a line for each stage."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for stage in range(4):
        held = [predict_run(model, MeshPlan(dp=n, stage=stage, recompute="needed"), machine).memory.total for n in counts]
        axes.plot(counts, [each / 1e9 for each in held], "o-", markersize=3, label=f"ZeRO-{stage}")
    axes.axhline(machine.memory / 1e9, color="k", linestyle=":", label=machine.name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(xlabel="data-parallel ranks", ylabel="GB of a rank", title=f"{model.parameters / 1e9:.0f} B parameters")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    """Searches, executes one rank, draws."""
    flags, start = parse(argv), time.perf_counter()
    model = attrs.evolve(LLAMA_70B, layers=flags.layers)
    machine = attrs.evolve(MACHINES[flags.machine], factors={"products": 1 / EFFICIENCY})
    runs = ranked(model, flags.ranks, flags.rows, machine)
    if not runs:
        raise SystemExit(f"--ranks {flags.ranks} --rows {flags.rows}: no mesh of these fits {machine.name}; try more ranks")
    print(f"{model.parameters / 1e9:.1f} B parameters on {flags.ranks:,} ranks of {machine.name}: {len(runs)} meshes fit")
    print(table(runs[: flags.shown]), flush=True)
    tp = 8 if flags.ranks % 8 == 0 else 1
    one = predict_run(model, MeshPlan(dp=flags.ranks // tp, tp=tp, stage=1, recompute="needed"), machine)
    print(f"\none rank of {flags.ranks:,}, a step of {name_of(one.plan)}, run without values")
    print(compared(one), flush=True)
    counts = [1 << power for power in range(1, flags.most.bit_length())]
    flags.out.mkdir(parents=True, exist_ok=True)
    pictures = {"meshes": of_meshes(runs[: flags.shown]), "ranks": of_ranks(model, counts, flags.rows, machine)}
    for name, figure in (pictures | {"memory": of_memory(model, counts, machine)}).items():
        figure.savefig(flags.out / f"{name}.png", dpi=120)
    names = ", ".join(str(flags.out / f"{name}.png") for name in (*pictures, "memory"))
    print(f"\nthe pictures: {names}; {time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
