"""``load``: a checkpoint into a state, straight into shards."""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.marks import like_marked
from functional_ds.state_dict.describe import Held, as_before, as_tensors, dense, describe
from functional_ds.step.slots import with_room
from functional_ds.step.state import State

from . import storage
from .directory import candidates, check_pointer, check_tag, open_manifest, read_pointer, written
from .errors import DamagedError, NoCheckpointError, agreed, together
from .matching import Choice, Differences, match

__all__ = ["load", "verify"]


def verify(path: str | Path, tag: str | None = None) -> None:
    """Reads every byte of a checkpoint; with ``tag=None``, of all in the folder, and what says which is the newest.

    It asks no other rank. A load checks what it reads, too.

    Raises:
        DamagedError: a file is missing, shortened, altered or not the checkpoint's; the message names it.
        NewerFormatError: a later version of this library wrote it.
        NoCheckpointError: there is none.
    """
    folder = Path(path)
    if tag is None:
        pointed = read_pointer(folder)
        found = written(folder)
        if not found and pointed is None:
            raise NoCheckpointError(f"{folder} has no checkpoint")
        for each in dict.fromkeys([*found, *([] if pointed is None else [pointed])]):
            verify(folder, each)
        return
    place, manifest = open_manifest(folder, tag)
    for file in manifest.files:
        storage.check_file(place, file)


def load(
    path: str | Path,
    *,
    like: State,
    tag: str | None = None,
    group: comm.Group | None = None,
    only: str | Sequence[str] | None = None,
    allow_missing: str | Sequence[str] = (),
    allow_extra: str | Sequence[str] = (),
    with_extra: bool = False,
    donate: bool = False,
) -> Any:
    """The state that was saved, as a value of ``like``'s structure: its ranks, stage, units, precision and devices.

    Law 37: ``load_M ∘ save_N = id``, bitwise; ``run(k + j) = run(j) ∘ load ∘ save ∘ run(k)``, bitwise at equal n.

    Collective over ``group``. Each rank reads the blocks of 1 MiB that its own stretches lie in, straight into them, and
    checks each; nothing is unpickled. Where the precision is another one, a leaf comes from the most exact form that it was
    saved in, and floating tensors are cast.

    Names are ``params/<leaf>``, ``optimizer.exp_avg/<leaf>``, ``averages/<leaf>``, ``step``, and so on; patterns are
    ``fnmatch``'s, on a whole name or on what is before its slash. Masters count as ``params``.

    Args:
        path: the folder.
        like: a state from ``step.init``; it is not changed.
        tag: which checkpoint; None for the newest that is whole: damaged ones are passed over, with a warning.
        group: the ranks that ``like`` is spread over; None for the whole world.
        only: what to load; ``like``'s values stay for all else. ``only="params"`` loads weights alone.
        allow_missing: what ``like`` has may be missing in the checkpoint if it matches; ``like``'s values stay.
        allow_extra: what the checkpoint has may be missing in ``like`` if it matches.
        with_extra: return the pair of the state and the ``extra`` that was saved beside it.
        donate: write into ``like``'s memory and take it, as a step does; an error may leave it half written.

    Raises:
        NoCheckpointError: there is none, or none of this tag.
        DamagedError: a file of the tag is missing or not as it was written; without a tag, of all.
        StructureError: the checkpoint and ``like`` differ in leaves or shapes; the message lists them.
        NewerFormatError: a later version of this library wrote it.
        CheckpointError: the folder is another library's.
        ValueError: the tag is no plain name; a pattern of ``only`` matches nothing in ``like``.
    """
    if not isinstance(like, State):
        raise TypeError(f"like={type(like).__name__}: load takes a state that a step made, as from step.init(params)")
    group = (comm.world() if group is None else group).channel("checkpoint")
    choice = Choice.of(only, allow_missing, allow_extra)
    loading = _Loading(Path(path), group, like, choice, donate)
    if tag is not None:
        check_tag(tag)
        state, extra = loading.attempt(tag)
    else:
        state, extra = loading.newest()
    if donate:
        state = like.donate(state)
    return (state, extra) if with_extra else state


