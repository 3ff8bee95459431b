"""How a run is split over ranks, and what a rank stores, computes and sends: exact counts."""

from collections import Counter
from collections.abc import Mapping

import attrs

from functional_ds.dry_run.operations import SizedOperation
from functional_ds.memory.formulas import elements_sent
from functional_ds.pipelining.schedules.generators import interleaved_one_f_one_b, one_f_one_b
from functional_ds.pipelining.schedules.schedule import Schedule

from .transformer import Transformer, positive

RECOMPUTE = ("none", "needed", "whole")


@attrs.frozen(kw_only=True)
class MeshPlan:
    """A mesh dp x pp x tp, with neighbouring ranks along the last axis, and the settings of a step.

    Attributes:
        dp: data-parallel ranks.
        tp: tensor-parallel ranks.
        pp: pipeline ranks.
        chunks: of the model on each of these; more than 1 for interleaved 1F1B, else 1F1B.
        stage: of ZeRO over dp.
        micro_batch: rows of a micro-batch.
        micro_batches: of a rank's step.
        recompute: of each layer in the backward pass: "none"; what is "needed", as ``T.remat`` does, which omits the last
            product; or the "whole" layer, as Megatron-LM did in 2021.
        fp32_gradients: whether sums over micro-batches are fp32, and in stages 0 and 1 sent so, as in this library.
        overlap: whether ZeRO's collectives overlap computation: stage 3's all of it, others' the last backward pass.

    >>> plan = MeshPlan(dp=4, tp=2, pp=8, stage=1, micro_batch=2, micro_batches=16)
    >>> plan.ranks, plan.rows
    (64, 128)
    """

    dp: int = attrs.field(default=1, validator=positive)
    tp: int = attrs.field(default=1, validator=positive)
    pp: int = attrs.field(default=1, validator=positive)
    chunks: int = attrs.field(default=1, validator=positive)
    stage: int = attrs.field(default=0, validator=attrs.validators.in_(range(4)))
    micro_batch: int = attrs.field(default=1, validator=positive)
    micro_batches: int = attrs.field(default=1, validator=positive)
    recompute: str = attrs.field(default="none", validator=attrs.validators.in_(RECOMPUTE))
    fp32_gradients: bool = True
    overlap: bool = True

    def __attrs_post_init__(self) -> None:
        if self.stage > 1 and self.pp > 1:
            raise ValueError(
                f"stage={self.stage}, pp={self.pp}: a pipeline's schedule says when stages 2 and 3 gather and reduce, so they "
                "are predicted without one; use stage 1"
            )

    @property
    def gradient_bytes(self) -> int:
        """Of an element of the gradients."""
        return 4 if self.fp32_gradients and self.micro_batches > 1 else 2

    @property
    def ranks(self) -> int:
        """Of the mesh."""
        return self.dp * self.pp * self.tp

    @property
    def rows(self) -> int:
        """Of a step, on all ranks."""
        return self.dp * self.micro_batch * self.micro_batches

    @property
    def stages(self) -> int:
        """Of the pipeline."""
        return self.pp * self.chunks

    def schedule(self) -> Schedule:
        """The pipeline's."""
        if self.chunks > 1:
            return interleaved_one_f_one_b(self.pp, self.micro_batches, v=self.chunks)
        return one_f_one_b(self.pp, self.micro_batches)

    def layers_of_a_stage(self, model: Transformer) -> int:
        """The number of layers per stage.

        Raises:
            ValueError: the mesh does not divide the model.
        """
        if model.layers % self.stages:
            raise ValueError(
                f"pp={self.pp}, chunks={self.chunks}: {self.stages} stages do not divide the {model.layers} layers of the model"
            )
        sizes = {"heads": model.heads, "key_heads": model.groups, "inner": model.mlp, "vocabulary": model.vocabulary}
        for name, size in sizes.items():
            if size % self.tp:
                raise ValueError(f"tp={self.tp}: it does not divide the model's {name}, {size}")
        return model.layers // self.stages


_AGAIN = {"none": 0, "needed": 1, "whole": 2}  # all-reduces of a layer that a recomputation repeats


@attrs.frozen
class PassWork:
    """A rank's work in a stage's forward or backward pass of a micro-batch.

    Attributes:
        operations: how often each runs: products of layers and of the head, and elementwise kernels.
        calls: the number of all-reduces of activations over tp.
        elements: of everything that is reduced, including the loss's numbers.
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
        units: elements of each layer, and of the rest together, the largest first: what ZeRO gathers at once.
        sent: elements that it sends in a step, by axis: tp, pp, dp.
        flops: of its products in a step.
    """

    parameters: int
    units: tuple[int, ...]
    sent: dict[str, float]
    flops: int


def rank_share(model: Transformer, plan: MeshPlan, place: int = 0) -> RankShare:
    """What a rank at some place of the pipeline stores, computes and sends.

    ``sent`` is what a ledger counts, except padding and scalars. Over tp, and in products, it is what
    ``stage_passes`` has. A boundary between stages on two ranks sends an activation and its gradient. Over dp it is what ZeRO
    sends; stage 3 gathers each unit twice a micro-batch. A tied head on another rank than the embedding is a separate table;
    the communication that keeps both equal is not counted.

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
        raise ValueError(f"place={place} is not one of the pipeline's {plan.pp} ranks")
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
    flops = micro_batches * sum(operation.flops * count for work in passes for operation, count in work.operations.items())
    return RankShare(parameters, tuple(sorted([layer] * layers + [outside] * (first or last), reverse=True)), sent, flops)
