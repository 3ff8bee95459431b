"""A schedule of your own: written as rows of actions, proved, priced, drawn, and used for training.

    python examples/new_schedule.py

1F1B keeps p - s micro-batches in flight on rank s, too few to hide messages that take as long as a forward. This schedule
keeps nearly twice as many. The library does not know its name.
"""

import torch
from torch import Tensor

import functional_ds as fds
from functional_ds import comm, transforms
from functional_ds import pipelining as pp
from functional_ds.comm.algorithms.cost import Link


def patient_1f1b(p: int, m: int) -> pp.Schedule:
    """1F1B with 2 (p - s) - 1 forwards before rank s's first backward."""
    rows = []
    for s in range(p):
        early = min(m, 2 * (p - s) - 1)
        row = [f"{s}F{j}" for j in range(early)]
        for j in range(m):
            row += [f"{s}B{j}", *([f"{s}F{early + j}"] if early + j < m else [])]
        rows.append(row)
    return pp.Schedule.of(rows)


RANKS, MICROBATCHES = 4, 8
mine = pp.validate(patient_1f1b(RANKS, MICROBATCHES), in_flight=[7, 5, 3, 1])

slow = pp.Costs(link=Link(latency=1.0, bandwidth=float("inf")))  # a message takes as long as a forward
for name, schedule in {"1F1B": pp.one_f_one_b(RANKS, MICROBATCHES), "patient 1F1B": mine}.items():
    line = pp.timeline(schedule, slow)
    print(f"{name}: makespan {line.makespan:g}, bubble {line.bubble:.0%}, in flight {pp.in_flight(schedule)}")
print(pp.timeline(mine, slow))


def train() -> list[float]:
    """Some training steps of a small network's stages: on each rank of a pipeline, or on one device."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.randn(16, 16, generator=generator) / 4 for _ in range(RANKS)]
    x, y = torch.randn(2, 32, 16, generator=generator)

    def layer(weight: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(x @ weight)

    stages = pp.stages([layer] * RANKS, params, loss=lambda out, batch: (out - batch[1]).square().mean())
    piped = transforms.pipeline(mine, stages) if comm.world().size > 1 else fds.compose()
    step = piped(fds.train_step(stages, fds.adamw(0.01)))
    state, losses = step.init(params), []
    for _ in range(5):
        state, metrics = step(state, (x, y))
        losses.append(metrics["loss"].item())
    return losses


piped, alone = comm.simulate(train, world_size=RANKS)[0], train()
print("losses in the pipeline:", *(f"{loss:.6f}" for loss in piped))
print("losses on one device:  ", *(f"{loss:.6f}" for loss in alone))
