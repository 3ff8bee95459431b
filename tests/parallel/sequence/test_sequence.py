"""``T.sequence``: a step whose sequences are cut among ranks is the step on one device (laws 44, 49 and 53)."""

import functools
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_ds as fds
from functional_ds import comm, seq
from functional_ds import transforms as T
from functional_ds.pipelining.schedules.generators import one_f_one_b
from functional_ds.step.axes import axis
from functional_ds.step.over_ranks.mesh_axes import Axis, AxisRole
from functional_ds.testing import simulated_cuda
from functional_ds.transforms.parallel.batch_cut import BatchCut
from functional_ds.transforms.parallel.sequence import _SequenceParallel
from tests.parallel.sequence.causal_models import (
    batch_of,
    model_loss,
    model_params,
    model_stages,
    plain_attention,
    shifted,
)

Outcome = tuple[list[float], list[float], float, list[Tensor]]


def trained(loss: Callable[..., Any], batches: Sequence[Any], *strategy: Any) -> Outcome:
    """Losses, hits, an evaluation of the first batch before training, and the params after it."""
    step = fds.compose(*strategy)(fds.train_step(loss, fds.adamw(0.05), seed=3))
    state = step.init(model_params())
    before = step.evaluate(state, batches[0]).item()
    losses, hits = [], []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(metrics["loss"].item())
        hits.append(metrics["hits"].item() if "hits" in metrics else 0.0)
    return losses, hits, before, fds.tree.leaves(step.params(state))


def on_one_device(batches: Sequence[dict[str, Tensor]], dropout: float, causal: bool, *strategy: Any) -> Outcome:
    """Torch's attention on whole sequences, with labels that were shifted by hand, and no T.sequence."""
    plain, documents = zip(*map(shifted, batches), strict=True)
    with_documents = [{**batch, "numbers": number} for batch, number in zip(plain, documents, strict=True)]

    def loss(params: Any, batch: dict[str, Any], key: fds.Key | None) -> Any:
        attend = functools.partial(plain_attention, documents=batch["numbers"])
        return model_loss(attend, causal=causal, dropout=dropout)(params, batch, key)

    return trained(loss, with_documents, *strategy)


def assert_same(found: Outcome, expected: Outcome) -> None:
    """All of it, within the rounding of fp64."""
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.law(44)
@given(
    dp=st.sampled_from([1, 2]),
    sp=st.sampled_from([1, 2, 4]),
    layout=st.sampled_from(["contiguous", "zigzag", "striped"]),
    stage=st.integers(0, 3),
    k=st.sampled_from([1, 2]),
    padding=st.sampled_from([None, "right", "left", "packed"]),
    dropout=st.sampled_from([0.0, 0.3]),
    causal=st.booleans(),
    data=st.data(),
)
def test_a_step_over_sequences_is_the_step_on_one_device(
    dp: int, sp: int, layout: str, stage: int, k: int, padding: str | None, dropout: float, causal: bool, data: st.DataObject
) -> None:
    """Losses, metrics, an evaluation and the params after three steps, for any mesh, layout, stage, padding and accumulation.

    Dropout draws at global positions; ranks differ in how many tokens count.
    """
    length = 8 * data.draw(st.integers(1, 2))
    attend = data.draw(st.sampled_from([seq.ring(), seq.ring(save_blocks=True), seq.ulysses(), seq.gathered()]), "attention")
    batches = [batch_of(2 * dp * k, length, seed, padding) for seed in range(3)]
    expected = on_one_device(batches, dropout, causal)
    first = data.draw(st.booleans(), "T.sequence first")

    def program() -> Outcome:
        mesh = comm.mesh(dp=dp, sp=sp)
        cut = T.sequence(mesh["sp"], layout=layout)
        strategy = [T.zero(stage, mesh["dp", "sp"]), *([T.accumulate(k)] if k > 1 else [])]
        strategy.insert(0 if first else len(strategy), cut)
        here = mesh["dp"]
        own = [{name: leaf.chunk(here.size)[here.rank] for name, leaf in batch.items()} for batch in batches]
        return trained(model_loss(attend, causal=causal, dropout=dropout), own, *strategy)

    for found in comm.simulate(program, world_size=dp * sp):
        assert_same(found, expected)


