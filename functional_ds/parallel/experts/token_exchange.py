"""Token dispatch and combine: tokens are sent to the ranks of their experts, and the results back."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import attrs
import torch
from torch import Tensor

from functional_ds import comm
from functional_ds.base import tree
from functional_ds.comm.agreement.alike import alike
from functional_ds.comm.record.group import Ready
from functional_ds.comm.worlds.current import recorder, runs_on_shapes
from functional_ds.step.axes import axis
from functional_ds.step.pass_scope import current_pass

from .axis import ExpertAxis
from .closures import closed_over
from .grouped import RowGroups, even_rows
from .routing import Routing, check_shapes, overflow_error
from .token_order import TokenOrder, combine, spread

Way = Literal["auto", "all_to_all", "gather", "by_rank"]
ExpertFunction = Callable[[Tensor, RowGroups], Tensor]


@attrs.frozen
class ExchangeVolume:
    """The elements that each rank sends in one forward pass, and again in its backward pass, for each way of exchange.

    Attributes:
        all_to_all: for even routing.
        gather: for any routing.
        by_rank: for even routing.
    """

    all_to_all: float
    gather: float
    by_rank: float

    @property
    def way(self) -> Literal["all_to_all", "gather", "by_rank"]:
        """The cheapest way."""
        if self.by_rank < min(self.all_to_all, self.gather):
            return "by_rank"
        return "gather" if self.gather < self.all_to_all else "all_to_all"


def exchange_volume(tokens: int, k: int, *, width: int, ranks: int, reach: int | None = None) -> ExchangeVolume:
    """What an exchange sends: ``2 T k M (P - 1)/P`` elements by all-to-all, ``2 T M (P - 1)`` by gathering; less if k > P.

    By rank it is ``2 T r M (P - 1)/P``, if a token's experts are on r ranks: less than both if r < k and r < P.

    Args:
        tokens: T, of one rank.
        k: experts per token.
        width: M, of a row.
        ranks: P, of the expert-parallel group.
        reach: r, as from ``Routing.reach``; None for the most, min(k, P).

    >>> exchange_volume(100, 4, width=8, ranks=4, reach=2)
    ExchangeVolume(all_to_all=4800.0, gather=4800, by_rank=2400.0)
    """
    sent = 2 * tokens * width * (ranks - 1)
    return ExchangeVolume(sent * k / ranks, sent, sent * (min(k, ranks) if reach is None else reach) / ranks)


def exchange(
    f: ExpertFunction,
    x: Tensor,
    *,
    routing: Routing,
    group: comm.Group | None = None,
    way: Way = "auto",
    shared: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """The mixture of experts ``Σ_j w_j f_{e_j}(x)``, with E / P experts on each rank of ``group``.

    For any routing, value and gradients (by x, the weights and the experts' params) equal a single device's with all
    experts, also if a rank has no tokens or gets all of them. A choice dropped by capacity adds nothing. Each rank has its own
    tokens, results, and gradients of x and the weights. The gradients of a rank's experts are summed over the tokens of all
    ranks of ``group``, so divide them by the weight of these tokens, as ``T.zero`` over all data-parallel ranks does.

    Cost, in elements forward, and again backward:

    - ``all_to_all`` sends a row for each choice on another rank and gets one back: 2 T k M (P - 1)/P for even routing, and E (P
      - 1)/P integers forward only.
    - ``gather`` sends every token to all ranks and sums their parts: 2 T M (P - 1), the routing's 2 T k (P - 1), of which T k
      integers forward only, and (E + 1)(P - 1) counts, for any routing; T is the largest of the ranks'.
    - ``by_rank`` sends a token once to each rank with some of its experts, with its k ids and weights, and gets one row back.
      For device-limited routing over r ranks: 2 T r M (P - 1)/P, and (E + P)(P - 1)/P counts.

    The host waits once, for the numbers of rows.

    Args:
        f: a function of rows [R, M], sorted by local expert, and their ``RowGroups``: [R, M']. It is called once, also without
            rows. ``gated_mlp`` makes one.
        x: [..., M], the tokens.
        routing: their experts, as from ``route``; T is the product of x's leading sizes.
        group: the ranks that hold the experts, rank r E/P of them from r E/P on. None: those of the running step
            (``T.experts``), or else one device with all experts.
        way: "auto" takes the cheapest by ``exchange_volume``: "by_rank" if the routing's groups limit a token to fewer ranks
            than k and P, else "gather" if k > P, else "all_to_all".
        shared: a function of x that is computed during communication; its result is added.

    Raises:
        ValueError: sizes that do not match, experts that are not divisible by the ranks, or an overflow with ``drop="error"``,
            which all ranks report.

    >>> import functional_ds as fds
    >>> def program(x):
    ...     scale = torch.tensor([1.0, 10.0])[comm.world().rank]  # two experts, one on each rank
    ...     routing = fds.moe.Routing(torch.tensor([[0], [1]]), torch.ones(2, 1), 2)
    ...     return exchange(lambda rows, groups: scale * rows, x, routing=routing, group=comm.world()).tolist()
    >>> comm.simulate(program, torch.ones(2, 1), world_size=2)
    [[[1.0], [10.0]], [[1.0], [10.0]]]
    """
    if way not in ("auto", *_WAYS):
        raise ValueError(f"way={way!r}: 'auto', 'all_to_all', 'gather' or 'by_rank'")
    group = _ranks(group)
    size = 1 if group is None else group.size
    rows = x.reshape(-1, x.shape[-1])
    _check(rows, x, routing, size)
    traced = recorder().traces
    if traced or group is None or size == 1:
        out = _as_one_call(f, rows, routing, group, way) if traced else _alone(f, rows, routing)
        if size > 1 and not len(rows):
            _keep(out)
        out = out.view(*x.shape[:-1], out.shape[-1])
        return out if shared is None else out + shared(x)
    volume = exchange_volume(1, routing.experts.shape[1], width=1, ranks=size, reach=routing.reach(size))
    with alike("moe.exchange", group, experts=routing.count, k=routing.experts.shape[1], way=way):
        under_way = _WAYS[volume.way if way == "auto" else way](routing, group).start(rows, beside=shared is not None)
    beside = None if shared is None else shared(x)
    out = under_way(f)
    if not len(rows):
        _keep(out)
    out = out.view(*x.shape[:-1], out.shape[-1])
    return out if beside is None else out + beside


def _ranks(group: comm.Group | None) -> comm.Group | None:
    if group is not None:
        if not isinstance(group, comm.Group):
            raise TypeError(f"group={group!r} is not a group: pass mesh['ep'], or None within a step that has T.experts")
        return group
    ep_axis = axis("ep")
    return ep_axis.group if isinstance(ep_axis, ExpertAxis) else None


def _as_one_call(f: ExpertFunction, rows: Tensor, routing: Routing, group: comm.Group | None, way: Way) -> Tensor:
    """The exchange in a traced step: its sizes depend on values, so the graph calls it as one operation."""
    closure, rebuilt = closed_over(f)
    leaves, spec = tree.flatten((rows, tree.replace(routing, probabilities=None), closure))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def run(*given: Tensor) -> Tensor:
        now = [*leaves]
        for place, x in zip(places, given, strict=True):
            now[place] = x
        rows, routing, closure = tree.unflatten(spec, now)
        return exchange(rebuilt(closure), rows, routing=routing, group=group, way=way)

    tensors = [leaves[place] for place in places]
    for place in places:  # tensors of the trace would stay as long as the graph
        leaves[place] = None
    return recorder().eager(run, tensors)


def _check(rows: Tensor, x: Tensor, routing: Routing, ranks: int) -> None:
    check_shapes(routing)
    if len(routing.experts) != len(rows):
        raise ValueError(
            f"a routing of {len(routing.experts)} tokens for x of shape {list(x.shape)}, which has {len(rows)}: route these"
        )
    if routing.count % ranks:
        raise ValueError(f"{routing.count} experts do not divide by the {ranks} ranks of the expert-parallel group")


def _keep(out: Tensor) -> None:
    """Makes the backward pass reach the exchange on a rank without tokens, even if its loss is a constant."""
    pass_ = current_pass()
    if pass_ is not None and pass_.trains and out.requires_grad:
        pass_.roots.append(out)


def _alone(f: ExpertFunction, rows: Tensor, routing: Routing) -> Tensor:
    """On one device; the host waits only if capacity may have dropped or exceeded rows."""
    order = TokenOrder.of(routing.experts, routing.kept, routing.count)
    load = routing.load()
    if routing.overflow is not None and not runs_on_shapes(rows):
        overflow_error(routing, [routing.overflow.tolist()])
    if routing.kept is None:
        return combine(f(spread(rows, order), RowGroups.of(load)), routing.weights, order)
    counts = even_rows(routing.experts.numel(), routing.count) if runs_on_shapes(rows) else load.tolist()
    order = order.cut(sum(counts))
    return combine(f(spread(rows, order), RowGroups(load.cumsum(0).to(torch.int32), tuple(counts))), routing.weights, order)


@attrs.frozen(eq=False)
class _Exchange:
    routing: Routing
    group: comm.Group

    @property
    def ids(self) -> Tensor:
        """The experts that each token has chosen; -1 for choices that are dropped."""
        experts, kept = self.routing.experts, self.routing.kept
        return experts if kept is None else experts.masked_fill(~kept, -1)

    def _begun(self, collective: Callable[..., Any], sent: Any, *, beside: bool, **splits: list[int]) -> Callable[[], Any]:
        """Starts to send; the result waits for what arrives. ``beside``: whether there is work to overlap with it."""
        request = comm.table.prepare(collective, sent, self.group, **splits)
        return request.start().wait if beside else Ready(request.run()).wait

    def _of_local_experts(self, f: ExpertFunction, arrived: Mapping[str, Tensor], counts: list[int], table: Tensor) -> Tensor:
        """The part of each token's result that this rank's experts compute, which get ``counts`` rows."""
        local = arrived["ids"] - self.group.rank * len(counts)
        kept = (local >= 0) & (local < len(counts))
        order = TokenOrder.of(local.masked_fill(~kept, 0), kept, len(counts)).cut(sum(counts))
        return combine(f(spread(arrived["rows"], order), _groups(counts, table)), arrived["weights"], order)


class _ExchangeByAllToAll(_Exchange):
    """Rows are sent to the ranks of their experts."""

    def start(self, rows: Tensor, *, beside: bool) -> Callable[[ExpertFunction], Tensor]:
        """Sends the rows; the result completes the exchange. ``beside``: whether there is work to overlap with it."""
        order = TokenOrder.of(self.routing.experts, self.routing.kept, self.routing.count)
        sent, counts, table = self._counts(rows)
        order = order.cut(sum(sent))
        received = [sum(source_counts) for source_counts in counts]  # by source
        rows = spread(rows, order)
        wait = self._begun(comm.all_to_all, rows, beside=beside, input_splits=sent, output_splits=received)

        def rest(f: ExpertFunction) -> Tensor:
            arrived = wait()  # sorted by source, then by expert
            by_expert = _by_expert(counts, table)
            groups = _groups([sum(expert_counts) for expert_counts in zip(*counts, strict=True)], table)
            done = f(arrived, groups) if by_expert is None else combine(f(spread(arrived, by_expert), groups), None, by_expert)
            back = comm.all_to_all(done, self.group, input_splits=received, output_splits=sent)
            return combine(back, self.routing.weights, order)

        return rest

    def _counts(self, rows: Tensor) -> tuple[list[int], list[list[int]], Tensor]:
        """The numbers of rows that go to each rank, and that come from each rank for each local expert, also on the device."""
        size, routing = self.group.size, self.routing
        load = routing.load().view(size, -1)  # [P, E / P]
        told = load if routing.overflow is None else torch.cat([load, routing.overflow.expand(size, 3)], 1)
        heard = comm.all_to_all(told, self.group)
        if runs_on_shapes(rows):
            even, local = even_rows(routing.experts.numel(), routing.count), load.shape[1]
            here = even[self.group.rank * local : (self.group.rank + 1) * local]
            sent = [sum(even[r * local : (r + 1) * local]) for r in range(size)]
            return sent, [here] * size, heard[:, :local]
        numbers = torch.cat([load.sum(1), heard.flatten()]).tolist()  # the host waits here
        sent, width = numbers[:size], heard.shape[1]
        counts = [numbers[start : start + width] for start in range(size, len(numbers), width)]
        if routing.overflow is not None:
            overflow_error(routing, [by_rank[-3:] for by_rank in counts])
            counts = [by_rank[:-3] for by_rank in counts]
        return sent, counts, heard[:, : load.shape[1]]


def _groups(counts: list[int], table: Tensor) -> RowGroups:
    """From the rows of each expert, and the same by source on the device."""
    return RowGroups(table.sum(0).cumsum(0).to(torch.int32), tuple(counts))


def _by_expert(counts: list[list[int]], table: Tensor) -> TokenOrder | None:
    """From rows sorted by source to rows sorted by expert; None where that is the same."""
    blocks = [expert for by_expert in counts for expert, rows in enumerate(by_expert) if rows]
    if blocks == sorted(blocks):
        return None
    experts = torch.arange(table.shape[1], device=table.device).repeat(len(table))
    ids = experts.repeat_interleave(table.flatten(), output_size=sum(map(sum, counts)))  # of each row
    return TokenOrder.of(ids[:, None], None, table.shape[1])


class _ExchangeByGather(_Exchange):
    """Every rank gets all tokens, and computes its experts' part of each."""

    def start(self, rows: Tensor, *, beside: bool) -> Callable[[ExpertFunction], Tensor]:
        """Gathers the tokens; the result completes the exchange. ``beside``: whether there is work to overlap with it."""
        routing, group = self.routing, self.group
        tokens, counts, table = self._counts(rows)
        most = max(tokens)
        mine = {"rows": rows, "weights": routing.weights, "ids": self.ids}
        if min(tokens) < most:
            mine = {
                name: torch.cat([leaf, leaf.new_full((most - len(rows), leaf.shape[1]), -1 if name == "ids" else 0)])
                for name, leaf in mine.items()
            }
        wait = self._begun(comm.all_gather, mine, beside=beside)

        def rest(f: ExpertFunction) -> Tensor:
            part = self._of_local_experts(f, wait(), counts, table)
            return comm.reduce_scatter(part, group)[: len(rows)]

        return rest

    def _counts(self, rows: Tensor) -> tuple[list[int], list[int], Tensor]:
        """Every rank's tokens, the rows of each local expert, and these by source on the device."""
        size, routing = self.group.size, self.routing
        per_rank = routing.count // size
        local = slice(self.group.rank * per_rank, (self.group.rank + 1) * per_rank)
        told = [routing.load(), routing.experts.new_full((1,), len(rows))]
        told += [] if routing.overflow is None else [routing.overflow]
        heard = comm.all_gather(torch.cat(told), self.group, tiled=False)
        if runs_on_shapes(rows):
            even = [rows * size for rows in even_rows(routing.experts.numel(), routing.count)[local]]
            return [len(rows)] * size, even, heard[:, local]
        numbers = heard.tolist()  # the host waits here
        if routing.overflow is not None:
            overflow_error(routing, [by_rank[-3:] for by_rank in numbers])
        counts = [sum(by_expert) for by_expert in zip(*(by_rank[local] for by_rank in numbers), strict=True)]
        return [by_rank[routing.count] for by_rank in numbers], counts, heard[:, local]


class _ExchangeByRank(_Exchange):
    """A token is sent once to each rank that holds some of its experts, which sums its part of the result."""

    def start(self, rows: Tensor, *, beside: bool) -> Callable[[ExpertFunction], Tensor]:
        """Sends the tokens; the result completes the exchange. ``beside``: whether there is work to overlap with it."""
        routing, group = self.routing, self.group
        per_rank = routing.count // group.size
        ranks = routing.experts // per_rank
        first = _first_choices(ranks, routing.kept)
        sent, received, counts, table = self._counts(rows, torch.where(first, ranks, group.size))
        order = TokenOrder.of(ranks, first, group.size).cut(sum(sent))
        mine = {"rows": spread(rows, order), "weights": spread(routing.weights, order), "ids": self.ids[order.tokens]}
        wait = self._begun(comm.all_to_all, mine, beside=beside, input_splits=sent, output_splits=received)

        def rest(f: ExpertFunction) -> Tensor:
            part = self._of_local_experts(f, wait(), counts, table)
            return combine(comm.all_to_all(part, group, input_splits=received, output_splits=sent), None, order)

        return rest

    def _counts(self, rows: Tensor, targets: Tensor) -> tuple[list[int], list[int], list[int], Tensor]:
        """The tokens to and from each rank, the rows of each local expert, and these by source on the device."""
        size, routing = self.group.size, self.routing
        load = routing.load().view(size, -1)  # [P, E / P]
        flat = targets.flatten()
        tokens = torch.zeros(size + 1, dtype=flat.dtype, device=flat.device).index_add_(0, flat, torch.ones_like(flat))[:size]
        told = [load, tokens[:, None]] + ([] if routing.overflow is None else [routing.overflow.expand(size, 3)])
        heard = comm.all_to_all(torch.cat(told, 1), self.group)
        per_rank = load.shape[1]
        if runs_on_shapes(rows):
            rank = self.group.rank
            here = even_rows(routing.experts.numel(), routing.count)[rank * per_rank : (rank + 1) * per_rank]
            even = even_rows(len(rows) * routing.reach(size), size)
            return even, [even[rank]] * size, [size * count for count in here], heard[:, :per_rank]
        numbers = torch.cat([tokens, heard.flatten()]).tolist()  # the host waits here
        wide = heard.shape[1]
        by_rank = [numbers[start : start + wide] for start in range(size, len(numbers), wide)]
        if routing.overflow is not None:
            overflow_error(routing, [row[-3:] for row in by_rank])
        counts = [sum(row[expert] for row in by_rank) for expert in range(per_rank)]
        return numbers[:size], [row[per_rank] for row in by_rank], counts, heard[:, :per_rank]


def _first_choices(ranks: Tensor, kept: Tensor | None) -> Tensor:
    """Of each token's kept choices [T, k], the first on each rank."""
    same = ranks[:, :, None] == ranks[:, None, :]
    same = same if kept is None else same & kept[:, None, :]
    first = ~same.tril(-1).any(-1)
    return first if kept is None else first & kept


_WAYS: dict[str, type[_ExchangeByAllToAll] | type[_ExchangeByGather] | type[_ExchangeByRank]] = {
    "all_to_all": _ExchangeByAllToAll,
    "gather": _ExchangeByGather,
    "by_rank": _ExchangeByRank,
}
