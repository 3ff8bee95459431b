"""Laws 46 and 47: experts on P ranks are one device's, for any routing; what is sent is the formula's."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from functional_ds import comm, moe
from functional_ds.step.pass_scope import Pass
from functional_ds.step.views.plain_view import stored_view
from functional_ds.testing import simulated_cuda
from tests.parallel.experts.oracle import E, M, close, gradients, mixture, numbers, on, own, weights_of

TOKENS = (5, 7, 0, 2)  # of each rank


def routing_of(tokens: int, k: int, *, seed: int, spread: str) -> moe.Routing:
    """Any experts, the same for all tokens, or those of one rank alone."""
    logits = numbers(tokens, E, seed=seed)
    bias = {"any": torch.zeros(E), "one rank": torch.tensor([50.0, 50.0, 0, 0]), "same": torch.tensor([0, 50.0, 0, 50.0])}
    chosen = moe.route(logits, k, bias=bias[spread])
    return moe.Routing(chosen.experts, chosen.weights, E)


def on_ranks(ranks: int, k: int, spread: str, way: str, *, shared: bool = False) -> list[dict[str, Tensor]]:
    """Value and gradients of each rank."""

    def program() -> dict[str, Tensor]:
        group = comm.world()
        routing = routing_of(TOKENS[group.rank], k, seed=group.rank, spread=spread)
        leaves = on(
            {"x": numbers(TOKENS[group.rank], M, seed=10 + group.rank), "w": routing.weights, **own(weights_of(), group)}
        )
        routing = moe.Routing(routing.experts, leaves["w"], E)
        f = moe.gated_mlp(leaves["gate_up"], leaves["down"])
        beside = (lambda x: 2 * x.tanh()) if shared else None
        y = moe.exchange(f, leaves["x"], routing=routing, group=group, way=way, shared=beside)  # type: ignore[arg-type]
        return {"y": y.detach(), **gradients((y * numbers(*y.shape, seed=20 + group.rank)).sum(), leaves)}

    return comm.simulate(program, world_size=ranks)


def on_one_device(ranks: int, k: int, spread: str, *, shared: bool = False) -> list[dict[str, Tensor]]:
    """What each rank should have."""
    routings = [routing_of(TOKENS[r], k, seed=r, spread=spread) for r in range(ranks)]
    xs = on({f"x{r}": numbers(TOKENS[r], M, seed=10 + r) for r in range(ranks)})
    ws = on({f"w{r}": routing.weights for r, routing in enumerate(routings)})
    params = on(weights_of())
    ys = [mixture(params, xs[f"x{r}"], moe.Routing(routings[r].experts, ws[f"w{r}"], E)) for r in range(ranks)]
    ys = [y + 2 * xs[f"x{r}"].tanh() for r, y in enumerate(ys)] if shared else ys
    loss = torch.stack([(y * numbers(*y.shape, seed=20 + r)).sum() for r, y in enumerate(ys)]).sum()
    found = gradients(loss, {**xs, **ws, **params})
    return [
        {
            "y": ys[r].detach(),
            "x": found[f"x{r}"],
            "w": found[f"w{r}"],
            **{name: found[name].chunk(ranks)[r] for name in params},
        }
        for r in range(ranks)
    ]


@pytest.mark.law(46, 47)
@given(
    ranks=st.sampled_from((1, 2, 4)),
    k=st.sampled_from((1, 2, 4)),
    spread=st.sampled_from(("any", "one rank", "same")),
    way=st.sampled_from(("auto", "all_to_all", "gather", "by_rank")),
    shared=st.booleans(),
)
def test_experts_on_ranks_are_one_device(ranks: int, k: int, spread: str, way: str, shared: bool) -> None:
    """Value, and gradients by x, the weights of the routing and the experts; ranks without tokens or without rows included."""
    expected = on_one_device(ranks, k, spread, shared=shared)
    for found, wanted in zip(on_ranks(ranks, k, spread, way, shared=shared), expected, strict=True):
        for name in wanted:
            close(found[name], wanted[name])


@pytest.mark.law(46)
@given(k=st.sampled_from((1, 2, 3)), ranks=st.sampled_from((1, 2, 4)), way=st.sampled_from(("all_to_all", "gather", "by_rank")))
def test_combining_what_was_dispatched_sums_the_kept_weights(k: int, ranks: int, way: Any) -> None:
    """combine ∘ dispatch (x) = (Σ kept weights) x, with capacity, for integers bitwise."""

    def program() -> None:
        rank = comm.world().rank
        routing = moe.route(numbers(8, E, seed=rank), k, capacity=moe.Capacity(0.8, rows=4))
        assert routing.kept is not None
        weights = torch.randint(1, 5, routing.weights.shape, generator=torch.Generator().manual_seed(rank)).double()
        x = torch.randint(-4, 5, (8, M), generator=torch.Generator().manual_seed(rank)).double()
        routing = moe.Routing(routing.experts, weights, E, kept=routing.kept)
        y = moe.exchange(lambda rows, groups: rows, x, routing=routing, group=comm.world(), way=way)
        assert torch.equal(y, (weights * routing.kept).sum(1, keepdim=True) * x)

    comm.simulate(program, world_size=ranks)


def even(tokens: int, k: int, experts: int) -> Tensor:
    """Each expert is chosen equally often by the tokens of one rank."""
    return (torch.arange(tokens)[:, None] + torch.arange(k) * (experts // k)) % experts


@pytest.mark.law(46)
@pytest.mark.parametrize(("ranks", "k"), [(2, 1), (2, 2), (4, 2), (4, 4), (8, 2)])
@pytest.mark.parametrize("way", ["all_to_all", "gather"])
def test_what_is_sent_is_the_formula(ranks: int, k: int, way: Any) -> None:
    """At even routing: 2TkM(P-1)/P by all-to-all, 2TM(P-1) by gathering, and as much backward; in so many messages."""
    tokens, experts = 16, 8

    def program() -> Any:
        group = comm.world()
        routing = moe.Routing(even(tokens, k, experts), torch.full((tokens, k), 0.5, requires_grad=True), experts)
        x = torch.ones(tokens, M, requires_grad=True)
        scale = torch.ones((), requires_grad=True)
        with comm.ledger() as forward:
            y = moe.exchange(lambda rows, groups: rows * scale, x, routing=routing, group=group, way=way)
        with comm.ledger() as backward:
            y.sum().backward()
        return [{row.collective: (row.calls, row.elements) for row in book.rows} for book in (forward, backward)]

    volume = moe.exchange_volume(tokens, k, width=M, ranks=ranks)
    half, others = tokens * k * M * (ranks - 1) // ranks, ranks - 1
    for forward, backward in comm.simulate(program, world_size=ranks):
        if way == "all_to_all":
            assert volume.all_to_all == 2 * half
            assert forward == {"all_to_all": (3, 2 * half + experts * others // ranks)}
            assert backward == {"all_to_all": (2, 2 * half)}
        else:
            half, routing = tokens * M * others, tokens * k * others
            assert volume.gather == 2 * half
            assert forward == {
                "all_gather": (2, half + 2 * routing + (experts + 1) * others),
                "reduce_scatter": (1, half),
            }
            assert backward == {"all_gather": (1, half), "reduce_scatter": (1, half + routing)}


@pytest.mark.law(46)
def test_device_limited_tokens_travel_once_to_each_rank() -> None:
    """Experts on at most two of four ranks: 2TrM(P-1)/P elements in place of 2TkM(P-1)/P, as much backward; the same result."""
    tokens, experts, k, reach = 16, 16, 6, 2
    logits = numbers(4 * tokens, experts, seed=5).view(4, tokens, experts)
    limited = moe.route(logits.flatten(0, 1), k, groups=4, top_groups=reach, group_top=1)
    whole = mixture(weights_of(experts), numbers(4 * tokens, M, seed=6), limited).chunk(4)

    def program() -> Any:
        group = comm.world()
        routing = moe.route(logits[group.rank], k, groups=4, top_groups=reach, group_top=1)
        leaves = on({"x": numbers(4 * tokens, M, seed=6).chunk(4)[group.rank], **own(weights_of(experts), group)})
        with comm.ledger() as book:
            y = moe.exchange(moe.gated_mlp(leaves["gate_up"], leaves["down"]), leaves["x"], routing=routing, group=group)
        close(y, whole[group.rank])
        chosen = [{int(e) // 4 for e in token} for token in routing.experts]  # each token's ranks, in plain Python
        assert max(map(len, chosen)) <= reach
        sent = sum(rank != group.rank for token in chosen for rank in token)
        back = sum(group.rank in {int(e) // 4 for e in token} for r in range(4) if r != group.rank for token in routed[r])
        assert book.elements == sent * (M + 2 * k) + back * M + 3 * (4 + 1)
        return book.rows

    routed = [moe.route(each, k, groups=4, top_groups=reach, group_top=1).experts for each in logits]
    for rows in comm.simulate(program, world_size=4):
        assert [(row.collective, row.calls) for row in rows] == [("all_to_all", 3)]
    volume = moe.exchange_volume(tokens, k, width=M, ranks=4, reach=limited.reach(4))
    assert (volume.by_rank, volume.way) == (2 * tokens * reach * M * 3 / 4, "by_rank")
    assert moe.route(logits[0], k, groups=8, top_groups=3).reach(4) == 3  # two groups on a rank
    assert moe.route(logits[0], k, groups=2, top_groups=1).reach(4) == 2  # a group of two ranks
    assert moe.Routing(limited.experts, limited.weights, experts).reach(4) == 4  # nobody says


def test_the_cheaper_way_is_taken() -> None:
    """Gathering is cheaper iff k > P."""
    for ranks in (2, 4, 8):
        for k in (1, 2, 3, 4, 5, 8):
            assert (moe.exchange_volume(10, k, width=4, ranks=ranks).way == "gather") == (k > ranks)

    def program(k: int) -> set[str]:
        routing = moe.Routing(even(8, k, 8), torch.ones(8, k), 8)
        with comm.ledger() as book:
            moe.exchange(lambda rows, groups: rows, torch.ones(8, M), routing=routing, group=comm.world())
        return {row.collective for row in book.rows}

    assert comm.simulate(program, 2, world_size=2)[0] == {"all_to_all"}
    assert comm.simulate(program, 4, world_size=2)[0] == {"all_gather", "reduce_scatter"}


@pytest.mark.parametrize("way", ["all_to_all", "gather", "by_rank"])
@pytest.mark.parametrize("drop", [None, "error", "probability"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_host_waits_once(way: Any, drop: Any, ranks: int) -> None:
    """On a simulated GPU: for the numbers of rows; not at all where one device has all experts and all choices."""
    capacity = None if drop is None else moe.Capacity(4.0, rows=3, drop=drop)

    def program() -> None:
        group = comm.world() if ranks > 1 else None
        with simulated_cuda() as gpu:
            whole = weights_of() if group is None else own(weights_of(), group)
            params = {name: leaf.float().cuda().requires_grad_() for name, leaf in whole.items()}
            x, logits = (numbers(6, width).float().cuda().requires_grad_() for width in (M, E))
            gpu.clear()
            routing = moe.route(logits, 2, normalise=True, capacity=capacity)
            y = moe.exchange(moe.gated_mlp(**params), x, routing=routing, group=group, way=way, shared=torch.tanh)
            loss = y.square().sum() + moe.balance_loss(routing, group=group) + moe.z_loss(logits)
            torch.autograd.grad(loss, [x, logits, *params.values()])
            assert [found.text.partition(" ")[0] for found in gpu.host_syncs] == ["tolist"] * (ranks > 1 or drop is not None)

    comm.simulate(program, world_size=ranks)


@pytest.mark.parametrize("way", ["all_to_all", "gather", "by_rank"])
def test_a_second_derivative_is_one_device_s(way: Any) -> None:
    """A gradient penalty through the exchange."""

    def penalty(y: Tensor, x: Tensor, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        (by_x,) = torch.autograd.grad((y**2).sum(), [x], create_graph=True)
        return gradients((by_x**2).sum(), leaves)

    routing = moe.route(numbers(6, E), 2)

    def program() -> dict[str, Tensor]:
        group = comm.world()
        leaves = on({"x": numbers(6, M).chunk(2)[group.rank], **own(weights_of(), group)})
        mine = moe.Routing(routing.experts.chunk(2)[group.rank], routing.weights.chunk(2)[group.rank], E)
        y = moe.exchange(moe.gated_mlp(leaves["gate_up"], leaves["down"]), leaves["x"], routing=mine, group=group, way=way)
        return penalty(y, leaves["x"], leaves)

    leaves = on({"x": numbers(6, M), **weights_of()})
    expected = penalty(mixture({n: leaves[n] for n in ("gate_up", "down")}, leaves["x"], routing), leaves["x"], leaves)
    for rank, found in enumerate(comm.simulate(program, world_size=2)):
        for name in expected:
            close(found[name], expected[name].chunk(2)[rank])


@pytest.mark.parametrize(
    ("dtype", "router"), [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)]
)
def test_half_precision_sums_in_fp32(dtype: torch.dtype, router: torch.dtype) -> None:
    """The combined result is rounded once; the weights' gradients come in their own dtype."""
    x = (numbers(64, M) * 4).round().to(dtype)
    weights = (((numbers(64, 3).abs() * 16).round() + 1) / 16).to(router).requires_grad_()  # sums that fp32 has exactly
    routing = moe.Routing(moe.route(numbers(64, E), 3).experts, weights, E)
    y = moe.exchange(lambda rows, groups: rows, x, routing=routing)
    assert y.dtype == dtype
    assert torch.equal(y, (x.float() * weights.float().sum(1, keepdim=True)).to(dtype))
    y.float().sum().backward()
    assert weights.grad is not None
    assert weights.grad.dtype == router


