"""``jit`` on the other axes: equal bits as a graph, or eagerly, with the reason."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm, moe, seq
from functional_ds import pipelining as pp
from functional_ds import transforms as T
from functional_ds.compiling import JitWarning

WIDE = 16
Made = tuple[Any, Any, Any]


def layer(sizes: dict[str, int]) -> Made:
    """Attention and experts, with tensor, sequence and expert parallelism where sizes are above 1."""
    mesh = comm.mesh(**{"dp": 1, "sp": 1, "tp": 1} | sizes).split("dp", edp=1, ep=sizes.get("dp", 1))

    def loss(p: Any, batch: Any) -> fds.Weighted:
        qkv = fds.tp.column(batch["x"] * p["scale"], [p["q"], p["k"], p["v"]])
        q, k, v = (each.unflatten(-1, (-1, 8)).transpose(1, 2) for each in qkv)
        x = fds.tp.row(seq.ring()(q, k, v, causal=True).transpose(1, 2).flatten(2), p["o"])
        if "dp" in sizes:
            x = moe.exchange(moe.mlp(p["up"], p["down"], tp=mesh["tp"]), x, routing=moe.route(x @ p["router"].T, 2))
        return fds.Weighted(x.square().sum(), torch.tensor(float(x.numel())))

    shapes = {"scale": (WIDE,), **dict.fromkeys("qkvo", (WIDE, WIDE))}
    plan: dict[str, Any] = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}
    transforms = [T.zero(1, mesh["edp", "ep", "sp"]), T.sequence(mesh["sp"], dims={"x": 1})]
    if "dp" in sizes:
        shapes |= {"router": (4, WIDE), "up": (4, 32, WIDE), "down": (4, WIDE, 32)}
        plan |= {"up": 1, "down": 2}
        transforms.append(T.experts("up|down", mesh["ep"], edp=mesh["edp", "sp"]))
    draws = torch.Generator().manual_seed(0)
    params = {name: torch.randn(shape, generator=draws) / 4 for name, shape in shapes.items()}
    step = fds.compose(*transforms, T.tensor_parallel(plan, mesh["tp"]))(fds.train_step(loss, fds.adamw(0.01)))
    return step, params, {"x": torch.randn(2, 4, 8, WIDE, generator=draws)[mesh.coordinates["ep"]]}


def local_experts() -> Made:
    """Experts on each rank, without an exchange."""

    def loss(p: Any, x: Tensor) -> Tensor:
        routing = moe.route(x @ p["router"].T, 2)
        return moe.exchange(moe.mlp(p["up"], p["down"]), x, routing=routing).square().mean()

    draws = torch.Generator().manual_seed(0)
    shapes = {"router": (4, WIDE), "up": (4, 32, WIDE), "down": (4, WIDE, 32)}
    params = {name: torch.randn(shape, generator=draws) / 4 for name, shape in shapes.items()}
    return T.zero(3)(fds.train_step(loss, fds.adamw(0.01))), params, torch.randn(8, WIDE, generator=draws)


def balanced() -> Made:
    """A router whose bias follows the counts of its choices."""

    def loss(p: Any, x: Tensor) -> Tensor:
        routing = moe.route(x @ p["router"].T, 2, bias=moe.router_bias("router"))
        moe.count_demand("router", routing.demand())
        return moe.exchange(moe.mlp(p["up"], p["down"]), x, routing=routing).square().mean()

    _, params, x = local_experts()
    return T.balance(0.1, {"router": 4})(T.zero(1)(fds.train_step(loss, fds.adamw(0.01)))), params, x


def vocabulary() -> Made:
    mesh = comm.mesh(tp=2)

    def loss(p: Any, batch: tuple[Tensor, Tensor]) -> fds.Weighted:
        return fds.tp.cross_entropy(fds.tp.column(batch[0], p["head"]), batch[1])

    step = T.tensor_parallel({"head": "colwise"}, mesh["tp"])(fds.train_step(loss, fds.sgd(0.1)))
    return step, {"head": torch.eye(8, 4)}, (torch.ones(3, 4), torch.tensor([1, 7, -100]))


def pipeline() -> Made:
    halves = [{"w": torch.eye(4)}, {"w": torch.eye(4) / 2}]
    blocks = pp.stages([lambda p, x: torch.tanh(x @ p["w"])] * 2, halves, loss=lambda y, batch: (y - batch[1]).square().mean())
    step = T.pipeline(pp.one_f_one_b(2, 2), blocks)(fds.train_step(blocks, fds.sgd(0.1)))
    return step, halves, (torch.ones(4, 4), torch.zeros(4, 4))


def offload() -> Made:
    strategy = fds.compose(T.offload(optimizer="cpu"), T.zero(1))
    step = strategy(fds.train_step(lambda p, x: (x @ p["w"]).square().mean(), fds.adamw(0.1)))
    return step, {"w": torch.ones(4, 4)}, torch.ones(2, 4)


def partitioned() -> Made:
    apply, params = fds.functional(nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))))
    step = T.remat("*", policy="recompute,inputs=partition", group=comm.mesh(tp=2)["tp"])(
        fds.train_step(lambda p, x: apply(p, x).square().mean(), fds.adamw(0.1))
    )
    return step, {name: torch.full_like(leaf, 0.5) for name, leaf in params.items()}, torch.ones(2, 4)


def run(make: Callable[[], Made], jits: bool) -> tuple[list[str], list[Tensor], list[str]]:
    step, params, batch = make()
    step = fds.jit(step) if jits else step
    state, losses = step.init(params), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", JitWarning)
        for _ in range(3):
            state, metrics = step(state, batch)
            losses.append(repr(metrics["loss"].item()))
    return losses, [x for x in fds.tree.leaves(state) if isinstance(x, Tensor)], step.reasons if jits else []


CASES: dict[str, tuple[Callable[[], Made], str]] = {
    "tensor": (lambda: layer({"tp": 2}), ""),
    "sequence": (lambda: layer({"sp": 2}), ""),
    "local experts": (local_experts, ""),
    "balance": (balanced, ""),
    "vocabulary": (vocabulary, ""),
    "experts": (lambda: layer({"dp": 2}), ""),
    "pipeline": (pipeline, ""),
    "offload": (offload, ""),
    "partitioned activations": (partitioned, ""),
}


@pytest.mark.sample(3)
@pytest.mark.law(58)
@pytest.mark.parametrize("name", CASES)
def test_a_jitted_step_is_the_step(name: str) -> None:
    make, reason = CASES[name]
    found, expected = (comm.simulate(run, make, jits, world_size=2) for jits in (True, False))
    for (losses, leaves, reasons), (their_losses, theirs, _) in zip(found, expected, strict=True):
        assert losses == their_losses
        assert all(map(torch.equal, leaves, theirs))
        assert bool(reasons) == bool(reason)
        assert all(reason in each for each in reasons), reasons


def new_lengths(jits: bool, odd: bool = False) -> tuple[list[float], list[str]]:
    """Sequences of two lengths in turn; ``odd`` gives ranks other values where a length is new."""

    def loss(p: Any, batch: Any) -> fds.Weighted:
        x = batch["x"] @ p["w"]
        y = seq.ring()(x[:, None], x[:, None], x[:, None], causal=True)
        return fds.Weighted(y.square().sum(), torch.tensor(float(y.numel())))

    here = comm.world()
    step = fds.compose(T.zero(1, here), T.sequence(here, dims={"x": 1}))(fds.train_step(loss, fds.sgd(0.1)))
    step = fds.jit(step) if jits else step
    state, losses = step.init({"w": torch.eye(4)}), []
    for length in (8, 8, 12, 12, 8, 12):
        x = torch.linspace(-1, 1, length * 4).view(1, length, 4) + (here.rank if odd and length == 12 else 0)
        state, metrics = step(state, {"x": x})
        losses.append(metrics["loss"].item())
    return losses, step.reasons if jits else []


def test_a_new_length_is_traced_in_its_second_step() -> None:
    """Ranks compare batches of a new shape, in an eager step."""
    assert comm.simulate(new_lengths, True, world_size=2) == comm.simulate(new_lengths, False, world_size=2)
    with pytest.raises(ValueError, match="have another batch than rank 0"):
        comm.simulate(new_lengths, True, True, world_size=2)
