"""Recomputing, offloading or partitioning activations, block by block."""

import difflib
import fnmatch
import functools
from collections.abc import Callable, Iterable
from typing import Any

import attrs
from torch import nn

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.remat.policy import Saving, everything
from functional_ds.remat.region import called, run
from functional_ds.remat.remat import check_group, check_names
from functional_ds.remat.report import open_report
from functional_ds.remat.saved_tensors import Keeper
from functional_ds.step.state import State
from functional_ds.step.step import Step, Transform, wrap
from functional_ds.step.tape import Tape, current_tape
from functional_ds.step.traits import Trait

__all__ = ["remat"]


def remat(blocks: str | None = None, *, policy: str | Saving = "recompute", group: comm.Group | None = None) -> Transform:
    """Calls of a module's blocks keep what their backward pass needs as the policy says; nothing else changes.

    Law 28: the step is the same, dropout included, for every policy, in every stage of ZeRO; it commutes with what wraps other
    phases. It wraps ``prepare``, to check the blocks' paths, and ``forward``.

    | policy | between forward and backward |
    |---|---|
    | "recompute" | a block's inputs stay, the rest is computed again; "recompute,inputs=offload": they wait on the host |
    | "save" | everything stays, as without this transform |
    | "offload" | what autograd would save in the block waits on the host |
    | "partition" | of that, each rank of ``group`` keeps 1/n; the backward pass gathers |
    | "recompute,matmuls=save,attn_out=offload" | exceptions for matrix products and for named values |

    Bytes sent by each rank: (n - 1) / n of what is partitioned, once it is needed again.

    Args:
        blocks: which modules of an ``fds.functional`` module: a path in which each name may be a pattern ("blocks.*",
            "decoder.layers.[0-3].mlp"); a list of modules ("blocks") stands for its members. None for the repeated blocks:
            those that end with a path's first number. "" for the whole loss function as one part.
        policy: as for ``fds.remat``.
        group: for "partition": ranks with the same activations.

    Raises:
        ValueError: a word of the policy is unknown; ``init`` finds no params at such a path; the loss function runs no such
            module; the policy names values that no block names; it partitions without a group.

    >>> import torch, functional_ds as fds
    >>> apply, params = fds.functional(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)))
    >>> step = remat(policy="recompute")(fds.train_step(lambda p, x: apply(p, x).sum(), fds.sgd(0.1)))
    >>> state, metrics = step(step.init(params), torch.ones(3, 2))
    """
    found = Saving.parse(policy)
    check_group(found, group)
    if blocks is not None and not isinstance(blocks, str):
        raise TypeError(f"blocks={blocks!r} is no path: give a pattern such as 'blocks.*', None, or '' for the whole function")
    inside = _Remat(blocks, found, group)
    where = "repeated blocks" if blocks is None else blocks or "loss"
    return wrap(f"remat({where}, {found})", prepare=inside.prepare, forward=inside.forward)


@attrs.define(eq=False)
class _Remat:
    blocks: str | None
    policy: Saving
    group: comm.Group | None
    _calls: "_Calls" = attrs.field(init=False)
    _looked: bool = False

    def __attrs_post_init__(self) -> None:
        self._calls = _Calls(self.blocks, self.policy, self.group)

    def prepare(self, inner: Any, step: Step, params: Any) -> Any:
        """Refuses a pattern that fits no path above a leaf."""
        if self.blocks != "":
            paths = dict.fromkeys(tail for path, _ in tree.named(params) for tail in _above(path))
            if not any(_fits(path, self.blocks) for path in paths):
                raise _nothing(self.blocks, paths)
        return inner(step, params)

    def forward(self, inner: Any, step: Step, state: State, function: Callable[[Any], Any], batch: Any) -> Any:
        """The inner forward; blocks that it runs are parts."""
        tape = current_tape()
        if tape is None or not tape.records:
            return inner(step, state, function, batch)
        keeper = Keeper.current(self.group, settles=False)
        keeper.account.looks |= not self._looked
        self._looked = True
        if open_report() is not None:
            function = self._part(function, "elsewhere", everything, _ignore)
        found = self._run(inner, step, state, function, batch, tape)
        keeper.agree()  # on every rank, also where nothing was divided
        return found

    def _run(self, inner: Any, step: Step, state: State, function: Callable[[Any], Any], batch: Any, tape: Tape) -> Any:
        if self.blocks == "":
            check = functools.partial(check_names, self.policy)
            return inner(step, state, self._part(function, "loss", self.policy, check), batch)
        # Whoever is composed later runs first, and is outside.
        before, tape.calls = tape.calls, (self._calls, *tape.calls)
        try:
            found = inner(step, state, function, batch)
        finally:
            tape.calls = before
        self._calls.check(whole=not step.has(Trait.PIPELINES))
        return found

    def _part(self, function: Callable[[Any], Any], part: str, policy: Saving, seen: Any) -> Callable[[Any], Any]:
        return lambda batch: run(function, (batch,), {}, saving=policy, group=self.group, part=part, seen=seen)


