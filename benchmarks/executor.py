"""What the pipeline executor itself takes for an action, beside the tensor work of its stages.

    python benchmarks/executor.py
    python benchmarks/executor.py --width 64 --rounds 100

One rank holds all stages, so nothing is sent. "ours" is a pass of the executor over a schedule: everything that happens
between the batch and its gradients. "alone" is the same modules called one after the other, each followed by
``torch.autograd.backward`` at its own boundary, without schedule, checks or bookkeeping. Both take turns; what is given is
the processor's time of a pass over its number of forwards and backwards, in microseconds. Of the rounds there are the
median and the least, which other programs on the machine disturb less.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import pipelining as pp
from functional_ds import transforms as T

RESULTS = Path(__file__).parent / "results"
SHAPES = ((1, 64), (4, 16), (8, 8))  # stages, micro-batches
WARM = 5  # rounds before the first that counts


def stack(stages: int, width: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(stages)]


def loss_of(y: Tensor) -> Tensor:
    return y.pow(2).mean()


def ours(stages: int, microbatches: int, batch: Tensor) -> Callable[[], dict[str, Tensor]]:
    """A pass of the executor; the gradients by path."""
    pairs = [fds.functional(module) for module in stack(stages, batch.shape[1])]
    params = [each for _, each in pairs]
    schedule = pp.one_f_one_b(1, microbatches) if stages == 1 else pp.interleaved_one_f_one_b(1, microbatches, v=stages)
    parts = pp.stages([apply for apply, _ in pairs], params, inputs=lambda x: x, loss=lambda y, x: loss_of(y))
    step = T.pipeline(schedule, parts)(fds.train_step(parts, fds.sgd(0.0)))
    state = step.init(params)
    paths = [path for path, _ in fds.tree.named(state.params)]
    return lambda: dict(zip(paths, step.gradients(state, batch, None, True)[1].sum, strict=True))


def alone(stages: int, microbatches: int, batch: Tensor) -> Callable[[], dict[str, Tensor]]:
    """The modules by themselves; the gradients by path."""
    modules = stack(stages, batch.shape[1])

    def once() -> dict[str, Tensor]:
        for rows in batch.chunk(microbatches):
            y, kept = rows, []
            for place, module in enumerate(modules):
                x = y.detach().requires_grad_(place > 0)
                y = module(x)
                kept.append((x, y))
            seed, kept[-1] = None, (kept[-1][0], loss_of(kept[-1][1]))
            for x, y in reversed(kept):
                torch.autograd.backward(y, seed)
                seed = x.grad
        grads = {f"{i}.{name}": p.grad for i, module in enumerate(modules) for name, p in module.named_parameters()}
        for module in modules:
            module.zero_grad(set_to_none=True)
        return {path: grad for path, grad in grads.items() if grad is not None}

    return once


def measure(stages: int, microbatches: int, width: int, rounds: int) -> dict[str, float]:
    """Microseconds for an action."""
    batch = torch.randn(2 * microbatches, width, generator=torch.Generator().manual_seed(1))
    passes = {"ours": ours(stages, microbatches, batch), "alone": alone(stages, microbatches, batch)}
    torch.testing.assert_close(passes["ours"](), passes["alone"]())
    times: dict[str, list[float]] = {name: [] for name in passes}
    for turn in range(WARM + rounds):
        for name, run in passes.items():
            begin = time.process_time()
            run()
            if turn >= WARM:
                times[name].append(1e6 * (time.process_time() - begin) / (2 * stages * microbatches))
    gaps = [mine - bare for mine, bare in zip(times["ours"], times["alone"], strict=True)]
    return {
        "ours": statistics.median(times["ours"]),
        "alone": statistics.median(times["alone"]),
        "overhead": statistics.median(gaps),
        "least": min(times["ours"]) - min(times["alone"]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=8, help="default 8")
    parser.add_argument("--rounds", type=int, default=100, help="default 100")
    parser.add_argument("--out", type=Path, default=RESULTS / "executor.json", help="where the numbers go")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for stages, microbatches in SHAPES:
        row = measure(stages, microbatches, args.width, args.rounds)
        rows.append({"stages": stages, "microbatches": microbatches, **row})
        print(
            f"{stages} stages, {microbatches:>2} micro-batches: ours {row['ours']:6.1f} us an action, "
            f"alone {row['alone']:6.1f}, overhead {row['overhead']:6.1f} (least {row['least']:.1f})"
        )
    where = {"python": platform.python_version(), "torch": torch.__version__, "machine": platform.machine()}
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps({"width": args.width, "rounds": args.rounds, "where": where, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
