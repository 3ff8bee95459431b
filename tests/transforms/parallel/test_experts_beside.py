"""Experts beside optimizers, offloading, deferred leaves, pipelines, checkpoints and processes, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm
from functional_ds import pipelining as pp
from functional_ds import transforms as T
from functional_ds.step.axes import axis
from tests.transforms.parallel.mixture import PATTERN, batch, layer, loss, params
from tests.transforms.parallel.test_experts import TOLERANCE, assert_same, exchanged, on_ranks, trained

STAGES = (0, 1, 2, 3)


@pytest.mark.sample(2)
@pytest.mark.law(47)
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("places", ["cpu", "disk"])
def test_offloaded_experts(stage: int, places: Any, tmp_path: Path) -> None:
    """States, and in stage 3 params, on the host or a disk; with one rank a block (nothing is gathered) and with two."""
    path = tmp_path if places == "disk" else None
    offload = T.offload(places, places if stage == 3 else None, path=path)
    expected = trained([T.clip(0.5)], 8)
    for edp, ep in ((1, 2), (2, 2)):
        program = on_ranks([offload], lambda dp, mesh: T.zero(stage, dp), [T.clip(0.5)], edp, ep, rows=8)
        for found in comm.simulate(program, world_size=edp * ep):
            assert_same(found, expected)


@pytest.mark.parametrize("stage", STAGES)
def test_experts_that_are_read_later(stage: int) -> None:
    """Deferred experts give the bits of experts with values, and a rank reads none but its own."""
    whole = params()

    def program() -> Any:
        mesh = comm.mesh(dp=4).split("dp", edp=2, ep=2)
        read: list[tuple[str, int, int]] = []

        class Noted:
            def read(self, path: str, start: int, stop: int) -> Tensor:
                read.append((path, start, stop))
                return whole[path].reshape(-1)[start:stop]

        chain = T.zero(stage, mesh["edp", "ep"]), T.experts(PATTERN, mesh["ep"], edp=mesh["edp"])
        step = fds.compose(*chain)(fds.train_step(loss, fds.sgd(0.1)))
        found = step.params(step.init(fds.from_source(whole, Noted())))
        return found, [(start, stop) for path, start, stop in read if path == "0.up"], mesh["ep"].rank

    half, total = whole["0.up"].numel() // 2, 0
    for found, read, ep in comm.simulate(program, world_size=4):
        assert all(torch.equal(found[path], leaf) for path, leaf in whole.items())
        assert all(ep * half <= start <= stop <= (ep + 1) * half for start, stop in read)
        total += sum(stop - start for start, stop in read)
    assert total == (4 if stage == 0 else 2) * half  # a block's ranks share what is read where states lie in shards


@pytest.mark.sample(2)
@pytest.mark.law(47)
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("rule", ["groups", "muon"])
def test_optimizers(stage: int, rule: str) -> None:
    """Other optimizers for experts than for the rest; Muon for each expert's matrix, whole at the rank that owns it."""
    made = {
        "groups": lambda: fds.param_groups({PATTERN: fds.sgd(0.05, momentum=0.9)}, fds.adamw(1e-2, eps=1e-4, decay="embed")),
        "muon": lambda: fds.muon(
            0.02, fds.adamw(1e-2, eps=1e-4), matrices="embed|head|up|down", stacks="up|down", dtype=torch.float32
        ),
    }[rule]
    expected = trained([T.clip(0.5)], 8, rule=made())
    for edp, ep in ((1, 2), (2, 2)):
        program = on_ranks([], lambda dp, mesh: T.zero(stage, dp), [T.clip(0.5)], edp, ep, rows=8, rule=made())
        for found in comm.simulate(program, world_size=edp * ep):
            assert_same(found, expected, 1e-4)


