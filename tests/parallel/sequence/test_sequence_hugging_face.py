"""An unmodified Llama on dp x sp, through transformers' registries, is the model with "sdpa" on one device."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm, seq
from functional_ds import transforms as T
from functional_ds.parallel.sequence.sequence_layout import SequenceLayout
from tests.parallel.sequence.causal_models import batch_of

transformers = pytest.importorskip("transformers")


def llama(attention: str) -> nn.Module:
    """Two layers, four heads of which two are key-value heads."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=11,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        attn_implementation=attention,
        use_cache=False,
        tie_word_embeddings=True,
    )
    model: nn.Module = transformers.LlamaForCausalLM(config).double()
    return model


def run(attention: str, batches: list[dict[str, Tensor]], *strategy: Any) -> tuple[list[float], float, list[Tensor]]:
    """Losses of three steps, an evaluation, and the params after them."""
    apply, params = fds.functional(llama(attention))

    def loss(params: Any, batch: dict[str, Tensor]) -> fds.Weighted:
        if "labels" in batch:  # the model's own loss: it shifts, and it divides by the number of labels that count
            count = (batch["labels"][:, 1:] != -100).sum()
            return fds.Weighted(apply(params, **batch).loss * count, count)
        labels = batch["shift_labels"]
        return fds.Weighted(apply(params, **batch, labels=labels, num_items_in_batch=1).loss, (labels != -100).sum())

    step = fds.compose(*strategy)(fds.train_step(loss, fds.adamw(0.01)))
    state, losses = step.init(params), []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(metrics["loss"].item())
    return losses, step.evaluate(state, batches[0]).item(), fds.tree.leaves(step.params(state))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("attention", "layout", "stage", "padding", "length", "more"),
    [
        ("fds_ring", "zigzag", 3, "right", 8, ()),
        ("fds_ring", "contiguous", 2, None, 7, (T.remat(), T.accumulate(2))),
        ("fds_ulysses", "striped", 1, "right", 8, (T.clip(0.1),)),
        ("fds_gathered", "zigzag", 0, "left", 8, ()),
        ("fds_ulysses_ring", SequenceLayout("zigzag", inner=2), 3, "right", 8, (T.remat(),)),
    ],
)
def test_llama_over_sequences(
    attention: str, layout: Any, stage: int, padding: str | None, length: int, more: tuple[Any, ...]
) -> None:
    """Each way of attention, layouts, padding masks, lengths that do not divide, recomputed blocks, and every stage."""
    seq.register_attention()
    inner = layout.inner if isinstance(layout, SequenceLayout) else 1
    batches = [batch_of(4, length, seed, padding) for seed in range(3)]
    expected = run("sdpa", batches, *more)

    def program() -> Any:
        mesh = comm.mesh(dp=2 // inner, sp=2 * inner)
        here = mesh["dp"]
        own = [{name: leaf.chunk(here.size)[here.rank] for name, leaf in batch.items()} for batch in batches]
        cut = T.sequence(mesh["sp"], layout=layout, pad=True)
        return run(attention, own, T.zero(stage, mesh["dp", "sp"]), cut, *more)

    for found in comm.simulate(program, world_size=4):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class TiledModule(nn.Module):
    """A module of tokens, in tiles."""

    def __init__(self, inner: nn.Module, tiles: int) -> None:
        super().__init__()
        self.inner, self.tiles = inner, tiles

    def forward(self, x: Tensor) -> Tensor:
        def call(params: dict[str, Tensor], part: Tensor) -> Tensor:
            found: Tensor = torch.func.functional_call(self.inner, params, (part,))
            return found

        found: Tensor = fds.tiled(call, self.tiles)(dict(self.inner.named_parameters()), x)
        return found


class TiledHead(nn.Module):
    """A causal model whose loss is computed in tiles, from the states before its head."""

    def __init__(self, model: Any, tiles: int) -> None:
        super().__init__()
        self.model, self.tiles = model, tiles

    def forward(self, shift_labels: Tensor, **inputs: Tensor) -> fds.Weighted:
        hidden = self.model.model(**inputs).last_hidden_state
        return seq.tiled_loss(hidden, self.model.lm_head.weight, shift_labels, tiles=self.tiles)


@pytest.mark.parametrize("stage", [0, 3])
def test_llama_in_tiles(stage: int) -> None:
    """Its MLPs and its loss tile by tile, in shards that are gathered once, with a head that is the embedding."""
    seq.register_attention()
    batches = [batch_of(4, 8, seed, "right") for seed in range(3)]
    expected = run("sdpa", batches)[0]

    def program() -> list[float]:
        model: Any = llama("fds_ring")
        for layer in model.model.layers:
            layer.mlp = TiledModule(layer.mlp, 3)
        apply, params = fds.functional(TiledHead(model, 5))
        step = fds.train_step(lambda params, batch: apply(params, **batch), fds.adamw(0.01))
        step = fds.compose(T.zero(stage), T.sequence(layout="zigzag"))(step)
        state, losses = step.init(params), []
        for batch in batches:
            state, metrics = step(state, batch)
            losses.append(metrics["loss"].item())
        return losses

    for found in comm.simulate(program, world_size=2):
        assert found == pytest.approx(expected, rel=1e-4)


def test_sdpa_is_refused() -> None:
    """A model whose attention knows of no other ranks would train, but wrongly."""

    def program() -> None:
        run("sdpa", [batch_of(2, 8, 0, None)], T.zero(0), T.sequence())

    with pytest.raises(ValueError, match="no function of the loss asked for the sequence axis"):
        comm.simulate(program, world_size=2)


def test_a_models_own_loss_is_refused() -> None:
    """It wants labels, which are shifted before the cut: then it has no loss at all."""
    seq.register_attention()

    def program() -> None:
        apply, params = fds.functional(llama("fds_ring"))
        step = fds.compose(T.zero(0), T.sequence())(fds.train_step(lambda p, b: apply(p, **b).loss, fds.sgd(0.1)))
        step(step.init(params), batch_of(2, 8, 0, None))

    with pytest.raises(ValueError, match=r"the loss is None: .* the batch has 'shift_labels'.*fds\.Weighted"):
        comm.simulate(program, world_size=2)
