"""Draws the docs' figures from runs on two simulated ranks, and from tables of pages: ``python docs/figures/make.py``, which
`make docs` does. Names of figures draw these alone.

The horizontal axes of the first three count events, so a second run draws the same files. The pipeline's figure has measured
times: ``--measure`` draws it anew, everything else leaves it as it is.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import matplotlib as mpl
import pages
import torch
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import FancyBboxPatch, Patch

import functional_ds as fds
from functional_ds import comm, moe, seq
from functional_ds import pipelining as pp
from functional_ds import transforms as T
from functional_ds.comm.simulation.simulator import SimulatedWorld
from functional_ds.step.phase_signatures import PHASES
from functional_ds.transforms.zero.gather import Gatherer
from functional_ds.transforms.zero.reduce import Reducer

HERE = Path(__file__).resolve().parent
TOP = HERE.parents[1]
BLOCKS = 5
BLUE, PALE, GREEN, ORANGE, GREY = "#4c72b0", "#b6c7e3", "#55a868", "#dd8452", "#8c8c8c"


def model(mark: Callable[[str, int], None]) -> tuple[dict[str, torch.Tensor], Callable[..., torch.Tensor]]:
    """Params of five square layers, and a loss that marks when each layer is computed, forward and backward."""

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        for index, weight in enumerate(params.values()):
            x = torch.tanh(x @ weight)
            mark("forward", index)
            if x.requires_grad:
                x.register_hook(lambda grad, index=index: mark("backward", index))
        return x.square().mean()

    return {f"blocks.{index}.w": torch.eye(8) for index in range(BLOCKS)}, loss


def third_step(transform: Any, loss: Callable[..., Any], params: Any, recording: Callable[[], Any]) -> None:
    """On each of two ranks, three steps, the third of which is recorded: the first two settle the order of fetches."""

    def program() -> None:
        step = transform(fds.train_step(loss, fds.adamw(0.1)))
        state, x = step.init(params), torch.ones(4, 8)
        for _ in range(2):
            state, _ = step(state, x)
        if comm.world().rank == 0:
            with recording():
                step(state, x)
        else:
            step(state, x)

    comm.simulate(program, world_size=2)


# -- ZeRO-3: the files between step() and the wire -------------------------------------------------------------------------


def calls() -> list[tuple[str, list[str]]]:
    """For each collective of a ZeRO-3 step, its name and the library files on the stack when the world starts it."""
    found: list[tuple[str, list[str]]] = []
    start, owner = SimulatedWorld.start, [False]

    def noted(self: SimulatedWorld, call: Any, *args: Any, **options: Any) -> Any:
        if owner[0] and self.rank == 0:
            stack, frame = [_file(start.__code__.co_filename)], sys._getframe(1)
            while frame is not None and frame.f_code.co_name != "program":
                stack.append(_file(frame.f_code.co_filename))
                frame = frame.f_back
            found.append((call.collective.name, [name for name in reversed(stack) if name]))
        return start(self, call, *args, **options)

    @contextmanager
    def recording() -> Iterator[None]:
        owner[0] = True
        yield
        owner[0] = False

    params, loss = model(lambda what, index: None)
    with mock.patch.object(SimulatedWorld, "start", noted):
        third_step(T.zero(3), loss, params, recording)
    return found


def _file(name: str) -> str:
    """A file of the library as it stands in the checkout; "" for any other."""
    path = Path(name)
    inside = path.is_relative_to(TOP) and path.relative_to(TOP).parts[0] in ("functional_ds", "comm", "transforms")
    return path.relative_to(TOP).as_posix() if inside else ""


def path_of(collective: str, through: str) -> list[str]:
    """The distinct files on the way to the first such collective that passes ``through``, in the order of their first call."""
    stack = next(stack for name, stack in calls() if name == collective and f"transforms/zero/{through}" in stack)
    return list(dict.fromkeys(stack))


DOES = {
    "functional_ds/step/step.py": "step(state, batch) calls the phases in order",
    "functional_ds/step/phase_signatures.py": "the phases, and what each is called with",
    "functional_ds/step/train_step.py": "the phase gradients: view, loss, backward",
    "functional_ds/step/views/view.py": "pull: gradients of what the loss saw",
    "functional_ds/step/pass_scope.py": "ends the forward pass, starts the backward",
    "transforms/zero/units/lazy_tensor.py": "a torch function touches a leaf",
    "transforms/zero/lazy_params.py": "which unit; its node in the graph",
    "transforms/zero/gather.py": "follows the plan of fetches",
    "functional_ds/base/torch_private.py": "runs torch's autograd engine",
    "transforms/zero/reduce.py": "packs a unit's gradients, in turn",
    "transforms/zero/collectives.py": "levels of groups, codecs",
    "comm/api.py": "all_gather, reduce_scatter",
    "comm/calls/dispatch.py": "the table's row, checked and counted",
    "comm/simulation/simulator.py": "the wire: here threads; else Gloo or NCCL",
}


def zero_path() -> Figure:
    """Both ways through the files, from step() down to the wire; files on both ways stand in the middle."""
    gather, reduce = path_of("all_gather", "gather.py"), path_of("reduce_scatter", "reduce.py")
    rows = dict.fromkeys([*gather, *reduce], 0)
    steps = [*pairwise(gather), *pairwise(reduce)]
    while late := {below: rows[above] + 1 for above, below in steps if rows[below] <= rows[above]}:
        rows |= late  # below all that lead there
    deepest, middle = max(rows.values()), 7.0
    figure = Figure(figsize=(10.6, 0.75 * deepest + 0.8))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 14), ylim=(7.9 - deepest, 9.0))
    axes.axis("off")
    columns = {name: middle if name in gather and name in reduce else 2.4 if name in gather else 11.6 for name in rows}
    where = {name: (columns[name], 8.4 - row) for name, row in rows.items()}
    for name, (x, y) in where.items():
        axes.add_patch(FancyBboxPatch((x - 2.05, y - 0.31), 4.1, 0.62, boxstyle="round,pad=0.03", fc="white", ec="#333333"))
        axes.text(x, y + 0.12, name, ha="center", va="center", fontsize=8.5, family="monospace")
        axes.text(x, y - 0.14, DOES.get(name, ""), ha="center", va="center", fontsize=7.5, color="#444444")
    for names, colour, shift in ((gather, BLUE, -0.35), (reduce, ORANGE, 0.35)):
        for above, below in pairwise(names):
            (x0, y0), (x1, y1) = where[above], where[below]
            start, end = ((x + (shift if x == middle else 0), y) for x, y in ((x0, y0 - 0.35), (x1, y1 + 0.36)))
            axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": colour, "linewidth": 1.6})
    x, y = 0.3, where["comm/simulation/simulator.py"][1]
    axes.text(x, y + 1.9, "a param's values", color=BLUE, fontsize=10, weight="bold")
    values = "all-gather when first touched;\nback up the same files: flat\ntensors, then views of them"
    axes.text(x, y + 1.05, values, color=BLUE, fontsize=8)
    axes.text(10.3, y + 1.9, "its gradient", color=ORANGE, fontsize=10, weight="bold")
    gradient = "reduce-scatter when its unit\nis complete; back: a shard,\nwhich the update gets"
    axes.text(10.3, y + 1.05, gradient, color=ORANGE, fontsize=8)
    return figure


# -- a step's phases -------------------------------------------------------------------------------------------------------


def phases() -> Figure:
    """The phases of a recorded step as a flame graph: what each called, from left to right in order."""
    spans: list[list[Any]] = []  # name, first event, last event, depth
    clock, depth, on = [0], [0], [False]

    def observing(name: str) -> Callable[..., Any]:
        def phase(inner: Callable[..., Any], step: Any, *args: Any) -> Any:
            if not on[0] or comm.world().rank:
                return inner(step, *args)
            span = [name, clock[0], 0, depth[0]]
            spans.append(span)
            depth[0] += 1
            first = clock[0]
            try:
                return inner(step, *args)
            finally:
                depth[0] -= 1
                clock[0] = max(clock[0], first + 1)
                span[2] = clock[0]

        return phase

    def watch(step: fds.Step) -> fds.Step:
        shown = [name for name in PHASES if name not in ("comm_dtype", "leaf_map")]
        seen = {name: fds.outermost(_with_arguments(observing(name), PHASES[name])) for name in shown}
        sums = [name for name in step.over_ranks if name not in ("batch_shard", "micro_batches")]
        over_ranks = {name: partial(observing(name), step.over_ranks[name]) for name in sums}
        return attrs.evolve(fds.wrap("watch", **seen)(step), over_ranks={**step.over_ranks, **over_ranks})

    @contextmanager
    def recording() -> Iterator[None]:
        on[0] = True
        yield
        on[0] = False

    params, loss = model(lambda what, index: None)
    transform = fds.compose(T.mixed_precision("bf16"), T.zero(2), T.accumulate(2), T.clip(1.0), watch)
    third_step(transform, loss, params, recording)
    deepest = max(span[3] for span in spans)
    figure = Figure(figsize=(10, 0.62 * (deepest + 1) + 0.9), layout="constrained")
    axes = figure.subplots()
    for name, first, last, level in spans:
        colour = GREEN if name in ("update", "norm", "finite", "rate", "scatter", "publish") else PALE if level else BLUE
        colour = ORANGE if name in ("reduce", "sum_over_ranks", "sync_buffers") else colour
        axes.barh(-level, last - first, left=first, height=0.86, color=colour, edgecolor="white", linewidth=1.5)
        upright = last - first < 0.09 * len(name) * clock[0] / 12
        axes.text((first + last) / 2, -level, name, ha="center", va="center", fontsize=8, rotation=90 if upright else 0)
    axes.set(xlim=(0, clock[0]), ylim=(-deepest - 0.6, 0.6), xlabel="order of the calls, not time")
    axes.set_title("step(state, batch) of compose(mixed_precision, zero(2), accumulate(2), clip)", fontsize=9)
    axes.set_xticks([])
    axes.set_yticks([])
    for side in axes.spines.values():
        side.set_visible(False)
    return figure


def _with_arguments(phase: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """The phase with the arguments that its name says, which ``wrap`` checks."""
    words = ", ".join(("inner", "step", *names))
    return eval(f"lambda {words}: phase({words})", {"phase": phase})


# -- the life of ZeRO-3's units --------------------------------------------------------------------------------------------


@attrs.define
class Lives:
    """What happened to units in a recorded step: (event, unit) at times 0, 1, 2, ..."""

    events: list[tuple[str, int]] = attrs.field(factory=list)
    on: bool = False

    def mark(self, what: str, unit: int) -> None:
        """Notes an event of rank 0."""
        if self.on and comm.world().rank == 0:
            self.events.append((what, unit))

    def begun(self, owner: type, name: str, what: str) -> Any:
        """Patches a method whose first argument is a unit, to mark its calls."""
        method = getattr(owner, name)

        def noted(this: Any, unit: int) -> Any:
            self.mark(what, unit)
            return method(this, unit)

        return mock.patch.object(owner, name, noted)

    def arrived(self) -> Any:
        """Patches the plan's next fetch, to mark units that have become whole."""
        method = Gatherer._follow_plan

        def noted(this: Gatherer) -> None:
            before = set(this.whole)
            method(this)
            for unit in set(this.whole) - before:
                self.mark("whole", unit)

        return mock.patch.object(Gatherer, "_follow_plan", noted)

    def settled(self) -> Any:
        """Patches the end of a reduction."""
        method = Reducer._settle

        def noted(this: Reducer) -> None:
            unit = this._own[0][0]
            method(this)
            self.mark("reduced", unit)

        return mock.patch.object(Reducer, "_settle", noted)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Marks events while it is open."""
        self.on = True
        yield
        self.on = False


def zero_life() -> Figure:
    """A line for each unit: in flight, whole, freed, gathered again, reduced."""
    lives = Lives()
    params, loss = model(lives.mark)
    with ExitStack() as patches:
        for patch in (
            lives.begun(Gatherer, "_start", "gather"),
            lives.begun(Gatherer, "_drop", "drop"),
            lives.begun(Reducer, "_start", "reduce"),
            lives.arrived(),
            lives.settled(),
        ):
            patches.enter_context(patch)
        third_step(T.zero(3), loss, params, lives.recording)
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    axes = figure.subplots()
    end = len(lives.events)
    kinds = {"gather": ("whole", PALE), "whole": ("drop", BLUE), "reduce": ("reduced", ORANGE)}
    for time, (what, unit) in enumerate(lives.events):
        if what in kinds:
            until, colour = kinds[what]
            later = (t for t in range(time + 1, end) if lives.events[t] == (until, unit))
            below = -0.2 if what == "reduce" else 0.12
            height = 0.22 if what == "reduce" else 0.4
            axes.barh(-unit + below, next(later, end) - time, left=time, height=height, color=colour)
        elif what in ("forward", "backward"):
            for colour, size in (("white", 7), ("black", 4)):
                axes.plot(time + 0.5, -unit + 0.12, marker=">" if what == "forward" else "<", color=colour, markersize=size)
    first = next(t for t, (what, _) in enumerate(lives.events) if what == "backward")
    axes.axvline(first, color=GREY, linestyle=":")
    axes.text(first - 0.3, 0.75, "forward", ha="right", fontsize=9, color="#444444")
    axes.text(first + 0.3, 0.75, "backward", ha="left", fontsize=9, color="#444444")
    axes.set_yticks([-unit for unit in range(BLOCKS)], [f"blocks.{unit}" for unit in range(BLOCKS)])
    axes.set(xlim=(0, end), ylim=(-BLOCKS + 0.4, 1.1), xlabel="order of events on rank 0, not time")
    axes.set_xticks([])
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    names = {PALE: "all-gather in flight", BLUE: "whole on this rank", ORANGE: "reduce-scatter in flight"}
    handles: list[Any] = [Patch(color=colour, label=name) for colour, name in names.items()]
    handles += [
        Line2D([], [], marker=marker, color="black", linestyle="", markersize=4, label=label)
        for marker, label in ((">", "its output, forward"), ("<", "its output's gradient, backward"))
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=8)
    return figure


# -- a pipeline beside its prediction --------------------------------------------------------------------------------------


def pipeline() -> Figure:
    """A measured ZB-H1 step of two processes beside the timeline that its mean times predict."""
    run = comm.spawn(_measured, world_size=2)[0]
    costs = pp.measured(run)
    return pp.draw(pp.timeline(pp.zb_h1(2, 6), costs), beside=run)


def _measured() -> Any:
    torch.set_num_threads(1)
    schedule, recorder = pp.zb_h1(2, 6), pp.Recorder()
    params = [{"w": torch.randn(512, 512) / 23} for _ in range(8)]
    halves = [params[:4], params[4:]]
    blocks = pp.stages([_layers] * 2, halves, loss=lambda y, batch: (y - batch[1]).square().mean())
    step = T.pipeline(schedule, blocks, recorder=recorder)(fds.train_step(blocks, fds.sgd(0.1)))
    state, batch = step.init(halves), (torch.randn(6 * 256, 512), torch.randn(6 * 256, 512))
    for _ in range(4):
        state, _ = step(state, batch)
    return recorder.run(schedule, comm.world())


def _layers(params: Any, x: torch.Tensor) -> torch.Tensor:
    for each in params:
        x = torch.tanh(x @ each["w"])
    return x


# -- what length costs -----------------------------------------------------------------------------------------------------


def sequence_length() -> Figure:
    """What ranks of a sequence keep and send against its length, of the example's model."""
    sys.path.insert(0, str(TOP / "examples"))
    import long_context

    found: Figure = long_context.costs(long_context.LENGTHS, 8)
    return found


