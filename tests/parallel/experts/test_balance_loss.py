"""Law 48: the balance loss of ranks is its value on all their tokens, and shares the weight of the loss."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import functional_ds as fds
from functional_ds import comm, moe, transforms
from tests.parallel.experts.oracle import close, numbers

TOKENS, E = 24, 4


def switch(logits: Tensor, k: int, mask: Tensor | None = None) -> Tensor:
    """E Σ f_i P_i of all tokens, as the paper has it; a mean."""
    logits = logits if mask is None else logits[mask]
    p = logits.softmax(1)
    f = torch.stack([(p.topk(k).indices == i).sum() for i in range(E)]).double() / (len(p) * k)
    return E * (f * p.mean(0)).sum()


@pytest.mark.law(48)
@given(
    parts=st.sampled_from(((24,), (12, 12), (5, 19), (7, 0, 17), (6, 6, 6, 6))),
    k=st.integers(1, 3),
    masked=st.booleans(),
    seed=st.integers(0, 50),
)
def test_over_the_global_batch_it_is_one_device_s(parts: tuple[int, ...], k: int, masked: bool, seed: int) -> None:
    """Sums over ranks, divided by all tokens: value and gradient, also of unequal parts and with masks."""
    logits = numbers(TOKENS, E, seed=seed)
    mask = torch.arange(TOKENS) % 3 != 1 if masked else torch.ones(TOKENS, dtype=torch.bool)

    def program() -> tuple[Tensor, Tensor]:
        rank = comm.world().rank
        mine = logits.split(parts)[rank].clone().requires_grad_()
        routing = moe.route(mine, k)
        loss = moe.balance_loss(routing, group=comm.world(), mask=mask.split(parts)[rank])
        return loss.detach(), torch.autograd.grad(loss, [mine])[0]

    whole = logits.clone().requires_grad_()
    expected = switch(whole, k, mask)
    number = int(mask.sum())
    found = comm.simulate(program, world_size=len(parts))
    close(torch.stack([loss for loss, _ in found]).sum() / number, expected.detach())
    close(torch.cat([grad for _, grad in found]) / number, torch.autograd.grad(expected, [whole])[0])


def test_it_is_hugging_face_s_over_k() -> None:
    """Theirs sums f over the k places, so it is k times as large."""
    logits = numbers(TOKENS, E)
    routing = moe.route(logits, 2, normalise=True)
    theirs = load_balancing_loss_func((logits,), E, 2)
    close(2 * moe.balance_loss(routing) / TOKENS, theirs.double(), 1e-6)


@pytest.mark.law(48, 23)
@given(k=st.integers(1, 2), parts=st.sampled_from((1, 2, 3, 6)), seed=st.integers(0, 50))
def test_by_sequence_no_partition_of_the_batch_matters(k: int, parts: int, seed: int) -> None:
    """The mean over sequences of each one's loss, as DeepSeek-V3 has it; also of a sequence that lies on several ranks."""
    length = 4
    logits = numbers(TOKENS, E, seed=seed)
    scores = logits.sigmoid()
    p = (scores / scores.sum(1, keepdim=True)).view(-1, length, E)
    chosen = scores.topk(k).indices.view(-1, length, k)
    f = torch.stack([(chosen == i).sum((1, 2)) for i in range(E)], 1) / (k * length)
    expected = E * (f * p.mean(1)).sum(1).mean()
    each = [moe.balance_loss(moe.route(rows, k, gate="sigmoid"), sequence=length) for rows in logits.chunk(parts)]
    close(torch.stack(each).sum() / TOKENS, expected)

    def program() -> Tensor:  # each rank has half of every sequence
        half = logits.view(-1, 2, length // 2, E)[:, comm.world().rank].reshape(-1, E)
        return moe.balance_loss(moe.route(half, k, gate="sigmoid"), sequence=length // 2, group=comm.world())

    close(torch.stack(comm.simulate(program, world_size=2)).sum() / TOKENS, expected)


def test_what_it_sends() -> None:
    """E + 1 integers are all-reduced, nothing backward."""

    def program() -> Any:
        logits = numbers(6, E).requires_grad_()
        with comm.ledger() as book:
            moe.balance_loss(moe.route(logits, 2), group=comm.world()).backward()
        return [(row.collective, row.calls, row.elements) for row in book.rows]

    ((name, calls, elements),) = comm.simulate(program, world_size=2)[0]
    assert (name, calls, elements) == ("all_reduce", 1, E + 1)


@pytest.mark.law(48, 53)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("ranks", [2, 3])
def test_in_a_step_it_shares_the_weight_of_the_loss(stage: int, ranks: int) -> None:
    """Ranks with unequal tokens, ZeRO: params, losses and the load are those of one device on the whole batch."""
    sizes = {1: (24,), 2: (7, 17), 3: (10, 0, 14)}

    def program(ranks: int) -> Any:
        group = comm.world()

        def loss(params: Any, x: Tensor) -> Any:
            logits = x @ params["router"]
            routing = moe.route(logits, 2)
            main = ((routing.weights.sum(1) + x @ params["w"]) ** 2).sum()
            aux = moe.balance_loss(routing, group=group) + 0.1 * moe.z_loss(logits)
            return fds.Weighted(main + 0.5 * aux, len(x)), moe.load_metrics(routing, prefix="moe/")

        step = transforms.zero(stage, group)(fds.train_step(loss, fds.sgd(0.1)))
        state = step.init({"router": numbers(5, E, seed=1), "w": numbers(5, seed=2)})
        x = numbers(TOKENS, 5, seed=3).split(sizes[ranks])[group.rank]
        for _ in range(2):
            state, metrics = step(state, x)
        return step.params(state), metrics

    params, metrics = comm.simulate(program, 1, world_size=1)[0]
    assert {name for name in metrics if "/" in name} == {"moe/load.0", "moe/load.1", "moe/load.2", "moe/load.3", "moe/dropped"}
    assert sum(float(metrics[f"moe/load.{i}"]) for i in range(E)) == pytest.approx(E)
    for found, seen in comm.simulate(program, ranks, world_size=ranks):
        for name in params:
            close(found[name], params[name])
        for name, value in metrics.items():
            assert float(seen[name]) == pytest.approx(float(value), abs=1e-6)


def test_the_load_counts_what_was_dropped() -> None:
    routing = moe.route(torch.tensor([[3.0, 2.0, 1.0]] * 4), 1, capacity=moe.Capacity(1.5, rows=4))
    found = {name: float(value.mean()) for name, value in moe.load_metrics(routing).items()}
    assert found == {"load.0": 3.0, "load.1": 0.0, "load.2": 0.0, "dropped": 0.5}
    masked = moe.load_metrics(routing, mask=torch.tensor([True, False, True, True]))
    assert float(masked["dropped"].mean()) == pytest.approx(2 / 3)


def test_z_loss_is_the_square_of_the_log_of_the_sum() -> None:
    logits = numbers(6, E)
    close(moe.z_loss(logits), (logits.exp().sum(1).log() ** 2).sum())
    mask = torch.arange(6) < 2
    close(moe.z_loss(logits, mask=mask), moe.z_loss(logits[:2]))


def test_what_does_not_fit_is_named() -> None:
    routing = moe.route(numbers(6, E), 2)
    with pytest.raises(ValueError, match="without probabilities"):
        moe.balance_loss(moe.Routing(routing.experts, routing.weights, E))
    with pytest.raises(ValueError, match="sequence=4: 6 tokens are not a whole number of sequences"):
        moe.balance_loss(routing, sequence=4)
    with pytest.raises(ValueError, match=r"mask has shape \[5\], and the routing 6 tokens"):
        moe.balance_loss(routing, mask=torch.ones(5))


def sequences_balanced(dp: int, sp: int, tp: int, axes: tuple[str, ...], sequence: int | None = None) -> Any:
    """Params after two steps with a balance loss whose counts are summed over these axes of a mesh."""
    mesh = comm.mesh(dp=dp, sp=sp, tp=tp)
    over = mesh[axes]

    def loss(params: Any, batch: Any) -> fds.Weighted:
        x = params["words"][batch["input_ids"]].flatten(0, 1)
        hidden = fds.tp.row(fds.tp.column(x, params["up"], group=mesh["tp"]).tanh(), params["down"], group=mesh["tp"])
        routing = moe.route(x @ params["router"], 2)
        main = ((routing.weights.sum(1) + hidden.sum(-1)) ** 2).sum()
        return fds.Weighted(main + 0.5 * moe.balance_loss(routing, sequence=sequence, group=over), len(x))

    cut = [transforms.tensor_parallel({"up": "colwise", "down": "rowwise"}, mesh["tp"])]
    cut += [transforms.sequence(mesh["sp"], tokenwise=True, shift=False)]
    step = fds.compose(transforms.zero(1, mesh["dp", "sp"]), *cut)(fds.train_step(loss, fds.sgd(0.1)))
    shapes = {"words": (7, 4), "router": (4, E), "up": (8, 4), "down": (4, 8)}
    state = step.init({name: numbers(*shape, seed=len(name)).float() for name, shape in shapes.items()})
    for index in range(2):
        tokens = torch.randint(0, 7, (4, 8), generator=torch.Generator().manual_seed(index)).chunk(dp)[mesh["dp"].rank]
        state, _ = step(state, {"input_ids": tokens})
    return step.params(state)


MESHES = [((2, 2, 1), ("dp", "sp")), ((1, 2, 2), ("sp", "tp")), ((2, 2, 2), ("dp", "sp", "tp")), ((2, 2, 2), ("dp", "sp"))]


@pytest.mark.law(48)
@pytest.mark.parametrize(("sizes", "axes"), MESHES)
def test_counts_over_axes_beside_a_cut_sequence(sizes: tuple[int, int, int], axes: tuple[str, ...]) -> None:
    """The axes hold ``T.sequence``'s ranks, so the loss is the whole batch's; tensor-parallel ranks count the same."""
    alone = comm.simulate(sequences_balanced, 1, 1, 1, axes, world_size=1)[0]
    for found in comm.simulate(sequences_balanced, *sizes, axes, world_size=torch.Size(sizes).numel()):
        for name in alone:
            close(found[name], alone[name], 1e-5)


def test_counts_of_a_ranks_own_tokens_beside_a_cut_sequence_are_refused() -> None:
    """Counts that miss some of the sequence's ranks are not the single device's."""
    with pytest.raises(ValueError, match="the loss is not a sum over tokens"):
        comm.simulate(sequences_balanced, 2, 2, 1, ("dp",), world_size=4)


def test_by_sequence_beside_a_cut_sequence() -> None:
    """The length of a rank's part gives the single device's loss; the whole sequence's would mix sequences, and is refused."""
    (alone,) = comm.simulate(sequences_balanced, 1, 1, 1, ("sp",), 8, world_size=1)
    for found in comm.simulate(sequences_balanced, 2, 2, 1, ("sp",), 4, world_size=4):
        for name in alone:
            close(found[name], alone[name], 1e-5)
    with pytest.raises(
        ValueError, match=r"sequence=8: T\.sequence splits sequences of 8 positions over the 2 ranks.*sequence=4"
    ):
        comm.simulate(sequences_balanced, 2, 2, 1, ("sp",), 8, world_size=4)
