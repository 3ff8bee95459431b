"""Attention over cut sequences against others': torch's context parallel, a plain ring, DeepSpeed's Ulysses, a plain Ulysses.

    python benchmarks/sequence.py                                  2 and 4 ranks over Gloo on loopback; some minutes
    python benchmarks/sequence.py --ranks 4 --length 8192 --rounds 9
    python benchmarks/sequence.py --quick                          seconds; its figures mean little

A turn is the forward and the backward pass of one causal attention. Contenders run in the same processes and take turns in
changing order; a barrier comes before each, and a turn takes as long as its slowest rank does. Ratios are taken within a
round. Before that, results and gradients of all are compared: all do the same work.

- "torch" is the ring of ``torch.distributed.tensor.experimental``'s context parallel, by its private functions with the CPU's
  kernel, as torch lets ``context_parallel`` run on CUDA alone; with each of its two ways to pass keys on.
- "plain ring": contiguous pieces, keys and values as two messages that are waited for before the block is computed with.
- "DeepSpeed" is its ``DistributedAttention``, where it is installed.
- "plain ulysses": four all-to-alls, with the transpositions that they need.
"""

import argparse
import importlib.util
import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import attrs
import torch
import torch.distributed as dist
from peers import facts, positive, progress
from torch import Tensor
from torch.nn import functional as F

from functional_ds import comm, seq

RESULTS = Path(__file__).parent / "results" / "sequence.json"
GOAL = 0.9
FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@attrs.frozen
class Setup:
    """The sizes of one attention: rows, heads, key-value heads, positions in all, and of a head."""

    rows: int
    heads: int
    keys: int
    length: int
    size: int
    dtype: str
    rounds: int

    def inputs(self) -> list[Tensor]:
        """q, k, v and the result's gradient, of the whole sequence."""
        torch.manual_seed(0)
        shapes = [(self.rows, heads, self.length, self.size) for heads in (self.heads, self.keys, self.keys, self.heads)]
        return [torch.randn(shape).to(getattr(torch, self.dtype)) for shape in shapes]


# -- the others --------------------------------------------------------------------------------------------------------