def sequence_ranks(
    loss: Callable[..., Any],
    batches: Sequence[Any],
    *more: Any,
    sp: int = 2,
    stage: int = 2,
    world: str = "simulate",
    **options: Any,
) -> list[Outcome]:
    """Every rank's outcome with the same batches on ranks of one sequence."""

    def program() -> Outcome:
        return trained(loss, batches, T.zero(stage), T.sequence(**options), *more)

    return comm.simulate(program, world_size=sp)


CLIPPED = T.clip(0.5)


@pytest.mark.parametrize(
    "more",
    [(T.remat(""),), (CLIPPED,), (T.remat("", policy="offload"), T.accumulate(2), CLIPPED)],
    ids=["remat", "clip", "all"],
)
def test_with_other_transforms(more: tuple[Any, ...]) -> None:
    """Recomputation draws and masks as the first run did; norms are of the whole gradient."""
    batches = [batch_of(4, 8, seed, "right") for seed in range(2)]
    expected = on_one_device(batches, 0.2, True, *more)
    for found in sequence_ranks(model_loss(seq.ring(), dropout=0.2), batches, *more, layout="zigzag"):
        assert_same(found, expected)


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_in_half_precision(policy: str) -> None:
    """Masters, a loss scale and an overflow on one of the ranks: losses are those of one device, within half precision."""
    batches = [batch_of(2, 8, seed, None) for seed in range(3)]
    mixed = T.mixed_precision(policy, *([2.0**8] if policy == "fp16" else []))
    expected = on_one_device(batches, 0.0, True, mixed)
    for found in sequence_ranks(model_loss(seq.ring()), batches, mixed, layout="striped", stage=0):
        assert found[0] == pytest.approx(expected[0], rel=0.05)
        assert found[2] == pytest.approx(expected[2], rel=0.05)


@pytest.mark.sample(2)
@pytest.mark.parametrize("padding", [None, "right", "packed"])
@pytest.mark.parametrize("causal", [True, False])
def test_lengths_that_do_not_divide_are_padded(padding: str | None, causal: bool) -> None:
    """``pad=True`` appends positions that nobody attends to, no loss counts, and no draw notices."""
    batches = [batch_of(2, 7, seed, padding) for seed in range(2)]
    expected = on_one_device(batches, 0.3, causal)
    loss = model_loss(seq.ring(), causal=causal, dropout=0.3)
    for found in sequence_ranks(loss, batches, layout="zigzag", pad=True, sp=3):
        assert_same(found, expected)


def test_layouts_of_many_batches_are_not_kept() -> None:
    """What is known of batches, whose documents may differ in each, has a bound."""

    def program() -> None:
        def layout(batch: Any) -> seq.SequenceLayout:
            return seq.SequenceLayout.per_document(batch["x"][0].tolist())

        cut = _SequenceParallel(Axis(None, AxisRole.SEQUENCE), layout, BatchCut({"y": 1}, False, False, True), True)
        step = fds.train_step(lambda p, b: fds.Weighted((p["w"] * b["y"]).sum(), 1), fds.sgd(0.1))
        step = fds.compose(T.zero(0), cut.transform())(step)
        state = step.init({"w": torch.ones(())})
        for first in range(1, 13):
            documents = torch.tensor([[first, 14 - first]])
            state, _ = step(state, {"x": documents, "y": torch.ones(1, 14)})
        assert 0 < len(cut.axes) <= 4
        assert 0 < len(cut.agreed) <= 4

    with mock.patch("functional_ds.transforms.parallel.sequence._KINDS", 4):
        comm.simulate(program, world_size=2)


def test_layouts_by_document() -> None:
    """A layout for each batch, from its documents, which need not divide."""
    batches = [batch_of(1, 12, seed, "packed") for seed in range(4)]
    expected = on_one_device(batches, 0.3, True)

    def by_document(batch: dict[str, Tensor]) -> seq.SequenceLayout:
        starts = [*(batch["position_ids"][0] == 0).nonzero().flatten().tolist(), 12]
        return seq.SequenceLayout.per_document([stop - start for start, stop in pairwise(starts)])

    for found in sequence_ranks(model_loss(seq.ring(), dropout=0.3), batches, layout=by_document):
        assert_same(found, expected)


