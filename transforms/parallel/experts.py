"""Expert parallelism: experts split over some of the data-parallel ranks (Lepikhin et al., "GShard", 2020)."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import attrs
from torch import Tensor, nn

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.base.marks import like_marked, mark_sharers, mark_slices, module_of, slices_of
from functional_ds.base.torch_private import parameters_of
from functional_ds.parallel.experts.axis import ExpertAxis
from functional_ds.parallel.experts.stacked import StackedExperts
from functional_ds.sharding.leaf_slice import LeafSlice
from functional_ds.sharding.path_patterns import check_expression, nearest
from functional_ds.sharding.sources import sliced
from functional_ds.step.axes import asked
from functional_ds.step.compose import wrap
from functional_ds.step.over_ranks.mesh_axes import Axis, AxisRole
from functional_ds.step.state.state import State
from functional_ds.step.step import Step
from functional_ds.step.views.view import View

from .slice_errors import traced


def _is_group(experts: Any, field: Any, value: Any) -> None:
    if not (isinstance(value, comm.Group) or (value is None and field.name == "edp")):
        raise TypeError(f"{field.name}={value!r} is not a group: pass mesh[{field.name!r}]")
    if value is not None and value.rank < 0:
        raise ValueError(f"{field.name}={value!r}: this rank is not in it")


@attrs.frozen(eq=False, repr=False)
class Experts:
    """Expert parallelism: stores 1/n of the experts on each of the n ranks of ``ep``, which stay data-parallel.

    Leaves whose paths match hold one expert per index of dim 0, for example ``[E, a, b]``. Rank r of ``ep`` has experts ``r
    E/n`` to ``(r + 1) E/n - 1``, and the loss sees only these: it sends each token to the ranks that hold its experts. For all
    other leaves the ranks are data-parallel. ``axis("ep")`` gives a model's functions the group.

    For any size of ``ep`` it equals the single-device step on the whole leaves and the concatenated batch. The
    gradients of experts cross ``ep`` through the transpose of the loss's exchange; ``zero`` sums them over ``edp``, the ranks
    that hold the same experts, and divides them by the weight of all ranks' batches. The norm counts each expert once.

    Put it after ``zero``, whose group must be that of both axes together: ``mesh["dp"]`` for ``mesh.split("dp", edp=...,
    ep=...)``. If several axes share the batch, ``edp`` includes them: ``experts["edp", "sp"]``.

    Cost: it sends nothing itself. With Ψ elements of experts on a rank, ``zero`` gathers and reduces them over the d ranks of
    ``edp`` instead of n d: each rank sends 2Ψ(d-1)/d in stages 0 to 2, and nothing if d = 1.

    At ``init`` each rank keeps its part of its own params, or reads its part of deferred ones, so build the same model on every
    rank. Optimizers that need whole leaves raise an error, except ``muon`` and ``per_matrix`` with ``stacks``.

    Args:
        pattern: a regular expression for the paths of the leaves that hold experts.
        ep: the ranks over which experts are split.
        edp: the ranks that hold the same experts as this one; None if there are none.

    Raises:
        TypeError: ``ep`` or ``edp`` is not a ``comm.Group``.
        ValueError: the expression matches no path; the number of experts is not divisible by the ranks; a leaf is split along
            dim 0 already; it belongs to a module that is not a stack of experts; the groups form no grid, or do not match
            ``zero``'s; no transform before this one sums gradients; in the first step: a module that sends nothing over ``ep``,
            or a loss that reads experts outside the exchange, such as a penalty on all params.

    >>> import functional_ds as fds
    >>> from functional_ds import transforms as T
    >>> def program():
    ...     mesh = comm.mesh(dp=2).split("dp", edp=1, ep=2)
    ...
    ...     def loss(p, x):  # the first rows are for the first expert, and so on
    ...         mine = comm.all_to_all(x, mesh["ep"]) * p["experts"]
    ...         return fds.Weighted(comm.all_to_all(mine, mesh["ep"]).sum(), 2.0)
    ...
    ...     step = fds.compose(T.zero(1, mesh["edp", "ep"]), experts("experts", mesh["ep"]))(fds.train_step(loss, fds.sgd(1.0)))
    ...     state = step.init({"experts": torch.ones(2, 1)})
    ...     state, metrics = step(state, torch.tensor([[1.0], [2.0]]))
    ...     return state.params[0].tolist(), metrics["loss"].item(), step.params(state)["experts"].tolist()
    >>> comm.simulate(program, world_size=2)[0]
    ([0.5], 1.5, [[0.5], [0.0]])
    """

    pattern: str
    ep: comm.Group = attrs.field(validator=_is_group)
    edp: comm.Group | None = attrs.field(default=None, kw_only=True, validator=_is_group)
    _of_modules: set[str] = attrs.field(factory=set, init=False)  # paths of experts that modules use

    def __attrs_post_init__(self) -> None:
        check_expression("pattern=", self.pattern)
        ranks = [rank for block in self.blocks for rank in block]
        if len(set(ranks)) != len(ranks) or self.ep.ranks[self.ep.rank] not in self._same:
            raise ValueError(
                f"edp: the ranks {list(self._same)} of group {getattr(self.edp, 'name', None)!r} and the ranks "
                f"{list(self.ep.ranks)} of ep={self.ep.name!r} share more than this rank; pass two axes of one mesh: "
                'mesh.split("dp", edp=..., ep=...)'
            )

    def __call__(self, step: Step) -> Step:
        """The step, wrapped."""
        return wrap(
            str(self),
            axes=[
                Axis(self.ep, AxisRole.EXPERTS, name="ep", value=ExpertAxis(self.ep)),
                *([] if self.edp is None else [Axis(self.edp)]),
            ],
            check=self.check,
            init=self.init,
            guards={"view": self.guard_view, "forward": self.guard_forward},
            params=self.params,
        )(step)

    def __repr__(self) -> str:
        beside = "" if self.edp is None else f", edp={self.edp.name!r} of {self.edp.size}"
        return f"experts({self.pattern!r}, {self.ep.name!r} of {self.ep.size}{beside})"

    @property
    def blocks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of the world that hold the same experts, for each part of the experts.

        Groups along the same axes of a mesh differ by a shift of their ranks.
        """
        here = self.ep.ranks[self.ep.rank]
        return tuple(tuple(rank + other - here for rank in self._same) for other in self.ep.ranks)

    @property
    def _same(self) -> tuple[int, ...]:
        return (self.ep.ranks[self.ep.rank],) if self.edp is None else self.edp.ranks

    def check(self, step: Step) -> None:
        """Raises an error for a step whose gradients are not summed, or that has experts already.

        Raises:
            ValueError: it is such a step.
        """
        if self.ep.size > 1 and not step.has(AxisRole.BATCH):
            raise ValueError(
                f"{self}: its ranks have batches of their own, and no transform before it sums their gradients ({step}); put "
                "zero before it"
            )
        other = step.has(AxisRole.EXPERTS)
        if other:
            raise ValueError(f"{self}: this step has {other} already; name all experts in one pattern")

    # -- what is stored ------------------------------------------------------------------------------------------------

    def init(self, inner: Any, step: Step, params: Any) -> State:
        """The inner state of this rank's experts."""
        if self.ep.size > 1:
            groups = [group for group in (self.ep, self.edp) if group is not None]
            mend = 'pass two axes of one mesh: mesh.split("dp", edp=..., ep=...)'
            comm.agree(self.blocks, *groups, what="ep, edp", differ="other groups beside them", mend=mend)
        return inner(step, self.cut(params))  # type: ignore[no-any-return]

    def cut(self, params: Any) -> Any:
        """This rank's experts and all other leaves, marked for ``zero(...).cost_report`` and the like."""
        named = tree.named(params)
        if not any(re.search(self.pattern, path) for path, _ in named):
            raise ValueError(f"pattern={self.pattern!r} matches no path; {nearest(self.pattern, [path for path, _ in named])}")
        self._check_lists(named)
        return tree.map_named(lambda path, leaf: self._cut(path, leaf) if self._matches(path) else leaf, params)

    def _matches(self, path: str) -> bool:
        return self.ep.size > 1 and re.search(self.pattern, path) is not None

    def _check_lists(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Raises an error for a list of experts, each with leaves of its own: only stacks can be split.

        Raises:
            ValueError: there is such a list.
        """
        lists: dict[str, list[tuple[str, Tensor]]] = {}
        number = re.compile(r"(?<![^.])\d+(?=\.|$)")
        for path, leaf in named:
            hit = re.search(self.pattern, path)
            digits = None if hit is None or _owner_of(leaf)[0] is not None else number.search(path, hit.start())
            if digits is not None:
                lists.setdefault(path[: digits.start()].removesuffix("."), []).append((path, leaf))
        for name, leaves in lists.items():
            if self.ep.size > 1 and max(leaf.dim() for _, leaf in leaves) < 3:
                path, leaf = leaves[0]
                raise ValueError(
                    f"pattern: {path!r} of shape {list(leaf.shape)} is one expert's in the list {name!r}, and no stack of "
                    "experts along dim 0: put the list into one tree, torch.stack of each leaf, and call the experts by "
                    "fds.moe.each_expert (modules: fds.moe.StackedExperts)"
                )

    def _cut(self, path: str, leaf: Tensor) -> Tensor:
        shape, n = list(leaf.shape), self.ep.size
        owner, stacked = _owner_of(leaf)
        if isinstance(owner, (nn.Linear, nn.Embedding, nn.LayerNorm)) and not stacked:
            raise ValueError(
                f"pattern: {path!r} belongs to an nn.{type(owner).__name__}, which is not a stack of experts along dim 0 (a "
                r"router, or a shared expert?); begin the pattern with what the experts alone have, such as r'\.experts\.', "
                "and make experts that are modules of a list one stack by fds.moe.StackedExperts"
            )
        if owner is not None:
            self._of_modules.add(path)
        matrices = stacked or owner is None or max(parameter.dim() for parameter in owner.parameters(recurse=False)) > 2
        if len(shape) < 3 and not matrices:
            raise ValueError(
                f"pattern: {path!r} of shape {shape} belongs to a {type(owner).__name__} without a stack of matrices "
                "[experts, a, b], so it is a router rather than experts, and each rank would choose among its own part of "
                r"them; let the pattern begin with what the experts alone have, such as r'\.experts\.'"
            )
        if not shape or shape[0] % n:
            raise ValueError(
                f"pattern: {path!r} of shape {shape} does not divide along dim 0 by the {n} ranks {list(self.ep.ranks)} of "
                f"{self.ep.name!r}: each must hold as many experts"
            )
        if any(cut.dim == 0 for cut in slices_of(leaf)):
            raise ValueError(f"pattern: {path!r} of shape {shape} is split along dim 0 already; let one transform split it")
        piece = sliced(leaf, LeafSlice.even(0, shape[0], n, self.ep.rank))
        return mark_sharers(piece, self.blocks)

    def params(self, inner: Any, step: Step, state: State) -> Any:
        """The user's tree, with the experts of all ranks."""
        params = inner(step, state)

        def whole(path: str, leaf: Tensor) -> Tensor:
            if not self._matches(path):
                return leaf
            gathered = like_marked(comm.all_gather(leaf.detach(), self.ep), leaf)
            return mark_sharers(mark_slices(gathered, tuple(cut for cut in slices_of(leaf) if cut.dim)), None)

        return tree.map_named(whole, params)

    # -- guards --------------------------------------------------------------------------------------------------------

    def guard_view(self, inner: Any, step: Step, state: State, trains: bool, whole: bool) -> View:
        """Refuses a loss that reads experts outside the exchange.

        Raises:
            ValueError: a gradient reaches experts without a collective over ``ep``.
        """
        view: View = inner(step, state, trains, whole)
        if not self.ep.compares or step.has(AxisRole.STAGES):
            return view
        plain = {id(leaf): path for path, leaf in tree.named(view.params)}

        def path_of(node: Any, output: int) -> str | None:
            return plain.get(id(getattr(node, "variable", None))) or view.path_of(node, output)

        def inspect(roots: Sequence[Tensor]) -> None:
            path = read_alone(roots, self.ep, path_of, self._matches)
            if path is not None:
                raise ValueError(
                    f"{self}: the loss reads the leaf {path!r} in addition to what it sends among the ranks of "
                    f"{self.ep.name!r}, as a penalty on all params does: each rank has 1/{self.ep.size} of the experts, so "
                    f"that term would count {self.ep.size} times too little for them. Decay weights in the optimizer, leave "
                    "experts out of the term, or sum their part over the ranks: comm.all_reduce(term, axis('ep').group)"
                )

        return attrs.evolve(view, guards=(*view.guards, inspect))

    def guard_forward(self, inner: Any, step: Step, state: State, function: Any, batch: Any) -> Any:
        """Refuses, in the first pass, a module with experts whose loss sends nothing over ``ep``.

        Raises:
            ValueError: it is such a loss.
        """
        if state.batch is not None or not self._of_modules or self.ep.size == 1 or step.has(AxisRole.STAGES):
            return inner(step, state, function, batch)
        alone = ValueError(
            f"{self}: the loss sends nothing among the ranks of {self.ep.name!r}, so each rank would use its own experts "
            "alone: let the model's experts go through fds.moe.exchange; a Hugging Face model does if it takes "
            "experts_implementation=fds.moe.register_experts()"
        )
        try:
            with comm.ledger() as sent:
                result = inner(step, state, function, batch)
        except (RuntimeError, IndexError) as error:
            if type(error) in (RuntimeError, IndexError) and not asked("ep") and _in_experts(error):
                raise alone from error
            raise
        zero = step.leaf_map(state).group
        others = () if zero is None or zero.name == self.ep.name else (zero.name,)
        if not asked("ep") and not any(row.ranks == self.ep.ranks and row.group not in others for row in sent.rows):
            raise alone
        return result


def _in_experts(error: Exception) -> bool:
    """Whether torch's error comes from a module with a stack of matrices."""
    modules = [module for _, module in traced(error.__traceback__) if module is not None]
    return any(leaf is not None and leaf.dim() > 2 for module in modules[-1:] for leaf in parameters_of(module).values())


def _owner_of(leaf: Tensor) -> tuple[nn.Module | None, bool]:
    """The module whose parameter a leaf is, and whether it belongs to a stack of experts."""
    known = module_of(leaf)
    if known is None:
        return None, False
    module: nn.Module = known[0].module
    parts = known[1].split(".")[:-1]
    owners = [module.get_submodule(".".join(parts[:count])) for count in range(len(parts) + 1)]
    return owners[-1], any(isinstance(owner, StackedExperts) for owner in owners)


experts = Experts


def read_alone(
    roots: Sequence[Tensor], ep: comm.Group, path_of: Callable[[Any, int], str | None], matches: Callable[[str], bool]
) -> str | None:
    """The path of an expert leaf that a gradient reaches without a collective over ``ep``; None if there is none.

    Args:
        roots: where the backward pass begins.
        ep: the ranks that experts are split over.
        path_of: the path of the leaf that is an output of a node of the graph; None if it is not a leaf.
        matches: whether a path is that of experts.
    """
    todo: list[Any] = [root.grad_fn for root in roots if root.grad_fn is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        group = getattr(node, "group", None)
        if isinstance(group, comm.Group) and set(ep.ranks) <= set(group.ranks):
            continue
        for next_node, output in node.next_functions:
            if next_node is None:
                continue
            path = path_of(next_node, output)
            if path is not None and matches(path):
                return path
            if next_node not in seen:
                seen.add(next_node)
                todo.append(next_node)
    return None
