"""Explains torch's shape errors in a model that runs on slices."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from torch import nn

from functional_ds import comm
from functional_ds.base import torch_private
from functional_ds.base.torch_private import parameters_of
from functional_ds.sharding.leaf_slice import LeafSlice

_OURS = {Path(comm.__file__).parent, Path(torch_private.__file__).parent.parent, Path(__file__).parent.parent}


@contextmanager
def named_errors(slices: Mapping[str, LeafSlice], group: comm.Group) -> Iterator[None]:
    """A context in which torch's shape errors name the module that failed, its slices and what to do instead.

    An error outside of any module gets a note that names the sliced leaves.

    Raises:
        ValueError: replaces a ``RuntimeError`` of torch, which is its cause.
    """
    try:
        yield
    except (RuntimeError, IndexError, ValueError) as error:
        stack = list(traced(error.__traceback__))
        known = type(error) in (RuntimeError, IndexError) or "values to unpack" in str(error)  # splits by the unsliced size
        if group.size == 1 or not slices or not known or not stack:
            raise
        file, _ = stack[-1]
        if any(folder in file.parents for folder in _OURS):  # an error of the library's own
            raise
        modules = [module for _, module in stack if module is not None]
        if not modules:
            names = ", ".join(repr(name) for name in [*slices][:4]) + (
                "" if len(slices) <= 4 else f" and {len(slices) - 4} more"
            )
            error.add_note(
                f"tensor_parallel: the loss has slices over the {group.size} ranks of {group.name!r} of the leaves {names}; "
                "where it uses one outside of the plan's modules, use fds.tp's functions, or leave the leaf out of the plan"
            )
            raise
        raise ValueError(_text(modules, slices, group, error)) from error


def traced(trace: TracebackType | None) -> Iterator[tuple[Path, nn.Module | None]]:
    """The files of an error's calls, outermost first, each with its module if it is a method of one."""
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        yield Path(trace.tb_frame.f_code.co_filename), owner if isinstance(owner, nn.Module) else None
        trace = trace.tb_next


def _text(modules: list[nn.Module], slices: Mapping[str, LeafSlice], group: comm.Group, error: Exception) -> str:
    names = {id(module): path for path, module in modules[0].named_modules(remove_duplicate=False)}
    failed = next((module for module in reversed(modules) if any(module.children())), modules[-1])  # containers of layers
    path, here = names.get(id(modules[-1]), ""), names.get(id(failed), "")
    cut = []
    for name, module in failed.named_modules():
        for key, leaf in parameters_of(module).items():
            whole = [slices[sliced].size for sliced in slices if sliced.endswith(".".join(filter(None, (here, name, key))))]
            if leaf is not None and whole:
                cut.append(f"{'.'.join(filter(None, (name, key)))} {list(leaf.shape)} of {whole[0]}")
    numbers = [
        name
        for name, value in vars(failed).items()
        if isinstance(value, int) and ("head" in name or "split" in name) and value > 1
    ]
    counts = [name for name in numbers if name == "split_size" or not name.endswith(("_dim", "_size"))]
    local = f"; attributes that count what is split may be 'local', such as {counts}" if counts else ""
    return (
        f"tensor_parallel: {path!r} ({type(modules[-1]).__name__}) fails on slices over the {group.size} ranks "
        f"of {group.name!r}: {str(error).splitlines()[0]}. {type(failed).__name__} {here!r} has here: "
        f"{', '.join(cut) or 'no slices'}. Layers that meet must be split alike and in whole heads{local}; "
        f"{_advice(path, modules[-1])}; else leave these layers out of the plan"
    )


def _advice(path: str, module: nn.Module) -> str:
    """What the plan can say of the module that failed."""
    layer = type(module).__name__
    if isinstance(module, nn.GroupNorm):
        leaves = "".join(f"'{path}.{key}': 0, " for key, leaf in parameters_of(module).items() if leaf is not None)
        return f"of a {layer} split the params and count the groups of each rank, {{{leaves}'{path}.num_groups': 'local'}}"
    whole = "use 'colwise_gather_output' for the layer before it and 'rowwise_split_input' for the one after it"
    if getattr(module, "running_mean", None) is not None:
        return f"the running statistics of a {layer} are buffers, which stay whole: {whole}"
    if hasattr(module, "normalized_shape"):
        return f"{layer} needs all features of its input: {whole}"
    return "a leaf that acts on each feature alone is split by its dim, {'scale': 0}, and a norm needs all features"