@pytest.mark.law(54)
@pytest.mark.parametrize("stage", [1, 3])
def test_pipelines_whose_stages_have_experts(stage: int) -> None:
    """pp x edp x ep: the pipeline of whole stages."""

    trees = [
        {path: leaf for path, leaf in params().items() if path == "embed" or path.startswith("0.")},
        {path: leaf for path, leaf in params().items() if path == "head" or path.startswith("1.")},
    ]

    def model(ep: comm.Group | None) -> pp.Stages:

        def start(p: Any, inputs: Tensor) -> Tensor:
            x = inputs @ p["embed"]
            return x + layer(x, p, 0, ep)

        def end(p: Any, x: Tensor) -> Tensor:
            return (x + layer(x, p, 1, ep)) @ p["head"]

        return pp.stages([start, end], trees, loss=lambda y, given: (y - given[1]).square().mean())

    def run(stages: pp.Stages, *strategy: fds.Transform, part: tuple[int, int] = (0, 1)) -> Any:
        step = fds.compose(*strategy)(fds.train_step(stages, fds.adamw(1e-2, eps=1e-4)))
        state = step.init(trees)
        own = tuple(x.tensor_split(part[1])[part[0]] for x in batch(16)[:2])
        found = []
        for _ in range(2):
            state, metrics = step(state, own)
            found.append({name: value.item() for name, value in metrics.items()})
        return found, step.params(state), None, step.evaluate(state, own).item()

    def program() -> Any:
        mesh = comm.mesh(dp=4, pp=2).split("dp", edp=2, ep=2)
        dp, stages = mesh["edp", "ep"], model(mesh["ep"])
        chain = [
            T.zero(stage, dp),
            T.pipeline(pp.one_f_one_b(2, 2), stages, mesh["pp"]),
            T.experts(PATTERN, mesh["ep"], edp=mesh["edp"]),
            T.clip(0.1),
        ]
        return run(stages, *chain, part=(dp.rank, dp.size))

    expected = run(model(None), T.clip(0.1))
    for found in comm.simulate(program, world_size=8):
        assert_same(found, expected)


@pytest.mark.law(29)
@pytest.mark.parametrize("stage", [0, 2])
def test_stochastic_rounding_draws_for_the_whole_leaf(stage: int) -> None:
    """The same bits as on one device, since an expert's draws depend on its place among all experts."""
    precision = T.mixed_precision("params=bf16,compute=bf16", stochastic=True)

    def of_ranks(p: Any, x: Tensor) -> fds.Weighted:
        ep = 1 if axis("ep") is None else axis("ep").group.size  # no rank has other ranks' tokens here
        parts = (leaf.float().sum() * (ep if path[2:] in ("up", "bias", "down") else 1) for path, leaf in p.items())
        total = sum(parts, torch.zeros(()))
        return fds.Weighted((total if ep == 1 else exchanged(total)) * x.sum(), x.sum())

    def run(*strategy: fds.Transform) -> Any:
        step = fds.compose(precision, *strategy)(fds.train_step(of_ranks, fds.sgd(2.0**-9)))
        state = step.init(params())
        for _ in range(2):
            state, _ = step(state, torch.ones(2))
        return step.params(state)

    def program() -> Any:
        mesh = comm.mesh(dp=4).split("dp", edp=2, ep=2)
        return run(T.zero(stage, mesh["edp", "ep"]), T.experts(PATTERN, mesh["ep"], edp=mesh["edp"]))

    expected = run()
    for found in comm.simulate(program, world_size=4):
        assert all(torch.equal(found[path], leaf) for path, leaf in expected.items())


def test_whole_params_are_those_of_any_step() -> None:
    """What ``step.params`` gives has no mark of where it came from."""

    def program() -> Any:
        mesh = comm.mesh(dp=2).split("dp", edp=1, ep=2)
        base = fds.train_step(loss, fds.sgd(0.1))
        step = fds.compose(T.zero(1, mesh["edp", "ep"]), T.experts(PATTERN, mesh["ep"]))(base)
        found = step.params(step.init(params()))
        return [
            T.zero(stage)(base).init(found).slots["zero"].layout == T.zero(stage)(base).init(params()).slots["zero"].layout
            for stage in (0, 3)
        ]

    assert comm.simulate(program, world_size=2) == [[True, True]] * 2


