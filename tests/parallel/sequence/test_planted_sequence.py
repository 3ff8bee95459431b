"""Bugs of sequence-parallel steps and of tiles, each planted alone: a law must break."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import functional_ds as fds
from functional_ds import comm, seq
from functional_ds import transforms as T
from functional_ds.parallel.sequence.tiling.tiled import tiled
from tests.parallel.sequence import test_order_check, test_sequence, test_tiled
from tests.parallel.sequence.causal_models import batch_of, model_loss
from tests.planting import Bug, planted

pytestmark = pytest.mark.timeout(60)


def one_device(padding: str | None = None, dropout: float = 0.0, length: int = 8, **options: Any) -> None:
    """A step on two ranks of a sequence is the step on one device."""
    batches = [batch_of(2, length, seed, padding) for seed in range(2)]
    expected = test_sequence.on_one_device(batches, dropout, options.pop("causal", True))
    loss = model_loss(seq.ring(), dropout=dropout)
    for found in test_sequence.sequence_ranks(loss, batches, layout="zigzag", **options):
        test_sequence.assert_same(found, expected)


def not_causal(padding: str | None, length: int) -> None:
    """Attention to all positions, some of which are padding."""
    batches = [batch_of(2, length, 0, padding)]
    expected = test_sequence.on_one_device(batches, 0.0, False)
    for found in test_sequence.sequence_ranks(model_loss(seq.ring(), causal=False), batches, pad=True):
        test_sequence.assert_same(found, expected)


def rows_of_two_data_ranks() -> None:
    """Dropout on dp x sp is one device's: sequence ranks share their rows."""
    batches = [batch_of(4, 8, 0, None)]
    expected = test_sequence.on_one_device(batches, 0.3, True)

    def program() -> Any:
        mesh = comm.mesh(dp=2, sp=2)
        own = [{name: leaf.chunk(2)[mesh["dp"].rank] for name, leaf in batch.items()} for batch in batches]
        loss = model_loss(seq.ring(), dropout=0.3)
        return test_sequence.trained(loss, own, T.zero(0, mesh["dp", "sp"]), T.sequence(mesh["sp"]))

    for found in comm.simulate(program, world_size=4):
        test_sequence.assert_same(found, expected)


def recomputed_in_a_pipeline() -> None:
    """Attention that runs again finds the masks of its own micro-batch."""
    test_sequence.test_in_a_pipeline(2, fds.remat(seq.ring()), ())


def tiles_draw() -> None:
    """A tiled function with dropout by a key is the function."""
    params, x, scale = test_tiled.inputs(5, torch.float64)
    key = fds.Key.of(1).at(places={1: (torch.tensor([4, 0, 2, 6, 5]), 7)})
    args = params, x, scale, key
    found, expected = test_tiled.gradients(tiled(test_tiled.mlp, 2), *args), test_tiled.gradients(test_tiled.mlp, *args)
    torch.testing.assert_close(found, expected)


def loss_in_tiles() -> None:
    """Value and gradients of cross entropy with smoothing, ignored labels and a factor from outside."""
    torch.manual_seed(0)
    hidden, weight = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((7, 4), (6, 4)))
    labels = torch.tensor([0, 5, -100, 2, 1, -100, 3])
    expected = F.cross_entropy(hidden @ weight.T, labels, reduction="sum", label_smoothing=0.2)
    found = seq.tiled_loss(hidden, weight, labels, tiles=3, label_smoothing=0.2)
    assert found.weight == 5
    torch.testing.assert_close(found.sum, expected)
    torch.testing.assert_close(*(torch.autograd.grad(3 * each, [hidden, weight]) for each in (found.sum, expected)))


def slices_draw() -> None:
    """A slice along two dims, and one by rows, draw what the whole tensor draws."""
    key, whole = fds.Key.of(1).at(rows=2), torch.empty(4, 3, 5)
    at = torch.tensor([3, 1])
    expected = key.uniform(whole, "a")
    assert torch.equal(key.uniform(whole[:, 1:, at], "a", places={1: (range(1, 3), 3), 2: (at, 5)}), expected[:, 1:, at])
    assert torch.equal(key.uniform(whole[at], "a", places={0: (at + 2, 6)}), expected[at])


def refused(options: dict[str, Any], batch: Callable[[int], Any], words: str) -> None:
    """What would be silently wrong is refused."""
    test_sequence.test_what_is_refused(options, batch, words)


