"""The steps of this library in ``benchmarks/hosts.py``, and their predicted times.

Predictions know nothing of the measured times of what they predict. They are those of ``functional-ds plan``, and of
``graph.cost`` for a jitted step, on a machine whose rates were measured with other programs: of computation by
``benchmarks/plan.py``, scaled so that the contender without communication takes the time that it took; of messages within a
host by ``benchmarks/comm.py``; of the link, its token bucket's, or what broadcasts got where that is less.
"""

import json
import math
import statistics
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import attrs
import peers
import torch
from torch import nn

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.cli.planning.forecast import communicating_seconds
from functional_ds.comm.worlds.gloo_shapes import GlooShapesWorld
from functional_ds.comm.worlds.shapes import rank_on_shapes
from functional_ds.dry_run.dry_run import dry_run, kernels_of
from functional_ds.dry_run.events import Events
from functional_ds.scaling import Machine


def built(model: nn.Module, transform: fds.Transform | None, optimizer: Any = None) -> tuple[fds.Step, Any]:
    """A step of this library, and its params; without a transform it does not communicate."""
    apply, params = fds.functional(model)
    optimizer = optimizer or fds.adamw(**peers.ADAMW)
    step = fds.train_step(lambda params, batch: peers.loss_of(partial(apply, params), batch), optimizer)
    return step if transform is None else transform(step), params


def transforms(per_host: int) -> dict[str, fds.Transform]:
    """Those of this library that compute what DDP does, with and without codecs."""
    mesh = comm.mesh(host=2, place=per_host)
    int8 = {
        name: comm.codecs.compressed(getattr(comm, name), comm.codecs.Blocks(8)) for name in ("all_gather", "reduce_scatter")
    }
    all_int8 = comm.codecs.compressed(comm.all_reduce, comm.codecs.Blocks(8))
    found = {f"zero{stage}": T.zero(stage) for stage in range(4)}
    found |= {"zero0 int8": T.zero(0, all_reduce=all_int8), "zero3 int8": T.zero(3, **int8)}
    if per_host > 1:
        whole, inside, size = mesh["host", "place"], mesh["place"], 2 * per_host
        apart = comm.new_group([*range(0, size, 2), *range(1, size, 2)], "apart")  # its neighbours share no host
        found |= {"zero0 flat": T.zero(0, apart), "zero3 flat": T.zero(3, apart)}
        found |= {
            "two-level": T.zero(3, whole, intra_node=inside),
            "two-level hpZ": T.zero(3, whole, intra_node=inside, hpz=True),
            "two-level hpZ int8": T.zero(3, whole, intra_node=inside, hpz=True, **int8),
            "replicated": T.zero(3, inside, replicate=mesh["host"]),
        }
    return found


BYTES = {"10gbit": 1.25e9, "1gbit": 1.25e8, "100mbit": 1.25e7}  # a second


def machine_of(per_host: int, rate: str, gbit: float = math.inf) -> Machine:
    """Two ranks on two cores as they trained other models, messages within this machine, and the link."""
    ranks = 2 * per_host
    known = Machine(**json.loads((peers.RESULTS / "plan-2-ranks.json").read_text())["machine"])
    contests = json.loads((peers.RESULTS / f"comm-{ranks}-ranks.json").read_text())["contests"]
    small, large = (
        next(each["ours"] for each in contests if (each["collective"], each["bytes"]) == ("all_reduce", size))
        for size in (2**10, 2**24)
    )
    return attrs.evolve(
        known,
        link_latency=statistics.median(small["seconds"]) / (2 * (ranks - 1)),
        link_bandwidth=large["bus_bandwidth"],
        factors={**known.factors, "communicate": 1.0},
        ranks_per_node=per_host,
        node_bandwidth=min(BYTES[rate], gbit * 1.25e8) / per_host,
    )


def slower(machine: Machine, times: float) -> Machine:
    """The machine with computation that takes so many times as long."""
    factors = {name: factor if name == "communicate" else factor * times for name, factor in machine.factors.items()}
    return attrs.evolve(machine, factors=factors, node_latency=machine.node_seconds * times)


