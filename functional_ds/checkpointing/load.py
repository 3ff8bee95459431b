"""``load``: reads a checkpoint directly into a state's shards."""

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.device import is_pinned
from functional_ds.base.disk.files import checked_path
from functional_ds.base.marks import like_marked
from functional_ds.state_dict.all_or_none import all_or_none, gather_or_none
from functional_ds.state_dict.describe import TensorShard, as_before, as_tensors, dense, describe
from functional_ds.state_dict.errors import DamagedError, NoCheckpointError
from functional_ds.state_dict.matching import Choice, Differences, match, per_rank_name, without_rank
from functional_ds.step.state.slots import with_room
from functional_ds.step.state.state import State

from . import storage
from .directory import candidates, check_pointer, check_tag, open_manifest, read_pointer, written

T = TypeVar("T")


def verify(path: str | Path, tag: str | None = None) -> None:
    """Reads and checks every byte of a checkpoint; with ``tag=None``, of all in the folder, and the file ``latest``.

    Not collective. ``load`` also checks what it reads.

    Raises:
        DamagedError: a file is missing, truncated, altered, or belongs to something else; names the file.
        NewerFormatError: a later version of this library wrote it.
        NoCheckpointError: there is no checkpoint.

    >>> import tempfile, torch
    >>> import functional_ds as fds
    >>> state = fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.sgd(0.5)).init({"w": torch.ones(2)})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     tag = fds.save(state, folder)
    ...     verify(folder, tag)
    ...     file = max(Path(folder, tag).iterdir(), key=lambda each: each.stat().st_size)
    ...     data = file.read_bytes()
    ...     _ = file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    ...     verify(folder, tag)
    Traceback (most recent call last):
        ...
    functional_ds.state_dict.errors.DamagedError: ...
    """
    folder = checked_path(path)
    if tag is None:
        pointed = read_pointer(folder)
        written_tags = written(folder)
        if not written_tags and pointed is None:
            raise NoCheckpointError(f"{folder} has no checkpoint")
        for name in dict.fromkeys([*written_tags, *([] if pointed is None else [pointed])]):
            verify(folder, name)
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
    """Loads a checkpoint into a new state with ``like``'s structure: its ranks, ZeRO stage, units, precision and devices.

    ``load_M ∘ save_N = id``, bitwise, slices included; ``run(k + j) = run(j) ∘ load ∘ save ∘ run(k)``, bitwise
    for equal n.

    Collective over ``group``. Each rank reads and checks the 1 MiB blocks that contain its elements; nothing is unpickled. If
    the precision differs, a leaf is read from the most precise saved form, and floating-point tensors are cast.

    Names are ``params/<leaf>``, ``optimizer.exp_avg/<leaf>``, ``averages/<leaf>``, ``step``, and so on. Patterns are those of
    ``fnmatch``, and match a whole name or the part before its slash. Masters are named ``params``.

    Args:
        path: the folder.
        like: a state from ``step.init``; it is not changed.
        tag: which checkpoint; None for the newest complete one: damaged ones are skipped, with a warning.
        group: the ranks that ``like`` is spread over; None for the whole world.
        only: patterns of what to load; everything else keeps ``like``'s values. ``only="params"`` loads just the weights.
        allow_missing: patterns of what may be missing in the checkpoint; it keeps ``like``'s values.
        allow_extra: patterns of what the checkpoint may have and ``like`` may lack.
        with_extra: return a pair, the state and the ``extra`` that was saved with it.
        donate: write into ``like``'s memory and invalidate it, as a step does; an error may leave it half written.

    Raises:
        NoCheckpointError: there is no checkpoint, or none with this tag.
        DamagedError: a file of this checkpoint is missing or damaged; without a tag, of every checkpoint.
        StructureError: the checkpoint and ``like`` differ in leaves or shapes, which are listed.
        NewerFormatError: a later version of this library wrote it.
        CheckpointError: the folder belongs to another library.
        ValueError: the tag is not a plain name; a pattern of ``only`` matches nothing in ``like``.

    >>> import tempfile
    >>> import torch
    >>> import functional_ds as fds
    >>> step = fds.train_step(lambda params, x: (params["w"] * x).sum(), fds.sgd(1.0))
    >>> with tempfile.TemporaryDirectory() as path:
    ...     _ = fds.save(step.init({"w": torch.ones(2)}), path)
    ...     state = load(path, like=step.init({"w": torch.zeros(2)}))
    >>> step.params(state)["w"].tolist()
    [1.0, 1.0]
    """
    if not isinstance(like, State):
        raise TypeError(f"like={type(like).__name__}: load takes a state that a step made, as from step.init(params)")
    group = (comm.world() if group is None else group).channel("checkpoint")
    choice = Choice.of(only, missing=allow_missing, extra=allow_extra)
    loading = _Loading(checked_path(path), group, like, choice, donate)
    if tag is not None:
        check_tag(tag)
        loading.begin(lambda: None)
        try:
            state, extra = loading.attempt(tag)
        except DamagedError as error:
            raise DamagedError(f"{error}; load another tag, or none, which takes the newest whole checkpoint") from error
    else:
        state, extra = loading.newest()
    if donate:
        state = like.donate(state)
    return (state, extra) if with_extra else state


