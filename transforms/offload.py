"""Offloading of optimizer states and params to host memory or disk (ZeRO-Offload; ZeRO-Infinity, Rajbhandari et al. 2021)."""

import os
from pathlib import Path
from typing import Any, Literal, get_args

import attrs
import torch

from functional_ds.base import tree
from functional_ds.base.weighted import Weighted
from functional_ds.sharding.sources import home
from functional_ds.step.compose import wrap
from functional_ds.step.phase_signatures import Metrics
from functional_ds.step.phases import Trait
from functional_ds.step.state.state import State
from functional_ds.step.step import Step, Transform
from functional_ds.transforms.offloading.files import check_folder
from functional_ds.transforms.offloading.handles import fetched, is_handle
from functional_ds.transforms.offloading.init import Options, initial_state, plan_of
from functional_ds.transforms.offloading.leaf_states import beside_params, on_device
from functional_ds.transforms.offloading.plan import Place
from functional_ds.transforms.offloading.storage import OffloadSlot, Storage, make_disk
from functional_ds.transforms.offloading.update import Update

_PLACES: tuple[Place, ...] = get_args(Place)


def offload(
    optimizer: Literal["cpu", "disk"] | None = None,
    params: Literal["cpu", "disk"] | None = None,
    *,
    path: str | os.PathLike[str] | None = None,
    ratio: float = 1.0,
    buffers: int = 2,
    buffer_bytes: int = 2**25,
    threads: int = 4,
    direct: bool = True,
) -> Transform:
    """Offloads the optimizer's state, with master weights, and the params to host memory or disk.

    Results are unchanged, bitwise on CPUs, in every stage of ZeRO; offload, then fetch, is the identity.

    With ``optimizer="cpu"`` the state is in host memory, pinned if there is a GPU, and the update runs on the host; gradients
    and params are copied while other pieces are computed. With ``optimizer="disk"`` the state is in files under ``path``, two
    versions of each tensor. The update goes through ``buffers`` buffers of about ``buffer_bytes``, so its host memory does not
    grow with the model: while it computes one piece, it reads the next and writes the last one. Every read is checked against a
    CRC-32.

    ``params`` needs ``zero(3)``, also on one rank. Shards are then fetched before units are gathered, one unit ahead.

    If a read or write fails, all ranks raise ``offloading.OffloadError``, which names the file, and the old state stays valid.
    Files are deleted with the last state that uses them, or, after a crash, by the next run.

    Put it after ``mixed_precision`` and ``ema`` and before ``zero``. The transforms before it, and the optimizer, must be
    elementwise, except that they may use ``step.norm``, ``step.finite`` and ``step.leaf_map``.

    Cost: on disk, two versions of 8Ψ/n bytes for Adam, of 12Ψ/n with masters. Each update all-reduces one number, by which
    ranks agree that no disk failed.

    Args:
        optimizer: where to store its state, masters and ``ema``'s means: ``"cpu"``, ``"disk"`` or None for the device.
        params: where to store params between uses; no further from the device than the optimizer's state.
        path: an existing folder, for ``"disk"``.
        ratio: the fraction of the trained elements, taken from the first leaves, whose optimizer state is offloaded; the others
            are updated on the device.
        buffers: the number of buffers; with one, nothing overlaps.
        buffer_bytes: bytes of each buffer. An optimizer that needs whole leaves (``lamb``, ``muon``, ``param_groups``,
            ``decay=``) takes whole leaves (in ZeRO segments), and buffers are then as large as the largest.
        threads: the number of threads that read and write.
        direct: whether to bypass the page cache (O_DIRECT), where the file system supports it.

    Raises:
        ValueError: an unknown place; a ratio outside 0..1; a path that is missing, not writable or not used; a wrong order of
            transforms; at ``init``, before anything is allocated: a state that cannot be split by leaves.
        OffloadError: at ``init``: the disk is too small.

    >>> import tempfile
    >>> import functional_ds as fds
    >>> with tempfile.TemporaryDirectory() as path:
    ...     step = offload(optimizer="disk", path=path)(
    ...         fds.train_step(lambda p, x: (p["w"] * x).sum(), fds.sgd(0.5, momentum=0.5))
    ...     )
    ...     state = step.init({"w": torch.ones(2)})
    ...     for _ in range(2):
    ...         state, _ = step(state, torch.tensor([1.0, 2.0]))
    ...     step.params(state)["w"].tolist(), state.optimizer.momentum[0].read().tolist()
    ([-0.25, -1.5], [1.5, 3.0])
    """
    places: dict[str, Place] = {}
    for name, word in (("optimizer", optimizer), ("params", params)):
        if word not in ("cpu", "disk", None):
            raise ValueError(f"{name}={word!r} is unknown: use 'cpu', 'disk' or None")
        places[name] = word or "device"
    if optimizer is None and params is None:
        raise ValueError("offload: optimizer=None and params=None offload nothing; use 'cpu' or 'disk' for one of them")
    if _PLACES.index(places["params"]) > _PLACES.index(places["optimizer"]):
        raise ValueError(f"params={params!r} needs optimizer={params!r}, too: where they are updated, its state must be")
    part: Any = ratio
    if not isinstance(part, int | float) or not 0 <= part <= 1:
        raise ValueError(f"ratio={ratio!r} must be in 0..1: it is the part of the optimizer's state that is offloaded")
    if ratio != 1 and params is not None:
        raise ValueError(f"ratio={ratio} keeps a part of the optimizer's state on the device, which params={params!r} leave")
    for name, number in (("buffers", buffers), ("buffer_bytes", buffer_bytes), ("threads", threads)):
        if type(number) is not int or number < 1:
            raise ValueError(f"{name}={number!r} must be at least 1, and whole")
    if (path is None) == ("disk" in places.values()):
        raise ValueError(f"path={path!r}: 'disk' needs a folder, and nothing else does")
    root = None if path is None else check_folder(path)
    options = Options(places["optimizer"], places["params"], float(ratio), buffer_bytes)
    return _Offload(options, root, buffers, threads, direct).transform()


