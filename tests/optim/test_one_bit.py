"""1-bit Adam, 0/1 Adam, and gradients with error feedback: what stays the same, what is sent, and where it leads."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm
from functional_ds import pipelining as pp
from functional_ds import transforms as T
from functional_ds.optim.one_bit import UpdateIntervals
from functional_ds.testing import assert_same
from tests.planting import Bug, planted
from tests.transforms.models import CASES, own_rows
from tests.transforms.rules import ROWS, fresh, linear

EXACT = ("mlp", "tied", "lora", "odd leaves", "weighted", "recurrent")


def trained(optimizer: Any, *strategy: fds.Transform, steps: int = 6, show: Callable[..., Any] = fds.Step.params) -> Any:
    """Some steps with gradients that are exact, each with another batch."""
    step, here = fds.compose(*strategy)(fds.train_step(linear, optimizer)), comm.world()
    state = step.init(fresh())
    for count in range(steps):
        rows = torch.arange(ROWS) * (count + 1) + 7 * count
        state, _ = step(state, rows.tensor_split(here.size)[here.rank])
    return show(step, state)


def run(name: str, optimizer: Any, *strategy: fds.Transform, n: int = 1, steps: int = 4) -> list[Any]:
    """The losses and params of a model of ``CASES`` on each of n ranks."""

    def program() -> Any:
        params, loss = CASES[name].make()
        step = fds.compose(*strategy)(fds.train_step(loss, optimizer))
        state, losses = step.init(params), []
        for _ in range(steps):
            state, metrics = step(state, own_rows(CASES[name].batch(12), comm.world()))
            losses.append(metrics["loss"])
        return torch.stack(losses), step.params(state)

    return comm.simulate(program, world_size=n)


def close(found: Any, expected: Any, tolerance: float = 2e-5) -> None:
    for (path, leaf), other in zip(fds.tree.named(found), fds.tree.leaves(expected), strict=True):
        torch.testing.assert_close(leaf, other, rtol=tolerance, atol=tolerance, msg=lambda text, path=path: f"{path}: {text}")


# -- without compression ----------------------------------------------------------------------------------------------


@pytest.mark.law(19)
@given(n=st.sampled_from((1, 2, 3, 4)), decay=st.sampled_from((None, "w$")), which=st.sampled_from((0, 1)))
@settings(max_examples=settings.default.max_examples // 2)
def test_the_warm_up_is_adam(n: int, decay: str | None, which: int) -> None:
    """Before the variance is frozen, and while all its updates follow each other: AdamW on the whole batch, bitwise."""
    rule = (
        fds.one_bit_adam(0.1, warmup=6, weight_decay=0.1, decay=decay),
        fds.zero_one_adam(0.1, freeze=9, each=6, local=4, longest=2, weight_decay=0.1, decay=decay),
    )[which]
    expected = trained(fds.adamw(0.1, weight_decay=0.1, decay=decay))
    for found in comm.simulate(lambda: trained(rule, T.local_gradients()), world_size=n):
        assert_same(found, expected)


@pytest.mark.law(19)
@given(
    name=st.sampled_from(EXACT),
    n=st.sampled_from((2, 3, 4)),
    k=st.sampled_from((1, 3)),
    rule=st.sampled_from(("1-bit", "0/1")),
)
@settings(max_examples=settings.default.max_examples // 2)
def test_exact_momenta_are_the_single_device_step(name: str, n: int, k: int, rule: str) -> None:
    """Without a codec, n ranks are one rank with the whole batch, in the warm-up and after it, for any micro-batches."""
    # Where a variance is next to nothing, rounding turns into anything: eps is large.
    optimizer = {
        "1-bit": fds.one_bit_adam(0.01, warmup=2, eps=1e-3, codec=None, weight_decay=0.1),
        "0/1": fds.zero_one_adam(0.01, freeze=4, each=1, eps=1e-3, codec=None, weight_decay=0.1),
    }[rule]
    (expected,) = run(name, optimizer, T.local_gradients())
    for found in run(name, optimizer, T.local_gradients(), T.accumulate(k if name != "weighted" else 1), n=n if k == 1 else 2):
        close(found, expected)


@given(codec=st.sampled_from((None, comm.codecs.OneBit(8))), n=st.sampled_from((2, 3)))
def test_gradients_that_are_summed_already_count_once(codec: Any, n: int) -> None:
    """Under zero(0) nobody's gradients are unreduced: each rank does the whole update by itself, and sends nothing for it."""

    def program() -> tuple[Any, set[str]]:
        with comm.ledger() as book:
            params = trained(fds.one_bit_adam(0.1, warmup=3, codec=codec), T.zero(0))
        return params, {row.collective for row in book.rows}

    first, *others = comm.simulate(program, world_size=n)
    for other in others:
        assert_same(other[0], first[0])
    assert "all_to_all" not in first[1]
    if codec is None:
        close(first[0], trained(fds.one_bit_adam(0.1, warmup=3, codec=None)))


