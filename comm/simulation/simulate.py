"""Runs a program on simulated ranks."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, TypeVar, TypeVarTuple, cast

import torch

from functional_ds.comm.record.group import check_ranks_per_node
from functional_ds.comm.table.errors import UnmatchedError, of_rank
from functional_ds.comm.worlds.current import enter, exclusive_simulation
from functional_ds.comm.worlds.rng_state import kept_rng

from .schedule import AbortedError, Simulator
from .simulator import SimulatedWorld

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def simulate(
    program: Callable[[*Ts], T],
    *args: *Ts,
    world_size: int,
    seed: int = 0,
    shapes_only: bool = False,
    rules: Literal["nccl"] | None = None,
    variance: bool = False,
    ranks_per_node: int = 1,
) -> list[T]:
    """Runs ``program(*args)`` on ``world_size`` simulated ranks and returns their results in rank order.

    Law: if ranks communicate through collectives only, the result does not depend on ``seed`` and equals that of ``spawn``
    bitwise.

    Each rank has its own random generators (torch's default, Python's and NumPy's), warning filters and default dtype, which
    start as copies of the caller's. Ctrl-C ends the ranks.

    Args:
        program: what each rank runs.
        args: its arguments, the same objects on all ranks.
        world_size: the number of ranks.
        seed: picks the interleaving.
        shapes_only: uses meta tensors, which have no values. The ranks run one after another, and their calls are compared
            afterwards. With a ``ledger`` this counts the traffic of thousands of ranks.
        rules: "nccl" also reports programs that run here but would hang on NCCL if all tensors were on GPUs.
        variance: checks declarations of values (``replicated``, ``invariant``, ``varying``, ``partial``) and propagates them
            through the program, at some ten microseconds, and a pass over the result, per operation.
        ranks_per_node: how many consecutive ranks share a node, as for ``init_distributed``.

    Raises:
        MismatchError: ranks of one group called different collectives; names both call sites.
        DeadlockError: no rank can continue; names the calls that the ranks wait in, and for which ranks. Not detected with
            ``shapes_only``. With ``rules="nccl"``, also if ranks launch calls in contradicting orders; names these calls.
        UnmatchedError: some ranks never made a call that others had started asynchronously.
        CommError: a rank called a collective from another thread.
        VarianceError: with ``variance``, a value, or its use, contradicts its declaration; names the line.
        Exception: the exception that a rank raised, with a note that names the rank.

    >>> from functional_ds import comm
    >>> simulate(lambda: comm.all_reduce(torch.tensor(comm.world().rank)).item(), world_size=4)
    [6, 6, 6, 6]
    """
    _check_options(world_size, shapes_only, rules, variance)
    check_ranks_per_node(ranks_per_node, world_size)
    if shapes_only:
        from functional_ds.comm.worlds.shapes import run_on_shapes  # imported on demand, like the modules below

        return run_on_shapes(program, args, world_size, ranks_per_node)
    simulator, ranks = Simulator(world_size, seed), tuple(range(world_size))
    by_rank = watches = None
    if rules:
        from .nccl_rules import rules_by_rank

        by_rank = rules_by_rank(world_size)
    if variance:
        from functional_ds.comm.variance.watch import Watches

        watches = Watches()
    results: list[T | None] = [None] * world_size

    def run(rank: int) -> None:
        torch.set_num_threads(1)  # one rank runs at a time, and each thread would start its own pool
        try:
            simulator.take(rank)
            # Autograd without threads: a backward pass stays on its rank's thread.
            own_rules = by_rank[rank] if by_rank else None
            world = SimulatedWorld(rank, simulator, threads={threading.get_ident(): rank}, rules=own_rules)
            world.ranks_per_node = ranks_per_node
            followed: AbstractContextManager[Any] = nullcontext()
            if watches is not None:
                world.watch = own_watch = watches.of(rank)
                followed = own_watch.trace
            with enter(world, ranks), torch.autograd.set_multithreading_enabled(False), followed:
                simulator.check()
                results[rank] = program(*args)
        except AbortedError:
            pass
        except BaseException as error:
            failure = of_rank(error, rank, world_size)
            failure.add_note(f"raised on simulated rank {rank} of {world_size}")
            simulator.failure = simulator.failure or failure
        finally:
            simulator.finish(rank)

    with exclusive_simulation(), kept_rng(), nullcontext() if watches is None else watches.keeping():
        threads = torch.get_num_threads()
        workers = [threading.Thread(target=run, args=(r,), daemon=True, name=f"rank {r}") for r in range(world_size)]
        try:
            for worker in workers:
                worker.start()
            simulator.pass_to(simulator.random.randrange(world_size))
            simulator.over.wait()
        except BaseException as error:  # KeyboardInterrupt
            simulator.failure = simulator.failure or error
            simulator.interrupt(workers)
            raise
        finally:
            for worker in [] if simulator.abandoned else workers:
                worker.join()
            simulator.end_lanes()
            torch.set_num_threads(threads)
    if simulator.failure is not None:
        if watches is not None:
            watches.check(simulator.failure)
        raise simulator.failure
    if simulator.slots:
        raise UnmatchedError(simulator.unmatched())
    if watches is not None:
        watches.check(None)
    return cast(list[T], results)


def _check_options(world_size: int, shapes_only: bool, rules: str | None, variance: bool) -> None:
    if type(world_size) is not int or world_size < 1:
        raise ValueError(f"world_size={world_size!r}: a world has at least one rank")
    if rules not in (None, "nccl"):
        raise ValueError(f"rules={rules!r} are unknown; use 'nccl', or None for what every transport allows")
    if shapes_only and rules is not None:
        raise ValueError(f"shapes_only=True and rules={rules!r}: each rank runs by itself there, in no common order")
    if shapes_only and variance:
        raise ValueError("shapes_only=True and variance=True: tensors have no values there that could be compared")
