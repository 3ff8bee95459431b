"""Checks a collective of your own against the laws of the library's."""

import pickle
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.comm.backends.primitives import Communicator
from functional_ds.optim.sgd import sgd
from functional_ds.step.train_step import train_step

from .holds import LawResult, LawTable
from .method import NotApplicableError, refuses
from .same import assert_same

_STEP = 1e-4  # of a difference quotient in fp64

Function = Callable[[Any], Any]
Pair = tuple[Any, Any]  # what must be equal
Compared = tuple[str, Any, Any, float]  # where, what must be equal, and the tolerance; 0 for bits


def _values(like: Tensor, seed: int = 0) -> Tensor:
    """Values of this rank."""
    generator = torch.Generator().manual_seed(64 * seed + comm.world().rank)
    return (4 * torch.randn(like.shape, dtype=torch.float64, generator=generator)).to(like.dtype)


def _start(function: Function, x: Tensor) -> Pair:
    inner, args, options = _parts(function)
    return comm.start(inner, *args, x, **options).wait(), function(x)


def _input(function: Function, x: Tensor) -> Pair:
    before = x.clone()
    function(x)
    return x, before


def _both_ways(function: Function, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """v, C v by a difference quotient, which is exact if C is linear, and y, C^T y by a backward pass, in fp64."""
    result = function(x.requires_grad_())
    if not result.requires_grad:
        raise NotApplicableError("no gradient flows through it")
    v, y = _values(x, 1), _values(result, 2).requires_grad_()
    with torch.no_grad():
        pushed = (function(x + _STEP * v) - function(x - _STEP * v)) / (2 * _STEP)
    return v, pushed, y, torch.autograd.grad(result, x, y, create_graph=True)[0]


def _adjoint(function: Function, x: Tensor) -> Pair:
    v, pushed, y, pulled = _both_ways(function, x)
    left, right = comm.all_reduce(torch.stack([(pushed * y).sum(), (v * pulled).sum()]).detach())
    return left, right


def _second_adjoint(function: Function, x: Tensor) -> Pair:
    v, pushed, y, pulled = _both_ways(function, x)
    return torch.autograd.grad(pulled, y, v)[0], pushed


def _jit(function: Function, x: Tensor) -> Pair:
    from functional_ds.compiling.jitted.jit_step import jit

    step = train_step(lambda w, batch: function(w).square().sum() + (w * batch).sum(), sgd(0.1))
    jitted = jit(step)
    ends: list[Any] = []
    for each in (jitted, step):
        state, _ = each(each.init(x.clone()), x)  # the first step is never a graph
        ends.append(each(state, x)[0].params)
    how = f"eagerly: {jitted.reasons[0]}" if jitted.reasons else "as a graph"
    return (ends[0], how), (ends[1], "as a graph")


_LAWS: dict[str, tuple[str, Callable[[Function, Tensor], Pair]]] = {
    "start": ("comm.start(f, x).wait() is f(x)", _start),
    "input": ("it does not write to its input", _input),
    "leaves": ("a tree gives the tree of its leaves' results", lambda f, x: (f([x, [x.flip(0)]]), [f(x), [f(x.flip(0))]])),
    "strides": ("strided inputs give the same bits", lambda f, x: (f(x.repeat_interleave(2, -1)[..., ::2]), f(x))),
    "empty": ("empty inputs give empty results", lambda f, x: (f(x[:0]).numel(), 0)),
    "precision": ("the result is that in fp64, in the input's dtype", lambda f, x: (f(x), f(x.double()).to(x.dtype))),
    "adjoint": ("the backward pass is the transpose: <C v, y> = <v, C^T y>, summed over ranks", _adjoint),
    "second adjoint": ("the backward pass of the backward pass is the collective", _second_adjoint),
    "jit": ("fds.jit traces it, and gives the same bits", _jit),
}
_ROUNDED, _ONCE = ("leaves", "precision", "adjoint", "second adjoint"), ("adjoint", "second adjoint", "jit")


def _observed(function: Function, inputs: Sequence[Tensor], in_process: bool = False) -> list[dict[str, Any]]:
    """For each input the result, its shape, the ledger's bytes and, in a process of its own, those of Gloo's messages."""
    sent, send = [0], Communicator.send

    def counting(self: Communicator, tensor: Tensor, peer: int) -> Any:
        sent[0] += tensor.nbytes
        return send(self, tensor, peer)

    if in_process:
        Communicator.send = counting  # type: ignore[method-assign]
    runs = []
    for like in inputs:
        x, before = like if like.is_meta else _values(like), sent[0]
        with comm.ledger() as book:
            result = function(x)
        if not isinstance(result, Tensor):
            raise TypeError(
                f"function={function!r} returns {type(result).__name__} for a tensor: pass one that returns a tensor"
            )
        outline = f"{result.dtype}{list(result.shape)}, {book.bytes} bytes"
        runs.append({"result": result, "outline": outline, "counted": book.bytes, "sent": sent[0] - before})
    return runs


def _parts(function: Function) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    return (function.func, function.args, function.keywords) if isinstance(function, partial) else (function, (), {})


def _result(law: str, says: str, compared: Callable[[], Iterator[Compared]]) -> LawResult:
    outcome, words, began, where = "ok", "", time.perf_counter(), ""
    try:
        for where, found, expected, within in compared():  # noqa: B007
            if within:
                torch.testing.assert_close(found, expected, rtol=within, atol=within)
            else:
                assert_same(found, expected)
    except (NotApplicableError, ModuleNotFoundError) as error:  # of a part that this installation leaves out
        outcome, words = "not applicable", str(error)
    except AssertionError as error:
        outcome, words = "wrong", f"{where}: {' '.join(str(error).split())}"
    except Exception as error:
        outcome, words = "refused" if refuses(error) else "wrong", f"{type(error).__name__}: {error}"
    return LawResult(law, says, outcome, words, seconds=time.perf_counter() - began)


def collective_holds(
    function: Callable[[Any], Any],
    *,
    world_sizes: Sequence[int] = (2, 3),
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16),
    shape: Sequence[int] = (12,),
    only: str | Iterable[str] | None = None,
) -> LawTable:
    """Checks a collective against the laws; returns a table of results, as ``holds`` does for transforms.

    On simulated ranks a collective computes what its row's ``denotation`` says, or what it is composed of. The laws compare
    this with other ways to run it: started, on trees, on shapes, in processes, backward and traced. Takes some ten seconds.

    Args:
        function: a function under ``@comm.table.collective`` or ``@comm.table.composed``, or a ``partial`` of one, from a
            tree to a tree. If it can be imported, it is also run in new processes. Values that all ranks share, as
            ``comm.copy_to`` takes, are not supported.
        world_sizes: numbers of ranks; processes run on the last.
        dtypes: of its inputs. Gradients are checked in fp64.
        shape: of its inputs.
        only: the laws to check, or one; by default all.

    Raises:
        TypeError: ``function`` is not a collective, or its result for a tensor is not one.
        ValueError: ``world_sizes``, ``dtypes``, ``shape`` or ``only`` is empty; a law's name is unknown.

    >>> print(collective_holds(partial(comm.permute, perm=[(0, 1), (1, 0)]), world_sizes=[2], dtypes=[torch.float32]))
    permute(perm=[(0, 1), (1, 0)]) on 2 ranks
    start              ok
    input              ok
    leaves             ok
    strides            ok
    empty              ok
    precision          ok
    adjoint            ok
    second adjoint     ok
    jit                ok
    shapes             ok
    processes          ok
    bytes              ok
    """
    inner, args, options = _parts(function)
    if not hasattr(inner, "request"):
        raise TypeError(
            f"function={function!r} is not a collective: pass comm.all_gather or its like, or put your function under "
            "@comm.table.collective if it returns a request, or @comm.table.composed if it calls other collectives"
        )
    if not world_sizes or not dtypes or not shape:
        raise ValueError(f"world_sizes={world_sizes!r}, dtypes={dtypes!r}, shape={shape!r}: pass at least one of each")
    n = world_sizes[-1]
    inputs, doubles = ([torch.empty(tuple(shape), dtype=dtype) for dtype in some] for some in (dtypes, [torch.float64]))
    simulated = comm.simulate(_observed, function, inputs, world_size=n)

    def on_ranks(law: str, check: Callable[[Function, Tensor], Pair]) -> Iterator[Compared]:
        for size, like in product(world_sizes, doubles if law in _ONCE else inputs):
            within = 16 * max(torch.finfo(like.dtype).eps if like.is_floating_point() else 0, 1e-7) * (law in _ROUNDED)
            pairs = comm.simulate(lambda x: check(function, _values(x)), like, world_size=size)
            yield from ((f"rank {rank} of {size}, {like.dtype}", *pair, within) for rank, pair in enumerate(pairs))

    def on_shapes() -> list[list[dict[str, Any]]]:
        return comm.simulate(_observed, function, [like.to("meta") for like in inputs], world_size=n, shapes_only=True)

    @cache
    def spawned() -> list[list[dict[str, Any]]]:
        try:
            if inner.__module__ == "__main__" and not hasattr(sys.modules["__main__"], "__file__"):
                raise ValueError("it is defined in a notebook")
            pickle.dumps(function)
        except Exception as error:
            raise NotApplicableError(f"other processes cannot import it ({error}); pass a function of a module") from None
        return comm.spawn(_observed, function, inputs, True, world_size=n)

    def between(other: Callable[[], list[list[dict[str, Any]]]], there: str, here: str) -> Iterator[Compared]:
        for rank, (runs, expected) in enumerate(zip(other(), simulated, strict=True)):
            yield f"rank {rank} of {n}", [run[there] for run in runs], [run[here] for run in expected], 0.0

    laws = {law: (says, partial(on_ranks, law, check)) for law, (says, check) in _LAWS.items()}
    laws["shapes"] = (
        "a run on shapes gives the shapes and the ledger's bytes",
        partial(between, on_shapes, "outline", "outline"),
    )
    laws["processes"] = "processes give the simulated ranks' bits", partial(between, spawned, "result", "result")
    laws["bytes"] = "processes send the bytes that the ledger counts", partial(between, spawned, "sent", "counted")
    chosen = [*laws] if only is None else [only] if isinstance(only, str) else [*only]
    if not chosen or not laws.keys() >= set(chosen):
        raise ValueError(f"only={only!r}: pass some of the laws {', '.join(laws)}")
    rows = [_result(law, *laws[law]) for law in laws if law in chosen]
    words = ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in options.items())])
    return LawTable(f"{inner.__name__}{words and f'({words})'} on {' and '.join(map(str, world_sizes))} ranks", rows)