def test_a_variance_with_gaps_is_the_formula() -> None:
    """0/1 Adam on one rank without a codec, written down: v moves in its updates, m in all, each with its own bias."""
    lr, (b1, b2), eps, grads = 0.1, (0.9, 0.999), 1e-8, [1.0, -2.0, 3.0, 0.5, -1.0, 2.0]
    intervals = UpdateIntervals.doubling(1, 5)
    assert [t for t in range(6) if t in intervals] == [0, 1, 3]
    step = fds.train_step(lambda p, x: (p["w"] * x).sum(), fds.zero_one_adam(lr, freeze=5, each=1, codec=None))
    state, w, m, v, seen = step.init({"w": torch.ones(1)}), 1.0, 0.0, 0.0, 0
    for t, grad in enumerate(grads):
        state, _ = step(state, torch.tensor([grad]))
        m = b1 * m + (1 - b1) * grad
        if t in (0, 1, 3):
            v, seen = b2 * v + (1 - b2) * grad**2, seen + 1
        w -= lr * m / (1 - b1 ** (t + 1)) / ((v / (1 - b2**seen)) ** 0.5 + eps)
        assert step.params(state)["w"].item() == pytest.approx(w, rel=1e-5)


# -- when ranks meet --------------------------------------------------------------------------------------------------


