"""Machines by name: data sheets, files, and this one, measured by short runs of single operations."""

import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from itertools import cycle
from pathlib import Path
from statistics import fmean, median
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from functional_ds import comm
from functional_ds.base.device import repeated, seconds_of
from functional_ds.base.disk.files import parse_json, read_text
from functional_ds.base.weighted import Weighted
from functional_ds.cli.words.errors_in_one_line import CommandError
from functional_ds.compiling.graphs.graph_nodes import OPERATOR
from functional_ds.compiling.jitted.jit_step import jit
from functional_ds.dry_run.operations import WORK_KINDS, OperationCounter
from functional_ds.modules.functional import functional
from functional_ds.optim.adam import AdamState, adam_optimizer, adamw
from functional_ds.scaling.machine import FACTORS, MACHINES, Machine
from functional_ds.step.state.state import State
from functional_ds.step.step import Step
from functional_ds.step.train_step import train_step


def machine_of(name: str, *, ranks: int = 1) -> Machine:
    """A machine by name, by a JSON file of its fields, or ``here``: measured in some seconds.

    Args:
        name: which.
        ranks: of the job; ``here`` measures as many at once as this machine has GPUs or cores, at most.

    Raises:
        CommandError: an unknown name; a file with unknown or missing fields.
    """
    if name == "here":
        places = torch.cuda.device_count() if torch.cuda.is_available() else os.cpu_count() or 1
        return measured_here(min(ranks, places))
    if name in MACHINES:
        return MACHINES[name]
    path = Path(name)
    if not path.is_file():
        raise CommandError(f"--machine: {name!r} is neither a file nor one of {', '.join(MACHINES)}")
    try:
        fields = parse_json(read_text(path))
        return Machine(**fields)
    except (OSError, json.JSONDecodeError, UnicodeDecodeError, TypeError) as error:
        names = ", ".join(field.name for field in attrs.fields(Machine))
        raise CommandError(f"--machine: {name} should be JSON with {names}: {error}") from error
    except ValueError as error:
        raise CommandError(f"--machine: {error}") from error


_RATES = (
    *("flops", "flops_fp32", "memory_bandwidth", "page_bandwidth", "link_bandwidth", "link_latency"),
    *("operation_latency", "node_latency", "overlaps"),
)
_TINY, _CALLS = 8, 10  # a model's width and layers; calls of a collective, or of a step with some


def measured_here(ranks: int = 1, *, seconds: float = 0.2) -> Machine:
    """This machine as seen by one of several ranks, measured concurrently, as they may share cores and memory.

    Rates are those of square products and of copies. A category's factor is the measured time of its operations relative to
    these rates; a start is a part of a tiny model's whole step, Python included.

    Args:
        ranks: how many processes; each has a GPU, or its share of the cores.
        seconds: to try each operation.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backend = None if device == "cuda" else "gloo"
    machines = (
        [_on_a_rank(device, seconds)]
        if ranks == 1
        else comm.spawn(_among_others, device, seconds, world_size=ranks, backend=backend)
    )
    name = torch.cuda.get_device_name() if device == "cuda" else "this CPU"
    name = name if ranks == 1 else f"{name} ({ranks} ranks at once)"
    memory = int(torch.cuda.get_device_properties(0).total_memory) if device == "cuda" else 0
    rates: dict[str, Any] = {rate: fmean(getattr(machine, rate) for machine in machines) for rate in _RATES}
    rates["factors"] = {factor: fmean(machine.factors[factor] for machine in machines) for factor in FACTORS}
    return attrs.evolve(machines[0], name=name, memory=memory, **rates)


def _among_others(device: str, seconds: float) -> Machine:
    """What this rank sees in a process of its own, where each trains a tiny model by itself, without a warning."""
    warnings.filterwarnings("ignore", ".*the first step has sent nothing")
    return _on_a_rank(device, seconds)


def _on_a_rank(device: str, seconds: float) -> Machine:
    """What this rank sees."""
    place = torch.device(device, comm.get_local_rank()) if device == "cuda" else torch.device("cpu")
    side, count, blocks = (8192, 1 << 26, 2) if device == "cuda" else (512, 1 << 20, 32)
    fresh = cycle(torch.ones(blocks, count, device=place).unbind())  # no cache has what is read next, as in a step
    full = torch.ones(side, side, device=place)
    half, weight = full.bfloat16(), next(fresh).view(side, -1).bfloat16()
    half = half if device == "cuda" else half[:64]  # a CPU without instructions for bf16 takes a second a GFLOP
    flops = 2 * side * count

    def timed(run: Callable[[], Any]) -> float:
        return _seconds(run, place, seconds)

    rates: dict[str, Any] = {
        "flops": flops * len(half) / side / timed(lambda: half @ weight),
        "flops_fp32": flops / timed(lambda: full @ next(fresh).view(side, -1)),
        "memory_bandwidth": 8 * count / timed(lambda: next(fresh).clone()),
        "operation_latency": _start(place, timed),
    }
    rates |= {"node_latency": _node(place), **_links(next(fresh), rates["memory_bandwidth"])}
    rates["overlaps"] = _overlaps(next(fresh), lambda: full @ next(fresh).view(side, -1))
    if device == "cpu":
        large = torch.ones((1 << 23) + 1)
        longer = timed(large.clone) - 2 * large.nbytes / rates["memory_bandwidth"]
        rates["page_bandwidth"] = large.nbytes / longer if longer > 0 else 0.0
    machine, factors = Machine("", **rates, device=device), dict[str, float]()
    for category, runs in _kinds(fresh, device).items():
        perfect, spent = 0.0, 0.0
        for run in runs:
            with OperationCounter() as counter:
                run()
            parts = machine.perfect_seconds(counter.operations, ())
            perfect += sum(parts[part] for part in WORK_KINDS)
            spent += timed(run) - (parts["starts"] if device == "cpu" else 0.0)
        factors[category] = max(spent, 0.0) / perfect
    return attrs.evolve(machine, factors=factors)


def _seconds(run: Callable[[], Any], place: torch.device, budget: float) -> float:
    """The median of a run's times, over all ranks."""
    run()
    comm.all_reduce(torch.zeros(1, device=place))
    times: list[float] = []
    while len(times) < 3 or sum(times) < budget:
        times.append(seconds_of(run, [place]))
    return median(times)


