"""Our step on one GPU against plain PyTorch, eager and compiled: milliseconds by CUDA events, and peak memory.

    python benchmarks/gpu.py --layers 12 --width 768 --dtypes bf16

Ours is a world of one on NCCL, so what it costs beyond eager PyTorch is the library's own overhead. All train the same
GPT on the same text with torch's fused AdamW, bf16 with fp32 masters. As in peers.py each contender has a process of
its own (so its peak memory is its own too) and the rounds are interleaved.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

import peers
import torch
from peers import ADAMW, Batch, Contender, Contest, Ready, Report
from torch import Tensor

TrainOnDevice = Callable[[Batch], Tensor]  # one step; its loss stays on the GPU, so that nothing waits for it

SIZES = {"layers": 12, "width": 768, "heads": 12, "batch": 8, "context": 1024}
TOLERANCE = {"fp32": 1e-3, "bf16": 3e-2}  # relative; compiled kernels sum in another order


def plain(setup: peers.Setup, *, compiled: bool) -> TrainOnDevice:
    """Eager PyTorch, or its compiled forward and backward; autocast for bf16."""
    model = setup.model().cuda()
    forward: Callable[[Tensor], Tensor] = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def train(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=setup.dtype == "bf16"):
            loss = peers.loss_of(forward, batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train


def ours(setup: peers.Setup, *, stage: int) -> TrainOnDevice:
    from functional_ds import comm

    comm.init_distributed()
    return peers.our_training(setup.model().cuda(), stage=stage, dtype=setup.dtype)


CONTENDERS = {
    "eager": Contender(partial(plain, compiled=False)),
    "compiled": Contender(partial(plain, compiled=True)),
    "zero0": Contender(partial(ours, stage=0), "functional_ds", ("eager", "compiled")),
    "zero3": Contender(partial(ours, stage=3), "functional_ds", ("eager", "compiled")),
}


def run_rank(conn: Connection, name: str, rank: int, setup: peers.Setup, port: int) -> None:
    with peers.answering(conn, rank, setup.ranks, port):
        serve(conn, CONTENDERS[name].build(setup), setup)


def serve(conn: Connection, train: TrainOnDevice, setup: peers.Setup) -> None:
    losses, _ = timed(train, setup.batches(0, 0, peers.SETTLE))
    conn.send(Ready(losses))
    while (order := conn.recv()) is not None:
        batches = setup.batches(0, order.first_step, order.steps)
        torch.cuda.reset_peak_memory_stats()
        losses, seconds = timed(train, batches)
        conn.send(Report(losses, seconds, torch.cuda.max_memory_allocated() / 1e6))


def timed(train: TrainOnDevice, batches: list[Batch]) -> tuple[list[float], list[float]]:
    """Losses, and seconds between events on the stream: the host runs ahead as it does in training."""
    on_device = [(tokens.cuda(), targets.cuda()) for tokens, targets in batches]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(batches) + 1)]
    losses = []
    events[0].record()
    for batch, event in zip(on_device, events[1:], strict=True):
        losses.append(train(batch))
        event.record()
    torch.cuda.synchronize()
    seconds = [begin.elapsed_time(end) / 1e3 for begin, end in pairwise(events)]
    return [float(loss) for loss in losses], seconds


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=peers.positive, default=default)
    parser.add_argument("--rounds", type=peers.positive, default=5)
    parser.add_argument("--steps", type=peers.positive, default=20, help="timed steps of each contender in a round")
    parser.add_argument("--dtypes", nargs="+", choices=tuple(TOLERANCE), default=list(TOLERANCE), metavar="DTYPE")
    parser.add_argument("--results", type=Path, default=peers.RESULTS, help="the folder of gpu-DTYPE.json and .png")
    return parser.parse_args()


def compete(setup: peers.Setup, args: argparse.Namespace) -> bool:
    """Runs the contest in one precision; False if a contender failed or losses disagree."""
    contest = Contest(run_rank, peers.available(CONTENDERS), setup)
    contest.run(rounds=args.rounds, steps=args.steps)
    title = f"{setup}, {torch.cuda.get_device_name()}, {args.rounds} rounds of {args.steps} steps"
    path = args.results / f"gpu-{setup.dtype}.json"
    return peers.present(
        contest,
        title,
        tolerance=TOLERANCE[setup.dtype],
        path=path,
        picture=path.with_suffix(".png"),
        floor="eager",
    )


def main() -> int:
    args = parse()
    if not torch.cuda.is_available():
        print("no GPU here: nothing to measure")
        return 0
    sizes = {name: getattr(args, name) for name in SIZES}
    done = [compete(peers.Setup(**sizes, ranks=1, dtype=dtype), args) for dtype in args.dtypes]
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
