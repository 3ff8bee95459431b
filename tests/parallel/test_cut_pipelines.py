"""Laws 44, 56: stages that pp.cut makes of an unmodified model of Hugging Face, on pp x sp x tp x ep, are the model."""

from functools import cache
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm, moe, seq
from functional_ds import pipelining as pp
from functional_ds import transforms as T
from tests.parallel import whole_models as wm

pytest.importorskip("transformers")

CUTS = {2: ["model.layers.1"], 4: ["model.layers.0", "model.layers.1", "model.norm"]}  # of four, the ends have no attention
SCHEDULES = {
    "1f1b": pp.one_f_one_b(2, 2),
    "gpipe": pp.gpipe(2, 3),
    "interleaved": pp.interleaved_one_f_one_b(2, 2),
    "zbv": pp.zbv(2, 4),
    "zb_h1": pp.zb_h1(2, 2),
}
Outcome = tuple[list[tuple[float, float]], dict[str, Tensor]]


@cache
def batch_of(index: int, padding: str | None) -> dict[str, Tensor]:
    """Four rows, of which some are shorter."""
    batch = {name: leaf[:4] for name, leaf in wm.batch_of(index).items()}
    if padding is None:
        return batch
    places, kept = torch.arange(wm.LENGTH), torch.tensor([8, 5, 7, 2]).roll(index)[:, None]
    mask = (places < kept) if padding == "right" else (places >= wm.LENGTH - kept)
    ignored = ~mask | ~mask.roll(-1, 1)
    return {**batch, "attention_mask": mask.long(), "shift_labels": batch["shift_labels"].masked_fill(ignored, -100)}


@cache
def plainly(kind: str, padding: str | None) -> Outcome:
    """Losses and norms of two updates, and params after them, of plain PyTorch."""
    model, found = wm.hugging_face(kind), []
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3, weight_decay=0.1)
    for index in range(2):
        optimizer.zero_grad()
        batch = batch_of(index, padding)
        logits = model(**wm.inputs_of(batch)).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
        loss.backward()
        found.append((loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()))
        optimizer.step()
    return found, {path: leaf.detach().clone() for path, leaf in model.named_parameters()}


@attrs.frozen
class Run:
    """A model, and how it lies on the ranks."""

    kind: str = "llama kv2"
    attention: str = "fds_ring"
    schedule: str = "1f1b"
    padding: str | None = None
    layout: str = "contiguous"
    zero: int = 1
    sp: int = 2
    tp: int = 1
    ep: int = 1

    @property
    def ranks(self) -> int:
        return 2 * self.sp * self.tp * self.ep

    def program(self) -> Outcome:
        mesh = comm.mesh(dp=self.ep, pp=2, sp=self.sp, tp=self.tp).split("dp", edp=1, ep=self.ep)
        schedule = SCHEDULES[self.schedule]
        model = wm.hugging_face(self.kind, self.attention, "fds_experts" if self.ep > 1 else None)
        example = {name: leaf[:1] for name, leaf in batch_of(0, self.padding).items()}
        stages, params = pp.cut(
            model,
            CUTS[schedule.stages],
            example=example,
            inputs=wm.inputs_of,
            loss=lambda output, batch: wm.summed_loss(output, batch, vocab=True),
        )
        chain = [
            T.zero(self.zero, mesh["edp", "ep", "sp"]),
            T.pipeline(schedule, stages, mesh["pp"]),
            T.sequence(mesh["sp"], layout=self.layout),
            *([T.experts(wm.PATTERN, mesh["ep"], edp=mesh["edp", "sp"])] if self.ep > 1 else []),
            T.tensor_parallel(wm.hugging_face_plan(self.kind), mesh["tp"]),
            T.clip(0.1),
        ]
        step = fds.compose(*chain)(fds.train_step(stages, fds.adamw(1e-2, eps=1e-3, weight_decay=0.1)))
        state, found = step.init(params), []
        for index in range(2):
            batch = batch_of(index, self.padding)
            rows = {name: leaf.tensor_split(self.ep)[mesh["ep"].rank] for name, leaf in batch.items()}
            state, metrics = step(state, rows)
            found.append((metrics["loss"].item(), metrics["grad_norm"].item()))
        return found, dict(fds.tree.named(step.params(state)))