@pytest.mark.parametrize("known", ["position_ids", "documents"])
def test_layouts_by_document_with_padding(known: str) -> None:
    """Documents of a layout, which the batch gives as well, and positions appended to them."""
    batches = [batch_of(1, 10, seed, "packed") for seed in range(2)]
    expected = on_one_device(batches, 0.3, True)

    def by_document(batch: dict[str, Tensor]) -> seq.SequenceLayout:
        starts = [*(batch["position_ids"][0] == 0).nonzero().flatten().tolist(), 10]
        return seq.SequenceLayout.per_document([stop - start for start, stop in pairwise(starts)])

    if known == "documents":
        batches = [{**batch, known: (batch["position_ids"] == 0).cumsum(1)} for batch in batches]
    for found in sequence_ranks(model_loss(seq.ring(), dropout=0.3), batches, layout=by_document, pad=True, sp=4):
        assert_same(found, expected)


def test_pieces_of_sequences() -> None:
    """With ``whole=False`` each rank gets its positions of shifted batches; masks are gathered."""
    batches = [batch_of(2, 8, seed, "right") for seed in range(2)]
    expected = on_one_device(batches, 0.3, False)
    layout = seq.SequenceLayout("zigzag")

    def program() -> Outcome:
        here = comm.world()
        at = layout.positions(8, here.size, here.rank)
        own = []
        for batch in batches:
            ready = {**shifted(batch)[0], "attention_mask": batch["attention_mask"]}
            own.append({name: leaf[:, at] for name, leaf in ready.items()})
        cut = T.sequence(layout=layout, whole=False)
        return trained(model_loss(seq.ring(), causal=False, dropout=0.3), own, T.zero(1), cut)

    for found in comm.simulate(program, world_size=2):
        assert_same(found, expected)


def test_a_head_in_tiles() -> None:
    """The loss over tiles on each rank, with unequal tokens, is the whole cross entropy."""
    batches = [batch_of(2, 8, seed, "left") for seed in range(2)]
    losses, _, before, params = on_one_device(batches, 0.0, True)
    loss = model_loss(seq.ring(), head=functools.partial(seq.tiled_loss, tiles=3))
    for found in sequence_ranks(loss, batches, layout="zigzag", stage=3):
        torch.testing.assert_close((found[0], found[2], found[3]), (losses, before, params), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("stage", "attend", "more"), [(1, seq.ring(), ()), (2, fds.remat(seq.ring()), ()), (3, seq.ring(), (T.remat(""),))]
)
def test_in_a_pipeline(stage: int, attend: Callable[..., Tensor], more: tuple[Any, ...]) -> None:
    """Two stages on pp x sp, with micro-batches whose masks differ, recomputed after others have run, and a tied embedding."""
    batches = [batch_of(4, 8, seed, "right") for seed in range(2)]
    expected = on_one_device(batches, 0.2, False)

    def program() -> Outcome:
        mesh = comm.mesh(pp=2, sp=2)
        model = model_stages(attend, causal=False, dropout=0.2)
        strategy = [T.zero(stage, mesh["sp"]), T.pipeline(one_f_one_b(2, 4), model, mesh["pp"]), T.sequence(mesh["sp"]), *more]
        return trained(model, batches, *strategy)

    for found in comm.simulate(program, world_size=4):
        assert_same(found, expected)


def on_processes() -> tuple[list[float], float]:
    """Two steps on two processes."""
    batches = [batch_of(2, 8, seed, "right") for seed in range(2)]
    found = trained(model_loss(seq.ring(), dropout=0.2), batches, T.zero(3), T.sequence(layout="zigzag"))
    return found[0], found[2]


def test_on_processes() -> None:
    """Two processes over Gloo have the simulator's losses."""
    expected = on_one_device([batch_of(2, 8, seed, "right") for seed in range(2)], 0.2, True)
    for found in comm.spawn(on_processes, world_size=2):
        torch.testing.assert_close(found, (expected[0], expected[2]), rtol=1e-9, atol=1e-9)


# -- what is cut --------------------------------------------------------------------------------------------------------


def noted(batch: Any, size: int = 2, **options: Any) -> list[Any]:
    """What each rank's loss gets of a batch."""

    def program() -> Any:
        seen = []

        def loss(params: Any, batch: Any) -> fds.Weighted:
            seen.append(batch)
            return fds.Weighted(params["w"].sum(), 1)

        step = fds.compose(T.zero(0), T.sequence(tokenwise=True, **options))(fds.train_step(loss, fds.sgd(0.1)))
        step.evaluate(step.init({"w": torch.ones(1)}), batch)
        return seen[0]

    return comm.simulate(program, world_size=size)