def _of_calls(run: Callable[[], Any], place: torch.device) -> float:
    """The median time of as many calls on every rank, since they communicate."""
    return median(seconds_of(run, [place]) for _ in range(_CALLS))


def _kinds(fresh: Iterator[Tensor], device: str) -> Mapping[str, list[Callable[[], Any]]]:
    """The operation that measures each category."""
    x, dtype = next(fresh), torch.bfloat16 if device == "cuda" else torch.float32
    q, k, v = (next(fresh)[: 1 << 18].view(1, 4, -1, 64).to(dtype).requires_grad_() for _ in range(3))
    params = [torch.ones(8 * len(x) if device == "cpu" else len(x), device=x.device)]
    grads, moments = Weighted([torch.ones_like(params[0])], torch.ones((), device=x.device)), AdamState.fresh(params)
    optimizer = adam_optimizer("adamw", 0.0, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, decoupled=True)

    def attention() -> None:
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(output, (q, k, v), output)

    return {
        "attention": [attention],
        "elementwise": [
            lambda: next(fresh) + x,
            lambda: F.gelu(next(fresh)),
            lambda: next(fresh).view(-1, 1024).softmax(-1),
            lambda: next(fresh).view(-1, 1024).sum(0),
        ],
        "update": [lambda: optimizer.update(params, grads, moments, 1.0)],
    }


def _start(place: torch.device, timed: Callable[[Callable[[], Any]], float]) -> float:
    """A step of many tiny operations, divided by their number."""
    run = repeated(*_tiny_step(place, _TINY))
    run()
    with OperationCounter() as counter:
        run()
    seconds: float = timed(run) / counter.operations.total()
    return seconds


def _node(place: torch.device) -> float:
    """How much longer a graph with more tiny nodes takes, divided by their number: what a step costs once cancels out."""
    measured = []
    for layers in (_TINY, 4 * _TINY):
        step, state, x = _tiny_step(place, layers)
        jitted = jit(step)
        state, _ = jitted(state, x)
        graph = jitted.graph(state, x)
        nodes = sum(isinstance(node.target, OPERATOR) for node in graph.module.graph.nodes)
        run = repeated(jitted, state, x)
        run()
        measured.append((_of_calls(run, place), nodes))
    (less, few), (more, many) = measured
    return max(more - less, 0.0) / (many - few)


def _tiny_step(place: torch.device, count: int) -> tuple[Step, State, Tensor]:
    layers = [layer for _ in range(count) for layer in (nn.Linear(_TINY, _TINY), nn.GELU())]
    apply, params = functional(nn.Sequential(*layers).to(place))
    step = train_step(lambda params, x: apply(params, x).square().mean(), adamw(0.0))
    return step, step.init(params), torch.ones(_TINY, _TINY, device=place)


def _overlaps(x: Tensor, compute: Callable[[], Any]) -> float:
    """The fraction of an all-reduce's time that a concurrent product hides. 1 for one rank."""
    if comm.world().size == 1:
        return 1.0

    def beside() -> None:
        handle = comm.start(comm.all_reduce, x)
        compute()
        handle.wait()

    def seconds(run: Callable[[], Any]) -> float:
        times = []
        for _ in range(_CALLS):
            comm.barrier()
            times.append(seconds_of(run, [x.device]))
        return median(times)

    sent, computed, both = (seconds(run) for run in (lambda: comm.all_reduce(x), compute, beside))
    return min(1.0, max(0.0, (sent + computed - both) / min(sent, computed)))


def _links(x: Tensor, bandwidth: float) -> dict[str, Any]:
    """From all-reduces as rings; one rank has no link, and gets a copy within the machine."""
    world = comm.world()
    if world.size == 1:
        return {"link_latency": 5e-5, "link_bandwidth": bandwidth / 2}
    empty, large = (_of_calls(lambda value=value: comm.all_reduce(value), x.device) for value in (x[:1], x))  # type: ignore[misc]
    hops = 2 * (world.size - 1)
    return {"link_latency": empty / hops, "link_bandwidth": hops / world.size * x.nbytes / max(large - empty, 1e-9)}
