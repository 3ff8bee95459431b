"""Every public record prints in a short line, without the elements of its tensors; transforms print as they were written."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import functional_ds as fds
from functional_ds import checkpointing, comm, interchange, memory
from functional_ds import pipelining as pp
from functional_ds import transforms as T
from functional_ds.comm import algorithms
from functional_ds.comm.algorithms import cost
from functional_ds.dry_run.events import EventRecorder

TRANSFORMS = {
    "accumulate(2)": lambda: T.accumulate(2),
    "clip(1.0)": lambda: T.clip(1.0),
    "compressed_gradients(OneBit(size=256), world)": lambda: T.compressed_gradients(comm.codecs.OneBit()),
    "ema(0.9)": lambda: T.ema(0.9),
    "local_gradients(world)": T.local_gradients,
    "offload(optimizer='cpu')": lambda: T.offload("cpu"),
    "schedule(warmup(3, floor=0.0, shape='linear'))": lambda: T.schedule(T.warmup(3)),
    "tensor_parallel({'w': 0}, world)": lambda: T.tensor_parallel({"w": 0}),
    "zero(3, world)": lambda: T.zero(3),
    "zero(2, world) -> clip(1.0)": lambda: fds.compose(T.zero(2), T.clip(1.0)),
    "clip(1.0) -> zero(1, world) -> ema(0.5)": lambda: fds.compose(T.clip(1.0), fds.compose(T.zero(1), T.ema(0.5))),
    "identity": fds.compose,
}


@pytest.mark.parametrize("text", TRANSFORMS)
def test_transforms_print_as_they_were_written(text: str) -> None:
    transform = TRANSFORMS[text]()
    assert (repr(transform), str(transform)) == (text, text)


def _records(folder: Path) -> list[Any]:
    """An instance of every public class, each with many leaves where it has leaves."""
    apply, params = fds.functional(nn.Sequential(*(nn.Linear(4, 4) for _ in range(40))))
    mixed = T.mixed_precision("fp16", T.DynamicScale())
    step = fds.compose(T.ema(0.9), mixed, T.zero(2))(fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.adamw(0.1)))
    state, _ = step(step.init(params), torch.ones(2, 4))
    offloaded = T.offload("cpu")(fds.train_step(lambda p, x: x, fds.adamw(0.1))).init(params)
    with comm.ledger() as ledger, fds.remat_report() as report:
        comm.all_reduce(torch.ones(3))
    pending = comm.start(comm.all_reduce, torch.ones(3))
    pending.wait()
    schedule = pp.one_f_one_b(2, 4)
    timeline = pp.timeline(schedule)
    action = pp.Action(pp.Kind(0), 0, 0)
    piece = pp.Piece(lambda p, x: x @ p["w"])
    stages = pp.stages([piece, piece], [{"w": torch.ones(2, 2)}] * 2, loss=lambda x, batch: x.sum())
    feedback = comm.codecs.ErrorFeedback(comm.codecs.TopK())
    link = cost.Link(1e-6, 1e9)
    network = cost.Network(link)
    price = cost.predict("ring", 1e6, 4, network)
    call = comm.table.Call(comm.table.TABLE[0], {"op": "sum"})
    live = [
        (step.leaf_map(state), fds.Layout.of(params, 2), fds.Key.of(0), step.view(state)),
        (fds.Weighted(list(params.values()), 1.0),),
        (fds.adamw(0.1), fds.lamb(0.1), fds.RematPolicy(), report, apply, step, state, offloaded, mixed),
        (step.open(state), fds.Gradients(state, None)),
        (fds.Checkpoints(folder), fds.Evaluation(lambda state: {}, every=3), fds.Logging(), checkpointing.Saver(folder)),
        (*state.slots.values(), state.optimizer, *step.layers, offloaded.optimizer, *offloaded.slots.values()),
        (
            T.DynamicScale(),
            T.NoScale(),
            T.StaticScale(2.0),
            T.Policy(),
            T.zero(3),
            T.Combine(torch.sum),
            T.experts("w", comm.world()),
            T.zero(3).cost_report(params, n=4),
        ),
        (
            comm.codecs.Blocks(),
            comm.codecs.Cast(),
            comm.codecs.OneBit(),
            comm.codecs.TopK(),
            feedback,
            feedback.init(list(params.values())),
        ),
        (
            comm.table.TABLE[0],
            call,
            comm.table.CallContext({"op": "sum"}, 0, 1),
            comm.world(),
            comm.mesh(dp=1),
            ledger,
            ledger.rows[0],
            pending,
        ),
        (comm.Permutation([(0, 1), (1, 0)]), comm.Recv(torch.ones(99), 1), comm.Send([torch.ones(99)], 1)),
        (comm.debug.Spread("all_reduce", "world", (0, 1), (0.1, 0.2)), link, network, price, price.inside),
        (cost.sent("ring", 8, 4, 0), memory.measured(state), memory.SIXTEEN, memory.Formula(4, 12)),
        (memory.Activations(1, 2, 3), EventRecorder()),
        (schedule, timeline, pp.Span(0, action, 0.0, 1.0), action, action.kind, pp.Costs(), pp.Recorder()),
        (pp.WaitSpan(action, 1, 0.0, 1.0), comm.debug.Offsets((0.0, 1.0)), comm.table.Variance.PARTIAL),
        (fds.CompileReport([]), fds.Job(model="models:MLP", steps=1, optimizer={"sgd": 0.1})),
        (piece, stages, stages.stages[0], pp.LossInput(torch.ones(99), torch.ones(99))),
    ]
    return [record for row in live for record in row]


def test_public_records_print_in_a_short_line(tmp_path: Path) -> None:
    records = _records(tmp_path)
    for record in records:
        text = repr(record)
        limit = 600 if isinstance(record, fds.Step) else 300  # a step prints its optimizer and all its transforms
        assert len(text) < limit, text
        assert "tensor(" not in text, text
        assert "\n" not in text, text
        assert " object at 0x" not in text, text
    packages = (fds, comm, T, checkpointing, interchange, memory, pp, algorithms, cost)
    public = {
        found
        for package in packages
        for found in (getattr(package, name) for name in package.__all__)
        if inspect.isclass(found) and not issubclass(found, BaseException) and not getattr(found, "_is_protocol", False)
    }
    assert {found.__name__ for found in public if not any(isinstance(record, found) for record in records)} == set()