class _Loading:
    def __init__(self, folder: Path, group: comm.Group, like: State, choice: Choice, donate: bool) -> None:
        self.folder, self.group, self.like, self.choice, self.donate = folder, group, like, choice, donate
        self._describe(like)
        choice.check(self.known)

    def _describe(self, like: State) -> None:
        """What is to be filled."""
        self.room, self.tensors = like, as_tensors(like)
        self.held = describe(self.tensors)
        self.known = set().union(*comm.all_gather_object({held.name for held in self.held}, self.group))

    def newest(self) -> tuple[State, Any]:
        """The first that is whole."""
        found, told = agreed(self.group, self.candidates)[0]
        for each in told:
            self.warn(f"{each}; the newest checkpoint that is whole is taken")
        for tag in found:
            try:
                return self.attempt(tag)
            except (DamagedError, NoCheckpointError) as error:
                self.warn(f"the checkpoint {tag!r} is passed over: {error}")
        kind = DamagedError if found or told else NoCheckpointError
        raise kind(f"{self.folder} has no checkpoint{' that is whole' if found or told else ''}")

    def candidates(self) -> tuple[list[str], list[str]]:
        """What there is, and what is to be said of it."""
        check_pointer(self.folder)
        return candidates(self.folder)

    def warn(self, text: str) -> None:
        """Once, not on every rank."""
        if self.group.rank == 0:
            warnings.warn(text, stacklevel=4)

    def attempt(self, tag: str) -> tuple[State, Any]:
        """A state from this checkpoint."""
        from .dcp import Reader

        group = self.group
        reader = together(group, lambda: Reader(self.folder, tag))
        there = {name: (each.shape, each.dtype) for name, each in reader.manifest.tensors.items() if self.choice.wants(name)}
        self._describe(with_room(self.like, there))
        sources, found = match(self.held, self.known, reader.manifest, self.choice, group.rank, group.size)
        everyone = Differences()
        for each in comm.all_gather_object(found, group):
            everyone.add(each)
        everyone.refuse(f"the checkpoint {tag!r} in {self.folder}")
        state = together(group, lambda: self.filled(reader, sources))
        return tree.map(as_before, self.room, state), reader.manifest.extra

    def filled(self, reader: Any, sources: Sequence[str | None]) -> State:
        """A new state, or like's own memory, with what these names give."""
        from .dcp import Planner, Spread

        state = dense(self.tensors) if self.donate else _room_like(self.tensors)
        held = describe(state)
        if not self.donate:
            _keep(self.tensors, state, [h for h, source in zip(held, sources, strict=True) if source is not None])
        stretches: dict[str, list[tuple[int, Tensor]]] = {}
        for h, source in zip(held, sources, strict=True):
            if source is not None:
                stretches.setdefault(source, []).append((h.offset, h.view))
        totals = {name: reader.manifest.tensors[name].numel for name in stretches}
        planner = Planner([h.view for h in held if h.shared])
        planner.set_up_planner({n: Spread(totals[n], tuple(found)) for n, found in stretches.items()}, reader.read_metadata())
        reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()
        return state


def _room_like(state: State) -> State:
    """New memory for every tensor, marked alike."""

    def room(leaf: Tensor) -> Tensor:
        pinned = leaf.device.type == "cpu" and torch.cuda.is_available() and leaf.is_pinned()
        return like_marked(torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device, pin_memory=pinned), leaf)

    return tree.map(room, state)  # type: ignore[no-any-return]


def _keep(like: State, state: State, filled: Sequence[Held]) -> None:
    """Copies what will not be filled: what is not loaded, and the padding between leaves."""
    covered: dict[int, list[tuple[int, int]]] = {}
    for h in filled:
        start = int(h.view.storage_offset())
        covered.setdefault(h.view.untyped_storage().data_ptr(), []).append((start, start + h.view.numel()))
    for old, new in zip(tree.leaves(like), tree.leaves(state), strict=True):
        place = 0
        source, target = old.detach().reshape(-1), new.detach().reshape(-1)
        for low, high in [*sorted(covered.get(new.untyped_storage().data_ptr(), [])), (target.numel(),) * 2]:
            if low > place:
                target[place:low].copy_(source[place:low])
            place = max(place, high)