def test_what_the_loss_gets() -> None:
    """Labels are shifted before the cut, positions are the sequence's own, and whole leaves stay whole."""
    tokens = torch.arange(8).view(1, 8)
    batch = {"input_ids": tokens, "labels": tokens, "pixels": torch.ones(1, 3), "scale": 2.0}
    first, second = noted(batch, layout="zigzag")
    assert {name: leaf.tolist() for name, leaf in first.items() if name != "scale"} == {
        "input_ids": [[0, 1, 6, 7]],
        "shift_labels": [[1, 2, 7, -100]],
        "position_ids": [[0, 1, 6, 7]],
        "pixels": [[1.0] * 3],
    }
    assert (second["shift_labels"].tolist(), second["scale"]) == ([[3, 4, 5, 6]], 2.0)
    assert noted(tokens[:, :7], pad=True)[1]["position_ids"].tolist() == [[4, 5, 6, 6]]
    assert noted(tokens)[1]["shift_labels"].tolist() == [[5, 6, 7, -100]]
    assert noted(tokens, shift=False, dims=1)[1].tolist() == [[4, 5, 6, 7]]
    assert noted({**batch, "pixels": torch.ones(1, 3, 8)}, dims={"input_ids": 1, "pixels": 2})[0]["pixels"].shape == (1, 3, 4)
    x, y = noted((tokens.float()[:, :7, None], tokens[:, :7]), dims=1, pad={"0": 0.5, "1": -100}, size=4)[3]
    assert (x.tolist(), y.tolist()) == ([[[6.0], [0.5]]], [[6, -100]])


def test_masks_of_documents() -> None:
    """Attention finds the documents of the whole sequence, of each micro-batch, and none where a mask hides nothing."""

    def program(batch: dict[str, Tensor]) -> list[Any]:
        seen = []

        def loss(params: Any, batch: Any) -> fds.Weighted:
            documents = axis("sp").documents
            if torch.is_grad_enabled():
                seen.append(None if documents is None else documents.tolist())
            return fds.Weighted(params["w"].sum(), 1)

        step = fds.compose(T.zero(0), T.sequence(), T.accumulate(2))(fds.train_step(loss, fds.sgd(0.1)))
        step(step.init({"w": torch.ones(1)}), batch)
        return seen

    tokens = torch.zeros(2, 4, dtype=torch.int64)
    mask, at = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1]]), torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]])
    of = functools.partial(comm.simulate, program, world_size=2)
    assert of({"input_ids": tokens, "attention_mask": mask}) == [[[[0, 0, 0, -1]], [[-1, 0, 0, 0]]]] * 2
    assert of({"input_ids": tokens, "attention_mask": torch.ones_like(mask), "position_ids": at}) == [[None, None]] * 2
    assert of({"input_ids": tokens, "position_ids": at}) == [[[[0, 0, 1, 1]], [[0, 0, 0, 0]]]] * 2
    assert of({"input_ids": tokens, "documents": at}) == [[at[:1].tolist(), at[1:].tolist()]] * 2
    both = {"input_ids": tokens, "documents": at, "attention_mask": mask}
    assert of(both) == [[[[0, 1, 0, -1]], [[-1, 1, 2, 3]]]] * 2


def test_it_sends_nothing_of_its_own() -> None:
    """A later step of a loss without attention sends what the step without T.sequence sends."""

    def loss(params: Any, batch: Any) -> fds.Weighted:
        return fds.Weighted((params["w"] * batch["x"]).sum(), batch["x"].numel())

    def program(*strategy: Any) -> tuple[int, int]:
        step = fds.compose(T.zero(2), *strategy)(fds.train_step(loss, fds.sgd(0.1)))
        state, batch = step.init({"w": torch.ones(8)}), {"x": torch.ones(2, 8, 8)}
        state, _ = step(state, batch)
        with comm.ledger() as sent:
            step(state, batch)
        return sent.bytes, sent.calls

    plain, cut = (comm.simulate(program, *more, world_size=2) for more in ((), (T.sequence(dims=1, tokenwise=True),)))
    assert cut == plain


