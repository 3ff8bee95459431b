"""``export``: params as safetensors files, without any rank holding the whole model."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import attrs
import torch
from torch import Tensor, nn

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.marks import part_of
from functional_ds.checkpointing.shard_plan import marks
from functional_ds.comm.record.group import Solo
from functional_ds.modules.functional import Apply
from functional_ds.state_dict.describe import as_tensors, describe
from functional_ds.step.slots import Role, fields_of_role
from functional_ds.step.state import State

from .format import INDEX, SINGLE, File, Spec, laid_out
from .gather_stream import Held, Hop, Known, agreed, chunk_bytes, stream
from .naming import Named, Naming, checked_dtype
from .safetensors_writer import Writer, refuse_existing

__all__ = ["Plan", "Transfer", "export"]


@attrs.frozen
class Plan:
    """Which files, and where."""

    folder: Path
    files: tuple[File, ...]
    overwrite: bool

    @staticmethod
    def of(path: Path, *, specs: Sequence[Spec], limit: int | None, metadata: Mapping[str, str], overwrite: bool) -> "Plan":
        """A file if the path ends with ``.safetensors``, else a folder."""
        if path.suffix != ".safetensors":
            return Plan(path, laid_out(specs, limit=limit, metadata=metadata), overwrite)
        if limit is not None:
            raise ValueError(f"shard_bytes={limit}: path={str(path)!r} is a single file; name a folder")
        return Plan(path.parent, (File.of(path.name, specs, metadata),), overwrite)

    def check(self) -> None:
        """Refuses to replace anything that it was not told to replace."""
        names = [file.name for file in self.files]
        model = len(names) > 1 or names == [SINGLE]
        if not self.overwrite:
            refuse_existing([self.folder / name for name in (dict.fromkeys([SINGLE, INDEX, *names]) if model else names)])


@attrs.frozen(eq=False)
class Transfer:
    """Leaves and buffers, and the files that they go into."""

    plan: Plan
    named: Mapping[Known, Named]
    buffers: Mapping[str, Tensor]
    ranks: comm.Group

    def run(self, held: Sequence[Held], hops: Sequence[Hop]) -> None:
        """All ranks together; what goes wrong in writing is raised on every rank, once nobody waits for anybody."""
        hops = [hop for hop in hops if hop.leaf in self.named]
        with ExitStack() as stack:
            writer = Writer(self.plan.folder, self.plan.files, self.plan.overwrite)
            writes = self.ranks.rank == 0

            def begin() -> None:
                self.plan.check()
                stack.enter_context(writer)

            self._together(begin if writes else None)
            taking = _Taking(writer, self.named)
            stream(hops, held, group=self.ranks, take=taking, cast=self._cast, chunk=chunk_bytes(self.named))

            def end() -> None:
                taking.raise_failure()
                for name, value in self.buffers.items():
                    writer.write(name, 0, value)
                writer.commit()

            self._together(end if writes else None)

    def _cast(self, leaf: Known) -> torch.dtype:
        """In which dtype values travel: narrowed already, but widened only where they are written."""
        there = self.named[leaf].dtype
        return there if there.itemsize < leaf.dtype.itemsize else leaf.dtype

    def _together(self, work: Callable[[], None] | None) -> None:
        """Rank 0 works; if it fails, all fail."""
        failure: Exception | None = None
        try:
            if work is not None:
                work()
        except (OSError, ValueError) as error:
            failure = error
        if self.ranks.size > 1:
            told = comm.broadcast_object(failure, 0, self.ranks)
            failure = told if failure is None else failure
        if failure is not None:
            raise failure


@attrs.define(eq=False)
class _Taking:
    """Writes what arrives. After a failure it goes on taking, as the others are sending."""

    writer: Writer
    named: Mapping[Known, Named]
    failure: OSError | None = None

    def __call__(self, hop: Hop, values: Tensor) -> None:
        if self.failure is None:
            try:
                for spec in self.named[hop.leaf].specs:
                    self.writer.write(spec.name, hop.offset, values)
            except OSError as error:
                self.failure = error

    def raise_failure(self) -> None:
        """What went wrong, if anything did."""
        if self.failure is not None:
            raise self.failure


# Where the values of a leaf are, the best first: masters, the exact shards of a compressed gather, what the loss sees.
_ROLES = (Role.MASTER.value, Role.EXACT.value, "params")
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
    """Writes params as safetensors: a file if ``path`` ends with ``.safetensors``, else a folder as ``transformers`` loads it.

    ``params`` is a tree of tensors, or a ``State`` of any step, whatever it shards, on which axes. A state is exported
    collectively over ``group``; a tree by whoever calls. A leaf's name is its path (``blocks.0.weight``).

    Law: what is read back is ``step.params(state)``, bit for bit.

    Slices of ``tensor_parallel`` are refused: export ``step.params(state)`` on one rank.

    Memory: values come in chunks, and rank 0 writes them where they belong as they come: beside the params it has at most
    the size of two of the largest leaf, and less than 64 MiB; the others half of that. A conversion takes 16 MiB.
    Cost: each rank sends what rank 0 does not have, once.

    The files are complete or not there: they are written under hidden names, synced, and renamed at the end.

    Args:
        params: a ``State``, or a tree of tensors. A state's masters count where it has them.
        path: a file, or a folder, which is made where it is not there.
        module: whose names, dtypes and buffers the file gets, so that it can be loaded into such a module: an ``nn.Module``,
            or the ``apply`` of ``fds.functional``. Without it, leaves have the dtypes in which ``step.params`` gives them.
        averaged: the mean that ``T.ema`` keeps, instead of the params.
        dtype: of floating leaves, buffers apart.
        rename: from a leaf's path to its name in the file; None leaves the leaf out.
        tied: a parameter that ``module`` ties stands under its first name, as ``transformers`` expects, with the others in
            the metadata for ``safetensors.torch.load_model``; or under ``"all"`` its names, for ``module.load_state_dict``.
        buffers: tensors to write beside the params; rank 0's count.
        shard_bytes: in a folder, a file holds no more; an index says which tensor is where.
        metadata: strings to put into the header.
        overwrite: replace what is there.
        group: the ranks that the state is spread over; None for the whole world.

    Raises:
        FileExistsError: ``path`` is there, or another model in the folder, and ``overwrite`` is not given.
        ValueError: names that occur twice or do not fit the module; a dtype that the format does not have (complex128);
            leaves that no rank has, or ranks have with other values, or that have no values yet.
        TypeError: a leaf is no tensor; ``metadata`` holds something else than strings.
        OSError: on rank 0; the others raise it too. Nothing stays behind.

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
        raise TypeError(f"metadata={metadata!r}: a header holds strings under strings alone")
    ranks = (group or comm.world()) if isinstance(params, State) else _alone()
    held = _of_state(params, averaged) if isinstance(params, State) else _of_tree(params, averaged)
    leaves, hops = agreed(held, ranks)
    naming = Naming.of(module, params)
    naming = attrs.evolve(naming, buffers={**naming.buffers, **(buffers or {})})
    named = naming.name(leaves, rename=rename, dtype=checked_dtype(dtype), every=tied == "all")
    plan = Plan.of(
        Path(path),
        specs=[spec for one in named for spec in one.specs] + naming.buffer_specs,
        limit=shard_bytes,
        metadata={**naming.metadata(every=tied == "all"), **(metadata or {})},
        overwrite=overwrite,
    )
    Transfer(plan, {one.leaf: one for one in named}, naming.buffers, ranks).run(held, hops)