CUT, STEP, TILED, LOSS = (
    "transforms.parallel.batch_cut",
    "transforms.parallel.sequence",
    "parallel.sequence.tiling.tiled",
    "parallel.sequence.tiling.tiled_loss",
)
PIECE = "leaf.index_select(dims[path], positions)"
BUGS: dict[Callable[[], None], list[Bug]] = {
    one_device: [
        Bug(
            "the split comes before the shift",
            "transforms.parallel.batch_cut:BatchCut.cut.piece",
            "leaf.index_select(dims[path], positions)",
            "F.pad(leaf.roll(1, 1)[:, positions][:, 1:], (0, 1), value=-100) if path[0] == 's' else "
            "leaf.index_select(dims[path], positions)",
        ),
        Bug(
            "each rank's positions begin at 0",
            "transforms.parallel.batch_cut:BatchCut.cut",
            "positions.clamp(max=length - 1)",
            "torch.arange(len(positions))",
        ),
    ],
    functools.partial(one_device, "right"): [
        Bug(
            "the loss is a mean of the ranks' means",
            "transforms.parallel.sequence:_SequenceParallel.guard_loss",
            "total, pass_ = (inner(step, state, params, batch), current_pass())",
            "(sums, more), pass_ = (inner(step, state, params, batch), current_pass())\n"
            "total = (Weighted(sums.sum / sums.weight, torch.tensor(1.0)), more)",
        ),
    ],
    functools.partial(one_device, None, 0.3): [
        Bug(
            "ranks draw at their own positions",
            f"{STEP}:",
            "key = tree.replace(key, places={**key.places, 1: (positions, length)})",
            "pass",
        ),
    ],
    rows_of_two_data_ranks: [
        Bug(
            "a key's rows are counted over sp, too",
            "step.over_ranks.mesh_axes:batch_shard",
            "row_of(layer.name, axis.ranks(), index, count, known=axis.shards)",
            "(index, count)",
        ),
    ],
    functools.partial(not_causal, "left", 8): [
        Bug("attention sees padding", "transforms.parallel.batch_cut:entered", "pieces[0].documents", "None", shows=ValueError),
    ],
    functools.partial(not_causal, None, 7): [
        Bug(
            "attention sees what was appended",
            "transforms.parallel.batch_cut:BatchCut._documents",
            "F.pad(documents, (0, missing), value=-1)",
            "None",
        ),
    ],
    functools.partial(test_sequence.test_layouts_by_document_with_padding, "documents"): [
        Bug(
            "numbers of documents are not padded",
            "transforms.parallel.batch_cut:BatchCut._documents",
            "documents is None and axis.layout.documents is not None",
            "axis.layout.documents is not None",
            shows=ValueError,
        ),
    ],
    test_sequence.test_masks_of_documents: [
        Bug(
            "a mask beside documents is dropped",
            "transforms.parallel.batch_cut:BatchCut._documents",
            "torch.where(mask == 0, -1, documents)",
            "documents",
        ),
    ],
    recomputed_in_a_pipeline: [
        Bug("what runs again sees the last micro-batch's masks", "step.pass_scope:Moment.restored", "self.axes", "pass_.axes"),
    ],
    tiles_draw: [
        Bug(
            "the last tile's gradients alone",
            "parallel.sequence.tiling.tiled:_TileByTile.backward",
            "totals[i].add_",
            "totals[i].copy_",
        ),
        Bug(
            "all tiles draw alike",
            f"{TILED}:_Tiles._key",
            "return tree.replace(key, places={**key.places, self.dim: (part_positions, size)})",
            "return key.at(places={1: None})",
        ),
        Bug(
            "a tile draws at its own positions",
            "parallel.sequence.tiling.tiled:_Tiles._key",
            "(part_positions, size)",
            "(range(len(part)), size)",
        ),
    ],
    test_tiled.test_sums_over_tiles_are_wide: [
        Bug(
            "gradients are summed in half",
            "parallel.sequence.tiling.tiled:_TileByTile.backward",
            "grad.to(wide_dtype(grad.dtype), copy=True)",
            "grad.clone()",
        ),
    ],
    test_tiled.test_generators_draw_again_in_the_backward_pass: [
        Bug(
            "the backward pass draws anew",
            "parallel.sequence.tiling.tiled:_again.restored",
            "torch.set_rng_state(host)",
            "pass",
        ),
    ],
    test_tiled.test_the_backward_pass_has_the_autocast_of_the_forward: [
        Bug(
            "the backward pass has no autocast",
            "parallel.sequence.tiling.tiled:_again",
            "torch.is_autocast_enabled(device_type)",
            "False",
        ),
    ],
    test_tiled.test_zero_3_gathers_once_for_all_tiles: [
        Bug(
            "lazy params go past autograd",
            "parallel.sequence.tiling.tiled:_Tiles.with_gradients",
            "tensor.view_as(tensor)",
            "tensor",
            RuntimeError,
        ),
    ],
    loss_in_tiles: [
        Bug(
            "ignored labels have gradients",
            "parallel.sequence.tiling.tiled_loss:_with_gradient",
            "grad.masked_fill_(~counts[:, None], 0.0)",
            "grad",
        ),
        Bug(
            "smoothing has no gradient",
            "parallel.sequence.tiling.tiled_loss:_with_gradient",
            "grad -= label_smoothing / size",
            "pass",
        ),
        Bug(
            "the last tile's gradients alone",
            "parallel.sequence.tiling.tiled_loss:_TiledCrossEntropy.forward",
            "by_weight += narrow.T @ hidden[part].to(exact)",
            "by_weight[:] = narrow.T @ hidden[part].to(exact)",
        ),
        Bug(
            "the factor from outside is lost",
            "parallel.sequence.tiling.tiled_loss:_TiledCrossEntropy.backward",
            "grad * seed.to(grad.dtype)",
            "grad",
        ),
    ],
    test_tiled.test_fp16_gradients_wait_for_the_loss_scale: [
        Bug(
            "gradients in fp16 before the loss scale",
            "parallel.sequence.tiling.tiled_loss:_TiledCrossEntropy.forward",
            "hidden.dtype == torch.float16",
            "False",
        ),
    ],
    slices_draw: [
        Bug("strides are those of the slice", "base.prng:_columns", "stride *= size", "stride *= like.shape[dim]"),
        Bug(
            "rows of a slice are counted on",
            "base.prng:Key._drawn",
            "split.pop(0)[0] if 0 in split else row + torch.arange(rows, device=device)",
            "row + torch.arange(rows, device=device)",
        ),
    ],
    functools.partial(refused, {}, test_sequence.tokens_of, "have another batch than rank 0"): [
        Bug(
            "other batches go unnoticed",
            "transforms.parallel.sequence:_SequenceParallel._compare",
            "theirs[3] != first[3]",
            "False",
        ),
    ],
    functools.partial(test_order_check.test_what_acts_along_a_piece_is_refused, "rotary positions"): [
        Bug(
            "all tokens keep their places",
            "transforms.parallel.loss_checks:in_other_orders",
            "[0, 2, 1, 3]",
            "[0, 1, 2, 3]",
        ),
        Bug(
            "no token sees another",
            "transforms.parallel.loss_checks:in_other_orders",
            "[0, 0, 2, 2]",
            "[0, 1, 2, 3]",
        ),
    ],
    functools.partial(test_order_check.test_what_acts_along_a_piece_is_refused, "behind a head of zeros"): [
        Bug("zeros say nothing", "transforms.parallel.loss_checks:has_zeros", "not view.any()", "False"),
    ],
    functools.partial(test_order_check.test_right_models_pass, "draws"): [
        Bug("draws of a check differ", "base.prng:Key._drawn", "self.constant", "False", shows=ValueError),
    ],
    functools.partial(test_order_check.test_right_models_pass, "a window of two"): [
        Bug("neighbours are parted", "parallel.sequence.axis:check_pieces", "window == 2", "False", shows=ValueError),
    ],
    functools.partial(test_order_check.test_attention_to_another_sequence_than_the_steps_is_refused, "the ring alone"): [
        Bug(
            "a part of a sequence passes",
            "parallel.sequence.axis:check_pieces",
            "length < known.length and group.ranks != known.group.ranks",
            "False",
        ),
    ],
    functools.partial(
        test_order_check.test_attention_to_another_sequence_than_the_steps_is_refused, "leaves that stay whole"
    ): [
        Bug("more than the sequence passes", "parallel.sequence.axis:check_pieces", "length > known.length", "False"),
    ],
    functools.partial(test_order_check.test_right_models_pass, "documents of its own"): [
        Bug(
            "other documents than the check's go unnoticed",
            "parallel.sequence.axis:resolve_axis",
            "documents is not theirs",
            "False",
            shows=ValueError,
        ),
    ],
    functools.partial(refused, {"tokenwise": False}, test_sequence.alike, "asked for the sequence axis"): [
        Bug(
            "attention within a rank goes unnoticed",
            "transforms.parallel.sequence:_SequenceParallel.guard_forward",
            "first and current_pass() is not None and (not self.tokenwise)",
            "False",
        ),
    ],
    functools.partial(
        refused, {"loss": lambda params, batch: params["w"].sum()}, test_sequence.alike, "a mean over this rank's tokens"
    ): [
        Bug(
            "a mean of means goes unnoticed",
            "transforms.parallel.sequence:_SequenceParallel.guard_loss",
            "pass_.slots.get('mean')",
            "False",
        ),
    ],
    functools.partial(refused, {"zero": False}, test_sequence.alike, "they must be an axis of them"): [
        Bug(
            "gradients that nobody sums go unnoticed",
            "step.over_ranks.sequence_rows:row_of",
            "_without(name, comm.all_gather(mine, control).tolist(), count, group)",
            "(index, count)",
        ),
    ],
}
CASES = [pytest.param(law, bug, id=bug.name) for law, bugs in BUGS.items() for bug in bugs]


@pytest.mark.sample(7)
@pytest.mark.parametrize("law", BUGS)
def test_the_laws_hold(law: Callable[[], None]) -> None:
    """Without a bug."""
    law()


@pytest.mark.sample(10)
@pytest.mark.parametrize(("law", "bug"), CASES)
def test_each_bug_breaks_its_law(law: Callable[[], None], bug: Bug) -> None:
    """A law that no bug breaks is no law."""
    with planted(bug), pytest.raises((bug.shows, AssertionError, pytest.fail.Exception)):
        law()