@pytest.mark.sample(2)
@pytest.mark.law(50)
@pytest.mark.parametrize(
    ("before", "after"), [((2, 2, 2), (2, 2, 2)), ((1, 2, 2), (3, 1, 4)), ((3, 1, 4), (0, 2, 2)), ((0, 1, 2), (1, 1, 1))]
)
def test_a_checkpoint_goes_to_any_other_mesh(before: Any, after: Any, tmp_path: Path) -> None:
    """From any stage, edp and ep to any other; AdamW, masters and averages go on as if there had been none."""

    def begin(stage: int, edp: int, ep: int) -> Any:
        mesh = comm.mesh(dp=edp * ep).split("dp", edp=edp, ep=ep)
        dp = mesh["edp", "ep"]
        chain = [T.ema(0.5), T.zero(stage, dp), T.experts(PATTERN, mesh["ep"], edp=mesh["edp"])]
        step = fds.compose(*chain)(fds.train_step(lambda p, b: loss(p, b, mesh["ep"]), fds.adamw(1e-2, eps=1e-4)))
        return step, step.init(params()), tuple(x.tensor_split(dp.size)[dp.rank] for x in batch(8))

    def save() -> None:
        step, state, mine = begin(*before)
        state, _ = step(state, mine)
        fds.save(state, tmp_path)

    def load() -> Any:
        step, state, mine = begin(*after)
        state, _ = step(fds.load(tmp_path, like=state), mine)
        return step.params(state), T.averaged(step, state)

    comm.simulate(save, world_size=before[1] * before[2])
    alone = fds.compose(T.ema(0.5))(fds.train_step(loss, fds.adamw(1e-2, eps=1e-4)))
    state = alone.init(params())
    for _ in range(2):
        state, _ = alone(state, batch(8))
    expected = alone.params(state), T.averaged(alone, state)
    for found in comm.simulate(load, world_size=after[1] * after[2]):
        for ours, theirs in zip(found, expected, strict=True):
            for path, leaf in theirs.items():
                torch.testing.assert_close(ours[path], leaf, rtol=TOLERANCE, atol=TOLERANCE)


def on_two_processes() -> Any:
    mesh = comm.mesh(dp=2).split("dp", edp=1, ep=2)
    dp = mesh["edp", "ep"]
    found = []
    for stage in STAGES:
        chain = [T.zero(stage, dp), T.experts(PATTERN, mesh["ep"], edp=mesh["edp"]), T.clip(0.5)]
        found.append(trained(chain, 8, (dp.rank, dp.size), loss_fn=lambda p, b: loss(p, b, mesh["ep"])))
    return found


def test_processes_give_the_bits_of_the_simulator() -> None:
    simulated, spawned = comm.simulate(on_two_processes, world_size=2), comm.spawn(on_two_processes, world_size=2)
    for here, there in zip(simulated, spawned, strict=True):
        for one, other in zip(here, there, strict=True):
            assert one[0] == other[0]
            assert all(torch.equal(one[1][path], other[1][path]) for path in one[1])


# -- bad input -----------------------------------------------------------------------------------------------------------


def refused(make: Any, words: str, kind: type[Exception] = ValueError) -> None:
    """Composing a step and its ``init`` on four ranks end with this error on every rank."""

    def program() -> None:
        mesh = comm.mesh(dp=4).split("dp", edp=2, ep=2)
        with pytest.raises(kind, match=words):
            fds.compose(*make(mesh))(fds.train_step(loss, fds.adamw(0.1))).init(params())

    comm.simulate(program, world_size=4)


def test_what_is_refused() -> None:
    def cut(mesh: comm.Mesh, pattern: str = PATTERN, **rest: Any) -> fds.Transform:
        return T.experts(pattern, mesh["ep"], **{"edp": mesh["edp"], **rest})

    def zero(mesh: comm.Mesh) -> fds.Transform:
        return T.zero(1, mesh["edp", "ep"])

    refused(lambda m: [zero(m), cut(m, "ups")], "pattern='ups' matches no path; the nearest is '1.up'")
    refused(lambda m: [zero(m), cut(m, "(")], "is not a regular expression")
    refused(
        lambda m: [zero(m), cut(m, "embed")],
        r"'embed' of shape \[5, 6\] does not divide along dim 0 by the 2 ranks \[\d, \d\] of 'ep'",
    )
    refused(lambda m: [zero(m), T.experts(PATTERN, 2)], "ep=2 is not a group", TypeError)
    refused(lambda m: [zero(m), cut(m, edp=2)], "edp=2 is not a group", TypeError)
    refused(lambda m: [zero(m), cut(m, edp=m["edp", "ep"])], "share more than this rank")
    refused(lambda m: [cut(m)], "no transform before it sums their gradients")
    refused(lambda m: [cut(m), zero(m)], "no transform before it sums their gradients")
    refused(lambda m: [zero(m), cut(m, "up"), cut(m, "down")], r"has experts\('up', 'ep' of 2, edp='edp' of 2\) already")
    refused(
        lambda m: [T.zero(1, m["edp"]), cut(m)],
        r"the leaf '0.up' is shared within the blocks \[\[0, 2\], \[1, 3\]\] of ranks, but data parallelism is over the ranks",
    )
    refused(
        lambda m: [zero(m), T.experts(PATTERN, m["ep"])],
        r"within the blocks \[\[\d\], \[\d\]\] of ranks, but data parallelism is over",
    )
    refused(lambda m: [zero(m), T.tensor_parallel({"up": 0}, m["ep"]), cut(m)], "along dim 0 already")
    refused(
        lambda m: [zero(m), cut(m), T.tensor_parallel({"up": 0}, m["ep"])],
        r"'0.up' of shape \[2, 6, 8\] is split along dim 0 already",
    )


