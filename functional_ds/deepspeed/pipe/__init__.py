"""``deepspeed.pipe``: models as sequences of layers, which become pipeline stages."""

from .pipeline_engine import PipelineEngine, pipeline_engine
from .pipeline_module import LayerSpec, PipelineModule, TiedLayerSpec
from .pipeline_parts import PipelineParts, pipeline_parts
from .topology import PipeDataParallelTopology, PipelineParallelGrid, PipeModelDataParallelTopology, ProcessTopology

__all__ = [
    "LayerSpec",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "PipelineEngine",
    "PipelineModule",
    "PipelineParallelGrid",
    "PipelineParts",
    "ProcessTopology",
    "TiedLayerSpec",
    "pipeline_engine",
    "pipeline_parts",
]
