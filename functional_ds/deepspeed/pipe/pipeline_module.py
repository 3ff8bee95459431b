"""``PipelineModule``: a sequence of layers, given as modules or specs, and where it is split into stages."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
import torch
from torch import nn

from functional_ds import comm
from functional_ds.base.torch_private import parameters_of
from functional_ds.comm.worlds.rng_state import kept_rng
from functional_ds.deepspeed.accelerator.accelerators import get_accelerator
from functional_ds.deepspeed.checkpointing import checkpoint
from functional_ds.deepspeed.runtime.utils import partition_balanced, partition_uniform, set_random_seed

from .topology import PipeDataParallelTopology, ProcessTopology


class LayerSpec:
    """A layer of a ``PipelineModule``: a module class and its arguments.

    >>> LayerSpec(nn.Linear, 2, 3, bias=False).build()
    Linear(in_features=2, out_features=3, bias=False)
    """

    def __init__(self, typename: type[nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not issubclass(typename, nn.Module):
            raise TypeError(f"{type(self).__name__}({typename!r}, ...): a class of torch.nn.Module is needed")
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    def build(self, log: bool = False) -> nn.Module:
        """The layer."""
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        given = [*map(repr, self.module_args), *(f"{name}={value!r}" for name, value in self.module_kwargs.items())]
        return f"{self.typename.__name__}({', '.join(given)})"


class TiedLayerSpec(LayerSpec):
    """A layer that occurs several times under one key, such as an embedding that is also the head.

    Attributes:
        key: layers with one key are one module; the first one builds it.
        forward_fn: ``forward_fn(module, x)`` instead of ``module(x)``.
        tied_weight_attr: has no effect: all of the module's params are shared.
    """

    def __init__(
        self,
        key: str,
        typename: type[nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = "weight",
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)


@attrs.frozen
class PlacedLayer:
    """One layer of the sequence.

    Attributes:
        class_name: its class's or function's name.
        name: of the child module that it calls; None for a function alone.
        tied: whether the name is a key of ``tied_modules``.
        function: called with (module, x), or only with x; None calls the module.
    """

    class_name: str
    name: str | None = None
    tied: bool = False
    function: Callable[..., Any] | None = None


class StageLayers(nn.Module):
    """Some layers of a sequence, with the names that they have in the whole sequence."""

    def __init__(
        self, layers: Sequence[PlacedLayer], whole: "StageLayers | None" = None, *, interval: int = 0, again: Any = checkpoint
    ) -> None:
        super().__init__()
        self.layers = list(layers)
        self.tied_modules = nn.ModuleDict()
        self.activation_checkpoint_interval, self.activation_checkpoint_func = interval, again
        self.checkpointable_layers: list[str] | None = None if whole is None else whole.checkpointable_layers
        if whole is not None:
            for layer in self.layers:
                if layer.name is not None:
                    (self.tied_modules if layer.tied else self).add_module(layer.name, whole.child(layer))
            self.train(whole.training)

    def child(self, layer: PlacedLayer) -> nn.Module:
        """The module that a layer calls."""
        return (self.tied_modules if layer.tied else self).get_submodule(layer.name or "")

    def forward(self, forward_input: Any) -> Any:
        """The layers, one after another; blocks of ``activation_checkpoint_interval`` layers are recomputed."""
        x, every = forward_input, self.activation_checkpoint_interval
        for first in range(0, len(self.layers), every or len(self.layers) or 1):
            block = self.layers[first : first + (every or len(self.layers))]
            if every and self._worth(block):
                x = self.activation_checkpoint_func(self._run(block), *(x if isinstance(x, tuple) else (x,)))
            else:
                x = self._run(block)(x)
        return x

    def _run(self, block: Sequence[PlacedLayer]) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            x: Any = inputs[0] if len(inputs) == 1 else inputs
            for layer in block:
                if layer.name is None and layer.function is not None:
                    x = layer.function(x)
                elif layer.function is not None:
                    x = layer.function(self.child(layer), x)
                else:
                    x = self.child(layer)(x)
            return x

        return run

    def _worth(self, block: Sequence[PlacedLayer]) -> bool:
        """Whether a block is recomputed: if it has params, or all of its classes are listed."""
        if self.checkpointable_layers is not None:
            return all(layer.class_name in self.checkpointable_layers for layer in block)
        return any(True for layer in block if layer.name is not None for _ in self.child(layer).parameters())


class PipelineModule(StageLayers):
    """A sequence of layers, split into ``num_stages`` stages. With one stage it is a plain module of all layers.

    Each layer is built in its turn, so random draws are those of the whole sequence on each rank, and the params of a
    ``LayerSpec`` of another stage are freed immediately: they are on the device "meta". ``deepspeed.initialize`` turns the
    sequence into stages of a pipeline by ``pipeline_parts``. Parameters have DeepSpeed's names: the layer's number, or
    ``tied_modules.key``.

    Attributes:
        parts: the first layer of each stage, and the number of layers.
        num_stages: the number of stages.
        loss_fn: ``loss_fn(outputs, labels)``; None if the last layer returns the loss.

    Raises:
        ValueError: a layer shares params with one of another stage, and none of them is a ``TiedLayerSpec``; there is no such
            ``partition_method``; the stages do not match the world.

    >>> model = PipelineModule([LayerSpec(nn.Linear, 4, 4), nn.ReLU(), nn.Linear(4, 1)], num_stages=1)
    >>> [name for name, _ in model.named_parameters()], model.parts
    (['0.weight', '0.bias', '2.weight', '2.bias'], [0, 3])
    """

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[[Any, Any], Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = checkpoint,
        checkpointable_layers: list[str] | None = None,
        dynamic_shape: bool = False,
    ) -> None:
        super().__init__((), interval=activation_checkpoint_interval, again=activation_checkpoint_func)
        self.loss_fn, self.checkpointable_layers, self.dynamic_shape = loss_fn, checkpointable_layers, dynamic_shape
        self._topo = _grid(num_stages, topology)
        self.num_stages = self._topo.get_dim("pipe")
        specs = list(layers)
        self.layers = [_placed(index, spec) for index, spec in enumerate(specs)]
        self.parts = self._partition(partition_method, specs)
        freed = _Freed(specs)
        for index, (spec, layer) in enumerate(zip(specs, self.layers, strict=True)):
            if seed_layers:
                (seed_fn or set_random_seed)(base_seed + index)
            held = self.tied_modules if layer.tied else self
            if layer.name is not None and layer.name not in dict(held.named_children()):
                module = spec.build() if isinstance(spec, LayerSpec) else spec
                stages = self.stages_of(layer)
                freed.note(index, module, stages)
                held.add_module(layer.name, module.to(get_accelerator().current_device_name()))
                if self.stage_id not in stages and isinstance(spec, LayerSpec):
                    freed.free(module)
        self._everywhere = frozenset(name for name, p in self.named_parameters() if id(p) in freed.kept)

    def _partition(self, method: str, specs: Sequence[Any]) -> list[int]:
        word = method.lower()
        if word == "uniform":
            return partition_uniform(len(self.layers), self.num_stages)
        if word == "parameters":
            return partition_balanced(_sizes(specs) if self.num_stages > 1 else [0.0] * len(specs), self.num_stages)
        if word.startswith("type:"):
            wanted = re.compile(word.split(":")[1], re.IGNORECASE)
            hits = [1.0 if wanted.search(layer.class_name) else 0.0 for layer in self.layers]
            if not any(hits):
                kinds = sorted({layer.class_name for layer in self.layers})
                raise ValueError(f"partition_method={method!r} matches no layer; there are {', '.join(kinds)}")
            return partition_balanced(hits, self.num_stages)
        raise ValueError(f"partition_method={method!r}: 'uniform', 'parameters' or 'type:REGEX'")

    def partitions(self) -> list[int]:
        """The first layer of each stage, and the number of layers."""
        return self.parts

    def stage_owner(self, layer_idx: int) -> int:
        """The stage of a layer.

        Raises:
            ValueError: there is no such layer.
        """
        for stage in range(self.num_stages):
            if self.parts[stage] <= layer_idx < self.parts[stage + 1]:
                return stage
        raise ValueError(f"layer_idx={layer_idx}: there are {len(self.layers)} layers, from 0 on")

    def stages_of(self, layer: PlacedLayer) -> list[int]:
        """The stages that run a layer's module; a tied one has several."""
        same = [index for index, other in enumerate(self.layers) if (other.name, other.tied) == (layer.name, layer.tied)]
        return sorted({self.stage_owner(index) for index in same})

    def holders(self, name: str) -> tuple[int, ...]:
        """The ranks that have the values of a parameter: those whose stages run it, or all if the caller made it."""
        if name in self._everywhere:
            return tuple(range(self._topo.world_size()))
        tied, (first, *rest) = name.startswith("tied_modules."), name.split(".")
        stages = self.stages_of(PlacedLayer("", rest[0] if tied else first, tied))
        return tuple(sorted(rank for stage in stages for rank in self._topo.filter_match(pipe=stage)))

    def _apply(self, fn: Callable[[Any], Any], recurse: bool = True) -> "PipelineModule":
        """For ``to``, ``cuda`` and ``half``: params without values change only their dtype."""

        def applied(x: Any) -> Any:
            return x.to(fn(torch.empty(0, dtype=x.dtype)).dtype) if x.is_meta else fn(x)

        return super()._apply(applied, recurse)  # type: ignore[no-any-return]

    def empty_bare(self) -> None:
        """Gives params without values no elements, on this rank's device, so that all params are on one device."""
        for p in self.parameters():
            if p.is_meta:
                here = get_accelerator().current_device_name()
                empty = nn.Parameter(torch.empty(0, dtype=p.dtype, device=here), requires_grad=p.requires_grad)
                empty.__dict__.update(p.__dict__)
                torch.utils.swap_tensors(p, empty)

    @property
    def stage_id(self) -> int:
        """This rank's stage."""
        return self._topo.get_coord(comm.world().rank)[self._topo.axes.index("pipe")]

    def topology(self) -> ProcessTopology:
        """Where ranks are in the grid of stages and data parallelism."""
        return self._topo

    def num_pipeline_stages(self) -> int:
        """The number of stages."""
        return self.num_stages

    def set_checkpoint_interval(self, interval: int) -> None:
        """Sets the number of layers in recomputed blocks; 0 for none."""
        if interval < 0:
            raise ValueError(f"interval={interval}: 0 for none, or a number of layers")
        self.activation_checkpoint_interval = interval

    def get_additional_losses(self) -> None:
        """None."""
        return None

    def stage(self, index: int) -> StageLayers:
        """The layers of one stage; it shares the modules."""
        layers = self.layers[self.parts[index] : self.parts[index + 1]]
        return StageLayers(layers, self, interval=self.activation_checkpoint_interval, again=self.activation_checkpoint_func)


