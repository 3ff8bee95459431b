"""``predict_run``: predicts a training run's time, memory, traffic and bubble from sizes."""

from collections.abc import Mapping

import attrs

from functional_ds.memory.account import Memory
from functional_ds.memory.formulas import EIGHTEEN, SIXTEEN, by_stage, elements_sent
from functional_ds.pipelining.planning.costs import Costs
from functional_ds.pipelining.planning.timeline import timeline

from .machine import Machine
from .mesh_plan import MeshPlan, PassWork, RankShare, rank_share, stage_passes
from .transformer import Transformer

_SPENT = ("products", "kernels", "tensor")
_LIVE = 3  # units that stage 3 has at one time by default: two whole, one ahead
_UPDATED = 26  # bytes of an element that Adam reads and writes besides the gradient: fp32 master and moments, 16-bit param


@attrs.frozen
class PredictedRun:
    """A predicted run.

    Attributes:
        model: what is trained.
        plan: on which mesh.
        machine: on which devices.
        shares: what the pipeline's ranks store and compute, by place.
        memories: their bytes, by place.
        bubble: the average fraction of the pipeline's time in which a rank does not compute, including message delays.
        seconds: of a step, by component: ``products`` and ``kernels`` of the busiest rank, ``tensor``, its all-reduces,
            ``pipeline``, its waits, ``data``, ZeRO's communication that is not overlapped, and ``update``.
    """

    model: Transformer
    plan: MeshPlan
    machine: Machine
    shares: tuple[RankShare, ...]
    memories: tuple[Memory, ...]
    bubble: float
    seconds: Mapping[str, float]

    @property
    def step_seconds(self) -> float:
        """Of a whole step."""
        return sum(self.seconds.values())

    @property
    def memory(self) -> Memory:
        """Of the rank with the most."""
        return max(self.memories, key=lambda memory: memory.total)

    @property
    def fits(self) -> bool:
        """Whether that fits in a device's memory."""
        return self.memory.total <= self.machine.memory

    @property
    def flops_per_second(self) -> float:
        """Of a rank, by the papers' convention, which counts a recomputation as a full one."""
        tokens = self.plan.rows * self.model.length
        whole = self.model.step_flops(tokens, recompute=self.plan.recompute != "none")
        return whole / self.step_seconds / self.plan.ranks

    @property
    def tokens_per_second(self) -> float:
        """Of all ranks."""
        return self.plan.rows * self.model.length / self.step_seconds

    def utilisation(self) -> float:
        """Model FLOPs utilisation (MFU), without recomputation."""
        tokens = self.plan.rows * self.model.length
        return self.model.step_flops(tokens) / self.step_seconds / self.plan.ranks / self.machine.flops


def predict_run(model: Transformer, plan: MeshPlan, machine: Machine) -> PredictedRun:
    """Predicts a run of mixed precision and Adam: 16-bit params, gradients and activations, fp32 masters and moments.

    Counts are exact, and checked by tests: parameters, operations, elements sent, state bytes, and the pipeline's own schedule,
    timed by ``pp.timeline``. Assumptions: products run at the machine's rate, elementwise kernels at the memory's bandwidth,
    and collectives as rings, each times its factor; ZeRO has one for each unit, links are not shared, and all ranks are equally
    fast.

    Args:
        model: the transformer.
        plan: the mesh, and the settings of a step.
        machine: the devices and links.

    Raises:
        ValueError: the mesh does not divide the model.

    >>> from functional_ds.scaling import MACHINES
    >>> model = Transformer(layers=128, width=25600, heads=160, vocabulary=51200, length=2048)
    >>> run = predict_run(model, MeshPlan(dp=6, tp=8, pp=64, micro_batches=512, recompute="whole"), MACHINES["a100-80gb"])
    >>> f"bubble {run.bubble:.1%}, {run.memory.total / 1e9:.0f} GB"
    'bubble 16.7%, 54 GB'
    """
    shares = tuple(rank_share(model, plan, place) for place in range(plan.pp))
    stages = [
        [_seconds(work, plan, machine) for work in stage_passes(model, plan, stage)] for stage in range(plan.stages)
    ]  # forward, backward
    network, apart = machine.network, plan.tp * plan.pp
    tokens = plan.micro_batch * model.length
    kept = plan.layers_of_a_stage(model) * (
        model.layer_kept(tokens, plan.tp) if plan.recompute == "none" else 2 * tokens * model.width
    )
    head = model.head_kept(tokens, plan.tp)
    costs = Costs(
        forward=[sum(forward.values()) for forward, _ in stages],
        backward=[sum(backward.values()) for _, backward in stages],
        link=network.inside if apart <= network.ranks_per_node else network.across,
        message=2 * tokens * model.width,
        activations=[kept + head * (stage == plan.stages - 1) for stage in range(plan.stages)],
    )
    line = timeline(plan.schedule(), costs)
    busy = [
        {name: plan.micro_batches * sum(work[name] for stage in stages[place :: plan.pp] for work in stage) for name in _SPENT}
        for place in range(plan.pp)
    ]
    most = max(busy, key=lambda seconds: sum(seconds.values()))
    lasts = [sum(costs.of("backward", plan.stages)[place :: plan.pp]) for place in range(plan.pp)]
    data = 0.0
    for share, last in zip(shares, lasts, strict=True):
        halves = elements_sent(plan.stage, micro_batches=plan.micro_batches)  # gathers and reductions; two are an all-reduce
        wide = {0: 2, 1: 1}.get(plan.stage, 0) * (plan.gradient_bytes - 2)
        nbytes, calls = share.parameters * (2 * halves + wide) / 2, len(share.units) * halves // 2
        beside = max(1, network.ranks_per_node // apart)
        spent = machine.factors["communicate"] * machine.reduces(nbytes, plan.dp, beside=beside, calls=calls)
        hidden = (line.makespan if plan.stage == 3 else float(last)) if plan.overlap else 0.0
        data = max(data, spent - hidden)
    updated = max(share.parameters for share in shares) / (plan.dp if plan.stage else 1)
    seconds = {
        **most,
        "pipeline": max(0.0, line.makespan - sum(most.values())),
        "data": data,
        "update": machine.factors["update"] * (_UPDATED + plan.gradient_bytes) * updated / machine.memory_bandwidth,
    }
    working = 0 if plan.recompute == "none" else model.layer_kept(tokens, plan.tp)
    memories = tuple(_memory(share, plan, round(peak) + working) for share, peak in zip(shares, line.peak, strict=True))
    return PredictedRun(model, plan, machine, shares, memories, max(0.0, line.bubble), seconds)


def _seconds(work: PassWork, plan: MeshPlan, machine: Machine) -> dict[str, float]:
    """Of a pass, by component."""
    seconds = dict.fromkeys(_SPENT, 0.0)
    for operation, count in work.operations.items():
        seconds["products" if operation.flops else "kernels"] += count * machine.operation_seconds(operation)
    return seconds | {"tensor": machine.factors["communicate"] * machine.reduces(2 * work.elements, plan.tp, calls=work.calls)}


def _memory(share: RankShare, plan: MeshPlan, activations: int) -> Memory:
    formulas = by_stage(plan.stage, SIXTEEN if plan.gradient_bytes == 2 else EIGHTEEN)
    held = {category: round(formula.bytes(share.parameters, plan.dp)) for category, formula in formulas.items()}
    gathered = 2 * sum(share.units[:_LIVE]) if plan.stage == 3 and plan.dp > 1 else 0
    return Memory().plus(**held, gathered=gathered, activations=activations)
