"""Compilation: blocks by torch.compile, and whole steps as graphs."""

from .compile_log import CompileReport, compile_report
from .graphs.graph_bucketing import bucketing
from .graphs.graph_passes import regather, schedule
from .graphs.graph_record import StepGraph
from .graphs.graph_trace import UntraceableError
from .graphs.jit_step import JitStep, JitWarning, jit

__all__ = [
    "CompileReport",
    "JitStep",
    "JitWarning",
    "StepGraph",
    "UntraceableError",
    "bucketing",
    "compile_report",
    "jit",
    "regather",
    "schedule",
]