def check(found: Outcome, expected: Outcome) -> None:
    for mine, theirs in zip(found[0], expected[0], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)
    for path, leaf in expected[1].items():
        torch.testing.assert_close(found[1][path], leaf, rtol=1e-4, atol=1e-4, msg=lambda text, path=path: f"{path}: {text}")


@pytest.mark.sample(1)
@pytest.mark.law(44)
@pytest.mark.law(56)
@pytest.mark.parametrize(
    "run",
    [
        Run(schedule="interleaved", layout="zigzag", padding="right", zero=3),
        Run("tied llama", "fds_ulysses", "zbv", padding="left", zero=2),
        Run("mixtral", "sdpa", "interleaved", sp=1, ep=2),
        Run("tied llama", "sdpa", "gpipe", sp=1, tp=2),
    ],
    ids=lambda run: f"{run.kind} {run.schedule}",
)
def test_stages_of_unmodified_models(run: Run) -> None:
    """Stages without attention or experts, a cut head that is the embedding, padded rows, uneven micro-batches."""
    seq.register_attention()
    moe.register_experts()
    expected = plainly(run.kind, run.padding)
    for found in comm.simulate(run.program, world_size=run.ranks):
        check(found, expected)


def on_a_process() -> Outcome:
    seq.register_attention()
    return Run("tied llama", padding="right", layout="zigzag").program()


@pytest.mark.law(44)
def test_processes() -> None:
    """pp x sp = 2 x 2 over Gloo: the only test of messages of both axes between real processes."""
    expected = plainly("tied llama", "right")
    for found in comm.spawn(on_a_process, world_size=4):
        check(found, expected)


# -- what is refused ----------------------------------------------------------------------------------------------------


def refused(attention: str, inputs: Any, padding: str | None = None) -> None:
    seq.register_attention()

    def program() -> None:
        mesh = comm.mesh(pp=2, sp=2)
        example = {name: leaf[:2] for name, leaf in batch_of(0, padding).items()}
        model = wm.hugging_face("llama kv2", attention)
        stages, params = pp.cut(model, CUTS[2], example=example, inputs=inputs, loss=wm.summed_loss)
        chain = T.zero(1, mesh["sp"]), T.pipeline(SCHEDULES["1f1b"], stages, mesh["pp"]), T.sequence(mesh["sp"])
        step = fds.compose(*chain)(fds.train_step(stages, fds.sgd(0.1)))
        step(step.init(params), batch_of(0, padding))

    comm.simulate(program, world_size=4)


def test_attention_of_a_ranks_own_positions() -> None:
    with pytest.raises(ValueError, match="no function of the loss asked for the sequence axis"):
        refused("sdpa", wm.inputs_of)


def test_positions_that_the_model_counts() -> None:
    """Left alone, it counts each rank's from 0: also in a trace, where they are constants."""
    with pytest.raises(ValueError, match="fds_ring: the model's position_ids are not this rank's positions in the sequence"):
        refused("fds_ring", lambda batch: {"input_ids": batch["input_ids"]})


def test_a_mask_that_other_ranks_do_not_know() -> None:
    def inputs(batch: Any) -> dict[str, Tensor]:
        return {**wm.inputs_of(batch), "attention_mask": (batch["input_ids"] > 3).long()}

    with pytest.raises(ValueError, match="fds_ring: the model's attention_mask is not the mask of the batch"):
        refused("fds_ring", inputs)


class Between(nn.Module):
    """Calls attention over ranks itself, between its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x).unflatten(-1, (2, 4)).transpose(1, 2)
        found: Tensor = self.blocks[1](seq.ring()(x, x, x).transpose(1, 2).flatten(2))
        return found


def test_attention_between_blocks() -> None:
    """A trace that had plain attention in its place would attend to a rank's own positions."""
    with pytest.raises(ValueError, match=r"comes from code that is not seen from outside.*put it into a module of its own"):
        pp.cut(Between(), ["blocks.1"], example=torch.ones(1, 4, 8), loss=lambda y, batch: y.sum())