def test_a_rank_without_tokens_may_have_a_constant_loss() -> None:
    """Its backward pass meets the others' all the same, through the pass's roots."""

    def program() -> list[Tensor]:
        group = comm.world()
        tokens = 4 if group.rank == 0 else 0
        with Pass(view=stored_view(own(weights_of(), group), trains=True)) as pass_:
            params = pass_.view.params
            routing = moe.Routing(torch.full((tokens, 1), 3), torch.ones(tokens, 1, dtype=torch.float64), E)
            y = moe.exchange(moe.gated_mlp(**params), numbers(tokens, M), routing=routing, group=group)
            return pass_.pull(y.sum() if tokens else torch.zeros(()), None, True).wait().sums

    with_tokens, without = comm.simulate(program, world_size=2)
    assert all(float(grad.abs().sum()) == 0 for grad in with_tokens)
    assert all(float(grad[1].abs().sum()) > 0 for grad in without)  # the experts that the other's tokens chose


@pytest.mark.sample(2)
@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("way", ["all_to_all", "gather", "by_rank"])
def test_shapes_alone_are_an_even_routing(way: Any, fake: bool) -> None:
    """On the meta device and of fake tensors, values are not read; what is sent is the formula's."""

    def program() -> tuple[Any, Any]:
        with FakeTensorMode() if fake else torch.device("meta"):
            x, logits = torch.empty(16, M, requires_grad=True), torch.empty(16, 8, requires_grad=True)
            gate_up, down = torch.empty(2, 6, M), torch.empty(2, M, 3)
            routing = moe.route(logits, 2, capacity=moe.Capacity(1.0, rows=4, drop="error"))
            with comm.ledger() as book:
                y = moe.exchange(moe.gated_mlp(gate_up, down), x, routing=routing, group=comm.world(), way=way)
                y.sum().backward()
        return y.shape, sum(row.elements for row in book.rows)

    volume = moe.exchange_volume(16, 2, width=M, ranks=4)
    expected = {  # the counts have capacity's three numbers
        "all_to_all": 3 * (2 + 3) + 2 * volume.all_to_all,
        "gather": 3 * (8 + 1 + 3) + 2 * volume.gather + 3 * 16 * 2 * 3,
        "by_rank": 3 * (2 + 1 + 3) + 2 * volume.by_rank + 3 * 8 * 2 * 3,
    }[way]
    for shape, sent in comm.simulate(program, world_size=4):
        assert shape == (16, M)
        assert sent == (0 if fake else expected)