@pytest.mark.parametrize("kind", ["replicated", "compressed", "one-bit"])
def test_transforms_that_keep_all_params_the_same(kind: str) -> None:
    made = {
        "replicated": lambda m: T.replicated(
            m["edp", "ep"], reduce=lambda g, memory, group: (comm.all_reduce(g, group), memory)
        ),
        "compressed": lambda m: T.compressed_gradients(comm.codecs.OneBit(), m["edp", "ep"]),
        "one-bit": lambda m: T.local_gradients(m["edp", "ep"]),
    }[kind]
    refused(lambda m: [made(m), T.experts(PATTERN, m["ep"], edp=m["edp"])], "'0.bias' holds other experts on other ranks")


@pytest.mark.parametrize("stage", [0, 1])
def test_optimizers_that_look_at_whole_leaves(stage: int) -> None:
    def program(rule: Any, words: str) -> None:
        mesh = comm.mesh(dp=2).split("dp", edp=1, ep=2)
        chain = T.zero(stage, mesh["edp", "ep"]), T.experts(PATTERN, mesh["ep"])
        with pytest.raises(ValueError, match=words):
            fds.compose(*chain)(fds.train_step(loss, rule)).init(params())

    for rule, name in ((fds.lamb(0.1), "lamb"), (fds.muon(0.1, fds.adamw(0.1)), "muon")):
        words = rf"{name}: '0.\w+' is the slice .*, cut along dim 0 of 4 over 2 ranks, but {name} looks at whole leaves"
        comm.simulate(lambda rule=rule, words=words: program(rule, words), world_size=2)


@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.law(47)
def test_each_expert_is_a_matrix_that_one_rank_owns(stage: int, tmp_path: Path) -> None:
    """per_matrix: states by the numbers of experts over all ranks, in checkpoints too; nothing is sent where nobody shares."""

    def rule(grad: Tensor, momentum: Tensor, step: int, param: Tensor) -> tuple[Tensor, Tensor]:
        momentum = 0.9 * momentum + grad / grad.norm().clamp(min=1e-3)
        return momentum + 0.01 * step * param, momentum

    def made() -> Any:
        others = fds.adamw(1e-2, eps=1e-4)
        return fds.per_matrix(torch.zeros_like, rule, lr=0.01, others=others, matrices="embed", stacks="up|down")

    def program(edp: int, ep: int) -> Any:
        mesh = comm.mesh(dp=edp * ep).split("dp", edp=edp, ep=ep)
        dp = mesh["edp", "ep"]
        chain = T.zero(stage, dp), T.experts(PATTERN, mesh["ep"], edp=mesh["edp"])
        step = fds.compose(*chain)(fds.train_step(lambda p, b: loss(p, b, mesh["ep"]), made()))
        mine = tuple(x.tensor_split(dp.size)[dp.rank] for x in batch(8))
        state, _ = step(step.init(params()), mine)
        fds.save(state, tmp_path / f"{edp}{ep}")
        with comm.ledger() as book:
            state, _ = step(state, mine)
        sent = sum(row.bytes for row in book.rows if row.collective == "all_to_all")
        return step.params(state), sent, sorted(state.optimizer.states[0].whole)

    alone = fds.train_step(loss, made())
    state = alone.init(params())
    for _ in range(2):
        state, _ = alone(state, batch(8))
    for edp, ep in ((1, 2), (2, 2)):
        found = comm.simulate(program, edp, ep, world_size=edp * ep)
        for leaves, _, _ in found:
            assert all(torch.allclose(leaves[path], leaf, atol=1e-5) for path, leaf in state.params.items())
        own = [[name for name in names if "[" in name] for _, _, names in found]
        if stage:
            assert len({name for names in own for name in names}) == sum(map(len, own))
        if edp == 1:  # gradients, params and changes of the embedding alone
            assert sum(sent for _, sent, _ in found) <= 3 * params()["embed"].nbytes
        assert {name for names in own for name in names} == {n for n in state.optimizer.states[0].whole if "[" in n}


