"""``tiled``: computes a function of tokens for some of them at a time, forward and backward."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import attrs
import optree
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from functional_ds.base import tree
from functional_ds.base.device import forked_rng, in_use, rng_state, set_rng_state
from functional_ds.base.prng import Key
from functional_ds.step.pass_scope import Moment
from functional_ds.step.views.view import wide_dtype


def tiled(function: Callable[..., Any], tiles: int, *, dim: int = 1, sums: bool = False) -> Callable[..., Any]:
    """Computes ``function(params, *args)`` for one of ``tiles`` parts of the tokens at a time, to save activation memory.

    For a function that acts on each token, value and gradients are unchanged; with ``sums``, for one that returns sums
    over tokens. Intermediates exist for one tile at a time: 1/tiles of the peak. The backward pass recomputes each tile, which
    costs one more forward pass. Gradients of params are accumulated over the tiles, in fp32 for half precision.

    The first argument is passed to every tile: params and anything that all tokens share; ZeRO-3 gathers it once per pass, not
    per tile. Every tensor in the further arguments is split along ``dim``, into parts whose sizes differ by at most one. A
    ``Key`` draws as for the whole tensors. Other values are passed to every tile. Torch's generators repeat their
    draws in the backward pass, but draw differently from the function without tiles.

    Args:
        function: ``(params, *args) -> a tree of tensors``. Tensors that need gradients must be among its arguments.
        tiles: how many; fewer if there are fewer tokens.
        dim: the tokens' dim in every tensor, counted from the front.
        sums: whether the function returns scalars, such as a ``Weighted``, which are summed, in fp32 at least. Otherwise its
            tensors have as many tokens along ``dim`` as the arguments, and are concatenated.

    Raises:
        ValueError: ``tiles`` or ``dim`` is out of range; when called: a tensor has another number of tokens, a result is not a
            scalar or has other tokens, or the function uses a tensor that requires grad and is not an argument.
        RuntimeError: in second derivatives.

    Source: tiled computation in Arctic Long Sequence Training (arXiv 2506.13996).

    >>> def mlp(w, x):
    ...     return (x @ w).tanh() @ w.T
    >>> w, x = torch.ones(2, 3, requires_grad=True), torch.arange(10.0).view(1, 5, 2)
    >>> whole, parts = (torch.autograd.grad(f(w, x).sum(), w)[0] for f in (mlp, tiled(mlp, 3)))
    >>> torch.allclose(whole, parts)
    True
    """
    if not isinstance(tiles, int) or tiles < 1:  # type: ignore[redundant-expr]
        raise ValueError(f"tiles={tiles!r}: the number of tiles must be a positive integer")
    if not isinstance(dim, int) or dim < 0:  # type: ignore[redundant-expr]
        raise ValueError(f"dim={dim!r}: count the dim of the tokens from the front, as tensors may differ in their last dims")

    def run(params: Any, *args: Any) -> Any:
        given: Any = (params, *args)
        leaves, spec = optree.tree_flatten(given, is_leaf=_is_key, namespace=tree.NAMESPACE)
        shared = len(optree.tree_leaves(params, is_leaf=_is_key, namespace=tree.NAMESPACE))
        tiled_call = _Tiles(function, tiles, dim, sums, leaves, spec, shared)
        return tiled_call.with_gradients() if tiled_call.differentiable else tiled_call.whole()

    return run


def _is_key(value: Any) -> bool:
    return isinstance(value, Key)


@attrs.define(eq=False, repr=False)
class _Tiles:
    """One call.

    Attributes:
        function: as given to ``tiled``, like the next three.
        tiles: how many tiles.
        dim: of the tokens.
        sums: whether results are summed.
        leaves: of all arguments; a key is one.
        spec: their structure.
        shared: how many of them are the first argument's.
        places: which of them are tensors.
        parts: the tokens of each tile.
    """

    function: Callable[..., Any]
    tiles: int
    dim: int
    sums: bool
    leaves: list[Any]
    spec: optree.PyTreeSpec
    shared: int
    places: list[int] = attrs.field(init=False)
    parts: list[range] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.places = [place for place, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        tokens = self._tokens()
        count = max(1, min(self.tiles, tokens))
        bounds = [i * tokens // count for i in range(count + 1)]
        self.parts = [range(*pair) for pair in pairwise(bounds)]

    def _tokens(self) -> int:
        cut = [self.leaves[place] for place in self.places if place >= self.shared]
        if not cut:
            raise ValueError("tiled: no argument after the first has a tensor, so there are no tokens to split")
        for leaf in cut:
            if leaf.dim() <= self.dim or leaf.shape[self.dim] != cut[0].shape[self.dim]:
                raise ValueError(
                    f"tiled: a tensor of shape {list(leaf.shape)} has other tokens along dim {self.dim} than the first, of "
                    f"shape {list(cut[0].shape)}; what all tiles share belongs into the first argument"
                )
        return int(cut[0].shape[self.dim])

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return [self.leaves[place] for place in self.places]

    @property
    def differentiable(self) -> bool:
        """Whether autograd records this call."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors)

    def of(self, tensor: Tensor, part: range) -> Tensor:
        """A tile of a tensor."""
        return tensor.narrow(self.dim, part.start, len(part))

    def cut(self, tensors: Sequence[Tensor], part: range) -> list[Tensor]:
        """The slices of the arguments' tensors for a tile."""
        pairs = zip(self.places, tensors, strict=True)
        return [tensor if place < self.shared else self.of(tensor, part) for place, tensor in pairs]

    def run(self, part: range, tensors: Sequence[Tensor]) -> Any:
        """The function's results for a tile, which has these tensors."""
        leaves = [self._key(leaf, part) if _is_key(leaf) else leaf for leaf in self.leaves]
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        results = self.function(*tree.unflatten(self.spec, leaves))
        if self.sums:  # a weight may be a number
            results = tree.map(lambda leaf: torch.as_tensor(leaf) if isinstance(leaf, int | float) else leaf, results)
        wanted = "scalars" if self.sums else f"tensors with the {len(part)} tokens that it got along dim {self.dim}"
        for leaf in tree.leaves(results):
            shape = leaf.shape if isinstance(leaf, Tensor) else None
            fits = shape is not None and (shape == () if self.sums else shape[self.dim : self.dim + 1] == (len(part),))
            if not fits:
                raise ValueError(
                    f"tiled: the function returned {tree.summary(leaf)}, and must return {wanted} (sums={self.sums})"
                )
        return results

    def _key(self, key: Key, part: range) -> Key:
        """The key that draws for a tile what this one draws for the whole."""
        if self.dim == 0:
            return key.at(rows=part.start)
        tokens = self.parts[-1].stop
        positions, size = key.places.get(self.dim) or (range(tokens), tokens)
        part_positions = (
            positions[part.start : part.stop] if isinstance(positions, range) else positions[..., part.start : part.stop]
        )
        return tree.replace(key, places={**key.places, self.dim: (part_positions, size)})

    def whole(self) -> Any:
        """The function's results, tile after tile."""
        given = self.tensors
        results: list[Tensor] = []
        for part in self.parts:
            tile_results, spec = tree.flatten(self.run(part, self.cut(given, part)))
            _refuse_foreign(tile_results, {id(tensor) for tensor in given})
            if not results:
                results = [self._room(leaf) for leaf in tile_results]
            for result, leaf in zip(results, tile_results, strict=True):
                if self.sums:
                    result.add_(leaf)
                else:
                    self.of(result, part).copy_(leaf)
        return tree.unflatten(spec, results)

    def _room(self, leaf: Tensor) -> Tensor:
        """Memory for the results of all tiles, from one tile's."""
        if self.sums:
            dtype = torch.int64 if leaf.dtype == torch.bool else wide_dtype(leaf.dtype)
            return torch.zeros((), dtype=dtype, device=leaf.device)
        return leaf.new_empty((*leaf.shape[: self.dim], self.parts[-1].stop, *leaf.shape[self.dim + 1 :]))

    def with_gradients(self) -> Any:
        """The function's results, for autograd."""
        specs: list[optree.PyTreeSpec] = []
        # a lazy leaf gives the param behind it, as autograd knows it
        given = [tensor if type(tensor) in (Tensor, nn.Parameter) else tensor.view_as(tensor) for tensor in self.tensors]
        for place, tensor in zip(self.places, given, strict=True):
            self.leaves[place] = tensor
        results = _TileByTile.apply(self, specs, *given)
        return tree.unflatten(specs[0], results)