@lru_cache(2)
def planned(setup: peers.Setup, name: str | None) -> Callable[[Machine], float]:
    """A contender's step on shapes; its seconds on a machine, as ``functional-ds plan`` has them."""
    per_host = setup.ranks // 2

    def program() -> Events:
        step, params = built(setup.model(), transforms(per_host)[name] if name else None)
        tokens = torch.zeros(setup.batch, setup.context, dtype=torch.int64, device="meta")
        return dry_run(step, step.init({path: x.to("meta") for path, x in params.items()}), (tokens, tokens))

    with kernels_of("cpu", whole=False):
        events = rank_on_shapes(program, world_size=setup.ranks, rank=0, kind=GlooShapesWorld, ranks_per_node=per_host)

    def seconds(machine: Machine) -> float:
        computing = machine.scaled(machine.perfect_seconds(events.work, ()))
        return sum(computing.values()) + communicating_seconds(machine, events)

    return seconds


@lru_cache(2)
def jitted(setup: peers.Setup, name: str | None) -> Callable[[Machine], float]:
    """A contender's graph; its seconds on a machine, as ``graph.cost`` has them."""
    per_host = setup.ranks // 2

    def program() -> Any:
        comm.world().world.ranks_per_node = per_host
        step, params = built(setup.model(), transforms(per_host)[name] if name else None)
        step, tokens = fds.jit(step), torch.zeros(setup.batch, setup.context, dtype=torch.int64)
        state, _ = step(step.init(params), (tokens, tokens))
        return step.graph(state, (tokens, tokens))

    graph = comm.symmetric(program, world_size=setup.ranks)
    return lambda machine: float(graph.cost(machine).seconds)


def predicted(
    found: Mapping[str, Any], per_host: int, name: str, predict: Callable[..., Callable[[Machine], float]]
) -> dict[str, float]:
    """Milliseconds of a contender's step by rate, from the file's time without communication."""
    flags = found["flags"]
    setup = peers.Setup(*(flags[key] for key in ("layers", "width", "heads", "batch", "context")), 2 * per_host, "fp32")
    alone, seconds, milliseconds = predict(setup, None), predict(setup, name), dict[str, float]()
    for row in found["rows"]:
        if (row["ranks_per_host"], row["contender"]) == (per_host, "no communication") and row["rate"] in BYTES:
            machine = machine_of(per_host, row["rate"], row.get("link_gbit", math.inf))
            machine = slower(machine, row["median_ms"] / 1e3 / alone(machine))
            milliseconds[row["rate"]] = seconds(machine) * 1e3
    return milliseconds


def add_predictions(found: Mapping[str, Any]) -> str:
    """Adds predictions to the rows of this library's contenders; returns a table of them as parts of what was measured."""
    lines = [f"{'ranks a host':<13}{'contender':<20}{'rate':<9}{'ms':>6}{'plan':>8}{'graph':>8}"]
    names = comm.simulate(lambda: [*transforms(2)], world_size=4)[0]
    alone = {row["ranks_per_host"] for row in found["rows"] if row["contender"] == "no communication"}
    alone = {per_host for per_host in alone if (peers.RESULTS / f"comm-{2 * per_host}-ranks.json").is_file()}
    for per_host, name in dict.fromkeys((row["ranks_per_host"], row["contender"]) for row in found["rows"]):
        if name not in names or per_host not in alone:
            continue
        peers.progress(f"{per_host} a host: {name}, predicted")
        ms = {key: predicted(found, per_host, name, way) for key, way in (("plan_ms", planned), ("graph_ms", jitted))}
        for row in found["rows"]:
            if (row["ranks_per_host"], row["contender"]) == (per_host, name) and row["rate"] in BYTES:
                row |= {key: by_rate[row["rate"]] for key, by_rate in ms.items()}
                ratios = "".join(f"{row[key] / row['median_ms']:>8.2f}" for key in ms)
                lines.append(f"{per_host:<13}{name:<20}{row['rate']:<9}{row['median_ms']:>6.0f}{ratios}")
    return "\n".join(lines)