def by_process(way: Any) -> tuple[Tensor, Tensor]:
    """On processes, for ``spawn``."""
    group = comm.world()
    routing = moe.route(numbers(6, E, seed=group.rank).float(), 2)
    params = own({name: leaf.float() for name, leaf in weights_of().items()}, group)
    x = numbers(6, M, seed=group.rank).float().requires_grad_()
    y = moe.exchange(moe.gated_mlp(**params), x, routing=routing, group=group, way=way)
    (grad,) = torch.autograd.grad((y**2).sum(), [x])
    return y.detach(), grad


def test_processes_give_the_simulator_s_bits() -> None:
    for found, expected in zip(
        comm.spawn(by_process, "all_to_all", world_size=2), comm.simulate(by_process, "all_to_all", world_size=2), strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


# -- what is refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["all_to_all", "gather", "by_rank"])
def test_an_overflow_is_named_on_all_ranks(way: Any) -> None:
    """Before anything waits for the rank that has it."""

    def program() -> str:
        group = comm.world()
        logits = torch.zeros(6, E)
        logits[:, 2] = 5.0 if group.rank == 1 else 0.0
        logits[torch.arange(6), torch.arange(6) % E] += 1.0
        routing = moe.route(logits, 1, capacity=moe.Capacity(2.0, rows=3, drop="error"))
        with pytest.raises(ValueError, match="capacity") as error:
            moe.exchange(lambda rows, groups: rows, torch.ones(6, M), routing=routing, group=group, way=way)
        return str(error.value)

    first, second = comm.simulate(program, world_size=2)
    assert first == second
    assert "3 tokens of group 0 of rank 1 of 2 chose expert 2, and its capacity is 2" in first


def test_sizes_that_do_not_fit_are_named() -> None:
    routing = moe.route(numbers(6, E), 2)

    def refused(words: str, **arguments: Any) -> None:
        with pytest.raises(ValueError, match=words):
            moe.exchange(lambda rows, groups: rows, **{"x": numbers(6, M), "routing": routing, **arguments})

    refused("a routing of 6 tokens for x of shape .5, 8., which has 5", x=numbers(5, M))
    refused("weights have shape .6, 1., and experts .6, 2.", routing=moe.Routing(routing.experts, routing.weights[:, :1], E))
    refused("experts are float64.6, 2.; integers", routing=moe.Routing(routing.weights, routing.weights, E))
    refused("way='ring'", way="ring")
    with pytest.raises(TypeError, match="is not a group"):
        moe.exchange(lambda rows, groups: rows, numbers(6, M), routing=routing, group="ep")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the rows come in 4 groups"):  # experts that were cut, and no group
        moe.exchange(moe.gated_mlp(*[leaf[:2] for leaf in weights_of().values()]), numbers(6, M), routing=routing)

    def three_ranks() -> None:
        with pytest.raises(ValueError, match="4 experts do not divide by the 3 ranks"):
            moe.exchange(lambda rows, groups: rows, numbers(6, M), routing=routing, group=comm.world())

    comm.simulate(three_ranks, world_size=3)
