"""Runs a module's blocks as compiled functions, in the library's copy of the module."""

import functools
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from functional_ds.base import tree
from functional_ds.base.torch_private import buffers_of, detect_fake_mode, dispatch_modes, parameters_of
from functional_ds.modules.attributes import ABSENT, put_attribute
from functional_ds.modules.skeleton import RunBy
from functional_ds.remat.block_paths import find_blocks, fits, no_such_block
from functional_ds.remat.entered import one_operation, refuse_exceptions
from functional_ds.remat.op_cache import OpRecorder
from functional_ds.step.pass_scope import Pass, current_pass

from .buffer_writes import written_and_used
from .compile_log import BlockClass, Compilation, CompileLog
from .compile_options import CompileOptions
from .errors import Refusal
from .torch_compiler import keep_saved_tensors, recompile_reasons, refuse_graph_breaks

_HERE = threading.local()  # the calls of compiled code that this thread is in
_RUN = "_fds_run"  # where a module that compiled code goes around has its runs
_OUTSIDE = "_fds_outside"  # and what torch.compile calls as it is, which runs these
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_PLAIN = (bool, int, float, str)
_EAGER = "why blocks are not compiled"  # the slot of a pass
_KEPT = "graphs of compiled blocks"  # the slot of a pass whose graphs stay as they are
_PART = "a part of it behind a module that runs by Python"
_UNLIMITED = 1 << 20  # steps count their own: a process may have many with the same class


