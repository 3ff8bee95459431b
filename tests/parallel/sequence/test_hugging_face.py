"""Unmodified models of Hugging Face over cut sequences are the models on one device, or refuse by name."""

import warnings
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from functional_ds import comm, seq
from functional_ds.step.axes import with_axis
from functional_ds.step.pass_scope import Pass

hf = pytest.importorskip("transformers")

ROWS, LENGTH, RANKS = 2, 16, 4
MODELS = {
    "llama": (lambda **kw: hf.LlamaForCausalLM(hf.LlamaConfig(**kw)), {}),
    "qwen3": (lambda **kw: hf.Qwen3ForCausalLM(hf.Qwen3Config(**kw)), {}),
    "windows": (
        lambda **kw: hf.Qwen3ForCausalLM(hf.Qwen3Config(**kw)),
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
}
WAYS = [
    ("fds_ring", seq.SequenceLayout("zigzag")),
    ("fds_ring", seq.SequenceLayout("striped", inner=2)),
    ("fds_ulysses", seq.SequenceLayout("zigzag")),
    ("fds_gathered", seq.SequenceLayout("contiguous")),
    ("fds_ulysses_ring", seq.SequenceLayout("zigzag", inner=2)),
]


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    """The names are registered once."""
    assert seq.register_attention() == ("fds_gathered", "fds_ring", "fds_ulysses", "fds_ulysses_ring")


def _model(name: str, way: str, **options: Any) -> Any:
    torch.manual_seed(0)
    make, extra = MODELS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers is renaming what it passes to itself
        return make(
            hidden_size=32,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            vocab_size=40,
            initializer_range=0.3,  # attention to other keys is another loss by far more than rounding
            attn_implementation=way,
            **extra,
            **options,
        )


def _batch(kind: str) -> dict[str, Tensor]:
    """Tokens, labels already shifted, and what says which tokens go together."""
    torch.manual_seed(1)
    ids = torch.randint(0, 40, (ROWS, LENGTH))
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)
    if kind == "padded":  # on the right and on the left
        mask = torch.ones(ROWS, LENGTH, dtype=torch.int64)
        mask[0, 11:] = mask[1, :3] = 0
        return {
            "input_ids": ids,
            "attention_mask": mask,
            "labels": labels.masked_fill(mask * F.pad(mask[:, 1:], (0, 1)) == 0, -100),
        }
    if kind == "packed":
        positions = torch.cat([torch.arange(7), torch.arange(9)])[None].expand(ROWS, -1)
        return {"input_ids": ids, "position_ids": positions, "labels": labels}
    return {"input_ids": ids, "labels": labels}


def _trained(model: Any, batch: dict[str, Tensor], **more: Any) -> tuple[Tensor, list[Tensor]]:
    """The summed loss and the gradients."""
    inputs = {name: leaf for name, leaf in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False, **more).logits
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum", ignore_index=-100)
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