class _TileByTile(torch.autograd.Function):
    """Forward and backward pass of one call."""

    @staticmethod
    def forward(ctx: Any, tiles: _Tiles, specs: list[optree.PyTreeSpec], *given: Tensor) -> tuple[Tensor, ...]:
        ctx.again = _again()
        results, spec = tree.flatten(tiles.whole())
        specs.append(spec)
        ctx.save_for_backward(*given)
        for place in tiles.places:  # drops the references, except autograd's: ZeRO-3 may free params
            tiles.leaves[place] = None
        ctx.tiles = tiles
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(leaf for leaf in results if not (leaf.is_floating_point() or leaf.is_complex())))
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *seeds: Tensor | None) -> tuple[Tensor | None, ...]:
        tiles: _Tiles = ctx.tiles
        needed = ctx.needs_input_grad[2:]
        given = [tensor.detach() for tensor in ctx.saved_tensors]
        shared = [place < tiles.shared for place in tiles.places]
        whole = [
            t.requires_grad_() if is_shared and need else t for t, is_shared, need in zip(given, shared, needed, strict=True)
        ]
        totals: dict[int, Tensor] = {}
        with ctx.again():
            for part in tiles.parts:
                cut = [
                    t if is_shared else t.detach().requires_grad_(need)
                    for t, is_shared, need in zip(tiles.cut(whole, part), shared, needed, strict=True)
                ]
                for i, grad in _gradients(tiles, part, cut, seeds):
                    if not shared[i]:
                        tiles.of(totals.setdefault(i, torch.zeros_like(given[i])), part).copy_(grad)
                    elif i in totals:
                        totals[i].add_(grad)
                    else:
                        totals[i] = grad.to(wide_dtype(grad.dtype), copy=True)
        return None, None, *(totals[i].to(t.dtype) if i in totals else None for i, t in enumerate(given))


