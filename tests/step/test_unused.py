"""Trained leaves that a step does not use: the optimizer leaves them alone, as torch's does where ``grad`` is None."""

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm
from functional_ds import pipelining as pp
from functional_ds import transforms as T
from functional_ds.comm.table.errors import CommError
from tests.planting import Bug, planted

DIM = 6
PLAN = [[0, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [2, 2, 2, 2], [0, 1, 2, 1], [1, 1, 1, 1], [0, 0, 0, 0], [2, 0, 0, 0]]


class Heads(nn.Module):
    """Every row goes through the body and through the head that it names."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(DIM, DIM)
        self.heads = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.never = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, head: Tensor) -> Tensor:
        y = self.body(x).tanh()
        parts = [(self.heads[i](y[head == i]) ** 2).sum() for i in head.unique().tolist()]
        return sum(parts, y.new_zeros(()))


def build() -> Heads:
    torch.manual_seed(0)
    return Heads()


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(step))
    return x, torch.tensor(PLAN[step % len(PLAN)])


def plain(rule: Callable[[Any], torch.optim.Optimizer], *, clip: float | None = None) -> dict[str, Tensor]:
    """The params after the steps of the plan, by torch alone."""
    module = build()
    optimizer = rule(module.named_parameters())
    for i in range(len(PLAN)):
        optimizer.zero_grad()
        x, head = batch(i)
        (module(x, head) / len(x)).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
    return dict(module.named_parameters())


def own_part(step: Any, state: Any, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    index, count = step.batch_shard(state)
    x, head = given
    return x.tensor_split(count)[index], head.tensor_split(count)[index]


def ours(optimizer: Any, *transforms: Any, steps: range = range(len(PLAN)), resume: Path | None = None, **options: Any) -> Any:
    apply, params = fds.functional(build())

    def loss(p: Any, given: Any) -> fds.Weighted:
        return fds.Weighted(apply(p, *given), len(given[0]))

    step = fds.compose(*transforms)(fds.train_step(loss, optimizer, **options))
    state = step.init(params)
    if resume is not None:
        state = fds.load(resume, like=state)
    for i in steps:
        state, _ = step(state, own_part(step, state, batch(i)))
    return step, state


def params_of(*args: Any, **options: Any) -> dict[str, Tensor]:
    step, state = ours(*args, **options)
    return dict(fds.tree.named(step.params(state)))


def check(found: dict[str, Tensor], expected: dict[str, Tensor], tol: float = 2e-5) -> None:
    assert found.keys() == expected.keys()
    for path, leaf in expected.items():
        torch.testing.assert_close(found[path], leaf.detach(), rtol=tol, atol=tol, msg=lambda m, path=path: f"{path}: {m}")


RULES: dict[str, tuple[Any, Callable[[Any], torch.optim.Optimizer]]] = {
    "adamw": (fds.adamw(0.05, weight_decay=0.1), lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1)),
    "adam": (fds.adam(0.05, weight_decay=0.1), lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.1)),
    "momentum": (
        fds.sgd(0.05, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1),
    ),
    "adagrad": (
        fds.adagrad(0.05, eps=1e-8, weight_decay=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-8, weight_decay=0.1),
    ),
    "groups": (
        fds.param_groups({"^heads": fds.adamw(0.05, weight_decay=0.1)}, fds.sgd(0.05, momentum=0.9)),
        lambda p: _Two(list(p)),
    ),
    "decay": (
        fds.adamw(0.05, weight_decay=0.1, decay="weight$"),
        lambda p: torch.optim.AdamW(_by_decay(list(p)), lr=0.05),
    ),
}


class _Two:
    def __init__(self, named: list[tuple[str, Tensor]]) -> None:
        heads = [p for name, p in named if name.startswith("heads")]
        rest = [p for name, p in named if not name.startswith("heads")]
        self.each = [torch.optim.AdamW(heads, lr=0.05, weight_decay=0.1), torch.optim.SGD(rest, lr=0.05, momentum=0.9)]

    def zero_grad(self) -> None:
        for each in self.each:
            each.zero_grad()

    def step(self) -> None:
        for each in self.each:
            each.step()


def _by_decay(named: list[tuple[str, Tensor]]) -> list[dict[str, Any]]:
    decays = [p for name, p in named if name.endswith("weight")]
    rest = [p for name, p in named if not name.endswith("weight")]
    return [{"params": decays, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


@pytest.mark.sample(10)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("stage", [None, 0, 1, 2, 3])
def test_a_step_is_torchs_where_heads_take_turns(rule: str, stage: int | None) -> None:
    """Law 19 for models that do not use all of their params: equal to plain PyTorch, whose grads are None there."""
    mine, theirs = RULES[rule]
    expected = plain(theirs)
    if stage is None:
        check(params_of(mine), expected)
        check(params_of(mine, T.accumulate(2)), expected)
        return
    for n in (1, 2):
        for found in comm.simulate(params_of, mine, T.zero(stage), T.accumulate(2), world_size=n):
            check(found, expected)


@pytest.mark.sample(5)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "before",
    [(), (T.mixed_precision("f32", 8.0),), (T.offload("cpu"),), (T.mixed_precision("f32"), T.ema(0.5), T.offload("cpu"))],
    ids=str,
)
def test_with_other_transforms(stage: int, before: tuple[Any, ...]) -> None:
    mine, theirs = RULES["adamw"]
    before = tuple(sorted(before, key=lambda t: "ema" not in str(t)))
    expected = plain(theirs, clip=0.05)
    for found in comm.simulate(params_of, mine, *before, T.zero(stage), T.clip(0.05), world_size=2):
        check(found, expected, 2e-4)


def test_without_zero_in_torchs_bits() -> None:
    """On one device, each leaf moves by the same bits as in torch with its fused kernel."""
    expected = plain(lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.1, fused=True))
    found = params_of(RULES["adamw"][0])
    check(found, expected, 0.0)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_zeros_are_there_for_who_wants_them(stage: int) -> None:
    """``unused="zeros"``: momentum and decay move every leaf in every step, in all stages alike."""
    mine = RULES["adamw"][0]
    alone = params_of(mine, unused="zeros")
    assert (alone["never"] < 1).all()
    for found in comm.simulate(lambda: params_of(mine, T.zero(stage), unused="zeros"), world_size=2):
        check(found, alone)
    assert torch.equal(params_of(mine)["never"], torch.ones(3))


@pytest.mark.parametrize("stages", [(None, 2), (3, 1), (0, None)])
def test_counts_go_with_checkpoints(tmp_path: Path, stages: tuple[int | None, int | None]) -> None:
    """Law 37: saved by one stage and number of ranks, resumed by another, it is the run that was not interrupted."""
    half = 5

    def before(stage: int | None) -> None:
        transforms = () if stage is None else (T.zero(stage),)
        _, state = ours(RULES["adamw"][0], *transforms, steps=range(half))
        fds.save(state, tmp_path)

    def after(stage: int | None) -> dict[str, Tensor]:
        transforms = () if stage is None else (T.zero(stage),)
        return params_of(RULES["adamw"][0], *transforms, steps=range(half, len(PLAN)), resume=tmp_path)

    comm.simulate(before, stages[0], world_size=1 if stages[0] is None else 2)
    for found in comm.simulate(after, stages[1], world_size=1 if stages[1] is None else 3):
        check(found, plain(RULES["adamw"][1]))


# -- optimizers that see leaves, and those of users ----------------------------------------------------------------------


def _decayed(grad: Tensor, memory: Tensor, step: int, param: Tensor) -> tuple[Tensor, Tensor]:
    memory = 0.9 * memory + grad
    return memory / (1 - 0.9**step) + 0.1 * param, memory


def _hand_adam(unit: str) -> fds.Optimizer:
    """Adam by hand, with one count for all, or one a tensor."""

    def init(params: list[Tensor]) -> dict[str, Any]:
        count: Any = torch.zeros(()) if unit == "one" else [torch.zeros(()) for _ in params]
        return {"count": count, "m": [torch.zeros_like(p) for p in params], "v": [torch.zeros_like(p) for p in params]}

    def update(params: list[Tensor], grads: Any, state: dict[str, Any], rate: Any) -> tuple[list[Tensor], Any]:
        count = state["count"] + 1 if unit == "one" else [c + 1 for c in state["count"]]
        counts = [count] * len(params) if unit == "one" else count
        g = [x / grads.weight for x in grads.sum]
        m = [0.9 * m + 0.1 * x for m, x in zip(state["m"], g, strict=True)]
        v = [0.999 * v + 0.001 * x * x for v, x in zip(state["v"], g, strict=True)]
        moves = [a / (1 - 0.9**c) / ((b / (1 - 0.999**c)).sqrt() + 1e-8) for a, b, c in zip(m, v, counts, strict=True)]
        return [p - 0.05 * rate * x for p, x in zip(params, moves, strict=True)], {"count": count, "m": m, "v": v}

    return fds.Optimizer(init, update, f"hand({unit})", elementwise=True)


@pytest.mark.parametrize("unit", ["one", "each"])
@pytest.mark.parametrize("stage", [None, 1, 3])
def test_an_optimizer_of_the_users_counts_what_moved_each_leaf(unit: str, stage: int | None) -> None:
    expected = plain(lambda p: torch.optim.Adam(p, lr=0.05))
    transforms = () if stage is None else (T.zero(stage),)
    for found in comm.simulate(params_of, _hand_adam(unit), *transforms, world_size=2 if transforms else 1):
        check(found, expected)


PER_LEAF = {
    "lamb": fds.lamb(0.05, weight_decay=0.1),
    "muon": fds.muon(0.05, fds.adamw(0.05), dtype=torch.float32),
    "per_matrix": fds.per_matrix(torch.zeros_like, _decayed, lr=0.05, others=fds.adamw(0.05), weight_decay=0.1),
    "lion": fds.lion(0.05, weight_decay=0.1),
}


def one_leaf(apply: Any, leaves: dict[str, Tensor], path: str, p: Any, given: tuple[Tensor, Tensor]) -> fds.Weighted:
    return fds.Weighted(apply(leaves | {path: p[path]}, *given), len(given[0]))


def alone(optimizer: Any) -> dict[str, Tensor]:
    """Torch's rule for any optimizer: each step moves the leaves that it uses, each by a step of its own."""
    apply, params = fds.functional(build())
    leaves = {path: leaf.detach() for path, leaf in fds.tree.named(params)}
    states: dict[str, Any] = {}
    for i in range(len(PLAN)):
        x, head = batch(i)
        used = {path for path in leaves if path.startswith("body") or any(f"heads.{h}." in path for h in PLAN[i])}
        for path in sorted(used):
            step = fds.train_step(functools.partial(one_leaf, apply, leaves, path), optimizer)
            if path not in states:
                states[path] = step.init({path: leaves[path].detach()})
            states[path], _ = step(states[path], (x, head), donate=False)
        leaves = leaves | {path: states[path].params[path] for path in used}
    return leaves


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", PER_LEAF)
@pytest.mark.parametrize("stage", [None, 0, 1, 3])
def test_optimizers_that_see_leaves(name: str, stage: int | None) -> None:
    expected = alone(PER_LEAF[name])
    transforms = () if stage is None else (T.zero(stage),)
    for found in comm.simulate(params_of, PER_LEAF[name], *transforms, world_size=3 if transforms else 1):
        check(found, expected, 1e-3 if name == "muon" else 2e-5)


def test_a_state_that_cannot_be_taken_apart_is_refused() -> None:
    """By name, in the first step that does not use a leaf, and nothing has changed."""
    rule = fds.Optimizer(
        lambda params: torch.zeros(sum(p.numel() for p in params)), lambda p, g, s, r: (p, s), "odd", elementwise=True
    )
    apply, params = fds.functional(build())
    step = fds.train_step(lambda p, given: apply(p, *given), rule)
    state = step.init(params)
    with pytest.raises(RuntimeError, match=r"odd cannot skip leaves, because its state has .* unused='zeros'"):
        step(state, batch(0))
    assert torch.equal(step.params(state)["never"], torch.ones(3))
    step = fds.train_step(lambda p, given: apply(p, *given), rule, unused="zeros")
    step(step.init(params), batch(0))
    with pytest.raises(ValueError, match="unused='none' is neither 'skip' nor 'zeros'"):
        fds.train_step(lambda p, given: apply(p, *given), rule, unused="none")


# -- agreement ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_skipped_step_counts_for_no_leaf(stage: int) -> None:
    """Law 25: an overflow leaves counts alone, too."""

    def program(overflows: bool) -> dict[str, Tensor]:
        apply, params = fds.functional(build())

        def loss(p: Any, given: Any) -> fds.Weighted:
            return fds.Weighted(apply(p, *given[:2]) * given[2], len(given[0]))

        step = fds.compose(T.mixed_precision("f32", T.DynamicScale(8.0)), T.zero(stage))(
            fds.train_step(loss, RULES["adamw"][0])
        )
        state = step.init(params)
        for i in range(len(PLAN)):
            given = own_part(step, state, batch(i))
            if overflows:
                state, metrics = step(state, (*given, torch.tensor(float("inf"))))
                assert metrics["skipped"]
            state, _ = step(state, (*given, torch.tensor(1.0)))
        return dict(fds.tree.named(step.params(state)))

    for found in comm.simulate(program, True, world_size=2):
        check(found, comm.simulate(program, False, world_size=2)[0], 0.0)


def test_nothing_more_is_sent_where_all_is_used() -> None:
    """4 bytes a leaf go with the scalars that are summed anyway; no collective is added, whether all is used or not."""

    def calls(steps: range, **options: Any) -> tuple[list[Any], int]:
        with comm.ledger() as book:
            ours(fds.adamw(0.1), T.zero(2), steps=steps, **options)
        return [(row.collective, row.group, row.calls) for row in book.rows], book.bytes

    rows, sent = comm.simulate(lambda: calls(range(3)), world_size=2)[0]
    without, less = comm.simulate(lambda: calls(range(3), unused="zeros"), world_size=2)[0]
    assert rows == without
    leaves = len(list(build().parameters()))
    assert sent - less == 3 * 4 * leaves


def test_tied_leaves_and_remat() -> None:
    """A tied leaf is used if one of its uses is; a recomputed block that is not run gives no gradient."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))
            self.b.weight = self.a.weight

        def forward(self, x: Tensor, head: Tensor) -> Tensor:
            pair = {0: (self.b,), 1: (self.a, self.c), 2: (self.c,)}[int(head[0])]
            for layer in pair:
                x = fds.remat(layer)(x).tanh()
            return (x**2).sum()

    torch.manual_seed(1)
    module = Tied()
    apply, params = fds.functional(module)
    twin = Tied()
    twin.load_state_dict(module.state_dict())
    optimizer = torch.optim.AdamW(twin.parameters(), lr=0.05, weight_decay=0.1)
    for i in range(len(PLAN)):
        x, head = batch(i)
        optimizer.zero_grad()
        for part, which in zip(x.chunk(2), head.chunk(2), strict=True):
            (twin(part, which) / len(x)).backward()
        optimizer.step()

    def program(stage: int) -> dict[str, Tensor]:
        step = T.zero(stage)(fds.train_step(lambda p, given: fds.Weighted(apply(p, *given), len(given[0])), RULES["adamw"][0]))
        state = step.init(params)
        for i in range(len(PLAN)):
            state, _ = step(state, own_part(step, state, batch(i)))
        return dict(fds.tree.named(step.params(state)))

    for stage in (0, 3):
        for found in comm.simulate(program, stage, world_size=2):
            check(found, {path: dict(twin.named_parameters(remove_duplicate=False))[path] for path in found})


@pytest.mark.parametrize("stage", [None, 1, 3])
def test_pipelines_agree_over_stages(stage: int | None) -> None:
    """Two stages with alternating heads each and a leaf that both share, times data-parallel ranks: plain PyTorch's."""
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=generator) * 0.5  # noqa: E731
    shared = draw(DIM)
    params = {"a": [draw(DIM, DIM), draw(DIM, DIM)], "b": [draw(DIM, DIM), draw(DIM, DIM)], "s": shared, "t": draw(DIM)}
    flat = {path: leaf.clone().requires_grad_() for path, leaf in fds.tree.named(params)}

    here = threading.local()  # which heads this step uses: stages may not branch on values of the batch

    def first(p: Any, x: Tensor) -> Tensor:
        one, two, s = p
        return x @ two + s if here.which else x @ one

    def second(p: Any, y: Tensor) -> Tensor:
        one, two, s, t = p
        return y.tanh() @ two * t + s if here.which else y.tanh() @ one

    uses = ("a.0", "a.1", "s"), ("b.0", "b.1", "s", "t")
    plan = [0, 1, 1, 0, 0, 1]

    def rows(i: int) -> Tensor:
        here.which = plan[i]
        return torch.randn(8, DIM, generator=torch.Generator().manual_seed(i))

    optimizer = torch.optim.AdamW(flat.values(), lr=0.05, weight_decay=0.1)
    for i in range(len(plan)):
        optimizer.zero_grad()
        x = rows(i)
        a, b = ([flat[path] for path in part] for part in uses)
        (second(b, first(a, x)) ** 2).mean().backward()
        optimizer.step()

    def program() -> dict[str, Tensor]:
        mesh = comm.mesh(dp=1 if stage is None else 2, pp=2)
        pieces = [pp.Piece(function, uses=part) for function, part in zip((first, second), uses, strict=True)]
        model = pp.stages(pieces, params, loss=lambda y, batch: (y**2).mean())
        transforms = [] if stage is None else [T.zero(stage, mesh["dp"])]
        transforms.append(T.pipeline(pp.one_f_one_b(2, 2), model, mesh["pp"]))
        step = fds.compose(*transforms)(fds.train_step(model, RULES["adamw"][0]))
        state = step.init(params)
        for i in range(len(plan)):
            index, count = step.batch_shard(state)
            state, _ = step(state, rows(i).chunk(count)[index])
        return dict(fds.tree.named(step.params(state)))

    for found in comm.simulate(program, world_size=2 if stage is None else 4):
        check(found, flat)