def _axis(layout: seq.SequenceLayout, documents: Tensor | None) -> seq.SequenceAxis:
    axis = seq.SequenceAxis(comm.world(), layout, LENGTH, documents=documents)
    if layout.inner == 1:
        return axis
    mesh = comm.mesh(ring=RANKS // layout.inner, ulysses=layout.inner)
    return attrs.evolve(axis, ring_group=mesh["ring"], ulysses_group=mesh["ulysses"])


def _in_a_step(axis: seq.SequenceAxis, function: Any) -> Any:
    with Pass():
        return with_axis("sp", axis, lambda _: function())(None)


@pytest.mark.sample(15)
@pytest.mark.law(42)
@pytest.mark.law(43)
@pytest.mark.parametrize(("way", "layout"), WAYS, ids=lambda value: value if isinstance(value, str) else value.kind)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", ["plain", "padded", "packed"])
def test_a_model_is_the_model_on_one_device(name: str, kind: str, way: str, layout: seq.SequenceLayout) -> None:
    batch = _batch(kind)
    loss, grads = _trained(_model(name, "sdpa"), batch)

    def program() -> tuple[Tensor, list[Tensor]]:
        axis = _axis(layout, seq.documents_of(batch.get("attention_mask"), position_ids=batch.get("position_ids")))
        own = {name: axis.cut(leaf) for name, leaf in batch.items()}
        own.setdefault("position_ids", axis.positions()[None])
        found: tuple[Tensor, list[Tensor]] = _in_a_step(axis, lambda: _trained(_model(name, way), own))
        return found

    losses, found = zip(*comm.simulate(program, world_size=RANKS), strict=True)
    torch.testing.assert_close(sum(losses), loss, rtol=1e-5, atol=1e-5)
    for expected, *parts in zip(grads, *found, strict=True):
        torch.testing.assert_close(sum(parts), expected, rtol=1e-4, atol=2e-5)


def _refused(match: str, *, layout: str = "zigzag", documents: Tensor | None = None, model: Any = None, **given: Any) -> None:
    """On every rank, before anything is sent."""

    def program() -> str:
        axis = _axis(seq.SequenceLayout(layout), documents)
        own = {"input_ids": axis.cut(_batch("plain")["input_ids"]), "position_ids": axis.positions()[None]}
        own |= {name: leaf(axis) for name, leaf in given.items()}
        with comm.ledger() as book, pytest.raises(ValueError, match=match):
            _in_a_step(axis, lambda: (model or (lambda: _model("llama", "fds_ring")))()(**own, use_cache=False))
        assert book.calls == 0
        return "refused"

    assert comm.simulate(program, world_size=RANKS) == ["refused"] * RANKS


def test_a_mask_that_the_step_does_not_know_is_refused() -> None:
    _refused("attention_mask is not the mask of the batch", attention_mask=lambda axis: torch.zeros(ROWS, 4, dtype=torch.int64))
    known = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    _refused("is not the mask", documents=known, attention_mask=lambda axis: torch.tensor([[1, 1, 1, 0]] * ROWS))


def test_a_mask_of_four_dims_is_refused() -> None:
    _refused(r"Tensor of shape \[2, 1, 4, 4\]", attention_mask=lambda axis: torch.ones(ROWS, 1, 4, 4, dtype=torch.bool))


def test_positions_that_are_not_the_ranks_are_refused() -> None:
    """A model that is not given any counts from 0 on every rank."""
    _refused("position_ids are not this rank's positions", layout="striped", position_ids=lambda axis: None)
    packed = torch.tensor([[0, 1, 0, 1]])
    _refused("position_ids are not this rank's positions", position_ids=lambda axis: packed)


def test_dropout_is_refused() -> None:
    _refused("dropout=0.5", model=lambda: _model("llama", "fds_ring", attention_dropout=0.5).train())


def test_a_ring_and_ulysses_need_groups() -> None:
    _refused("no groups for a ring and for Ulysses", model=lambda: _model("llama", "fds_ulysses_ring"))


def test_other_masks_are_refused() -> None:
    from transformers import masking_utils as masks

    def make(**options: Any) -> Any:
        config = _model("llama", "fds_ring").config
        some = torch.zeros(1, 4, 32)
        return lambda **_: options.pop("mask")(
            config=config, inputs_embeds=some, attention_mask=None, past_key_values=None, **options
        )

    chunked = masks.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64))
    _refused("chunked_overlay", model=lambda: make(mask=masks.create_causal_mask, and_mask_function=chunked))
    _refused("or_mask", model=lambda: make(mask=masks.create_causal_mask, or_mask_function=masks.causal_mask_function))
    blocks = torch.zeros(1, 4, dtype=torch.int64)
    _refused("or_mask", model=lambda: make(mask=masks.create_causal_mask, block_sequence_ids=blocks))


def test_a_cache_is_refused() -> None:
    def program() -> None:
        axis = _axis(seq.SequenceLayout("zigzag"), None)
        own = axis.cut(_batch("plain")["input_ids"])
        model = _model("llama", "fds_ring").eval()

        def twice() -> None:
            first = model(input_ids=own, position_ids=axis.positions()[None], use_cache=True)
            with pytest.raises(ValueError, match="no cache"):
                model(input_ids=own, position_ids=axis.positions()[None], past_key_values=first.past_key_values)

        _in_a_step(axis, twice)

    comm.simulate(program, world_size=RANKS)


@pytest.mark.parametrize("way", ["fds_gathered", "fds_ring", "fds_ulysses", "fds_ulysses_ring"])
def test_without_a_step_there_is_no_group(way: str) -> None:
    with pytest.raises(ValueError, match=f"{way}: .*T.sequence"):
        _model("llama", way)(input_ids=torch.zeros(1, 4, dtype=torch.int64))


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias", "head_mask", "cu_seq_lens_q"])
def test_what_attention_does_not_have_is_refused(name: str) -> None:
    x = torch.ones(1, 2, 4, 8)
    axis = seq.SequenceAxis(comm.world(), seq.SequenceLayout(), 4)
    attend = hf.AttentionInterface()["fds_ring"]
    with pytest.raises(ValueError, match=f"passes {name}"):
        _in_a_step(axis, lambda: attend(torch.nn.Module(), x, x, x, None, **{name: 1.0}))
