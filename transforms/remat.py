"""Activation checkpointing, offloading and partitioning, block by block (Chen et al. 2016)."""

import functools
from collections.abc import Callable
from typing import Any

import attrs
from torch import nn

from functional_ds import comm
from functional_ds.remat.block_paths import check_blocks, check_pattern, find_blocks, no_such_block
from functional_ds.remat.entered import called, owner_of
from functional_ds.remat.policy import Keep, RematPolicy
from functional_ds.remat.region import run
from functional_ds.remat.remat import check_group, check_names
from functional_ds.remat.report import open_report
from functional_ds.remat.saved_tensors import TensorStore
from functional_ds.step.compose import wrap
from functional_ds.step.over_ranks.mesh_axes import AxisRole
from functional_ds.step.pass_scope import current_pass
from functional_ds.step.state.state import State
from functional_ds.step.step import Step, Transform


def remat(blocks: str | None = None, *, policy: str | RematPolicy = "recompute", group: comm.Group | None = None) -> Transform:
    """Activation checkpointing: recomputes, offloads or partitions the activations of a module's blocks.

    Results are unchanged, dropout included, for every policy, in every stage of ZeRO. The transform commutes with those
    that wrap other phases. It wraps ``prepare``, to check the blocks' paths, and ``forward``.

    | policy | between forward and backward |
    |---|---|
    | "recompute" | a block's inputs stay on the device, everything else is recomputed |
    | "recompute,inputs=offload" | a block's inputs are in host memory |
    | "save" | everything stays on the device, as without this transform |
    | "offload" | what autograd saves in the block is in host memory |
    | "partition" | each rank of ``group`` keeps 1/n of what autograd saves; the backward pass all-gathers it |
    | "recompute,matmuls=save,attn_out=offload" | exceptions for matrix products and for named tensors |

    Cost: each rank sends (n - 1) / n of the partitioned bytes in the backward pass; other policies send nothing.

    Args:
        blocks: which modules of an ``fds.functional`` module: a path in which each name may be a pattern ("blocks.*",
            "decoder.layers.[0-3].mlp"); a list of modules ("blocks") stands for its members. None means the repeated blocks:
            modules whose path ends with its first number. "" means the whole loss function as one block.
        policy: as for ``fds.remat``.
        group: for "partition": ranks with the same activations.

    Raises:
        ValueError: an unknown word in the policy; a pattern that matches no module with params; the loss function runs no such
            module; the policy names tensors that no block names; the policy partitions and there is no group.

    >>> import torch, functional_ds as fds
    >>> apply, params = fds.functional(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)))
    >>> step = remat(policy="recompute")(fds.train_step(lambda p, x: apply(p, x).sum(), fds.sgd(0.1)))
    >>> state, metrics = step(step.init(params), torch.ones(3, 2))
    """
    parsed = RematPolicy.parse(policy)
    check_group(parsed, group)
    check_pattern(blocks)
    inside = _Remat(blocks, parsed, group)
    where = "repeated blocks" if blocks is None else blocks or "loss"
    return wrap(f"remat({where}, {parsed})", prepare=inside.prepare, forward=inside.forward)


@attrs.define(eq=False)
class _Remat:
    """The phases that remat wraps; as ``Pass.calls``, it runs the chosen submodules of a module under the policy.

    Attributes:
        paths: of all modules that were seen, and whether each was chosen.
        names: that ``checkpoint_name`` gave in the blocks that ran; None before the first block.
    """

    blocks: str | None
    policy: RematPolicy
    group: comm.Group | None
    paths: dict[str, bool] = attrs.field(factory=dict)
    names: set[str] | None = None
    _looked: bool = False

    def prepare(self, inner: Any, step: Step, params: Any) -> Any:
        """Raises an error for a pattern that matches no module with params."""
        if self.blocks != "":
            check_blocks("remat", params, self.blocks)
        return inner(step, params)

    def forward(self, inner: Any, step: Step, state: State, function: Callable[[Any], Any], batch: Any) -> Any:
        """The inner forward, with its blocks run under the policy."""
        pass_ = current_pass()
        if pass_ is None or not pass_.trains:
            return inner(step, state, function, batch)
        store = TensorStore.current(self.group, compares=False)
        store.log.compares_values |= not self._looked
        self._looked = True
        if open_report() is not None:
            function = self._part(function, "elsewhere", RematPolicy(Keep.SAVE), lambda names: None)
        if self.blocks == "":
            whole = self._part(function, "loss", self.policy, functools.partial(check_names, self.policy))
            output = inner(step, state, whole, batch)
        else:
            with pass_.run_by(self):  # transforms that are composed later run outside of this one
                output = inner(step, state, function, batch)
            self.check(whole=not step.has(AxisRole.STAGES))
        store.compare()  # on every rank, also where nothing was partitioned
        return output

    def _part(self, function: Callable[[Any], Any], part: str, policy: RematPolicy, seen: Any) -> Callable[[Any], Any]:
        return lambda batch: run(function, (batch,), {}, policy=policy, group=self.group, part=part, seen=seen)

    def chosen(self, module: nn.Module) -> list[str]:
        """The paths of the submodules to run under the policy."""
        paths = find_blocks(module, self.blocks)
        for path, _ in module.named_modules():
            self.paths.setdefault(path, False)
        self.paths.update(dict.fromkeys(paths, True))
        return paths

    def run(self, path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a submodule."""
        owner = owner_of(forward)
        call = forward if owner is None else called(owner, forward)
        return run(call, args, kwargs, policy=self.policy, group=self.group, part=path, seen=self._seen)

    def check(self, *, whole: bool) -> None:
        """Raises an error for a policy without effect: it chose no module, or names no tensor. ``whole``: all modules ran."""
        if whole and not any(self.paths.values()):
            if not self.paths:
                raise ValueError(
                    "remat: the loss function runs no fds.functional module, which has blocks to find; use fds.remat(function) "
                    "in it, or T.remat('') for the whole of it"
                )
            raise no_such_block("remat", self.blocks, self.paths)
        if self.names is not None:
            check_names(self.policy, self.names)

    def _seen(self, names: set[str]) -> None:
        self.names = names if self.names is None else self.names | names
