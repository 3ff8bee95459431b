"""``export``: writes params as safetensors files; no rank needs the whole model in memory."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import attrs
import torch
from torch import Tensor, nn

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.disk.files import checked_path
from functional_ds.base.marks import slices_of
from functional_ds.comm.record.group import Solo
from functional_ds.modules.functional import Apply
from functional_ds.sharding.leaf_region import LeafRegion, grouped
from functional_ds.state_dict.describe import as_tensors, describe
from functional_ds.state_dict.fingerprint import fingerprints
from functional_ds.state_dict.matching import FORMS
from functional_ds.step.state.slots import Apart, Role, fields_of_role
from functional_ds.step.state.state import State

from .format import SafetensorsFile, TensorSpec, split_files
from .gather_stream import LeafInfo, LeafSend, LocalShard, chunk_bytes, plan_sends, stream
from .naming import NamedLeaf, Naming, checked_dtype
from .safetensors_writer import SafetensorsWriter


@attrs.frozen(eq=False)
class Transfer:
    """Leaves and buffers on their way into files.

    Attributes:
        writer: of the files.
        named: the leaves, with their names in the files.
        buffers: tensors that rank 0 writes with them.
        ranks: the group that has the leaves.
    """

    writer: SafetensorsWriter
    named: Mapping[LeafInfo, NamedLeaf]
    buffers: Mapping[str, Tensor]
    ranks: comm.Group

    def run(self, shards: Sequence[LocalShard], sends: Sequence[LeafSend]) -> None:
        """Runs the transfer. Collective. All ranks raise an error of the writing, when none waits for another."""
        sends = [send for send in sends if send.leaf in self.named]
        with ExitStack() as stack:
            writer, writes = self.writer, self.ranks.rank == 0

            def begin() -> None:
                writer.check()
                stack.enter_context(writer)

            self._on_rank_0(begin if writes else None)
            sink = _Sink(writer, self.named, self._cast, {send.leaf for send in sends if any(send.region.dims)})
            stream(sends, shards, group=self.ranks, take=sink, cast=self._cast, chunk=chunk_bytes(self.named))

            def end() -> None:
                if sink.failure is not None:
                    raise sink.failure
                for name, value in self.buffers.items():
                    writer.write(name, value)
                writer.commit()

            self._on_rank_0(end if writes else None)

    def _cast(self, leaf: LeafInfo) -> torch.dtype:
        """The dtype in which a leaf is sent: casts to narrower dtypes happen before, others after."""
        there = self.named[leaf].dtype
        return there if there.itemsize < leaf.dtype.itemsize else leaf.dtype

    def _on_rank_0(self, work: Callable[[], None] | None) -> None:
        """Rank 0 works; if it fails, all ranks raise its error."""
        failure: Exception | None = None
        try:
            if work is not None:
                work()
        except Exception as error:  # any error: the other ranks wait for it
            failure = error
        if self.ranks.size > 1:
            plain = failure is None or isinstance(failure, OSError | ValueError)  # others may not be such as can be sent
            told = comm.broadcast_object(failure if plain else RuntimeError(str(failure)), 0, self.ranks)
            failure = told if failure is None else failure
        if failure is not None:
            raise failure


@attrs.define(eq=False)
class _Sink:
    """Writes what rank 0 receives. After a failure it keeps receiving, as the other ranks are sending."""

    writer: SafetensorsWriter
    named: Mapping[LeafInfo, NamedLeaf]
    cast: Callable[[LeafInfo], torch.dtype]
    joined: Collection[LeafInfo]  # those that are assembled, as neighbours in a slice are not neighbours in the leaf
    failure: Exception | None = None
    room: Tensor | None = None
    filled: int = 0

    def __call__(self, send: LeafSend, values: Tensor) -> None:
        if self.failure is None:
            try:
                for offset, chunk in self._ready(send, values.reshape(-1)):
                    for spec in self.named[send.leaf].specs:
                        self.writer.write(spec.name, chunk, offset=offset)
            except Exception as error:
                self.failure = error

    def _ready(self, send: LeafSend, values: Tensor) -> Iterator[tuple[int, Tensor]]:
        """What can be written now: consecutive elements of a leaf, and their offset in it."""
        region, leaf, stop = send.region, send.leaf, send.offset + send.numel
        if leaf not in self.joined:
            for box in region.boxes(send.offset, stop, region.dims):
                yield box.start[0], box.view(values, send.offset)
            return
        room = torch.empty(leaf.shape, dtype=self.cast(leaf)) if self.room is None else self.room
        whole = room.view(grouped(leaf.shape, region.dims))
        for box in region.boxes(send.offset, stop, region.dims):
            where = tuple(slice(a, a + n) for a, n in zip(box.start, box.shape, strict=True))
            whole[where] = box.view(values, send.offset)
        self.room, self.filled = room, self.filled + send.numel
        if self.filled == leaf.numel:
            self.room, self.filled = None, 0
            yield 0, room


# Roles that hold a leaf's values, the most exact first: masters, exact shards of a compressed gather, the loss's params.
_MEAN = Role.AVERAGE.value


def export(
    params: Any,
    path: str | Path,
    *,
    module: nn.Module | Apply | None = None,
    averaged: bool = False,
    dtype: torch.dtype | None = None,
    rename: Callable[[str], str | None] | None = None,
    tied: Literal["first", "all"] = "first",
    buffers: Mapping[str, Tensor] | None = None,
    shard_bytes: int | None = None,
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
    group: comm.Group | None = None,
) -> None:
    """Exports params as safetensors: one file if ``path`` ends with ``.safetensors``, else a folder for ``transformers``.

    ``params`` is a tree of tensors, or the ``State`` of any step, however it is sharded. Exporting a state is collective over
    ``group``; a tree is written by the calling rank alone. A leaf's name is its path (``blocks.0.weight``).

    Law: the tensors in the files are bitwise those of ``step.params(state)``.

    Memory: rank 0 receives values in chunks and writes each immediately. In addition to the params it needs at most twice the
    size of the largest leaf, and less than 64 MiB; other ranks need half of that. A conversion takes 16 MiB. Leaves that are
    sliced along another dim than their first are assembled on rank 0, one at a time. Cost: each rank sends what rank 0 does not
    have, once.

    The files appear when they are complete: they are written under hidden names, synced, and renamed at the end.

    Args:
        params: a ``State``, or a tree of tensors. Of a state with masters, the masters are written.
        path: a file, or a folder, which is created if missing.
        module: an ``nn.Module``, or the ``apply`` of ``fds.functional``, whose names, dtypes and buffers the files get, so that
            such a module can load them. Without it, leaves have the dtypes of ``step.params``.
        averaged: write the mean that ``T.ema`` keeps instead of the params.
        dtype: for floating-point leaves, but not for buffers.
        rename: from a leaf's path to its name in the file; None omits the leaf.
        tied: ``"first"`` writes a tied parameter of ``module`` under its first name, as ``transformers`` expects, with the
            others in the metadata for ``safetensors.torch.load_model``; ``"all"`` writes it under each name, for
            ``module.load_state_dict``.
        buffers: tensors to write with the params; rank 0's are used.
        shard_bytes: the largest size of a file in a folder; an index maps tensors to files.
        metadata: strings for the header.
        overwrite: replace existing files.
        group: the ranks that the state is spread over; None for the whole world.

    Raises:
        FileExistsError: ``path``, or another model in the folder, exists, and ``overwrite`` is False.
        ValueError: names occur twice, do not match the module or cannot be written as UTF-8; the format does not have a dtype
            (complex128); a leaf has no values yet, is on no rank, or differs between ranks.
        TypeError: a leaf is not a tensor; ``metadata`` contains values other than strings.
        OSError: rank 0 cannot write; all ranks raise it, and no files are left.

    >>> import tempfile
    >>> from safetensors.torch import load_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export({"w": torch.ones(2), "b": [torch.zeros(1)]}, f"{folder}/model.safetensors")
    ...     {name: value.tolist() for name, value in load_file(f"{folder}/model.safetensors").items()}
    {'b.0': [0.0], 'w': [1.0, 1.0]}
    """
    if tied not in ("first", "all"):
        raise ValueError(f"tied={tied!r} can be 'first' or 'all'")
    if shard_bytes is not None and shard_bytes < 1:
        raise ValueError(f"shard_bytes={shard_bytes} must be positive")
    if not all(isinstance(text, str) for pair in (metadata or {}).items() for text in pair):
        raise TypeError(f"metadata={metadata!r}: it must map strings to strings")
    if params is None:
        raise TypeError("params=None: export takes a state, or a tree of tensors")
    ranks = (group or comm.world()) if isinstance(params, State) else _alone()
    shards = _of_state(params, averaged) if isinstance(params, State) else _of_tree(params, averaged)
    leaves, sends = plan_sends(shards, ranks)
    naming = Naming.of(module, params)
    naming = attrs.evolve(naming, buffers={**naming.buffers, **(buffers or {})})
    named = naming.name(leaves, rename=rename, dtype=checked_dtype(dtype), every=tied == "all")
    specs = [spec for one in named for spec in one.specs] + naming.buffer_specs
    texts = {**naming.metadata(every=tied == "all"), **(metadata or {})}
    writer = SafetensorsWriter(*_files(checked_path(path), specs, shard_bytes, texts), overwrite)
    Transfer(writer, {one.leaf: one for one in named}, naming.buffers, ranks).run(shards, sends)


def _files(
    path: Path, specs: Sequence[TensorSpec], limit: int | None, metadata: Mapping[str, str]
) -> tuple[Path, tuple[SafetensorsFile, ...]]:
    """The folder, and the files in it: one if the path ends with ``.safetensors``."""
    if path.suffix != ".safetensors":
        return path, split_files(specs, limit=limit, metadata=metadata)
    if limit is not None:
        raise ValueError(f"shard_bytes={limit}: path={str(path)!r} is a single file; name a folder")
    return path.parent, (SafetensorsFile.of(path.name, specs, metadata),)


def _alone() -> comm.Group:
    """A world of one: a tree is exported without other ranks."""
    return comm.Group((0,), 0, "alone", Solo())


def _of_tree(params: Any, averaged: bool) -> list[LocalShard]:
    if averaged:
        raise ValueError("averaged=True: params is a tree, which keeps no mean; pass the state of a step that has T.ema")
    tree.tensors(params, "params")
    named = tree.named(params)
    for path in [path for path, times in Counter(path for path, _ in named).items() if times > 1]:
        _refuse_twice(path)
    for path, leaf in named:
        if leaf.is_meta:
            raise ValueError(f"params: {path!r} has no values yet; export the state that step.init(params) makes")
        region = LeafRegion.of(tuple(leaf.shape), slices_of(leaf))
        if region.ranges:
            raise ValueError(
                f"params: {path!r} is the slice {region} of a leaf of shape {list(region.shape)}; export the state, by all"
            )
    leaves = [(LeafInfo(path, tuple(leaf.shape), leaf.dtype), leaf.detach()) for path, leaf in named]
    return [LocalShard(leaf, LeafRegion(leaf.shape), 0, values) for leaf, values in leaves]


def _refuse_twice(path: str) -> None:
    raise ValueError(f"params: two leaves have the path {path!r}; keys with dots in them make such paths")


def _of_state(state: State, averaged: bool) -> list[LocalShard]:
    """All of this rank's values of leaves; ``plan_sends`` chooses between several values of a leaf."""
    roles = (*((_MEAN,) if averaged else ()), *FORMS)
    apart = next((slot for slot in state.slots.values() if isinstance(slot, Apart)), None)
    if apart is not None:
        raise ValueError(
            f"export: the ranks have {apart.size} models, of which this rank has number {apart.place}; export "
            "step.params(state), a tree, on the ranks of one of them"
        )
    shards = []
    for shard in describe(as_tensors(tree.replace(state, optimizer=()))):
        role, _, path = shard.name.partition("/")
        if role.partition("#")[0] in roles and "#" in role:
            _refuse_twice(path)
        if role in roles and not shard.shared:
            shards.append((shard, LeafInfo(path, shard.shape, shard.view.dtype, roles.index(role))))
    if averaged and not any(True for _ in fields_of_role(state, Role.AVERAGE)):
        raise ValueError("averaged=True: this state keeps no mean of its params; its step needs T.ema(decay)")
    numbers = fingerprints([shard.view for shard, _ in shards])
    pairs = zip(shards, numbers, strict=True)
    return [LocalShard(leaf, shard.region, shard.offset, shard.view, number) for (shard, leaf), number in pairs]