def _alone() -> comm.Group:
    """A world of one: who exports a tree asks nobody."""
    return comm.Group((0,), 0, "alone", Solo())


def _of_tree(params: Any, averaged: bool) -> list[Held]:
    if averaged:
        raise ValueError("averaged=True: params is a tree, which keeps no mean; pass the state of a step that has T.ema")
    tree.tensors(params, "params")
    named = tree.named(params)
    for path in [path for path, times in Counter(path for path, _ in named).items() if times > 1]:
        _refuse_twice(path)
    for path, leaf in named:
        if leaf.is_meta:
            raise ValueError(f"params: {path!r} has no values yet; export the state that step.init(params) makes")
    return [Held(Known(path, tuple(leaf.shape), leaf.dtype), 0, leaf.detach()) for path, leaf in named]


def _refuse_twice(path: str) -> None:
    raise ValueError(f"params: two leaves have the path {path!r}; keys with dots in them make such paths")


def _of_state(state: State, averaged: bool) -> list[Held]:
    """Everything that may stand for a leaf; what counts is settled between the ranks."""
    if any("slices" in (part_of(leaf) or "").split(", ") for leaf in tree.leaves(state.params) if isinstance(leaf, Tensor)):
        raise ValueError(
            "params: slices of tensor parallelism are not put together here; export step.params(state) on one rank"
        )
    roles = (*((_MEAN,) if averaged else ()), *_ROLES)
    found = []
    for held in describe(as_tensors(tree.replace(state, optimizer=()))):
        role, _, path = held.name.partition("/")
        if role.partition("#")[0] in roles and "#" in role:
            _refuse_twice(path)
        if role in roles and not held.shared:
            found.append((held, Known(path, held.shape, held.view.dtype, roles.index(role))))
    if averaged and not any(True for _ in fields_of_role(state, Role.AVERAGE)):
        raise ValueError("averaged=True: this state keeps no mean of its params; its step needs T.ema(decay)")
    numbers = marks([held.view for held, _ in found])
    return [Held(known, held.offset, held.view, mark) for (held, known), mark in zip(found, numbers, strict=True)]
