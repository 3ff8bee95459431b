"""Regions of graphs by back ends of torch's compiler. Equal ones share what was compiled, on all ranks of a process."""

import functools
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from functional_ds.base.torch_private import FakeTensorMode
from functional_ds.compiling.compile_log import BlockClass, Compilation
from functional_ds.compiling.graphs.graph_record import StepGraph
from functional_ds.compiling.torch_compiler import compiler_backend

from .graph_code import GraphCode, without_autocast
from .graph_regions import GraphRegion, in_regions

__all__ = ["RegionCode", "RegionError", "check_backend"]

_BACKENDS = ("fx", "aot_eager", "inductor")
_COMPILING = threading.Lock()  # torch's compiler is at work in one thread at a time


class RegionError(RuntimeError):
    """A region that a back end cannot compile."""


def check_backend(name: Any) -> None:
    """Refuses a back end that does not exist, or that this machine lacks something for.

    Raises:
        ValueError: with what would do.
    """
    if name not in _BACKENDS:
        raise ValueError(f"jit: there is no back end {name!r}; there are {', '.join(map(repr, _BACKENDS))}")
    if name == "inductor":
        compiler = os.environ.get("CXX") or {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
        if shutil.which(compiler) is None:
            raise ValueError(
                f"jit: backend='inductor' writes C++ code, and its compiler {compiler!r} is not here: install it, name another "
                "one in the variable CXX, or use backend='fx', which needs none and gives the eager step's bits"
            )


@attrs.frozen
class _RegionKey:
    """Equal for regions that one compilation is for."""

    backend: str
    text: str
    region: GraphRegion = attrs.field(eq=False)


@attrs.define(eq=False)
class _RegionFunction:
    """A region's function. Its first call looks whether results are laid out as in the trace, in memory of their own.

    Attributes:
        run: what the back end gave.
        outputs: the results as in the trace.
        compilations: one, for the first region that it was for.
    """

    run: Callable[..., Sequence[Tensor]]
    outputs: Sequence[Tensor]
    compilations: list[Compilation]
    _mended: list[int] | None = None

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        found = self.run(*inputs)
        if self._mended is None:
            self._mended = self._looked_at(inputs, found)
        return found if not self._mended else [self._as_traced(place, x) for place, x in enumerate(found)]

    def _looked_at(self, inputs: Sequence[Tensor], found: Sequence[Tensor]) -> list[int]:
        """The results that are views of others or of inputs, or laid out otherwise."""
        places, seen = list[int](), {x.untyped_storage().data_ptr() for x in inputs}
        for place, (x, model) in enumerate(zip(found, self.outputs, strict=True)):
            if (x.dtype, x.shape, x.device) != (model.dtype, model.shape, model.device):
                raise RegionError(
                    f"a result is a {x.dtype}{list(x.shape)} on {x.device}, and not {model.dtype}{list(model.shape)}"
                )
            memory = x.untyped_storage().data_ptr()
            if (memory in seen and x.numel()) or x.stride() != model.stride():
                places.append(place)
            seen.add(memory)
        return places

    def _as_traced(self, place: int, x: Tensor) -> Tensor:
        if place not in (self._mended or ()):
            return x
        model = self.outputs[place]
        return torch.empty_strided(model.shape, model.stride(), dtype=x.dtype, device=x.device).copy_(x)


@functools.lru_cache(maxsize=512)
def _compiled(key: _RegionKey) -> _RegionFunction:
    region, began = key.region, time.perf_counter()
    with FakeTensorMode():
        inputs = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in region.inputs]
    try:
        with torch.no_grad(), without_autocast():
            options = {"emulate_precision_casts": True} if key.backend == "inductor" else None  # so fp16 overflows where it did
            run = compiler_backend(key.backend, mode=None, options=options, dynamic=False)(region.module, inputs)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise RegionError(f"{key.backend} cannot compile a region of {region.kernels} kernels: {lines[0][:300]}") from error
    seconds = time.perf_counter() - began
    return _RegionFunction(run, region.outputs, [Compilation(region.name, 1, f"{region.kernels} kernels", seconds)])


@attrs.define(eq=False, init=False)
class RegionCode(GraphCode):
    """A graph whose regions are compiled. Equal regions share one function, on all ranks of the process.

    Args:
        graph: as its passes have left it.
        backend: "aot_eager" or "inductor".

    Raises:
        RegionError: the back end cannot compile a region.
    """

    regions: Sequence[GraphRegion]
    functions: Sequence[_RegionFunction]

    def __init__(self, graph: StepGraph, backend: str) -> None:
        functions: list[_RegionFunction] = []

        def function_of(region: GraphRegion) -> _RegionFunction:
            functions.append(_compiled(_RegionKey(backend, region.key, region)))
            return functions[-1]

        with _COMPILING:
            split, regions = in_regions(graph.module.graph, function_of)
        self.__attrs_init__(split, graph.module, graph.sites, regions, functions)

    @property
    def rows(self) -> list[BlockClass]:
        """The regions by the phase that they begin in, and what was compiled for them."""
        found: dict[str, BlockClass] = {}
        for region, function in zip(self.regions, self.functions, strict=True):
            row = found.setdefault(region.phase, BlockClass(f"regions of {region.phase}"))
            row.paths = (*row.paths, region.name)
            row.calls += self.runs
            row.follow(function.compilations)
        return list(found.values())
