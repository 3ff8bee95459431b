"""Compiles a model's blocks with ``torch.compile`` (Ansel et al. 2024)."""

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import attrs

from functional_ds.base.weighted import Weighted
from functional_ds.compiling.block_calls import BlockCalls, keep_graphs
from functional_ds.compiling.compile_log import BlockClass, CompileLog, Compiles
from functional_ds.compiling.compile_options import CompileOptions
from functional_ds.compiling.errors import backward_refusal
from functional_ds.remat.block_paths import check_blocks, check_pattern
from functional_ds.step.compose import wrap
from functional_ds.step.over_ranks.mesh_axes import AxisRole
from functional_ds.step.pass_scope import current_pass
from functional_ds.step.phase_signatures import Passed
from functional_ds.step.phases import Trait
from functional_ds.step.state.state import State
from functional_ds.step.step import Step, Transform
from functional_ds.transforms.zero.units.lazy_tensor import fetched


def compiled(
    blocks: str | None = None,
    *,
    backend: str | Callable[..., Any] = "inductor",
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    dynamic: bool | None = False,
    recompile_limit: int = 8,
    eager: str | None = None,
) -> Transform:
    """Runs a module's blocks under ``torch.compile``.

    The results are unchanged: bitwise with a backend that generates no code ("eager", "aot_eager"), within rounding
    with inductor. The collectives stay the same, and no more FSDP units are gathered at a time. The transform commutes with
    those that wrap other phases, and with ``T.remat``.

    All blocks of a class, on all ranks of a process, share one compiled function, with one graph for each shape, dtype and mode
    (training or not, gradients or not). ``fds.compile_report(step)`` lists compilations and the reasons for recompilations. A
    block's params are gathered before its function runs. Submodules that another transform runs (``T.remat``,
    ``T.tensor_parallel``) are graph breaks; collectives in the block's own code raise an error.

    Args:
        blocks: which modules of an ``fds.functional`` module to compile, as in ``T.remat``: a path in which each name may be a
            pattern; a list of modules stands for its members; None for the repeated blocks.
        backend: as for ``torch.compile``: a name, or a function of a graph and its inputs.
        mode: inductor's mode, such as "max-autotune-no-cudagraphs".
        options: the backend's options.
        dynamic: False compiles for each shape; True for symbolic sizes; None for symbolic sizes from the second size of a dim
            on.
        recompile_limit: how many compilations of a class are allowed before an error.
        eager: a pattern, as in ``blocks``, for submodules of blocks that stay eager because they run collectives or cannot be
            traced. They are graph breaks.

    Raises:
        ValueError: an unknown backend; at ``init``: a pattern that matches no module with params, or a mode with CUDA graphs,
            which need fixed addresses, over params that are sharded or offloaded.
        RuntimeError: a block, or its backward pass, cannot be compiled: it prints, has hooks, runs a collective, counts in
            Python, or has data-dependent shapes.

    >>> import torch, functional_ds as fds
    >>> from torch import nn
    >>> apply, params = fds.functional(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1)))
    >>> step = compiled(backend="eager")(fds.train_step(lambda p, x: apply(p, x).sum(), fds.sgd(0.1)))
    >>> state, metrics = step(step.init(params), torch.ones(3, 2))
    """
    check_pattern(blocks)
    if eager is not None and not isinstance(eager, str):
        raise TypeError(f"compiled: eager={eager!r} is not a path: give a pattern such as 'blocks.*.experts'")
    if blocks == "":
        raise ValueError(
            "compiled: blocks='' would be the whole loss function, which fetches leaves and runs collectives; name its blocks, "
            "or None for the repeated ones"
        )
    compile_options = CompileOptions.checked(backend, mode, options, dynamic, recompile_limit)
    inside = _Compiled(blocks, compile_options, eager)
    return wrap(
        f"compiled({blocks or 'repeated blocks'})", prepare=inside.prepare, forward=inside.forward, gradients=inside.gradients
    )


@attrs.define(eq=False)
class _Compiled(Compiles):
    blocks: str | None
    options: CompileOptions
    eager: str | None
    _calls: "WeakKeyDictionary[Step, BlockCalls]" = attrs.field(factory=WeakKeyDictionary)

    def compiled_rows(self, step: Step) -> list[BlockClass]:
        """The classes of blocks that ran."""
        return [*self._of(step).log.classes.values()]

    def _of(self, step: Step) -> BlockCalls:
        if step not in self._calls:
            log = CompileLog(self.options.recompile_limit)
            self._calls[step] = BlockCalls(self.blocks, self.options, log, fetched, self.eager)
        return self._calls[step]

    def prepare(self, inner: Any, step: Step, params: Any) -> Any:
        """Raises an error for a pattern that matches no module with params, and for CUDA graphs over params that move."""
        check_blocks("compiled", params, self.blocks)
        if self.eager is not None:
            check_blocks("compiled", params, self.eager)
        moves = step.has(Trait.SHARDS_PARAMS) or step.has(Trait.OFFLOADS)
        if moves and self.options.fixes_addresses:
            raise ValueError(
                f"compiled: mode={self.options.mode!r} replays CUDA graphs, which read params where they were, and {moves} has "
                "them elsewhere in each step; use mode='max-autotune-no-cudagraphs', or zero(2)"
            )
        return inner(step, params)

    def gradients(self, inner: Any, step: Step, state: State, batch: Any, carry: Weighted | None, last: bool) -> Passed:
        """The inner gradients; translates compiler errors of the backward pass."""
        try:
            return inner(step, state, batch, carry, last)  # type: ignore[no-any-return]
        except Exception as error:
            refusal = backward_refusal(self.blocks or "repeated blocks", error)
            if refusal is None:
                raise
            raise refusal from error

    def forward(self, inner: Any, step: Step, state: State, function: Callable[[Any], Any], batch: Any) -> Any:
        """The inner forward, with its blocks compiled."""
        pass_ = current_pass()
        if pass_ is None:
            return inner(step, state, function, batch)
        keep_graphs(pass_)
        calls = self._of(step)
        with pass_.run_by(calls):
            output = inner(step, state, function, batch)
        if not step.has(AxisRole.STAGES):
            calls.check()
        return output
