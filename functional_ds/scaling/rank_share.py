"""``rank_share``: what a rank of a mesh has of a transformer, and what it sends and computes in a step: exact counts."""

from collections import Counter
from collections.abc import Mapping

import attrs

from functional_ds.dry_run.operations import SizedOperation
from functional_ds.memory.formulas import elements_sent

from .mesh_plan import MeshPlan
from .transformer import Transformer

__all__ = ["PassWork", "RankShare", "rank_share", "stage_passes"]

_AGAIN = {"none": 0, "needed": 1, "whole": 2}  # all-reduces of a layer that a recomputation repeats


@attrs.frozen
class PassWork:
    """What a rank does in a stage's forward or backward pass of a micro-batch.

    Attributes:
        operations: how often each runs: products of layers and of the head, and elementwise kernels.
        calls: how many all-reduces of activations there are over tp.
        elements: of all that is reduced, the loss's numbers included.
    """

    operations: Mapping[SizedOperation, int]
    calls: int
    elements: int


def stage_passes(model: Transformer, plan: MeshPlan, stage: int) -> tuple[PassWork, PassWork]:
    """The forward and the backward pass of a stage, on one rank.

    A layer has two all-reduces in each pass, of which a recomputation repeats 1 or 2; the embedding has one forward, the head
    one backward and three of a number a token.

    Args:
        model: the transformer.
        plan: the mesh.
        stage: which.

    Raises:
        ValueError: the mesh does not divide the model.
    """
    layers, tokens, tp = plan.layers_of_a_stage(model), plan.micro_batch * model.length, plan.tp
    first, last, repeated = stage == 0, stage == plan.stages - 1, layers * (plan.recompute != "none")
    layer, head = (SizedOperation("products", True, work(tokens) // tp) for work in (model.layer_flops, model.head_flops))
    spared = model.last_product_flops(tokens) // tp if plan.recompute == "needed" else 0
    again, kernels = attrs.evolve(layer, flops=layer.flops - spared), model.layer_moved(tokens, tp)
    moved = SizedOperation("elementwise", True, bytes=kernels)
    forward, backward = 2 * layers + first, (2 + _AGAIN[plan.recompute]) * layers + last
    return (
        PassWork({layer: layers, moved: layers, head: last}, forward, forward * tokens * model.width),
        PassWork(
            Counter({layer: 2 * layers, moved: 2 * layers + repeated, head: 2 * last}) + Counter({again: repeated}),
            backward,
            backward * tokens * model.width + 3 * last * tokens,
        ),
    )


@attrs.frozen
class RankShare:
    """A rank's part.

    Attributes:
        parameters: before ZeRO.
        units: elements of each layer, and of all else together, the largest first: what ZeRO gathers at once.
        sent: elements that it sends in a step, by axis: tp, pp, dp.
        flops: of its products in a step.
    """

    parameters: int
    units: tuple[int, ...]
    sent: dict[str, float]
    flops: int


def rank_share(model: Transformer, plan: MeshPlan, place: int = 0) -> RankShare:
    """What a rank at some place of the pipeline has and does.

    Laws 21, 40 and 55: a ledger counts what is in ``sent``, but for padding and scalars. Over tp and in products it is what
    ``stage_passes`` has. A boundary between stages on two ranks passes an activation on and its gradient back. Over dp it is
    what ZeRO sends; stage 3 gathers each unit twice a micro-batch. A tied head on another rank than the embedding is a table of
    its own; what keeps both equal is left out.

    Args:
        model: the transformer.
        plan: the mesh.
        place: 0 for a rank of the pipeline's first stage.

    Raises:
        ValueError: no such place, or the mesh does not divide the model.

    >>> model = Transformer(layers=4, width=16, heads=4, vocabulary=64, length=8)
    >>> rank_share(model, MeshPlan(dp=2, tp=2)).sent
    {'tp': 2328.0, 'pp': 0.0, 'dp': 7424.0}
    """
    if not 0 <= place < plan.pp:
        raise ValueError(f"place={place} is none of the pipeline's {plan.pp} ranks")
    layers, tp, micro_batches = plan.layers_of_a_stage(model) * plan.chunks, plan.tp, plan.micro_batches
    first, last = place == 0, place == plan.pp - 1
    tokens, layer = plan.micro_batch * model.length, model.layer_cut // tp + model.layer_whole
    table, again = model.vocabulary * model.width // tp, model.tied and first and last
    outside = (table + model.learned_positions * model.length * model.width) * first
    outside += (model.final_norm + table * (not again)) * last
    parameters = layers * layer + outside

    passes = [work for stage in range(place, plan.stages, plan.pp) for work in stage_passes(model, plan, stage)]
    passed = sum(
        (stage % plan.pp == place) * (stage + 1 < plan.stages) + ((stage + 1) % plan.pp == place) * (stage + 1 < plan.stages)
        for stage in range(plan.stages)
    )
    sent = {
        "tp": micro_batches * 2 * (tp - 1) / tp * sum(work.elements for work in passes),
        "pp": float(micro_batches * passed * tokens * model.width * (plan.pp > 1)),
        "dp": elements_sent(plan.stage, micro_batches=micro_batches) * parameters * (plan.dp - 1) / plan.dp,
    }
    flops = micro_batches * sum(each.flops * count for work in passes for each, count in work.operations.items())
    return RankShare(parameters, tuple(sorted([layer] * layers + [outside] * (first or last), reverse=True)), sent, flops)