def test_on_a_device_the_host_does_not_wait() -> None:
    """From the second batch of a shape on: masks, draws, ring attention, tiles."""

    def program() -> list[Any]:
        found = []
        with simulated_cuda(check=False) as gpu:
            for stage, head in ((2, None), (3, functools.partial(seq.tiled_loss, tiles=2))):
                loss = model_loss(seq.ring(), dropout=0.3, head=head)
                step = fds.compose(T.zero(stage), T.sequence(layout="zigzag"))(fds.train_step(loss, fds.adamw(0.1)))
                state = step.init(fds.tree.map(lambda x: x.to("cuda"), model_params()))
                batch = {name: leaf.to("cuda") for name, leaf in batch_of(2, 8, 0, "right").items()}
                state, _ = step(state, batch)
                before = len(gpu.findings)
                step(state, batch)
                found += gpu.findings[before:]
            w, x = torch.ones(4, 8, device="cuda", requires_grad=True), torch.ones(2, 6, 4, device="cuda")
            before = len(gpu.findings)
            fds.tiled(lambda w, x: torch.dropout(x @ w, 0.5, True), 3)(w, x).sum().backward()
            return found + gpu.findings[before:]

    assert comm.simulate(program, world_size=2) == [[], []]


def test_a_checkpoint_goes_to_other_ranks_of_a_sequence(tmp_path: Path) -> None:
    """Saved on dp x sp = 1 x 2, loaded on 2 x 2 in another stage and layout, and goes on as one device does."""
    batches = [batch_of(4, 8, seed, "right") for seed in range(2)]
    expected = on_one_device(batches, 0.3, True)

    def program(dp: int, stage: int, layout: str) -> tuple[Any, Any]:
        mesh = comm.mesh(dp=dp, sp=2)
        strategy = fds.compose(T.zero(stage, mesh["dp", "sp"]), T.sequence(mesh["sp"], layout=layout))
        step = strategy(fds.train_step(model_loss(seq.ring(), dropout=0.3), fds.adamw(0.05), seed=3))
        rows = [{name: leaf.chunk(dp)[mesh["dp"].rank] for name, leaf in batch.items()} for batch in batches]
        state = step.init(model_params())
        if dp == 1:
            state, metrics = step(state, rows[0])
            fds.save(state, tmp_path)
        else:
            state = fds.load(tmp_path, like=state)
            state, metrics = step(state, rows[1])
        return metrics["loss"].item(), fds.tree.leaves(step.params(state))

    comm.simulate(program, 1, 3, "zigzag", world_size=2)
    for loss, params in comm.simulate(program, 2, 1, "striped", world_size=4):
        torch.testing.assert_close((loss, params), (expected[0][1], expected[3]), rtol=1e-9, atol=1e-9)


def test_shapes_of_many_ranks() -> None:
    """One rank of 64 without values: its gradients send what the ring's formula says."""

    def program() -> int:
        step = fds.compose(T.zero(3), T.sequence(layout="zigzag"))(fds.train_step(model_loss(seq.ring()), fds.sgd(0.1)))
        params = fds.tree.map(lambda x: x.to("meta"), model_params())
        state = step.init(params)
        with comm.ledger() as book:
            step.gradients(state, torch.zeros(1, 4096, dtype=torch.int64, device="meta"), None, True)
        return sum(row.elements for row in book.rows if (row.collective, row.group) == ("permute", "world"))

    size, layers, heads, ranks = 2, 2, 2, 64
    assert comm.symmetric(program, world_size=ranks) == 3 * (ranks - 1) * 2 * heads * size * 4096 // ranks * layers


def test_memory_is_predicted() -> None:
    """As that of the step over all ranks: sequences change no stored byte."""

    def predicted(*more: Any) -> Any:
        strategy = fds.compose(T.zero(3), *more)
        return fds.memory.predicted(
            lambda: strategy(fds.train_step(model_loss(seq.ring()), fds.adamw(0.1))), model_params(), world_size=4
        )

    found, expected = predicted(T.sequence()), predicted()
    assert found == expected


# -- what is refused ----------------------------------------------------------------------------------------------------


def tokens_of(rank: int) -> Tensor:
    """The same on all ranks but the second."""
    return torch.zeros(2, 8, dtype=torch.int64) + rank


Given = Callable[[int], Any]


def alike(rank: int) -> dict[str, Tensor]:
    """Tokens and their labels."""
    return {"input_ids": tokens_of(0), "labels": tokens_of(0)}