def through_a_pipeline(folder: Path) -> None:
    """Counts of leaves that no loss used: loaded into stages, trained and saved there, and loaded again elsewhere."""
    start = [{"w": torch.ones(2, 2)}, {"w": torch.ones(2, 2), "spare": torch.ones(2)}]
    uses = [False]  # whether the loss uses the spare leaf

    def first(p: Any, x: Tensor) -> Tensor:
        return (x @ p["w"]).tanh()

    def second(p: Any, y: Tensor) -> Tensor:
        return (y @ p["w"] + (p["spare"] if uses[0] else 0)).tanh()

    def program(strategy: str, load: str | None, save: str, steps: int) -> tuple[dict[str, int], Any]:
        model = pp.stages([first, second], start, loss=lambda y, batch: y.square().mean())
        transforms = {"dp": T.zero(0), "sharded": T.zero(1), "pp": T.pipeline(pp.gpipe(2, 2), model)}
        step = transforms[strategy](fds.train_step(model, fds.adamw(0.1)))
        state = step.init(start)
        state = fds.load(folder, like=state, tag=load) if load else state
        for _ in range(steps):
            state, _ = step(state, torch.ones(4, 2))
        fds.save(state, folder, tag=save)
        return {path: int(count) for path, count in state.idle.items()}, step.params(state)

    comm.simulate(program, "dp", None, "one", 1, world_size=2)
    counts = [idle for idle, _ in comm.simulate(program, "pp", "one", "six", 5, world_size=2)]
    assert counts == [{}, {"1.spare": 6}]
    uses[0] = True
    results = [r for ways in ("dp", "sharded") for r in comm.simulate(program, ways, "six", ways, 2, world_size=2)]
    results += comm.simulate(program, "dp", "six", "alone", 2, world_size=1)
    for idle, params in results:
        assert idle == {"1.spare": 6}
        torch.testing.assert_close(params, results[0][1])


def test_counts_go_through_a_pipeline(tmp_path: Path) -> None:
    through_a_pipeline(tmp_path)


def test_counts_of_other_stages_leaves_are_seen(tmp_path: Path) -> None:
    bug = Bug(
        "a stage counts what it lacks", "step.state.slots:with_room", 'f"idle.{path}" in names', 'f"idle.{path}" not in names'
    )
    with planted(bug), pytest.raises((AssertionError, CommError, fds.checkpointing.CheckpointError)):
        through_a_pipeline(tmp_path)


def _on_processes() -> dict[str, Tensor]:
    return params_of(RULES["adamw"][0], T.zero(3), T.accumulate(2))


def test_on_processes() -> None:
    for found in comm.spawn(_on_processes, world_size=2):
        check(found, plain(RULES["adamw"][1]))