# -- what a mesh sends -----------------------------------------------------------------------------------------------------


def mesh_traffic() -> Figure:
    """Who sends how much to whom on 2 x 2 x 2 ranks, in a step of a layer with attention and experts."""
    return comm.debug.draw_traffic(comm.simulate(_layer_on_a_mesh, world_size=8))


def _layer_on_a_mesh() -> comm.Ledger:
    mesh = comm.mesh(dp=2, sp=2, tp=2).split("dp", edp=1, ep=2)
    wide = 32

    def loss(p: Any, batch: Any) -> fds.Weighted:
        qkv = fds.tp.column(batch["x"] * p["scale"], [p["q"], p["k"], p["v"]])
        q, k, v = (each.unflatten(-1, (-1, 8)).transpose(1, 2) for each in qkv)
        x = fds.tp.row(seq.ring()(q, k, v, causal=True).transpose(1, 2).flatten(2), p["o"])
        x = moe.exchange(moe.mlp(p["up"], p["down"], tp=mesh["tp"]), x, routing=moe.route(x @ p["router"].T, 2))
        return fds.Weighted(x.square().sum(), torch.tensor(float(x.numel())))

    shapes = {"scale": (wide,), **dict.fromkeys("qkvo", (wide, wide))}
    shapes |= {"router": (4, wide), "up": (4, 64, wide), "down": (4, wide, 64)}
    draws = torch.Generator().manual_seed(0)
    params = {name: torch.randn(shape, generator=draws) / 6 for name, shape in shapes.items()}
    plan = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise", "up": 1, "down": 2}
    transform = fds.compose(
        T.zero(1, mesh["edp", "ep", "sp"]),
        T.sequence(mesh["sp"], dims={"x": 1}),
        T.experts("up|down", mesh["ep"], edp=mesh["edp", "sp"]),
        T.tensor_parallel(plan, mesh["tp"]),
    )
    step = transform(fds.train_step(loss, fds.adamw(0.01)))
    state, x = step.init(params), torch.randn(2, 4, 16, wide, generator=draws)[mesh.coordinates["ep"]]
    for _ in range(2):  # the first step also compares what ranks have
        with comm.ledger() as book:
            state, _ = step(state, {"x": x})
    return book