def _gradients(
    tiles: _Tiles, part: range, cut: Sequence[Tensor], seeds: Sequence[Tensor | None]
) -> Iterator[tuple[int, Tensor]]:
    """The gradients of a tile by its tensors that have one, with their places."""
    with torch.enable_grad():
        results = tree.leaves(tiles.run(part, cut))
    _refuse_foreign(results, {id(tensor) for tensor in cut})
    outputs, grads = [], []
    for leaf, seed in zip(results, seeds, strict=True):
        if leaf.requires_grad and seed is not None:
            outputs.append(leaf)
            grads.append((seed if tiles.sums else tiles.of(seed, part)).to(leaf.dtype))
    wanted = [i for i, tensor in enumerate(cut) if tensor.requires_grad]
    if outputs and wanted:
        by: tuple[Tensor | None, ...] = torch.autograd.grad(outputs, [cut[i] for i in wanted], grads, allow_unused=True)
        for i, grad in zip(wanted, by, strict=True):
            if grad is not None:
                yield i, grad


def _refuse_foreign(results: Sequence[Tensor], known: set[int]) -> None:
    """Raises an error for results that depend on a tensor that requires grad and is not an argument."""
    todo = [leaf.grad_fn for leaf in results if leaf.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in known:
            raise ValueError(
                f"tiled: the function uses a tensor of shape {list(variable.shape)} that requires grad and is not one of its "
                "arguments, so it would get no gradient; pass it in the first argument, the params"
            )
        following = {next_node for next_node, _ in node.next_functions if next_node is not None} - seen
        seen |= following
        todo.extend(following)


def _again() -> Callable[[], Any]:
    """Captures the pass, the generators' states and the autocast, and returns a context that restores them."""
    device = in_use()
    kinds = {"cpu"} if device is None else {"cpu", device.type}
    autocast = [
        (device_type, torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type)) for device_type in kinds
    ]
    drawn, host, moment = None if device is None else rng_state(device), torch.get_rng_state(), Moment.now()

    @contextmanager
    def restored() -> Iterator[None]:
        with moment.restored(), forked_rng():
            torch.set_rng_state(host)
            if device is not None and drawn is not None:
                set_rng_state(device, drawn)
            with ExitStack() as contexts:
                for device_type, dtype, enabled in autocast:
                    contexts.enter_context(torch.autocast(device_type, dtype, enabled=enabled))
                yield

    return restored
