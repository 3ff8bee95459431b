"""``functional-ds inspect`` and ``functional-ds convert``: shows a checkpoint, and converts it to another format."""

import fnmatch
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Set
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from torch import Tensor

from functional_ds.checkpointing.load import verify as verified
from functional_ds.state_dict.errors import CheckpointError
from functional_ds.state_dict.matching import FORMS

from .stored.kinds import NamedTensors, open_checkpoint
from .stored.writing import WRITTEN, state_names, written_as
from .words.errors_in_one_line import CommandError, refused
from .words.options import size
from .words.pages import OutputTable, bytes_of, count_of, emit

_SHOWN = 8
_FORMS = tuple(f"{form}/" for form in FORMS)
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def inspect(
    path: Annotated[str, typer.Argument(help="A file or folder of functional_ds, safetensors, DeepSpeed, DCP, torch.save.")],
    tag: Annotated[str | None, typer.Option(help="Which checkpoint of a folder; the newest by default.")] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte, where the kind has checksums.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; it always lists every tensor.")] = False,
) -> int:
    """Show what a checkpoint contains; exit code 1 if --verify finds damage.

    \b
    Examples:
      functional-ds inspect out/checkpoints
      functional-ds inspect out/checkpoints --tag 1000 --tensors --verify
      functional-ds inspect model.safetensors --json
    """
    checkpoint = open_checkpoint(path, tag=tag)
    damage = _damage(checkpoint) if verify else None
    groups: dict[str, list[Tensor]] = {}
    for name, tensor in checkpoint.tensors.items():
        groups.setdefault(_group(name, checkpoint.kind), []).append(tensor)
    sizes = {name: {"tensors": len(group), **_size(group)} for name, group in groups.items()}
    rows = [
        (
            name,
            str(of["tensors"]),
            count_of(of["elements"]),
            bytes_of(of["bytes"]),
            ", ".join(sorted(set(map(_dtype, groups[name])))),
        )
        for name, of in sizes.items()
    ]
    data: dict[str, Any] = {
        "path": path,
        "kind": checkpoint.kind,
        **{key: checkpoint.notes.get(key) for key in ("tag", "tags", "step", "ranks", "stage", "extra")},
        **_size(checkpoint.tensors.values()),
        "groups": sizes,
        "params": len(checkpoint.params),
        "tensors": [{"name": name, "shape": list(x.shape), "dtype": _dtype(x)} for name, x in checkpoint.tensors.items()],
        "left_out": list(checkpoint.left_out),
        "verified": None if not verify else damage == "",
        "damage": damage or None,
    }
    known = ", ".join(f"{key} {data[key]}" for key in ("tag", "step", "ranks", "stage") if data[key] is not None)
    page: list[OutputTable | str] = [f"{path}: {checkpoint.kind}" + (f", {known}" if known else "")]
    if len(data["tags"] or ()) > 1:
        page.append(f"tags: {', '.join(data['tags'])}")
    page.append(OutputTable("", ("", "tensors", "elements", "bytes", "dtypes"), rows))
    if tensors:
        listed = [(entry["name"], str(entry["shape"]), entry["dtype"]) for entry in data["tensors"]]
        page.append(OutputTable("tensors", ("name", "shape", "dtype"), listed))
    if checkpoint.left_out:
        page.append(f"no whole tensors: {', '.join(checkpoint.left_out)}")
    if verify:
        unchecked = "this kind has no checksums; sizes and headers were read"
        page.append(unchecked if damage is None else damage or "every byte is as it was written")
    emit(page, data, as_json=as_json)
    return 1 if damage else 0


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="What functional-ds inspect reads.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="A file (.safetensors, .pt) or a folder.")],
    to: Annotated[
        str | None, typer.Option(help="safetensors, functional-ds, dcp, torch; by DST's suffix if it has one.")
    ] = None,
    tag: Annotated[str | None, typer.Option(help="Which checkpoint of a folder; the newest by default.")] = None,
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None, typer.Option(help="For floating tensors; as they are by default.")
    ] = None,
    only: Annotated[str | None, typer.Option(help="A pattern of names, such as 'blocks.*'.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="The optimizer's tensors, too, under their full names; functional-ds has them always.")
    ] = False,
    shard_bytes: Annotated[str | None, typer.Option(help="The largest safetensors file in a folder: 5GB.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is there.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Convert a checkpoint to another format: the most precise values of each param; to functional-ds the whole state.

    \b
    Examples:
      functional-ds convert out/checkpoints model.safetensors --dtype bf16
      functional-ds convert deepspeed_run hf_model --to safetensors --shard-bytes 5GB
      functional-ds convert deepspeed_run out/checkpoints --to functional-ds
    """
    checkpoint = open_checkpoint(source, tag=tag)
    target_format = to or {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch"}.get(
        Path(target).suffix, ""
    )
    if target_format not in WRITTEN:
        raise CommandError(
            f"--to: {target_format!r} is not one of {', '.join(WRITTEN)}" if to else "--to: DST has no known suffix; pass --to"
        )
    limit = size(shard_bytes, option="--shard-bytes") if shard_bytes else None
    if limit is not None and (target_format != "safetensors" or Path(target).suffix == ".safetensors"):
        raise CommandError("--shard-bytes: it is for a folder of safetensors files")
    if target_format == "functional-ds":
        wanted = state_names(checkpoint)
    else:
        wanted = {name: name for name in checkpoint.tensors} if everything else dict(checkpoint.params)
    chosen = {name: place for name, place in wanted.items() if only is None or _is_like(name, only)}
    if not chosen:
        raise CommandError(f"--only: no name of {source} is like {only!r}" if only else f"{source} has no params")
    values = _values(checkpoint, chosen, _DTYPES.get(dtype or ""))
    if target_format == "functional-ds":
        values |= _counted(values)
    updates = int(values["step"]) if "step" in values else 0
    written_as(
        target_format,
        values,
        Path(target),
        shard_bytes=limit,
        overwrite=overwrite,
        step=updates,
        extra=checkpoint.notes.get("extra"),
    )
    left_out = [*_unused(checkpoint.tensors, set(chosen.values())), *checkpoint.left_out, *checkpoint.notes.get("beside", ())]
    data: dict[str, Any] = {
        "source": source,
        "from": checkpoint.kind,
        "target": target,
        "to": target_format,
        "tensors": len(values),
        **_size(values.values()),
        "left_out": left_out,
    }
    page = [f"{source} ({checkpoint.kind}) -> {target} ({target_format}): {len(values)} tensors, {bytes_of(data['bytes'])}"]
    if left_out:
        page.append(f"left out: {_roles(left_out)}")
    emit(page, data, as_json=as_json)
    return 0


def _unused(names: Iterable[str], used: Set[str]) -> list[str]:
    """The names that are not used, except params with a more precise form that is used."""
    forms = {place.partition("/")[2] for place in used if place.startswith(_FORMS)}
    rest = (name for name in names if name not in used)
    return [name for name in rest if not (name.startswith(_FORMS) and name.partition("/")[2] in forms)]


def _is_like(name: str, pattern: str) -> bool:
    """Whether a name, or the leaf after its role, matches."""
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name.partition("/")[2], pattern)


def _counted(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The number of updates, where a checkpoint has only its optimizer's counts."""
    counts = [int(x) for name, x in values.items() if name.startswith("optimizer.steps/")]
    return {"step": torch.tensor(max(counts))} if counts and "step" not in values else {}


def _roles(names: Iterable[str]) -> str:
    """Names by what is before their slash: ``optimizer.exp_avg (2)``."""
    counts = Counter(name.partition("/")[0] for name in names)
    shown = [role if count == 1 else f"{role} ({count})" for role, count in counts.items()]
    return ", ".join(shown[:_SHOWN]) + (f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else "")


def _values(checkpoint: NamedTensors, wanted: dict[str, str], dtype: torch.dtype | None) -> dict[str, Tensor]:
    with refused(f"{checkpoint.path} cannot be read", CheckpointError, ValueError, OSError, RuntimeError):
        read = checkpoint.read(list(dict.fromkeys(wanted.values())))
    return {name: _cast(name, read[place], dtype) for name, place in wanted.items()}


def _cast(name: str, value: Tensor, dtype: torch.dtype | None) -> Tensor:
    """A param in the dtype; the optimizer's state keeps its precision."""
    floating = value.is_floating_point() and not name.startswith("optimizer.")
    return value.to(dtype) if dtype is not None and floating else value


def _damage(checkpoint: NamedTensors) -> str | None:
    """What is damaged; empty for nothing, None for a format without checksums."""
    if checkpoint.kind != "functional-ds":
        return None
    folder = checkpoint.path.parent if (checkpoint.path / "manifest.json").is_file() else checkpoint.path
    try:
        verified(folder, checkpoint.notes["tag"])
    except CheckpointError as error:
        return f"damaged: {error}"
    return ""


def _group(name: str, kind: str) -> str:
    if kind not in ("functional-ds", "deepspeed"):
        return "tensors"
    return name.partition("/")[0] if "/" in name else "others"


def _size(tensors: Collection[Tensor]) -> dict[str, int]:
    return {"elements": sum(x.numel() for x in tensors), "bytes": sum(x.nbytes for x in tensors)}


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