@given(stop=st.integers(1, 300), each=st.integers(1, 20), at=st.integers(0, 400))
def test_intervals_count_what_they_contain(stop: int, each: int, at: int) -> None:
    """``before`` counts; the distances of the variance's updates double after ``each`` of them."""
    intervals = UpdateIntervals.doubling(each, stop)
    named = [t for t in range(400) if t in intervals]
    assert intervals.before(at) == len([t for t in named if t < at])
    expected, t, count = [], 0, 0
    while t < stop:
        expected.append(t)
        count += 1
        t += 2 ** ((count - 1) // each)
    assert named == expected


@given(start=st.integers(1, 20), longest=st.sampled_from((1, 2, 4, 8)), times=st.integers(1, 4))
def test_meetings_are_never_further_apart_than_said(start: int, longest: int, times: int) -> None:
    """Up to the start in every update; then at distances that grow to ``longest``, each one for ``each`` updates."""
    intervals, each = UpdateIntervals.local_steps(start, longest * times, longest), longest * times
    named = [t for t in range(600) if t in intervals]
    assert named[: start + each] == list(range(start + each))
    gaps = [b - a for a, b in pairwise(named)]
    assert gaps == sorted(gaps)
    assert set(gaps) == {2**i for i in range(longest.bit_length())}


@pytest.mark.law(38)
@given(n=st.sampled_from((2, 3, 4)), which=st.sampled_from((0, 1, 2)))
@settings(max_examples=settings.default.max_examples // 3)
def test_ranks_have_the_same_bits_whenever_they_met(n: int, which: int) -> None:
    """After each meeting params, momenta and variances are the same on all ranks; between meetings, params are not."""
    rules = (
        fds.one_bit_adam(0.1, warmup=2),
        fds.zero_one_adam(0.1, freeze=3, each=1),
        fds.zero_one_adam(0.1, freeze=2, local=4, longest=4),
    )
    meets = UpdateIntervals.local_steps(2, 4, 4) if which == 2 else UpdateIntervals((range(99),))

    def program() -> list[list[Tensor]]:
        step, here = T.local_gradients()(fds.train_step(linear, rules[which])), comm.world()
        state, seen = step.init(fresh()), []
        for count in range(14):
            rows = (torch.arange(ROWS) + here.rank * 3) * (count + 1)
            state, _ = step(state, rows.tensor_split(here.size)[here.rank])
            own = state.optimizer
            seen.append([x.clone() for x in (*fds.tree.leaves(step.params(state)), *own.exp_avg, *own.exp_avg_sq)])
        return seen

    first, *others = comm.simulate(program, world_size=n)
    for count in range(14):
        if count in meets:
            for other in others:
                assert_same(other[count], first[count])
        else:
            assert any(not torch.equal(a, b) for a, b in zip(others[0][count], first[count], strict=True))


def test_local_steps_are_the_formula() -> None:
    """0/1 Adam with local steps on two ranks without a codec, written down: alone in between, the mean at each meeting."""
    lr, (b1, b2), eps, decay, n = 0.1, (0.9, 0.999), 1e-8, 0.01, 2
    grads = [[(1.0 + t) * (1 - 3 * rank) for rank in range(n)] for t in range(14)]

    def program() -> list[float]:
        rule = fds.zero_one_adam(lr, freeze=2, local=4, longest=4, codec=None, weight_decay=decay)
        step, seen = T.local_gradients()(fds.train_step(lambda p, x: (p["w"] * x).sum(), rule)), []
        state = step.init({"w": torch.ones(1)})
        for row in grads:
            state, _ = step(state, torch.tensor([row[comm.world().rank]]))
            seen.append(step.params(state)["w"].item())
        return seen

    found = comm.simulate(program, world_size=n)
    w, m, u = [1.0] * n, [0.0] * n, [0.0] * n
    met, v, rates = 1.0, 0.0, 0.0
    for t, own in enumerate(grads):
        mean = sum(own) / n
        row = [mean] * n if t < 2 else own
        if t < 2:
            v = b2 * v + (1 - b2) * mean**2
        root = (v / (1 - b2 ** min(t + 1, 2))) ** 0.5 + eps
        rate = 1 / (1 - b1 ** (t + 1))
        m = [b1 * old + (1 - b1) * grad for old, grad in zip(m, row, strict=True)]
        u = [moved + rate * new for moved, new in zip(u, m, strict=True)]
        met, rates = met * (1 - lr * decay), rates + rate
        w = [x * (1 - lr * decay) - lr * rate * new / root for x, new in zip(w, m, strict=True)]
        if t in (0, 1, 2, 3, 4, 5, 7, 9, 13):
            met -= lr * sum(u) / n / root
            w, m, u, rates = [met] * n, [sum(u) / n / rates] * n, [0.0] * n, 0.0
        assert [seen[t] for seen in found] == pytest.approx(w, rel=1e-4)
    assert found[0][12] != found[1][12]


# -- what is sent, and what is owed -----------------------------------------------------------------------------------


@given(n=st.sampled_from((2, 3, 4)), sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=3))
@settings(max_examples=settings.default.max_examples // 3)
def test_bytes_are_as_predicted(n: int, sizes: list[int]) -> None:
    """2 (n - 1) (⌈m/8⌉ + 4 ⌈m/2048⌉) for each leaf, m = ⌈numel/n⌉; in the warm-up an all-reduce of fp32; and scalars."""

    def program() -> list[dict[tuple[str, str], int]]:
        step = T.local_gradients()(
            fds.train_step(lambda p, x: sum((w * x).sum() for w in p.values()), fds.one_bit_adam(0.1, warmup=1))
        )
        state, found = step.init({f"w{i}": torch.ones(size) for i, size in enumerate(sizes)}), []
        for _ in range(2):
            with comm.ledger() as book:
                state, _ = step(state, torch.ones(1))
            found.append({(row.collective, row.group): row.bytes for row in book.rows})
        return found

    scalars = 3 * 4 * 2 * (n - 1)  # the weight, and the loss with its own; each is padded to a number a rank
    pieces = [-(-size // n) for size in sizes if size]
    payload = (n - 1) * sum(-(-m // 8) + 4 * -(-m // 2048) for m in pieces)
    for warm, frozen in comm.simulate(program, world_size=n):
        assert frozen["all_to_all", "world"] == payload
        assert frozen["all_gather", "world"] == payload
        assert frozen["all_reduce", "world"] <= scalars
        dense = warm["all_reduce", "world"] - frozen["all_reduce", "world"]
        assert dense == pytest.approx(8 * sum(sizes) * (n - 1) / n, abs=8 * n * len(sizes))
        assert set(frozen) <= {("all_to_all", "world"), ("all_gather", "world"), ("all_reduce", "world")}


@pytest.mark.law(38)
@given(
    n=st.sampled_from((1, 2, 3, 4)),
    codec=st.sampled_from((comm.codecs.OneBit(4), comm.codecs.TopK(0.25), comm.codecs.Blocks(4, size=4))),
    steps=st.integers(1, 5),
    weights=st.booleans(),
)
def test_error_feedback_loses_nothing(n: int, codec: comm.codecs.Codec, steps: int, weights: bool) -> None:
    """Σ applied = Σ gₜ - e_T, where e_T is what the slot owes, summed over ranks; with weights that differ by rank and step."""

    def program() -> tuple[Tensor, Tensor, Any]:
        def loss(p: Any, x: Tensor) -> fds.Weighted:
            return fds.Weighted((p["w"].flatten() * x[1:]).sum(), x[0])

        step, rank = T.compressed_gradients(codec)(fds.train_step(loss, fds.sgd(1.0))), comm.world().rank
        state, total = step.init({"w": torch.zeros(2, 5)}), torch.zeros(10)
        for t in range(steps):
            factors = (torch.arange(10.0) * (rank + 2 * t + 1)) % 7 - 3
            weight = 2.0 ** ((rank + t) % 2) if weights else 1.0
            state, _ = step(state, torch.cat([torch.tensor([weight]), factors]))
            total += factors / sum(2.0 ** ((r + t) % 2) if weights else 1.0 for r in range(n))
        return step.params(state)["w"].flatten(), total, state.slots["compressed_gradients"]

    results = comm.simulate(program, world_size=n)
    for moved, _, _ in results:
        assert_same(moved, results[0][0])
    applied = -results[0][0]
    wanted = sum(total for _, total, _ in results)
    owed = sum(slot.own[0].flatten() for _, _, slot in results) / n
    pieces = torch.cat([slot.piece[0] for _, _, slot in results])[:10] / n
    torch.testing.assert_close(applied, wanted - owed - pieces, rtol=1e-5, atol=1e-4)


# -- with other transforms ----------------------------------------------------------------------------------------------


@pytest.mark.law(25)
@pytest.mark.parametrize("rule", ["1-bit", "0/1", "feedback"])
@given(n=st.sampled_from((1, 2, 3)), victim=st.integers(0, 2), inside=st.booleans())
@settings(max_examples=max(1, settings.default.max_examples // 4))
def test_overflow_on_one_rank_skips_on_all(rule: str, n: int, victim: int, inside: bool) -> None:
    """Params, optimizer and what is owed stay bitwise the same on all ranks, and the next step goes on from there."""
    optimizer = {"1-bit": fds.one_bit_adam(0.1, warmup=2), "0/1": fds.zero_one_adam(0.1, freeze=2, local=2, longest=2)}
    data = T.compressed_gradients(comm.codecs.OneBit(8)) if rule == "feedback" else T.local_gradients()
    half = T.mixed_precision("fp16", 8.0)

    def program() -> None:
        chain = (data, half) if inside else (half, data)
        step = fds.compose(*chain)(fds.train_step(lambda p, x: (p["w"] * x).sum(), optimizer.get(rule, fds.adam(0.1))))
        state, x = step.init({"w": torch.ones(12)}), torch.arange(12.0) + comm.world().rank
        for _ in range(5):
            state, metrics = step(state, x)
            assert metrics["skipped"] == 0
        spiked = torch.where(torch.arange(12) == 5, 6e4, x) if comm.world().rank == victim % n else x
        after, metrics = step(state, spiked, donate=False)
        assert metrics["skipped"] == 1
        assert_same((after.params, after.optimizer, after.step), (state.params, state.optimizer, state.step))
        assert_same(after.slots.get("compressed_gradients"), state.slots.get("compressed_gradients"))
        again, metrics = step(after, x, donate=False)
        expected, _ = step(state, x)
        assert metrics["skipped"] == 0
        assert_same((again.params, again.optimizer), (expected.params, expected.optimizer))

    comm.simulate(program, world_size=n)


@given(n=st.sampled_from((1, 2, 3)))
def test_feedback_composes_with_clip(n: int) -> None:
    """clip gets the sum that all ranks share: a norm, and the same params everywhere; a lossless codec is zero(0)."""
    chain = (T.clip(0.05), T.accumulate(2))
    (expected,) = run("mlp", fds.adamw(0.01, eps=1e-3), T.zero(0), *chain)
    for found in run("mlp", fds.adamw(0.01, eps=1e-3), T.compressed_gradients(comm.codecs.TopK(1.0)), *chain, n=n):
        close(found, expected)


@pytest.mark.law(31)
@pytest.mark.parametrize("rule", ["1-bit", "0/1", "feedback"])
def test_donation_changes_nothing(rule: str) -> None:
    """A kept state stays as it is and gives the same again, what is owed included."""
    optimizer = {"1-bit": fds.one_bit_adam(0.1, warmup=1), "0/1": fds.zero_one_adam(0.1, freeze=1, local=2, longest=2)}
    data = T.compressed_gradients(comm.codecs.OneBit(8)) if rule == "feedback" else T.local_gradients()

    def program() -> None:
        step = data(fds.train_step(lambda p, x: (p["w"] * x).sum(), optimizer.get(rule, fds.adam(0.1))))
        state, x = step.init({"w": torch.ones(12)}), torch.arange(12.0) - comm.world().rank
        for _ in range(6):
            before = fds.tree.map(torch.clone, state)
            kept, _ = step(state, x, donate=False)
            assert_same(fds.tree.leaves(state), fds.tree.leaves(before))
            state, _ = step(state, x)
            assert_same(state, kept)

    comm.simulate(program, world_size=2)


def test_what_never_had_a_gradient_stays() -> None:
    """An element without a variance is not moved by the signs of others."""
    step = fds.train_step(lambda p, x: (p["w"] * x).sum(), fds.one_bit_adam(0.1, warmup=2))
    state = step.init({"w": torch.ones(4)})
    for x in ([1.0, 0.0, 2.0, 0.0], [1.0, 0.0, 2.0, 0.0], [1.0, 0.0, 2.0, 5.0]):
        state, _ = step(state, torch.tensor(x))
    found = step.params(state)["w"]
    assert found.isfinite().all()
    assert (found == 1).tolist() == [False, True, False, True]


def a_stage_without_leaves(rule: str) -> None:
    """A pipeline one of whose ranks has no params is the step without a pipeline, after the warm-up, too."""
    optimizer = {
        "1-bit": fds.one_bit_adam(0.0625, warmup=2, eps=1e-3, codec=comm.codecs.OneBit(2)),
        "0/1": fds.zero_one_adam(0.0625, freeze=2, each=1, local=2, longest=2, eps=1e-3, codec=comm.codecs.OneBit(2)),
    }[rule]
    params = {"w": torch.tensor([3.0, 2.0], dtype=torch.float64)}
    pieces = [pp.Piece(lambda w, x: x * w, uses="w"), pp.Piece(lambda _, x: x * x, uses=())]
    stages = pp.stages(pieces, params, inputs=lambda batch: batch, loss=lambda y, _: y.mean())

    def program(pipelined: bool) -> Any:
        mesh = comm.mesh(dp=2, pp=1 + pipelined)
        piped = [T.pipeline(pp.one_f_one_b(2, 1), stages, mesh["pp"])] if pipelined else []
        step = fds.compose(T.local_gradients(mesh["dp"]), *piped)(fds.train_step(stages, optimizer))
        state = step.init(params)
        for count in range(6):
            state, _ = step(state, torch.tensor([[1.0 + mesh["dp"].rank, 0.5 * count]], dtype=torch.float64))
        return step.params(state)

    expected = comm.simulate(program, False, world_size=2)
    for rank, found in enumerate(comm.simulate(program, True, world_size=4)):
        close(found, expected[rank // 2], 1e-12)


@pytest.mark.parametrize("rule", ["1-bit", "0/1"])
def test_a_stage_without_leaves(rule: str) -> None:
    """Its ranks update nothing; an update that asks its first leaf for the device breaks the law."""
    a_stage_without_leaves(rule)
    bug = Bug(
        "the first leaf's device",
        "optim.one_bit:_At._sync",
        "dtype, device = widest(params), params[0].device if params else None",
        "dtype, device = widest(params), params[0].device",
    )
    with planted(bug), pytest.raises(IndexError):
        a_stage_without_leaves(rule)


def test_bad_input() -> None:
    """Refused with what would do instead."""
    with pytest.raises(ValueError, match="warmup=0 must be at least 1"):
        fds.one_bit_adam(0.1, warmup=0)
    with pytest.raises(ValueError, match="lr=-1"):
        fds.one_bit_adam(-1, warmup=1)
    with pytest.raises(ValueError, match="local=3, longest=2: longest must be a power of two"):
        fds.zero_one_adam(0.1, freeze=4, local=3, longest=2)
    with pytest.raises(TypeError, match="is not a codec"):
        T.compressed_gradients(8)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="is not a group"):
        T.local_gradients("dp")  # type: ignore[arg-type]
    one = fds.one_bit_adam(0.1, warmup=1)
    params = {"w": torch.ones(2)}

    def step(optimizer: Any, *strategy: fds.Transform) -> fds.Step:
        return fds.compose(*strategy)(fds.train_step(lambda p, x: (p["w"] * x).sum(), optimizer))

    with pytest.raises(ValueError, match="does not sum gradients"):
        step(fds.adamw(0.1), T.local_gradients()).init(params)
    with pytest.raises(ValueError, match="does not sum gradients"):
        step(fds.param_groups({"w": one}, fds.adamw(0.1)), T.local_gradients()).init({**params, "b": torch.ones(1)})
    with pytest.raises(ValueError, match=r"reduces gradients already.*use either"):
        step(one, T.zero(1), T.local_gradients())
    with pytest.raises(ValueError, match="another transform of this step sums gradients"):
        step(one, T.local_gradients(), T.zero(1)).init(params)
    clipped = step(one, T.local_gradients(), T.clip(1.0))
    with pytest.raises(ValueError, match="no rank has the whole gradient"):
        clipped(clipped.init(params), torch.ones(2))

    def cut() -> None:
        step(one, T.zero(1)).init(params)

    with pytest.raises(ValueError, match=r"one_bit_adam.* compresses whole tensors, and group 'world' of 2 splits them"):
        comm.simulate(cut, world_size=2)

    def differing() -> None:
        step(one, T.local_gradients()).init({"w": torch.ones(2 + comm.world().rank)})

    with pytest.raises(ValueError, match=r"ranks \[1\] .* have other leaves"):
        comm.simulate(differing, world_size=2)


# -- where it leads ---------------------------------------------------------------------------------------------------


class TinyGPT(nn.Module):
    """A block of causal attention over 32 tokens."""

    def __init__(self, vocabulary: int = 16, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(8, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 64, dropout=0.0, batch_first=True, norm_first=True) for _ in range(1)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]  # [B, T, C]
        mask = torch.full((tokens.shape[1],) * 2, -torch.inf).triu(1)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x)


def gpt_loss(optimizer: Any, data: Callable[[], fds.Transform], steps: int) -> tuple[list[float], int]:
    """The mean loss of the last steps on a language of one rule, and the bytes that a rank sent."""
    torch.manual_seed(0)
    apply, params = fds.functional(TinyGPT())

    def loss(p: Any, tokens: Tensor) -> Tensor:
        return F.cross_entropy(apply(p, tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    step = data()(fds.train_step(loss, optimizer))
    state, losses = step.init(params), []
    generator = torch.Generator().manual_seed(comm.world().rank)
    with comm.ledger() as book:
        for _ in range(steps):
            tokens = [torch.randint(0, 16, (8,), generator=generator)]
            for _ in range(7):
                noise = torch.randint(0, 64, (8,), generator=generator)
                tokens.append(torch.where(noise < 16, noise, 3 * tokens[-1] + 5) % 16)  # a quarter is noise
            state, metrics = step(state, torch.stack(tokens, 1))
            losses.append(metrics["loss"].item())
    return losses, book.bytes


@cache
def adams_loss() -> tuple[float, int]:
    losses, sent = comm.simulate(gpt_loss, fds.adam(3e-3), lambda: T.zero(0), 70, world_size=2)[0]
    return sum(losses[-10:]) / 10, sent


@pytest.mark.sample(1)
@pytest.mark.parametrize("rule", ["1-bit", "0/1", "feedback"])
def test_a_gpt_learns_as_with_adam(rule: str) -> None:
    """After 70 steps the loss is within a few percent of Adam's, with a fraction of its bytes."""
    expected, bytes_of_adam = adams_loss()
    assert expected < 1.8  # it has learned: log 16 = 2.77
    optimizer = {
        "1-bit": fds.one_bit_adam(3e-3, warmup=25),
        "0/1": fds.zero_one_adam(3e-3, freeze=35, each=8, local=16, longest=2),
        "feedback": fds.adam(3e-3),
    }[rule]
    data = (lambda: T.compressed_gradients(comm.codecs.OneBit(256))) if rule == "feedback" else T.local_gradients
    losses, sent = comm.simulate(gpt_loss, optimizer, data, 70, world_size=2)[0]
    found = sum(losses[-10:]) / 10
    assert found < 1.04 * expected
    assert sent < {"1-bit": 0.45, "0/1": 0.45, "feedback": 0.15}[rule] * bytes_of_adam


# -- on processes -----------------------------------------------------------------------------------------------------


def on_any_world() -> tuple[Any, Any]:
    rule = fds.zero_one_adam(0.1, freeze=2, each=1, local=2, longest=2, weight_decay=0.1)
    one = fds.one_bit_adam(0.1, warmup=2)
    return trained(rule, T.local_gradients()), trained(one, T.local_gradients(), T.mixed_precision("bf16"))


def test_processes_give_the_same_bits() -> None:
    """On two Gloo processes as in the simulator."""
    for found, expected in zip(comm.spawn(on_any_world, world_size=2), comm.simulate(on_any_world, world_size=2), strict=True):
        assert_same(found, expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rule", ["1-bit", "0/1"])
def test_on_a_gpu(rule: str) -> None:
    """One rank on a GPU moves params as on the CPU, within rounding."""
    make = {"1-bit": fds.one_bit_adam(0.1, warmup=2), "0/1": fds.zero_one_adam(0.1, freeze=2, local=2, longest=2)}[rule]

    def program(device: str) -> Tensor:
        step = T.local_gradients()(fds.train_step(lambda p, x: (p["w"] * x).sum(), make))
        state = step.init({"w": torch.ones(12, device=device)})
        for t in range(6):
            state, _ = step(state, (torch.arange(12.0) + t).to(device))
        return step.params(state)["w"].cpu()

    torch.testing.assert_close(program("cuda"), program("cpu"), rtol=1e-5, atol=1e-5)