class _TorchRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, method: str) -> Tensor:
        from torch.distributed.tensor.experimental._context_parallel import _attention as cp

        def op(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
            return FORWARD(query, key, value, 0.0, is_causal)

        cp._cp_options.rotate_method = cp._RotateMethod[method]
        o, lse = cp._templated_ring_attention(dist.group.WORLD, 2, op, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.method = method
        return o

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from torch.distributed.tensor.experimental._context_parallel import _attention as cp

        def op(
            grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, is_causal: bool
        ) -> Any:
            return BACKWARD(grad_out, query, key, value, out, logsumexp, 0.0, is_causal)

        cp._cp_options.rotate_method = cp._RotateMethod[ctx.method]
        found = cp._templated_ring_attention_backward(
            dist.group.WORLD, 2, op, grad, "grad_out", *ctx.saved_tensors, is_causal=True
        )
        return (*found[:3], None)


def _hop(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Each to the next rank, a message each, and waited for."""
    rank, n = dist.get_rank(), dist.get_world_size()
    found = [torch.empty_like(x) for x in tensors]
    ops = [dist.P2POp(dist.isend, x.contiguous(), (rank + 1) % n) for x in tensors]
    ops += [dist.P2POp(dist.irecv, x, (rank - 1) % n) for x in found]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return found


class _PlainRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rank, n = dist.get_rank(), dist.get_world_size()
        total = lse = None
        ctx.save_for_backward(q, k, v)
        for step in range(n):
            if step <= rank:
                o, part = FORWARD(q, k, v, 0.0, step == 0)
                o, part = o.float(), part.unsqueeze(-1)
                if total is None:
                    total, lse = o, part
                else:
                    total = total - torch.sigmoid(part - lse) * (total - o)
                    lse = lse - F.logsigmoid(lse - part)
            if step < n - 1:
                k, v = _hop([k, v])
        ctx.o, ctx.lse = total.to(q.dtype), lse.squeeze(-1)
        return ctx.o

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rank, n = dist.get_rank(), dist.get_world_size()
        q, k, v = ctx.saved_tensors
        d_q, d_k, d_v = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
        for step in range(n):
            if step <= rank:
                found = BACKWARD(grad, q, k, v, ctx.o, ctx.lse, 0.0, step == 0)
                d_q, d_k, d_v = d_q + found[0], d_k + found[1], d_v + found[2]
            d_k, d_v = _hop([d_k, d_v])
            if step < n - 1:
                k, v = _hop([k, v])
        return d_q.to(q.dtype), d_k.to(q.dtype), d_v.to(q.dtype)


class _AllToAll(torch.autograd.Function):
    """[rows, heads, N/P, d] to [rows, heads/P, N, d], and back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, to_heads: bool) -> Tensor:
        n, ctx.to_heads = dist.get_world_size(), to_heads
        rows, heads, positions, size = x.shape
        if to_heads:
            sent = x.reshape(rows, n, heads // n, positions, size).transpose(0, 1).contiguous()
        else:
            sent = x.reshape(rows, heads, n, positions // n, size).permute(2, 0, 1, 3, 4).contiguous()
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent)
        if to_heads:
            return got.permute(1, 2, 0, 3, 4).reshape(rows, heads // n, n * positions, size)
        return got.transpose(0, 1).reshape(rows, n * heads, positions // n, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _AllToAll.apply(grad, not ctx.to_heads), None


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The attention that all Ulysses have inside."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def plain_ulysses(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Four all-to-alls."""
    q, k, v = (_AllToAll.apply(x, True) for x in (q, k, v))
    return _AllToAll.apply(causal(q, k, v), False)


def deepspeed_ulysses() -> Attend:
    """DeepSpeed's layer, whose tensors are [positions, rows, heads, d]."""
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would compile an extension for shared memory
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)

    def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal(*(x.permute(1, 2, 0, 3) for x in (q, k, v))).permute(2, 0, 1, 3)

    layer = DistributedAttention(local, dist.group.WORLD, scatter_idx=2, gather_idx=0)
    return lambda q, k, v: layer(*(x.permute(2, 0, 1, 3).contiguous() for x in (q, k, v)), 1).permute(1, 2, 0, 3)


# -- the contests ------------------------------------------------------------------------------------------------------


@attrs.frozen
class Contender:
    """An attention and the layout of its pieces."""

    attend: Attend
    layout: seq.SequenceLayout


def contenders(contest: str) -> dict[str, Contender]:
    """Ours first."""
    group, zigzag, contiguous = comm.world(), seq.SequenceLayout("zigzag"), seq.SequenceLayout("contiguous")
    if contest == "ring":
        return {
            "ring": Contender(lambda q, k, v: seq.ring(group, layout=zigzag)(q, k, v, causal=True), zigzag),
            "torch, all-gather": Contender(lambda q, k, v: _TorchRing.apply(q, k, v, "ALL_GATHER"), zigzag),
            "torch, all-to-all": Contender(lambda q, k, v: _TorchRing.apply(q, k, v, "ALL_TO_ALL"), zigzag),
            "plain ring": Contender(_PlainRing.apply, contiguous),
            "ring, saved blocks": Contender(
                lambda q, k, v: seq.ring(group, layout=zigzag, save_blocks=True)(q, k, v, causal=True), zigzag
            ),
            "gathered": Contender(lambda q, k, v: seq.gathered(group, layout=zigzag)(q, k, v, causal=True), zigzag),
        }
    found = {
        "ulysses": Contender(seq.ulysses(causal, group), contiguous),
        "plain ulysses": Contender(plain_ulysses, contiguous),
    }
    if importlib.util.find_spec("deepspeed"):
        found["DeepSpeed"] = Contender(deepspeed_ulysses(), contiguous)
    return found


def measure(contest: str, setup: Setup) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, str]]:
    """What each rank runs: seconds of each contender by round, those its thread computes, and why some could not take part."""
    group, absent = comm.world(), {}
    whole = setup.inputs()
    turns: dict[str, Callable[[], Any]] = {}
    expected: list[Tensor] | None = None
    for name, contender in contenders(contest).items():
        positions = contender.layout.positions(setup.length, group.size, group.rank)
        q, k, v, grad = (x.index_select(2, positions) for x in whole)
        leaves = [x.requires_grad_() for x in (q, k, v)]

        def turn(attend: Attend = contender.attend, leaves: list[Tensor] = leaves, grad: Tensor = grad) -> list[Tensor]:
            o = attend(*leaves)
            return [o.detach(), *torch.autograd.grad(o, leaves, grad)]

        try:
            found = turn()
        except Exception as error:  # another library's, which may not run here
            if expected is None:
                raise
            absent[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
            continue
        order = contender.layout.inverse(setup.length, group.size)
        results = [x.index_select(2, order) for x in comm.all_gather(found, dim=2)]
        expected = results if expected is None else expected
        for one, other in zip(results, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2 if setup.dtype != "float32" else 1e-3)
        turns[name] = turn
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    computing: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(setup.rounds + 1):
        names = list(turns)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            dist.barrier()
            began, busy = perf_counter(), thread_time()
            turns[name]()
            if number:
                seconds[name].append(perf_counter() - began)
                computing[name].append(thread_time() - busy)
    return seconds, computing, absent


def main() -> None:
    """Runs both contests, prints tables, writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {"rows": 1, "heads": 8, "keys": 4, "length": 4096, "size": 64, "rounds": 7}.items():
        parser.add_argument(f"--{name}", type=positive, default=default)
    parser.add_argument("--ranks", type=positive, nargs="+", default=[2, 4])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--only", choices=("ring", "ulysses"), nargs="+", default=["ring", "ulysses"])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.quick:
        args.length, args.rounds, args.out = 512, 2, None
    setup = Setup(args.rows, args.heads, args.keys, args.length, args.size, args.dtype, args.rounds)
    runs = []
    for contest in args.only:
        for ranks in args.ranks:
            progress(f"{ranks} ranks: {contest}")
            found = comm.spawn(measure, contest, setup, world_size=ranks)
            seconds = {name: [max(r) for r in zip(*(s[name] for s, *_ in found), strict=True)] for name in found[0][0]}
            busy = {name: [statistics.median(own[name]) for _, own, _ in found] for name in seconds}
            print(f"\n{contest}, {ranks} ranks, {args.length} positions, {args.heads}/{args.keys} heads, {args.dtype}")
            for name, times in seconds.items():
                ratio = statistics.median(a / b for a, b in zip(seconds[contest], times, strict=True))
                spread = max(busy[name]) / min(busy[name]) - 1
                print(
                    f"{name:<20} {statistics.median(times) * 1e3:9.1f} ms   {contest} takes {ratio:.2f} of it"
                    f"   computing {max(busy[name]) * 1e3:9.1f} ms, {spread:+.1%} between ranks"
                )
                runs.append(
                    {"contest": contest, "ranks": ranks, "name": name, "seconds": times, "ratio": ratio, "busy": busy[name]}
                )
            for name, why in found[0][2].items():
                print(f"{name:<20} did not run: {why}")
    print(f"\ngoal of the ratios: {GOAL}")
    if args.out is not None:
        args.out.write_text(json.dumps({"facts": facts(), "setup": attrs.asdict(setup), "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
