"""``pipeline_parts``: the parts of a ``PipelineModule``, for an engine or for a custom step."""

from collections.abc import Callable, Iterable
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.deepspeed.accelerator.accelerators import get_accelerator
from functional_ds.modules.functional import Apply, functional
from functional_ds.pipelining.schedules.generators import one_f_one_b
from functional_ds.pipelining.stages.from_functions import Piece
from functional_ds.pipelining.stages.from_functions import stages as stages_of
from functional_ds.pipelining.stages.stages import Stages
from functional_ds.sharding.sources import from_source
from functional_ds.step.step import Transform
from functional_ds.transforms.pipeline import pipeline

from .pipeline_module import PipelineModule
from .topology import PipelineParallelGrid


@attrs.frozen(eq=False)
class PipelineParts:
    """A pipeline's stages, params, and the groups of its ranks.

    The step is ``compose(T.zero(1, parts.data), parts.transform(m))(fds.train_step(parts.stages, optimizer))``: the pipeline
    comes after ZeRO, and before transforms that wrap gradients. Its batch is ``parts.joined(micros)``: (inputs, labels) of all
    micro-batches, the same on all ranks of a pipeline.

    Attributes:
        stages: the model; ``stages(params, batch)`` is its loss on one device.
        params: of all stages, by the names of ``PipelineModule.named_parameters``; those of other stages' specs have no values.
        pipe: the ranks of this rank's pipeline, in the order of stages.
        data: the ranks with this rank's stage.
    """

    stages: Stages
    params: dict[str, Tensor]
    pipe: comm.Group
    data: comm.Group
    _applies: tuple[Apply, ...] = attrs.field(alias="applies", repr=False)

    @property
    def modules(self) -> dict[str, Apply]:
        """For ``step.init(params, modules=...)``: each stage's buffers are a part of the state."""
        return {f"stage {index}": apply for index, apply in enumerate(self._applies)}

    def transform(self, micro_batches: int) -> Transform:
        """The pipeline, with DeepSpeed's schedule, 1F1B."""
        return pipeline(one_f_one_b(len(self.stages), micro_batches), self.stages, self.pipe)

    def train(self, mode: bool = True) -> None:
        """Sets the mode of all stages' modules for later passes."""
        for apply in self._applies:
            apply.module.train(mode)

    @staticmethod
    def joined(micros: Iterable[Any]) -> Any:
        """The micro-batches as one batch, which the pipeline splits again.

        Raises:
            ValueError: there are none, they have different numbers of rows, or contain values that are not tensors.
        """
        held = list(micros)
        if not held:
            raise ValueError("micros is empty: a batch is made of micro-batches")
        leaves = [tree.leaves(micro) for micro in held]
        other = next((leaf for micro_leaves in leaves for leaf in micro_leaves if not isinstance(leaf, Tensor)), None)
        if other is not None:
            raise ValueError(f"micros: a micro-batch has {other!r}; inputs and labels are tensors, or containers of them")
        if len({tuple(leaf.shape for leaf in micro_leaves) for micro_leaves in leaves}) > 1:
            raise ValueError("micros: the micro-batches of a pipeline have equal shapes; drop the last one of an epoch")
        joined = [torch.cat(parts) for parts in zip(*leaves, strict=True)]
        return tree.unflatten(tree.structure(held[0]), joined)


def pipeline_parts(module: PipelineModule) -> PipelineParts:
    """The stages of a ``PipelineModule``, its params, and the groups of ranks.

    On any ranks the step is the single-device step of the module on the joined batch, tied layers included: a
    module that several stages call is stored on each, and its gradients are summed.

    Raises:
        ValueError: a tied layer that several stages have has buffers.
    """
    _refuse_tied_buffers(module)
    here = comm.world()
    params = functional(module)[1]
    elsewhere = {name: p for name, p in params.items() if here.rank not in module.holders(name)}
    params.update(from_source(elsewhere, _elsewhere, device=get_accelerator().current_device_name()))
    applies, pieces = [], []
    for index in range(module.num_stages):
        apply, stage_params = functional(module.stage(index))
        applies.append(apply)
        pieces.append(Piece(apply, uses=_chosen(tuple(stage_params)), name=f"stage {index}"))
    loss = module.loss_fn
    stages = stages_of(pieces, params, loss=None if loss is None else lambda y, batch: loss(y, batch[1]))
    grid = PipelineParallelGrid(module.topology())
    return PipelineParts(stages, params, grid.get_pipe_parallel_group(), grid.get_data_parallel_group(), tuple(applies))


def _refuse_tied_buffers(module: PipelineModule) -> None:
    for key, tied in module.tied_modules.items():
        places = [index for index, layer in enumerate(module.layers) if layer.tied and layer.name == key]
        buffers = [name for name, _ in tied.named_buffers()]
        if buffers and len({module.stage_owner(index) for index in places}) > 1:
            raise ValueError(
                f"the tied layer {key!r} is in several stages and has the buffer {buffers[0]!r}, which each would have on "
                "its own; leave the buffer out, or split the module with pipelining.cut"
            )


def _elsewhere(path: str) -> Tensor:
    raise RuntimeError(f"the parameter {path!r} is another stage's: its values are on that stage's ranks alone")


def _chosen(names: tuple[str, ...]) -> Callable[[Any], Any]:
    return lambda params: {name: params[name] for name in names}