def _placed(index: int, spec: Any) -> PlacedLayer:
    if isinstance(spec, PipelineModule):
        raise ValueError(f"layer {index} is a PipelineModule; pass its layers")
    if isinstance(spec, TiedLayerSpec):
        return PlacedLayer(spec.typename.__name__, spec.key, True, spec.forward_fn)
    if isinstance(spec, LayerSpec | nn.Module):
        cls = spec.typename if isinstance(spec, LayerSpec) else type(spec)
        return PlacedLayer(cls.__name__, str(index))
    if not callable(spec):
        raise TypeError(f"layer {index} is {spec!r}: a module, a LayerSpec or a function is needed")
    return PlacedLayer(getattr(spec, "__name__", type(spec).__name__), None, False, spec)


def _sizes(specs: Sequence[Any]) -> list[float]:
    """The numbers of trained params. Builds layers one at a time, and restores the generators."""
    tied, sizes = dict[str, float](), []
    here = torch.device(get_accelerator().current_device_name())
    with torch.random.fork_rng([here] if here.type == "cuda" else []), kept_rng():
        for spec in specs:
            if isinstance(spec, TiedLayerSpec) and spec.key in tied:
                sizes.append(tied[spec.key])
                continue
            module = spec.build() if isinstance(spec, LayerSpec) else spec
            held = module.parameters() if isinstance(module, nn.Module) else ()
            sizes.append(float(sum(p.numel() for p in held if p.requires_grad)))
            if isinstance(spec, TiedLayerSpec):
                tied[spec.key] = sizes[-1]
    return sizes