@pytest.mark.parametrize(
    ("options", "batch", "words"),
    [
        (
            {},
            lambda rank: tokens_of(0)[:, :7],
            "leaf at 'input_ids': a sequence of 7 positions cannot be split over 2 ranks.*pad=True",
        ),
        ({"layout": "zigzag"}, lambda rank: tokens_of(0)[:, :6], "multiple of 4"),
        ({"layout": "spiral"}, alike, "spiral"),
        ({}, tokens_of, r"ranks \[1\] of group 'world' have another batch than rank 0"),
        ({}, lambda rank: tokens_of(0)[:, : 8 - 2 * rank], "different sequences: length: rank 0 8, rank 1 6"),
        ({"layout": "by rank"}, alike, r"different steps.*rank 0 has .*contiguous.*rank 1 has .*striped"),
        ({}, lambda rank: {**alike(0), "weights": torch.ones(2, 8)}, "leaf at 'weights' of shape .* no rule tells"),
        (
            {},
            lambda rank: {**alike(0), "attention_mask": torch.ones(2, 9)},
            "'input_ids' has 8 positions along dim 1, and 'attention_mask' has 9",
        ),
        ({}, lambda rank: {**alike(0), "attention_mask": torch.ones(2, 1, 8, 8)}, "'attention_mask' is known with 2 dims"),
        ({}, lambda rank: {"x": torch.ones(2, 8)}, "no leaf is known to be a sequence .*'x'"),
        ({"dims": {"x": 1}}, alike, "dims: 'x' matches no path; the nearest is"),
        ({"dims": {"labels": 0}, "shift": False}, alike, "cannot be split along dim 0"),
        ({"dims": 0}, alike, "dims=0: rows are along dim 0"),
        ({"dims": -1}, alike, "dims=-1: rows are along dim 0"),
        ({"dims": {"(": 1}}, alike, r"dims: '\(' is not a regular expression"),
        ({"dims": {"labels": 1, "la.*": 1}, "shift": False}, alike, "'labels' matches 'labels' and 'la"),
        (
            {"dims": 1, "pad": True, "shift": False},
            lambda rank: {"x": torch.ones(2, 7)},
            "there is no rule for what the leaf at 'x'",
        ),
        ({"whole": False}, alike, "'labels' of a piece of a sequence cannot be shifted"),
        ({"tokenwise": False}, alike, "no function of the loss asked for the sequence axis"),
        ({"layout": lambda batch: "zigzag"}, alike, "must return a SequenceLayout"),
        ({"loss": lambda params, batch: params["w"].sum()}, alike, "a plain number, a mean over this rank's tokens"),
        ({"zero": False}, alike, "sums gradients over 1 ranks, among which those of group 'world' have the places"),
    ],
)
def test_what_is_refused(options: dict[str, Any], batch: Given, words: str) -> None:
    """On all ranks, by leaf, size, ranks and layout; before anything is sent."""
    given = {"tokenwise": True, **options}
    loss = given.pop("loss", lambda params, batch: fds.Weighted(params["w"].sum(), 1))
    reduces = given.pop("zero", True)

    def program() -> None:
        rank, own = comm.world().rank, dict(given)
        if own.get("layout") == "by rank":
            own["layout"] = ["contiguous", "striped"][rank]
        strategy = [T.sequence(**own)] if not reduces else [T.zero(0), T.sequence(**own)]
        step = fds.compose(*strategy)(fds.train_step(loss, fds.sgd(0.1)))
        step(step.init({"w": torch.ones(1)}), batch(rank))

    with pytest.raises((ValueError, TypeError), match=words):
        comm.simulate(program, world_size=2)


def test_groups_that_are_no_axis() -> None:
    """A second T.sequence, what is no group, and a group that is spread unevenly over those that sum gradients."""
    with pytest.raises(TypeError, match="is not a group"):
        T.sequence("sp")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="splits sequences already"):
        T.sequence(tokenwise=True)(T.sequence()(fds.train_step(lambda p, b: p, fds.sgd(0.1))))

    def program() -> None:
        here = comm.world()
        parts = [(0, 2, 3), (1, 4, 5)]
        group = here.world.group(next(part for part in parts if here.rank in part), "odd")
        step = fds.compose(T.zero(0), T.sequence(group))(fds.train_step(model_loss(seq.ring()), fds.sgd(0.1)))
        step.evaluate(step.init(model_params()), batch_of(1, 6, 0, None))

    with pytest.raises(ValueError, match=r"have the places \[0, 2, 3\]; they must be an axis"):
        comm.simulate(program, world_size=6)
