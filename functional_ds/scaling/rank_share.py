"""``rank_share``: what a rank of a mesh has of a transformer, and what it sends and computes in a step: exact counts."""

import attrs

from functional_ds.memory.formulas import elements_sent, layer_elements_sent

from .mesh_plan import MeshPlan
from .transformer import Transformer

__all__ = ["RankShare", "rank_share"]

_ALL_REDUCES = {"none": 4, "needed": 5, "whole": 6}  # of a layer and micro-batch


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

    Laws 21, 40 and 55: a ledger counts what is in ``sent``, but for padding and scalars. A layer has 4 all-reduces over tp, of
    which a recomputation repeats 1 or 2; the embedding has one forward, the head one backward and 3 numbers a token. A boundary
    between stages on two ranks passes an activation on and its gradient back. Over dp it is what ZeRO sends; stage 3 gathers
    each unit twice a micro-batch. A tied head on another rank than the embedding is a table of its own; what keeps
    both equal is left out.

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

    ring = 2 * (tp - 1) / tp
    tensor = layers * layer_elements_sent(tokens, model.width, n=tp) * _ALL_REDUCES[plan.recompute] / 4
    tensor += ring * tokens * (model.width * first + (model.width + 3) * last)
    passed = sum(
        (stage % plan.pp == place) * (stage + 1 < plan.stages) + ((stage + 1) % plan.pp == place) * (stage + 1 < plan.stages)
        for stage in range(plan.stages)
    )
    sent = {
        "tp": micro_batches * tensor,
        "pp": float(micro_batches * passed * tokens * model.width * (plan.pp > 1)),
        "dp": elements_sent(plan.stage, micro_batches=micro_batches) * parameters * (plan.dp - 1) / plan.dp,
    }
    forward = model.layer_flops(tokens)
    repeated = {"none": 0, "needed": forward - model.last_product_flops(tokens), "whole": forward}[plan.recompute]
    flops = micro_batches * (layers * (3 * forward + repeated) + 3 * model.head_flops(tokens) * last) // tp
    return RankShare(parameters, tuple(sorted([layer] * layers + [outside] * (first or last), reverse=True)), sent, flops)