@pytest.mark.sample(2)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("sizes", [(1, 2), (2, 2)])
def test_compressed_gathers_and_reductions(stage: int, sizes: tuple[int, int]) -> None:
    """qwZ and qgZ over edp: near the single-device step, but for tokens that rounded routers send elsewhere."""
    gather, scatter = (
        comm.codecs.compressed(comm.all_gather, comm.codecs.Blocks(8)),
        comm.codecs.compressed(comm.reduce_scatter, comm.codecs.Blocks(8)),
    )
    program = on_ranks([], lambda dp, mesh: T.zero(stage, dp, all_gather=gather, reduce_scatter=scatter), [], *sizes, rows=8)
    expected = trained([], 8)
    for found in comm.simulate(program, world_size=sizes[0] * sizes[1]):
        for ours, theirs in zip(found[0], expected[0], strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.1)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_half_precision(stage: int) -> None:
    """bf16 params and gradients, fp32 masters: near the single-device step in bf16."""
    program = on_ranks([T.mixed_precision("bf16")], lambda dp, mesh: T.zero(stage, dp), [T.clip(0.5)], 2, 2, rows=8)
    expected = trained([T.mixed_precision("bf16"), T.clip(0.5)], 8)
    for found in comm.simulate(program, world_size=4):
        for ours, theirs in zip(found[0], expected[0], strict=True):
            assert ours == pytest.approx(theirs, rel=0.05)


class _Routed(nn.Module):
    """A router of its own class, and a stack of experts that knows of no other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Module(), nn.Module()
        self.gate.weight, self.experts.up = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("ti,eij,tj->t", x, self.experts.up, x)


class _Chosen(nn.Module):
    """Experts that fail on a part of the stack."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.ones(4, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(x.expand(4, -1, -1), self.up).sum(0)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("gate|experts", r"'gate.weight' of shape \[4, 3\] belongs to a Module without a stack of matrices.*a router"),
        ("experts", r"sends nothing among the ranks of 'ep'.*fds\.moe\.exchange"),
    ],
)
def test_modules_that_are_refused(pattern: str, words: str) -> None:
    apply, weights = fds.functional(_Routed())

    def program() -> None:
        mesh = comm.mesh(dp=2).split("dp", edp=1, ep=2)
        step = fds.train_step(lambda p, x: fds.Weighted(apply(p, x).sum(), len(x)), fds.sgd(0.1))
        step = fds.compose(T.zero(3, mesh["edp", "ep"]), T.experts(pattern, mesh["ep"]))(step)
        step(step.init(weights), torch.ones(2, 3))

    with pytest.raises(ValueError, match=words):
        comm.simulate(program, world_size=2)


def test_experts_that_fail_on_a_part_of_the_stack() -> None:
    """Torch's error about shapes is the cause of the one that says what would do."""
    apply, weights = fds.functional(nn.ModuleDict({"experts": _Chosen()}))

    def program() -> None:
        mesh = comm.mesh(dp=2).split("dp", edp=1, ep=2)
        step = fds.train_step(lambda p, x: fds.Weighted(apply.module["experts"](x).sum(), len(x)), fds.sgd(0.1))
        step = fds.compose(T.zero(1, mesh["edp", "ep"]), T.experts("experts", mesh["ep"]))(step)
        step(step.init(weights), torch.ones(2, 3))

    with pytest.raises(ValueError, match=r"sends nothing among the ranks of 'ep'.*fds\.moe\.exchange"):
        comm.simulate(program, world_size=2)
