"""Eager 1F1B: a custom pipeline schedule that hides messages, trained on text and compared with 1F1B.

1F1B keeps p - s micro-batches under way on rank s, so each message delays what waits for it. Eager 1F1B (Zhuang et al.
2022, arXiv:2211.05322) starts 2 (p - s) - 1 forward passes before the first backward pass: a message travels while another
micro-batch is computed, for more memory of activations.

Law: it is a valid schedule; where messages take time its makespan is never longer than that of 1F1B; training by it is
training on one device.
"""

from typing import Any

import torch
from shared import CONTEXT, rows, table
from torch import Tensor

import functional_ds as fds
from functional_ds import comm
from functional_ds import pipelining as pp
from functional_ds import transforms as T
from functional_ds.comm.algorithms.cost import Link


def eager_1f1b(p: int, m: int) -> pp.Schedule:
    """1F1B with 2 (p - s) - 1 forward passes before the first backward pass of rank s."""
    table_of_actions = []
    for s in range(p):
        early = min(m, 2 * (p - s) - 1)
        row = [f"{s}F{j}" for j in range(early)]
        for j in range(m):
            row += [f"{s}B{j}", *([f"{s}F{early + j}"] if early + j < m else [])]
        table_of_actions.append(row)
    return pp.Schedule.of(table_of_actions)


def makespan(schedule: pp.Schedule, latency: float) -> float:
    """How long a step takes if a forward pass takes 1, a backward pass 2, and a message so long."""
    return pp.timeline(schedule, pp.Costs(link=Link(latency=latency, bandwidth=float("inf")))).makespan


def law() -> None:
    """Valid, never slower, and the losses of one device."""
    for p, m in ((2, 4), (3, 7), (4, 8), (4, 16)):
        mine = pp.validate(eager_1f1b(p, m), in_flight=[min(m, 2 * (p - s) - 1) for s in range(p)])
        for latency in (0.0, 0.5, 1.0, 2.0):
            assert makespan(mine, latency) <= makespan(pp.one_f_one_b(p, m), latency)
    piped, alone = comm.simulate(losses, 4, 3, world_size=4)[0], losses(4, 3)
    torch.testing.assert_close(torch.tensor(piped), torch.tensor(alone), rtol=1e-4, atol=1e-5)


def losses(microbatches: int, steps: int) -> list[float]:
    """Of a small network whose layers are the stages, on the ranks of a pipeline or on one device."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(256, 16), (16 * CONTEXT, 48), (48, 48), (48, 256)]
    params = [torch.randn(shape, generator=generator) * shape[0] ** -0.5 for shape in shapes]

    def embed(weight: Tensor, tokens: Tensor) -> Tensor:
        return weight[tokens].flatten(1)

    def layer(weight: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(x @ weight)

    def loss(x: Tensor, batch: Any) -> Tensor:
        return torch.nn.functional.cross_entropy(x, batch[1])

    stages = pp.stages([embed, layer, layer, lambda weight, x: x @ weight], params, loss=loss)
    strategy = T.pipeline(eager_1f1b(4, microbatches), stages) if comm.world().size > 1 else fds.compose()
    step = strategy(fds.train_step(stages, fds.adamw(3e-3)))
    run = fds.record(step, step.init(params), [rows(index, rank=0, size=1) for index in range(steps)])
    return run.columns["loss"]


def main(p: int = 4, m: int = 16, latencies: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0)) -> str:
    """Predicted times by the time of a message, and activations on the first rank."""
    lines = []
    for name, schedule in {"1F1B": pp.one_f_one_b(p, m), "eager 1F1B": eager_1f1b(p, m)}.items():
        times = [makespan(schedule, latency) for latency in latencies]
        lines.append((name, *times, pp.in_flight(schedule)[0]))
    return table([f"{p} ranks, {m} micro-batches", *(f"message {latency:g}" for latency in latencies), "in flight"], lines)


TINY = {"m": 8}

if __name__ == "__main__":
    law()
    print(main())
