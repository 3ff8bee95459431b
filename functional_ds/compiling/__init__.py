"""Compilation: blocks with torch.compile, and whole steps as graphs."""

from .compile_log import CompileReport, compile_report
from .graphs.graph_bucketing import bucketing, merge
from .graphs.graph_cost import GraphCost
from .graphs.graph_passes import copied, finished, regather, schedule
from .graphs.graph_record import CollectiveCall, StepGraph
from .graphs.graph_trace import UntraceableError
from .jitted.jit_step import JitStep, JitWarning, jit
from .jitted.predicted_step import PredictedStep

__all__ = [
    "CollectiveCall",
    "CompileReport",
    "GraphCost",
    "JitStep",
    "JitWarning",
    "PredictedStep",
    "StepGraph",
    "UntraceableError",
    "bucketing",
    "compile_report",
    "copied",
    "finished",
    "jit",
    "merge",
    "regather",
    "schedule",
]