# -- the graph of a whole step ---------------------------------------------------------------------------------------------


def step_graph() -> Figure:
    """The predicted step of a small model in ZeRO-3 on devices whose links are slow."""

    class Block(torch.nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(width)
            self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
            return found

    def program() -> Any:
        apply, params = fds.functional(torch.nn.Sequential(*(Block(256) for _ in range(6))))
        step = fds.train_step(lambda params, x: apply(params, x).square().mean(), fds.adamw(0.1))
        step = fds.jit(fds.compose(T.mixed_precision("bf16"), T.zero(3), T.clip(1.0))(step))
        x = torch.ones(2048, 256)
        state, _ = step(step.init(params), x)
        return step.graph(state, x)

    machine = fds.scaling.Machine("a GPU", 312e12, 156e12, 2e12, link_bandwidth=25e9, operation_latency=0.0)
    found: Figure = comm.simulate(program, world_size=2)[0].draw(machine)
    return found


FIGURES = {"zero-path": zero_path, "phases": phases, "zero-life": zero_life, "sequence-length": sequence_length}
FIGURES |= {"mesh-traffic": mesh_traffic, "step-graph": step_graph}
FIGURES |= {"gallery-bytes": pages.gallery_bytes, "gallery-mup": pages.gallery_mup}


def save(name: str, figure: Figure) -> None:
    """Writes one figure as SVG, the same bytes for the same figure."""
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(HERE / f"{name}.svg", metadata={"Date": None, "Creator": None})


def main() -> None:
    """Draws the figures that the command line names, or all."""
    names = [word for word in sys.argv[1:] if word != "--measure"] or [*FIGURES, "cheat-sheet"]
    if "--measure" in sys.argv:
        save("pipeline", pipeline())
    for name in names:
        if name == "cheat-sheet":
            (HERE / "cheat-sheet.svg").write_text(pages.cheat_sheet(), encoding="utf-8")
        else:
            save(name, FIGURES[name]())


if __name__ == "__main__":
    main()