@attrs.frozen(eq=False)
class _Offload:
    options: Options
    root: Path | None
    buffers: int
    threads: int
    direct: bool

    def transform(self) -> Transform:
        """The phases that offload wraps."""
        return wrap(
            str(self),
            check=self.check,
            slot="offload",
            traits=[Trait.OFFLOADS, Trait.HEEDS_SKIPS],
            options={"places": self.options},  # ranks may have different folders
            init=self.init,
            scatter=self.scatter,
            update=self.update,
            params=self.params,
        )

    def check(self, step: Step) -> None:
        """Raises an error for a step that is sharded or offloaded already, or has a slot that must stay on the device."""
        if step.wraps("view"):
            raise ValueError(f"{self}: put it before zero, so that each rank offloads its own shards ({step})")
        if step.has(Trait.OFFLOADS):
            raise ValueError(f"{self}: this step is offloaded already ({step})")
        resident = step.has(Trait.RESIDENT_SLOT)
        if resident:
            raise ValueError(f"{self}: put it before {resident}, whose slot must stay on the device ({step})")

    def __str__(self) -> str:
        given = [("optimizer", self.options.optimizer), ("params", self.options.params)]
        words = [f"{name}={word!r}" for name, word in given if word != "device"]
        words += [f"path={str(self.root)!r}"] if self.root else []
        return f"offload({', '.join(words + [f'ratio={self.options.ratio}'] * (self.options.ratio != 1))})"

    def init(self, inner: Any, step: Step, params: Any) -> State:
        """Plans from shapes, then creates the files, then the state, a piece at a time."""
        name = str(self)
        copies = step.has(Trait.COPIES_PARAMS, after=name)
        if copies:
            raise ValueError(f"{self}: put it after {copies}, so that what that keeps is offloaded, too")
        if self.options.params != "device" and not step.has(Trait.SHARDS_PARAMS, after=name):
            raise ValueError(f"{self}: params are whole while they are used but with zero(3), which must come after it")
        inside = next((x for x in step.layers[step.names.index(name) :] if x.slot and x.is_innermost("update")), None)
        if inside is not None:
            raise ValueError(
                f"{self}: put it after {inside.name}, whose update is innermost and so runs once for each piece, and whose "
                f"slot {inside.slot!r} would be made of whole tensors"
            )
        whole = step.has(Trait.KEEPS_WHOLE, after=name)
        if self.options.params != "device" and whole:
            raise ValueError(f"{self}: {whole} keeps some params whole on the device; leave persistence_threshold out")
        leaves = tree.leaves(params)
        plan = plan_of(inner, step, params, self.options)
        device = home(leaves[0]) if leaves else torch.device("cpu")
        disk = None
        if self.root is not None and device.type != "meta":  # meta tensors are not stored
            disk = make_disk(self.root, plan, threads=self.threads, direct=self.direct)
        return initial_state(inner, step, params, Storage(plan, device, disk, self.buffers))

    def update(self, inner: Any, step: Step, state: State, grads: Weighted) -> tuple[State, Metrics]:
        """The inner update, piece by piece."""
        slot: OffloadSlot = state.slots["offload"]
        return Update.of(slot.storage, inner, step, state, grads).run()

    def scatter(self, inner: Any, step: Step, state: State) -> State:
        """The inner scatter, of a piece or of params in memory that the device can use.

        Raises:
            ValueError: the optimizer's params are on disk, or in host memory that the device cannot use.
        """
        self._refuse_handles(state)
        scattered: State = inner(step, state)
        self._refuse_handles(scattered)
        return scattered

    def _refuse_handles(self, state: State) -> None:
        if any(map(is_handle, tree.leaves(state.params))):
            raise ValueError(
                f"{self}: the params that the optimizer holds are offloaded between updates, so step.trained and step.scatter "
                "do not have them; use step.params(state), or ask in an update that offload wraps, which has a piece of them"
            )

    def params(self, inner: Any, step: Step, state: State) -> Any:
        """The user's tree; fetches params and slots for it, but not the optimizer's state."""
        slots = on_device(fetched(beside_params(state, state.slots)["slots"]), state.step.device)
        return inner(step, tree.replace(state, params=fetched(state.params), slots=slots))
