"""Law 56: any mesh dp x pp x sp x tp, experts inside of dp, with a checkpoint in between, is the single-device step."""

import itertools
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, note, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm, moe, seq
from functional_ds import pipelining as pp
from functional_ds import transforms as T
from tests.parallel import whole_models as wm
from tests.parallel.whole_models import Ways

transformers = pytest.importorskip("transformers")
RATE = 0.05
SCHEDULES = {"1f1b": pp.one_f_one_b, "gpipe": pp.gpipe, "zb_h1": pp.zb_h1}


@attrs.frozen
class Mesh:
    """Sizes of a mesh's axes, and what else of a strategy changes no value.

    Attributes:
        ep: the ranks of dp over which experts are cut.
        micro: how many micro-batches; pipelines run them.
        layout: of the sequence.
    """

    dp: int = 1
    pp: int = 1
    sp: int = 1
    tp: int = 1
    ep: int = 1
    zero: int = 1
    micro: int = 1
    remat: bool = False
    layout: str = "contiguous"
    schedule: str = "1f1b"

    @property
    def ranks(self) -> int:
        return self.dp * self.pp * self.sp * self.tp

    def strategy(self, plan: Any, *more: fds.Transform, stages: Any = None, bf16: bool = False, mixture: bool = True) -> Any:
        """The transforms in their order, and which rows this rank has."""
        whole = comm.mesh(dp=self.dp, pp=self.pp, sp=self.sp, tp=self.tp)
        mesh = whole.split("dp", edp=self.dp // self.ep, ep=self.ep)
        piped = self.pp > 1
        found = [
            *([T.mixed_precision("bf16")] if bf16 else []),
            T.zero(self.zero, mesh["edp", "ep", "sp"]),
            *([T.pipeline(SCHEDULES[self.schedule](self.pp, self.micro), stages, mesh["pp"])] if piped else []),
            *([T.accumulate(self.micro)] if self.micro > 1 and not piped else []),
            T.sequence(mesh["sp"], layout=self.layout),
            *([T.experts(wm.PATTERN, mesh["ep"], edp=mesh["edp", "sp"])] if mixture else []),
            T.tensor_parallel(plan, mesh["tp"]),
            *([T.remat("")] if self.remat and not piped else []),
            *more,
        ]
        return fds.compose(*found), whole["dp"], mesh


Outcome = tuple[list[tuple[float, float]], dict[str, Tensor]]


def follows(step: fds.Step, params: Any, rows: comm.Group, folder: Path | None, first: bool) -> Outcome:
    """Two updates, then a checkpoint; or one more update from it. Without a folder there is none."""
    state = step.init(params)
    state = state if first or folder is None else fds.load(folder, like=state)
    found = []
    for index in (0, 1) if first else (2,):
        batch = {name: leaf.chunk(rows.size)[rows.rank] for name, leaf in wm.batch_of(index).items()}
        state, metrics = step(state, batch)
        found.append((metrics["loss"].item(), metrics["grad_norm"].item()))
    if first and folder is not None:
        fds.save(state, folder)
    return found, dict(fds.tree.named(step.params(state)))


def assert_close(found: Outcome, losses: list[tuple[float, float]], params: dict[str, Tensor], tolerance: float) -> None:
    assert found[1].keys() == params.keys()
    for mine, theirs in zip(found[0], losses, strict=True):
        assert mine == pytest.approx(theirs, rel=tolerance)
    for path, leaf in params.items():
        torch.testing.assert_close(
            found[1][path].double(),
            leaf.double(),
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, path=path: f"{path}: {text}",
        )


# -- pure functions -----------------------------------------------------------------------------------------------------


@cache
def plainly(ways: Ways) -> tuple[list[tuple[float, float]], list[dict[str, Tensor]]]:
    """Losses, norms, and the params after each update, of plain PyTorch on one device."""
    tree = wm.pure_params(ways)
    leaves = [leaf.requires_grad_() for leaf in fds.tree.leaves(tree)]
    optimizer = torch.optim.AdamW(leaves, 1e-2, eps=1e-3, weight_decay=0.1)
    biases = [torch.zeros(wm.EXPERTS) for _ in tree["layers"]] if ways.biased else None
    found, after = [], []
    for index in range(3):
        optimizer.zero_grad()
        total, counts = wm.plain_loss(ways)(tree, wm.batch_of(index), None, biases)
        loss = total.sum / total.weight
        loss.backward()
        norm = nn.utils.clip_grad_norm_(leaves, 0.1)
        optimizer.step()
        found.append((loss.item(), norm.item()))
        after.append({path: leaf.detach().clone() for path, leaf in fds.tree.named(tree)})
        for bias, count in zip(biases or [], counts, strict=False):
            bias.add_(RATE * (count.double().mean() - count).sign())
    return found, after


@cache
def with_draws(ways: Ways, bf16: bool) -> tuple[list[tuple[float, float]], list[dict[str, Tensor]]]:
    """The same by the step on one device, whose draws and roundings the ranks must have, without any axis."""

    def loss(params: Any, batch: Any, key: fds.Key | None) -> fds.Weighted:
        return wm.plain_loss(ways)(params, batch, key)[0]  # type: ignore[no-any-return]

    chain = [*([T.mixed_precision("bf16")] if bf16 else []), T.clip(0.1)]
    step = fds.compose(*chain)(fds.train_step(loss, fds.adamw(1e-2, eps=1e-3, weight_decay=0.1), seed=3))
    state, found, after = step.init(wm.pure_params(ways)), [], []
    for index in range(3):
        state, metrics = step(state, wm.batch_of(index))
        found.append((metrics["loss"].item(), metrics["grad_norm"].item()))
        after.append({path: leaf.detach().clone() for path, leaf in fds.tree.named(step.params(state))})
    return found, after


def pure_program(ways: Ways, mesh: Mesh, folder: Path | None, first: bool, bf16: bool = False) -> Outcome:
    model = wm.pure_stages(ways) if mesh.pp > 1 else wm.pure_loss(ways)
    plan = wm.pure_plan(ways)
    groups = comm.mesh(dp=mesh.dp, pp=mesh.pp, sp=mesh.sp, tp=mesh.tp)
    names = {f"layer {i}": wm.EXPERTS for i in range(2)}
    more = [T.balance(RATE, names, over=groups["tp"] if ways.along else None)] if ways.biased else []
    chain, rows, _ = mesh.strategy(plan, *more, T.clip(0.1), stages=model, bf16=bf16, mixture=ways.mixture)
    step = chain(fds.train_step(model, fds.adamw(1e-2, eps=1e-3, weight_decay=0.1), seed=3))
    return follows(step, wm.pure_params(ways), rows, folder, first)


def meshes(draw: Any, *, key_heads: int, mixture: bool) -> Mesh:
    """One of two to eight ranks on which the model and the batch lie."""
    dp, stages, sp, tp = draw(
        st.sampled_from(
            [
                (dp, stages, sp, tp)
                for dp, stages, sp, tp in itertools.product((1, 2, 4, 8), (1, 2), (1, 2, 4), (1, 2, 4))
                if 1 < dp * stages * sp * tp <= 8 and tp <= key_heads
            ]
        )
    )
    return Mesh(
        dp,
        stages,
        sp,
        tp,
        draw(st.sampled_from([n for n in (1, 2, 4) if mixture and dp % n == 0] or [1])),
        draw(st.sampled_from((0, 1, 2, 3))),
        draw(st.sampled_from([m for m in ((2, 4) if stages > 1 else (1, 2)) if wm.ROWS // dp >= m])),
        draw(st.booleans()),
        draw(st.sampled_from(("contiguous", "zigzag", "striped"))),
        draw(st.sampled_from(sorted(SCHEDULES))),
    )


def agrees(ways: Ways, before: Mesh, after: Mesh, bf16: bool = False) -> None:
    """Losses, norms and params on one mesh, and from its checkpoint on another."""
    losses, params = with_draws(ways, bf16) if bf16 or ways.dropout else plainly(ways)
    tolerance = 0.06 if bf16 else 1e-5
    with tempfile.TemporaryDirectory() as name:
        for mesh, first in ((before, True), (after, False)):
            part = slice(0, 2) if first else slice(2, 3)
            for found in comm.simulate(pure_program, ways, mesh, Path(name), first, bf16, world_size=mesh.ranks):
                assert_close(found, losses[part], params[1 if first else 2], tolerance)


@pytest.mark.law(56)
@settings(max_examples=max(4, settings.default.max_examples // 3))
@given(data=st.data())
def test_any_mesh_of_pure_functions(data: st.DataObject) -> None:
    """Ring, Ulysses or gathered attention, grouped heads, experts with balanced routers, activations cut over tp."""
    draw = data.draw
    mixture = draw(st.booleans())
    ways = Ways(
        draw(st.sampled_from(("ring", "ulysses", "gathered"))),
        draw(st.booleans()),
        mixture,
        mixture and draw(st.booleans()),
        draw(st.sampled_from((2, 4))),
    )
    if not mixture and not ways.along and draw(st.booleans()):
        ways = attrs.evolve(ways, dropout=0.25)
    before, after = (meshes(draw, key_heads=ways.key_heads, mixture=mixture) for _ in range(2))
    note(f"{ways} {before} {after}")
    agrees(ways, before, after)


# -- unmodified models of Hugging Face ----------------------------------------------------------------------------------


@attrs.frozen
class Unmodified:
    """A model of Hugging Face, and through which registries and plan it runs."""

    kind: str
    attention: str = "fds_ring"
    along: bool = False
    vocab: bool = True

    def model(self, mesh: Mesh) -> nn.Module:
        attention = self.attention if mesh.sp > 1 else "sdpa"
        return wm.hugging_face(self.kind, attention, "fds_experts" if mesh.ep > 1 else None)


@cache
def plainly_unmodified(kind: str) -> tuple[list[tuple[float, float]], list[dict[str, Tensor]]]:
    """The model with torch's attention on one device."""
    model, found, after = wm.hugging_face(kind), [], []
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3, weight_decay=0.1)
    for index in range(3):
        optimizer.zero_grad()
        batch = wm.batch_of(index)
        logits = model(input_ids=batch["input_ids"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        found.append((loss.item(), norm.item()))
        after.append({path: leaf.detach().clone() for path, leaf in model.named_parameters()})
    return found, after


def unmodified_program(how: Unmodified, mesh: Mesh, folder: Path, first: bool) -> Outcome:
    def last(output: Any, batch: Any) -> fds.Weighted:
        return wm.summed_loss(output, batch, vocab=how.vocab)

    model: Any
    if mesh.pp > 1:
        example = {name: leaf[:2] for name, leaf in wm.batch_of(0).items()}
        model, params = pp.cut(how.model(mesh), ["model.layers.1"], example=example, inputs=wm.inputs_of, loss=last)
    else:
        apply, params = fds.functional(how.model(mesh))

        def model(params: Any, batch: Any) -> fds.Weighted:
            return last(apply(params, **wm.inputs_of(batch)), batch)

    plan = wm.hugging_face_plan(how.kind, along=how.along, vocab=how.vocab)
    chain, rows, _ = mesh.strategy(plan, T.clip(0.1), stages=model, mixture=mesh.ep > 1)
    step = chain(fds.train_step(model, fds.adamw(1e-2, eps=1e-3, weight_decay=0.1)))
    return follows(step, params, rows, folder, first)


def agrees_unmodified(how: Unmodified, before: Mesh, after: Mesh) -> None:
    seq.register_attention()
    moe.register_experts()
    losses, params = plainly_unmodified(how.kind)
    with tempfile.TemporaryDirectory() as name:
        for mesh, first in ((before, True), (after, False)):
            part = slice(0, 2) if first else slice(2, 3)
            for found in comm.simulate(unmodified_program, how, mesh, Path(name), first, world_size=mesh.ranks):
                assert_close(found, losses[part], params[1 if first else 2], 1e-4)


@pytest.mark.law(56)
@settings(max_examples=max(2, settings.default.max_examples // 5))
@given(data=st.data())
def test_any_mesh_of_unmodified_models(data: st.DataObject) -> None:
    """Llama, Qwen3 and Mixtral through their plans and registries; pipelines of what pp.cut makes of them."""
    draw = data.draw
    kind = draw(st.sampled_from(("llama kv1", "llama kv2", "tied llama", "qwen3 kv2", "mixtral")))
    how = Unmodified(
        kind, draw(st.sampled_from(("fds_ring", "fds_ulysses", "fds_gathered"))), draw(st.booleans()), draw(st.booleans())
    )
    before, after = (meshes(draw, key_heads=4, mixture=kind == "mixtral") for _ in range(2))
    note(f"{how} {before} {after}")
    agrees_unmodified(how, before, after)


# -- what law 56 has found, each once -----------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.law(56)
@pytest.mark.parametrize(
    ("ways", "before", "after"),
    [
        (Ways(), Mesh(dp=2, pp=2, tp=2, micro=2, zero=3), Mesh(pp=2, sp=2, tp=2, micro=2)),
        (Ways("ulysses", along=True), Mesh(pp=2, sp=2, tp=2, micro=2, zero=2, schedule="zb_h1"), Mesh(sp=4, tp=2, zero=0)),
        (Ways(mixture=True, biased=True), Mesh(dp=2, ep=2, pp=2, sp=2, micro=2), Mesh(dp=2, ep=2, sp=2, tp=2, zero=3)),
    ],
    ids=["a split vocabulary in a pipeline", "Ulysses in a pipeline", "balanced experts in a pipeline"],
)
def test_meshes_of_pure_functions(ways: Ways, before: Mesh, after: Mesh) -> None:
    agrees(ways, before, after)


@pytest.mark.sample(1)
@pytest.mark.law(56)
@pytest.mark.parametrize(
    ("how", "before", "after"),
    [
        (Unmodified("mixtral"), Mesh(dp=2, ep=2, sp=2, tp=2, zero=2), Mesh(dp=4, ep=4, zero=3)),
        (Unmodified("mixtral", along=True), Mesh(dp=2, ep=2, tp=2), Mesh(sp=2, tp=2, layout="zigzag")),
        (Unmodified("mixtral", vocab=False), Mesh(dp=2, ep=2, pp=2, tp=2, micro=2, zero=3), Mesh(dp=2, ep=2)),
    ],
    ids=["experts over ep and tp", "experts over ep beside a split sequence", "a split pipeline of experts"],
)
def test_meshes_of_mixtures(how: Unmodified, before: Mesh, after: Mesh) -> None:
    agrees_unmodified(how, before, after)


@pytest.mark.law(56)
def test_half_precision() -> None:
    """bf16 params and gradients: near one device's step in bf16, on all five axes."""
    agrees(Ways(), Mesh(dp=2, sp=2, tp=2, zero=3), Mesh(pp=2, sp=2, tp=2, micro=2, zero=1), bf16=True)


@pytest.mark.law(49)
@pytest.mark.law(56)
def test_draws() -> None:
    """Dropout on slices of features and of sequences, in pipelines too, is one device's."""
    agrees(Ways(dropout=0.25), Mesh(dp=2, sp=2, tp=2, zero=3, layout="striped"), Mesh(pp=2, sp=2, tp=2, micro=2, remat=True))


# -- values, and what is refused ----------------------------------------------------------------------------------------


@pytest.mark.sample(2)
@pytest.mark.law(51)
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("ways", "mesh"),
    [
        (Ways(), Mesh(dp=2, sp=2, tp=2, zero=3)),
        (Ways("ulysses", along=True), Mesh(pp=2, sp=2, tp=2, micro=2)),
        (Ways(mixture=True, biased=True), Mesh(dp=2, ep=2, sp=2, tp=2, zero=2)),
        (Ways(mixture=True, along=True), Mesh(dp=2, ep=2, tp=2, zero=0)),
    ],
    ids=["dense", "pipeline", "experts", "cut activations of experts"],
)
def test_nothing_contradicts_what_is_declared(ways: Ways, mesh: Mesh) -> None:
    """The check of values along axes finds nothing in such runs; batches and params are drawn outside of them."""
    plainly(ways)
    comm.simulate(pure_program, ways, mesh, None, False, world_size=mesh.ranks, variance=True)


def test_whole_experts_that_a_plan_would_sum() -> None:
    """A plan without its entries for the experts' weights would count whole experts n times."""

    def program() -> None:
        plan = {key: word for key, word in wm.hugging_face_plan("mixtral").items() if "experts." not in key}
        apply, params = fds.functional(wm.hugging_face("mixtral"))
        base = fds.train_step(lambda p, b: wm.summed_loss(apply(p, **wm.inputs_of(b)), b, vocab=True), fds.sgd(0.1))
        step = T.tensor_parallel(plan)(base)
        step(step.init(params), wm.batch_of(0))

    with pytest.raises(ValueError, match=r"experts' is 'moe_tp_experts', and nothing in it is split: the sum over the 2 ranks"):
        comm.simulate(program, world_size=2)


ORDERS = {
    "zero accumulate sequence experts tensor clip": "",
    "sequence zero accumulate experts tensor clip": "",
    "accumulate zero sequence clip experts tensor": "",
    "tensor zero accumulate sequence experts clip": r"put it after zero\(.*plan: 'embed' matches no path",
    "experts zero accumulate sequence tensor clip": "no transform before it sums their gradients",
    "zero sequence pipeline tensor experts clip": "replaces the gradients, which another transform of this step wraps already",
    "pipeline zero sequence experts tensor clip": "put pipeline after zero",
    "zero tensor pipeline sequence experts clip": r"another transform of this step wraps already .*; put pipeline before it",
}


@pytest.mark.sample(3)
@pytest.mark.law(56)
@pytest.mark.parametrize("order", ORDERS)
def test_orders_of_transforms(order: str) -> None:
    """Another order makes no difference, or is refused by name."""
    ways, names = Ways(mixture=True), order.split()
    piped = "pipeline" in names

    def program() -> Outcome:
        whole = comm.mesh(dp=2, pp=1 + piped, sp=2 - piped, tp=2)
        mesh = whole.split("dp", edp=1, ep=2)
        model = wm.pure_stages(ways) if piped else wm.pure_loss(ways)
        made = {
            "zero": lambda: T.zero(2, mesh["edp", "ep", "sp"]),
            "pipeline": lambda: T.pipeline(pp.one_f_one_b(2, 2), model, mesh["pp"]),
            "accumulate": lambda: T.accumulate(2),
            "sequence": lambda: T.sequence(mesh["sp"]),
            "experts": lambda: T.experts(wm.PATTERN, mesh["ep"], edp=mesh["edp", "sp"]),
            "tensor": lambda: T.tensor_parallel(wm.pure_plan(ways), mesh["tp"]),
            "clip": lambda: T.clip(0.1),
        }
        step = fds.compose(*(made[name]() for name in names))(
            fds.train_step(model, fds.adamw(1e-2, eps=1e-3, weight_decay=0.1))
        )
        return follows(step, wm.pure_params(ways), whole["dp"], None, True)

    if ORDERS[order]:
        with pytest.raises(ValueError, match=ORDERS[order]):
            comm.simulate(program, world_size=8)
        return
    losses, params = plainly(ways)
    for found in comm.simulate(program, world_size=8):
        assert_close(found, losses[:2], params[1], 1e-5)