def _ignore(names: set[str]) -> None:
    """No policy speaks of names there."""


@attrs.define(eq=False)
class _Calls:
    """Runs the chosen modules of a module.

    Attributes:
        paths: of all modules that were seen, and whether it was chosen.
        names: of values, in the blocks that ran; None before the first.
    """

    blocks: str | None
    policy: Saving
    group: comm.Group | None
    paths: dict[str, bool] = attrs.field(factory=dict)
    names: set[str] | None = None

    def chosen(self, module: nn.Module) -> list[str]:
        """The paths of the modules to be run here."""
        found: list[str] = []
        for path, inner in module.named_modules():
            self.paths.setdefault(path, False)
            if _fits(path, self.blocks):
                members = isinstance(inner, (nn.ModuleList, nn.ModuleDict))
                found += [f"{path}.{name}" for name, _ in inner.named_children()] if members else [path]
        self.paths.update(dict.fromkeys(found, True))
        return list(dict.fromkeys(found))

    def run(self, path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A module's call."""
        return run(_known(forward), args, kwargs, saving=self.policy, group=self.group, part=path, seen=self._seen)

    def check(self, *, whole: bool) -> None:
        """Refuses a policy that changed nothing: no module was chosen, or no value is named so. ``whole``: all of it ran."""
        if whole and not any(self.paths.values()):
            if not self.paths:
                raise ValueError(
                    "remat: the loss function runs no fds.functional module, which has blocks to find; use fds.remat(function) "
                    "in it, or T.remat('') for the whole of it"
                )
            raise _nothing(self.blocks, self.paths)
        if self.names is not None:
            check_names(self.policy, self.names)

    def _seen(self, names: set[str]) -> None:
        self.names = names if self.names is None else self.names | names


def _known(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A module's forward, through the calls that run it, as the call of that module."""
    own: Any = forward
    while isinstance(own, functools.partial):
        own = own.args[-1]
    owner = getattr(own, "__self__", None)
    return called(owner, forward) if isinstance(owner, nn.Module) else forward


def _above(path: str) -> list[str]:
    """The paths of the modules that hold a leaf, also as seen from inside of others: of ``a.b.w``, a, a.b and b."""
    parts = path.split(".")[:-1]
    return [".".join(parts[i:j]) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1)]


def _fits(path: str, blocks: str | None) -> bool:
    """Whether the path of a module fits; the whole module's, which is empty, fits none."""
    parts = path.split(".")
    if blocks is None:
        return parts[-1].isdecimal() and not any(part.isdecimal() for part in parts[:-1])
    wanted = blocks.split(".")
    return bool(path) and len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))


def _nothing(blocks: str | None, paths: Iterable[str]) -> ValueError:
    known = sorted({path for path in paths if path})
    if blocks is None:
        return ValueError(f"remat: no path has a number, so there are no repeated blocks; name some: {', '.join(known[:20])}")
    near = difflib.get_close_matches(blocks, known, n=1, cutoff=0.0)
    nearest = f"; the nearest path is {near[0]!r}" if near else ""
    return ValueError(f"blocks={blocks!r} matches no module{nearest}")