class _Loading:
    def __init__(self, folder: Path, group: comm.Group, like: State, choice: Choice, donate: bool) -> None:
        self.folder, self.group, self.like, self.choice, self.donate = folder, group, like, choice, donate
        self._describe(like)

    def _describe(self, like: State) -> dict[str, tuple[int, ...]]:
        """Finds the shards to fill; returns their tensors' shapes by name."""
        self.room, self.tensors = like, as_tensors(like)
        self.shards = describe(self.tensors)
        return {shard.name: shard.shape for shard in self.shards}

    def begin(self, work: Callable[[], T]) -> T:
        """Checks the patterns against the names that all ranks have, and returns rank 0's result of ``work``."""
        shapes = {shard.name: shard.shape for shard in self.shards}
        _, everyone = gather_or_none(self.group, lambda: (shapes, work()), share=lambda shared: shared)
        self.choice.check(_union([names for names, _ in everyone]))
        return everyone[0][1]

    def newest(self) -> tuple[State, Any]:
        """The state of the newest complete checkpoint."""
        candidates, warned = self.begin(self.candidates)
        for warning in warned:
            self.warn(f"{warning}; the newest checkpoint that is whole is taken")
        for tag in candidates:
            try:
                return self.attempt(tag)
            except (DamagedError, NoCheckpointError) as error:
                self.warn(f"the checkpoint {tag!r} is passed over: {error}")
        error_class = DamagedError if candidates or warned else NoCheckpointError
        raise error_class(f"{self.folder} has no checkpoint{' that is whole' if candidates or warned else ''}")

    def candidates(self) -> tuple[list[str], list[str]]:
        """The tags to try, and warnings about the folder."""
        check_pointer(self.folder)
        return candidates(self.folder)

    def warn(self, text: str) -> None:
        """Warns on rank 0 only."""
        if self.group.rank == 0:
            warnings.warn(text, stacklevel=4)

    def attempt(self, tag: str) -> tuple[State, Any]:
        """The state of this checkpoint, and its ``extra``."""
        group, rank = self.group, self.group.rank
        (reader, _), everyone = gather_or_none(group, lambda: self.opened(tag), share=lambda opened: opened[1])
        known = _union(everyone)
        manifest = reader.manifest
        whose = rank if group.size == manifest.summary.ranks else None
        sources, differences = match(self.shards, known, stored=manifest.tensors, choice=self.choice, rank=whose)
        total = Differences()
        for theirs in comm.all_gather_object(differences, group):
            total.add(theirs)
        total.refuse(f"the checkpoint {tag!r} in {self.folder}")
        state = all_or_none(group, lambda: self.filled(reader, sources))
        return tree.map(as_before, self.room, state), manifest.extra

    def opened(self, tag: str) -> tuple[Any, dict[str, tuple[int, ...]]]:
        """The checkpoint's reader, and the names of this rank's shards, including those that the checkpoint adds."""
        from .dcp import CheckpointReader

        reader = CheckpointReader(self.folder, tag)
        whose = self.group.rank if reader.manifest.summary.ranks == self.group.size else 0
        there = {}
        for name, stored in reader.manifest.tensors.items():
            base, apart = without_rank(name)
            if self.choice.wants(base) and (not apart or name == per_rank_name(base, whose)):
                there[base] = stored.shape, stored.dtype
        return reader, self._describe(with_room(self.like, there))

    def filled(self, reader: Any, sources: Sequence[str | None]) -> State:
        """A new state, or one in like's memory, whose shards are read from the tensors of these names."""
        state = dense(self.tensors) if self.donate else _empty_like(self.tensors)
        shards = describe(state)
        if not self.donate:
            _copy_rest(
                self.tensors, state, [shard for shard, source in zip(shards, sources, strict=True) if source is not None]
            )
        wanted: dict[str, list[TensorShard]] = {}
        for shard, source in zip(shards, sources, strict=True):
            if source is not None:
                wanted.setdefault(source, []).append(shard)
        reader.fill(wanted)
        return state


def _union(ranks: Sequence[dict[str, tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
    return {name: shape for shapes in ranks for name, shape in shapes.items()}


def _empty_like(state: State) -> State:
    """A state with new, uninitialised memory for every tensor, and the same marks."""

    def empty(leaf: Tensor) -> Tensor:
        return like_marked(torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device, pin_memory=is_pinned(leaf)), leaf)

    return tree.map(empty, state)  # type: ignore[no-any-return]


def _copy_rest(like: State, state: State, filled: Sequence[TensorShard]) -> None:
    """Copies the elements of like that no read fills: unselected ones, and the padding between leaves."""
    covered: dict[int, list[tuple[int, int]]] = {}
    for shard in filled:
        start = int(shard.view.storage_offset())
        covered.setdefault(shard.view.untyped_storage().data_ptr(), []).append((start, start + shard.view.numel()))
    for old, new in zip(tree.leaves(like), tree.leaves(state), strict=True):
        done = 0
        source, target = old.detach().reshape(-1), new.detach().reshape(-1)
        for low, high in [*sorted(covered.get(new.untyped_storage().data_ptr(), [])), (target.numel(),) * 2]:
            if low > done:
                target[done:low].copy_(source[done:low])
            done = max(done, high)