class _Freed:
    """The params of layers on other ranks: each is replaced by a meta tensor, and its memory is freed.

    Attributes:
        kept: the ids of those that stay, because the specs' layers do not make them: given layers', and other layers' weights.
    """

    def __init__(self, specs: Sequence[Any]) -> None:
        given = [x for spec in specs if isinstance(spec, LayerSpec) for x in (*spec.module_args, *spec.module_kwargs.values())]
        self.kept = {id(x) for x in given} | {id(p) for x in given if isinstance(x, nn.Module) for p in x.parameters()}
        self.kept |= {id(p) for spec in specs if isinstance(spec, nn.Module) for p in spec.parameters()}
        self._seen: dict[int, tuple[nn.Parameter, list[int]]] = {}  # by id, with their stages
        self._bare: dict[int, nn.Parameter] = {}

    def note(self, index: int, module: nn.Module, stages: list[int]) -> None:
        """Raises an error, on every rank, for a layer that shares params with a layer of other stages.

        Raises:
            ValueError: it does.
        """
        for path, p in module.named_parameters():
            if id(p) not in self.kept and self._seen.setdefault(id(p), (p, stages))[1] != stages:
                raise ValueError(
                    f"layers: the parameter {path!r} of layer {index} belongs to a layer of another stage, too, which would "
                    "train another copy of it: make both TiedLayerSpecs with one key"
                )

    def free(self, module: nn.Module) -> None:
        """Frees a layer's params."""
        for owner in module.modules():
            held = parameters_of(owner)
            held.update({name: self._without(p) for name, p in held.items() if p is not None and id(p) not in self.kept})

    def _without(self, p: nn.Parameter) -> nn.Parameter:
        if id(p) not in self._bare and not p.is_meta:
            bare = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
            bare.__dict__.update(p.__dict__)
            self._bare[id(p)], self._seen[id(bare)] = bare, (bare, self._seen[id(p)][1])
            p.data = p.data.new_empty(0)
        return self._bare.get(id(p), p)


def _grid(num_stages: int | None, topology: ProcessTopology | None) -> ProcessTopology:
    world = comm.world().size
    if topology is None:
        if num_stages is None:
            raise ValueError("PipelineModule: num_stages or topology is needed")
        if num_stages < 1 or world % num_stages:
            raise ValueError(f"num_stages={num_stages} does not divide the world of {world}")
        return PipeDataParallelTopology(num_stages, world // num_stages)
    if topology.get_dim("pipe") < 1 or topology.world_size() != world:
        raise ValueError(f"topology={topology}: it needs an axis 'pipe', and as many ranks as the world of {world}")
    if any(topology.get_dim(axis) > 1 for axis in topology.axes if axis not in ("pipe", "data")):
        raise ValueError(
            f"topology={topology}: tensor parallelism in stages is T.tensor_parallel's; see docs/which-strategy.md"
        )
    return topology
