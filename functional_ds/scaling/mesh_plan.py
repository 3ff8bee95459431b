"""``MeshPlan``: how a run is cut over ranks, as numbers."""

import attrs

from functional_ds.pipelining.schedules.generators import interleaved_one_f_one_b, one_f_one_b
from functional_ds.pipelining.schedules.schedule import Schedule

from .transformer import Transformer

__all__ = ["RECOMPUTE", "MeshPlan"]

RECOMPUTE = ("none", "needed", "whole")

_positive = attrs.validators.and_(attrs.validators.instance_of(int), attrs.validators.ge(1))


@attrs.frozen(kw_only=True)
class MeshPlan:
    """A mesh dp x pp x tp, whose last axis has neighbouring ranks, and what each rank does in a step.

    Attributes:
        dp: data-parallel ranks.
        tp: tensor-parallel ranks.
        pp: pipeline ranks.
        chunks: of the model on each of these; more than 1 for interleaved 1F1B, else 1F1B.
        stage: of ZeRO over dp.
        micro_batch: rows of a micro-batch.
        micro_batches: of a rank's step.
        recompute: of each layer in the backward pass: "none"; what is "needed", as ``T.remat`` does, which leaves out the last
            product; or the "whole" layer, as Megatron-LM did in 2021.
        fp32_gradients: whether sums over micro-batches are kept in fp32, and in stages 0 and 1 sent so, as this library does.
        overlap: whether ZeRO's collectives run beside the computation: stage 3's beside all of it, others' beside the last
            backward pass.
    """

    dp: int = attrs.field(default=1, validator=_positive)
    tp: int = attrs.field(default=1, validator=_positive)
    pp: int = attrs.field(default=1, validator=_positive)
    chunks: int = attrs.field(default=1, validator=_positive)
    stage: int = attrs.field(default=0, validator=attrs.validators.in_(range(4)))
    micro_batch: int = attrs.field(default=1, validator=_positive)
    micro_batches: int = attrs.field(default=1, validator=_positive)
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
        """How many layers each stage has.

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