@attrs.define(eq=False)
class BlockCalls:
    """Runs the chosen blocks of a module as compiled functions, as ``Pass.calls``.

    A class of blocks is one function, its ``forward`` with the module as first argument, which is given a module whose leaves
    were fetched: torch.compile sees only plain tensors, and nothing of storage, gathers or collectives. Other transforms that
    run the block, such as ``T.remat``, wrap the compiled function, in any order of composition. A submodule that another
    transform runs, or that ``eager`` matches, runs eagerly: it is a graph break.

    Attributes:
        blocks: which modules.
        options: of the compiler.
        log: of compilations.
        leaf: gives the tensor of a lazy leaf.
        eager: which submodules of blocks stay eager.
        paths: of all modules that were seen.
    """

    blocks: str | None
    options: CompileOptions
    log: CompileLog
    leaf: Callable[[Any], Any]
    eager: str | None = None
    paths: set[str] = attrs.field(factory=set)
    matched: bool = False  # whether one of them is a block

    def chosen(self, module: nn.Module) -> list[str]:
        """The paths of the blocks."""
        self.paths.update(path for path, _ in module.named_modules())
        paths = find_blocks(module, self.blocks)
        self.matched |= bool(paths)
        return paths

    def run(self, path: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a block."""
        innermost = _innermost(forward)
        module = getattr(innermost, "__self__", None)
        if not isinstance(innermost, types.MethodType) or not isinstance(module, nn.Module):
            raise Refusal(
                path, innermost, "its forward is not a method of it, so it is not the same function for its whole class"
            )
        compiled = types.MethodType(functools.partial(self._call, path, innermost), module)
        return _around(forward, compiled)(*args, **kwargs)

    def check(self) -> None:
        """Raises an error for a pattern that has matched no module.

        Raises:
            ValueError: the loss ran modules, and none matches; or it ran none.
        """
        if not self.paths:
            raise ValueError(
                "compiled: the loss function runs no fds.functional module, which has blocks to find; give torch.compile what "
                "the loss computes without params, or build the model as a module"
            )
        if not self.matched:
            raise no_such_block("compiled", self.blocks, self.paths)

    def _call(self, path: str, innermost: types.MethodType, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if detect_fake_mode() is not None:  # shapes alone are asked for
            return innermost(*args, **kwargs)
        row = self.log.of(type(module), path)
        refuse_exceptions()
        why = _watched()
        if why:
            row.eager[why] = row.eager.get(why, 0) + 1
            return innermost(*args, **kwargs)
        with _fetched(path, module, self.leaf, self.eager) as (owners, buffers, whole):
            params = [x for owner in owners for x in parameters_of(owner).values()]
            known = [x for x in (*params, *buffers, *tree.leaves((args, kwargs))) if isinstance(x, Tensor)]
            call = _BlockCall(self.log, row, path, owners, _shared(innermost.__func__, self.options, whole))
            with one_operation(known):
                return call.run(module, args, kwargs)


def _watched() -> str:
    """Why blocks of the current pass stay eager, if they do; applies to recomputations too."""
    pass_ = current_pass()
    seen = [type(mode).__name__.strip("_") for mode in dispatch_modes() if not isinstance(mode, OpRecorder)]
    words = f"{seen[-1]} looks at each operation, as in the first step over lazy leaves, or in a profile" if seen else ""
    return words if pass_ is None else str(pass_.slots.setdefault(_EAGER, words) if words else pass_.slots.get(_EAGER, ""))


def keep_graphs(pass_: Pass) -> None:
    """Keeps graphs of compiled blocks reusable until the pass ends, for schedules with split backward passes.

    Whether code overwrites its saved tensors is decided at compilation, and checked in each backward pass.
    """
    if _KEPT in pass_.slots:
        return
    pass_.slots[_KEPT] = True
    open_ = _HERE.__dict__.setdefault("open", [0, None])
    if not open_[0]:  # passes end in any order
        open_[1] = keep_saved_tensors()
        open_[1].__enter__()
    open_[0] += 1

    def leave() -> None:
        open_[0] -= 1
        if not open_[0]:
            open_[1].__exit__(None, None, None)

    pass_.at_end(leave)


# -- a block's function --------------------------------------------------------------------------------------------------


@attrs.define(eq=False)
class _ClassFunction:
    """The function that all blocks of a class share, on all ranks of this process, and what it was compiled for."""

    compiled: Callable[..., Any]
    code: types.CodeType
    compilations: list[Compilation] = attrs.field(factory=list)


@functools.lru_cache(maxsize=256)
def _shared(function: Any, options: CompileOptions, whole: bool) -> _ClassFunction:
    """``whole``: the block is one graph. Blocks with eager parts are several."""
    torch_compile: Any = torch.compile  # its overloads lack two of its arguments
    compiled = torch_compile(
        function,
        backend=_Counted(options.made()),
        fullgraph=whole,
        dynamic=options.dynamic,
        recompile_limit=_UNLIMITED,
        isolate_recompiles=True,
    )
    return _ClassFunction(compiled, function.__code__)


@attrs.frozen
class _Counted:
    """A backend that counts each graph in the call that caused its compilation."""

    backend: Any

    def __call__(self, graph: Any, inputs: Any, **kwargs: Any) -> Any:
        _HERE.calls[-1].count(graph)
        return self.backend(graph, inputs, **kwargs)


@attrs.define(eq=False)
class _BlockCall:
    """One call of a compiled function."""

    log: CompileLog
    row: BlockClass
    path: str
    owners: Sequence[nn.Module]
    shared: _ClassFunction
    graphs: int = 0
    refusal: Refusal | None = None
    _before: list[dict[str, Any]] | None = None  # the modules' numbers and words while torch.compile was at work

    def count(self, graph: Any) -> None:
        """Counts a graph. The block sets attributes when its code runs, so they still have their previous values."""
        self.graphs += 1
        name = written_and_used(graph.graph)
        if name is not None:
            self.refusal = Refusal(
                self.path,
                self.owners[0],
                f"its forward writes the buffer {name!r} in place and computes with it afterwards, for which torch's compiler "
                "gives wrong gradients: assign a new tensor instead, self.buffer = self.buffer * 2",
            )
            raise self.refusal
        if self._before is None:
            self._before = [_plain(owner) for owner in self.owners]

    def run(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """The block's result.

        Raises:
            Refusal: it cannot be compiled.
        """
        code = self.shared.code
        self.row.follow(self.shared.compilations)
        failed = len(recompile_reasons(code))
        _HERE.__dict__.setdefault("calls", []).append(self)
        self.row.calls += 1
        try:
            with refuse_graph_breaks(True):
                output = self.shared.compiled(module, *args, **kwargs)
        except Exception as error:
            refusal = self.refusal or Refusal.of(self.path, module, error)
            if refusal is None:
                raise
            raise refusal from error
        finally:
            _HERE.calls.pop()
        if self.graphs:
            self._note(type(module), recompile_reasons(code)[failed:])
        return output

    def _note(self, block_class: type, reasons: Sequence[str]) -> None:
        why = _nearest([reason.partition(": ")[2].strip() for reason in reasons]) or (_PART if self.shared.compilations else "")
        self.shared.compilations.append(Compilation(self.path, self.graphs, why))
        self._refuse_counters(block_class)
        self.row.own += 1
        if self.row.own > self.log.limit:
            raise Refusal(
                self.path,
                self.owners[0],
                f"its class was compiled {self.log.limit} times already, now because {why}. Pad batches to a few shapes, pass "
                "dynamic=True for code that takes any size, or a larger recompile_limit where so many are meant",
            )

    def _refuse_counters(self, block_class: type) -> None:
        for owner, before in zip(self.owners, self._before or (), strict=False):
            for name, value in _plain(owner).items():
                if name in before and before[name] != value:
                    self.log.changes[block_class, name] += 1
                    if self.log.changes[block_class, name] > 1:
                        raise Refusal(
                            self.path,
                            owner,
                            f"its forward sets {name!r} (now {value!r}), and code is compiled for one value of it, so each "
                            "step would compile anew: keep it in a buffer, self.register_buffer(...), or count in the loss",
                        )


def _nearest(reasons: Sequence[str]) -> str:
    """The most informative of the reasons, one for each code that did not match: that of the best match."""
    broad = ("GLOBAL_STATE", "requires_grad")
    return min(reasons, key=lambda reason: sum(word in reason for word in broad), default="")


def _plain(owner: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(owner).items() if type(value) in _PLAIN}


# -- the module that it is given -----------------------------------------------------------------------------------------


def _innermost(forward: Any) -> Any:
    """A module's own forward, without wrappers."""
    while isinstance(forward, RunBy):
        forward = forward.forward
    return forward


def _around(forward: Any, innermost: Any) -> Any:
    """A module's wrappers, around another forward of it."""
    return forward.around(_around(forward.forward, innermost)) if isinstance(forward, RunBy) else innermost


def _runs_otherwise(forward: Any) -> bool:
    """Whether wrappers other than the compiler of blocks run the module: a block in a block is a part of it."""
    while isinstance(forward, RunBy):
        if not isinstance(forward.call, BlockCalls):
            return True
        forward = forward.forward
    return False


@contextmanager
def _fetched(
    path: str, module: nn.Module, leaf: Callable[[Any], Any], eager: str | None
) -> Iterator[tuple[list[nn.Module], list[Tensor], bool]]:
    """A context in which a block's leaves are plain tensors, and wrapped submodules run eagerly, with lazy leaves.

    Gives the modules that are compiled, their buffers, and whether that is all of the block.
    """
    owners: list[nn.Module] = []
    undo: list[tuple[dict[str, Any], str, Any]] = []
    seen, whole = {id(module)}, True

    def put(into: dict[str, Any], key: str, value: Any) -> None:
        undo.append((into, key, into.get(key, ABSENT)))
        put_attribute(into, key, value)

    def enter(owner: nn.Module, at: str) -> None:
        nonlocal whole
        owners.append(owner)
        for name, lazy in list(parameters_of(owner).items()):
            fetched = leaf(lazy)
            if fetched is not lazy:
                put(parameters_of(owner), name, fetched)
        for key, child in owner.named_children():
            if id(child) in seen:
                continue
            seen.add(id(child))
            forward = child.__dict__.get("forward")
            if _runs_otherwise(forward) or (eager is not None and fits(f"{at}.{key}", eager)):
                whole = False
                put(child.__dict__, _RUN, child.forward)
                put(child.__dict__, _OUTSIDE, _outside())
                put(child.__dict__, "forward", types.MethodType(_by_python, child))
                continue
            if isinstance(forward, RunBy):
                innermost = _innermost(forward)
                put(
                    child.__dict__,
                    "forward",
                    ABSENT if getattr(innermost, "__func__", None) is type(child).forward else innermost,
                )
            _refuse_hooks(path, module, child)
            enter(child, f"{at}.{key}")

    try:
        enter(module, path)
        yield owners, [x for owner in owners for x in buffers_of(owner).values() if x is not None], whole
    finally:
        for into, key, value in reversed(undo):
            put_attribute(into, key, value)


def _refuse_hooks(path: str, module: nn.Module, owner: nn.Module) -> None:
    if any(vars(owner).get(hooks) for hooks in _HOOKS):
        raise Refusal(
            path,
            module,
            f"a {type(owner).__name__} inside of it has hooks, and compiled code does not look whether there are hooks, so it "
            "would go on without a hook that was added later: register them on the block itself, around compiled code",
        )


def _by_python(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a wrapped submodule as compiled code calls it: a graph break."""
    with refuse_graph_breaks(False):
        return getattr(module, _OUTSIDE)(module, *args, **kwargs)


def _run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module.__dict__[_RUN](*args, **kwargs)


@functools.cache
def _outside() -> Callable[..., Any]:
    return torch.compiler.disable(_run)  # type: ignore[no-any-return]
