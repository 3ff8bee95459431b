"""Positions in a run's data and random generators as JSON values, and all ranks' positions in one checkpoint."""

import base64
from typing import Any

import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base.device import in_use, rng_state, set_rng_state

_TENSOR, _BYTES = "__tensor__", "__bytes__"


def as_json(value: Any) -> Any:
    """Numbers, strings, None, tensors, bytes, and lists and dicts of these, as JSON values.

    Law: ``from_json ∘ as_json = id``, except that tuples become lists.

    Raises:
        TypeError: there is another kind of value.

    >>> from_json(as_json({"epoch": 2, "rows": torch.tensor([1, 2])}))
    {'epoch': 2, 'rows': tensor([1, 2])}
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, Tensor):
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {_TENSOR: str(value.dtype).removeprefix("torch."), "shape": list(value.shape), **as_json(raw)}
    if isinstance(value, list | tuple):
        return [as_json(part) for part in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: as_json(part) for key, part in value.items()}
    raise TypeError(
        f"the data's position holds {type(value).__name__} {value!r}, which a checkpoint does not keep; use numbers, "
        "strings, tensors, bytes, and lists and dicts (with strings as keys) of these"
    )


def from_json(value: Any) -> Any:
    """The inverse of ``as_json``."""
    if isinstance(value, list):
        return [from_json(part) for part in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        raw, dtype = bytearray(base64.b64decode(value[_BYTES])), getattr(torch, value[_TENSOR])
        flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        return flat.view(value["shape"])
    if _BYTES in value:
        return base64.b64decode(value[_BYTES])
    return {key: from_json(part) for key, part in value.items()}


def gathered(position: Any) -> Any:
    """All ranks' positions as JSON: a single one if all are equal, as for a function of the index. Collective."""
    everyone = comm.all_gather_object(as_json(position))
    return {"all": everyone[0]} if all(other == everyone[0] for other in everyone) else {"ranks": everyone}


def local_position(stored: Any) -> Any:
    """This rank's position, from the result of ``gathered``.

    Raises:
        ValueError: ranks had different positions, and the number of ranks has changed.
    """
    if "all" in stored:
        return from_json(stored["all"])
    here, ranks = comm.world(), stored["ranks"]
    if len(ranks) != here.size:
        raise ValueError(
            f"batches: the checkpoint keeps a position for each of {len(ranks)} ranks, and this run has {here.size}; resume on "
            f"{len(ranks)}, or pass batches with a position that all ranks share, such as a function of the index"
        )
    return from_json(ranks[here.rank])


def gathered_generators() -> Any:
    """The states of torch's default generators on all ranks, as JSON. Collective.

    So runs with ``nn.Dropout`` resume: ``restore_generators ∘ gathered_generators = id`` on as many ranks.
    """
    states, device = {"cpu": torch.get_rng_state()}, in_use()
    if device is not None:
        states[device.type] = rng_state(device)
    return {"count": comm.world().size, **gathered({"generators": states})}


def restore_generators(stored: Any) -> None:
    """Restores this rank's generators; on another number of ranks they stay as they are."""
    if stored is None or comm.world().size != stored["count"]:  # an older checkpoint, or other ranks
        return
    states, device = local_position(stored)["generators"], in_use()
    torch.set_rng_state(states["cpu"])
    if device is not None and device.type in states:
        set_rng_state(device, states[device.type])
