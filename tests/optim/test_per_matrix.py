"""Rules for whole matrices: equal in every stage, what they send, their checkpoints, and what is refused."""

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import functional_ds as fds
from functional_ds import comm, memory, transforms
from functional_ds.base.marks import is_trainable
from functional_ds.optim.matrix.muon import orthogonalize
from functional_ds.optim.matrix.per_matrix import MatrixStates
from functional_ds.sharding.layout import Layout
from functional_ds.state_dict.describe import as_tensors, describe
from tests.optim.test_optimizers_under_zero import slice_of, update_sends
from tests.planting import Bug, planted
from tests.transforms.rules import ROWS, RULES, assert_close, fresh, linear, trained

STAGES = (0, 1, 2, 3)
WHOLE = ("galore", "shampoo")


@cache
def alone(rule: str, steps: int = 3) -> Any:
    return trained(rule, steps=steps)


@pytest.mark.sample(11)
@pytest.mark.law(19)
@pytest.mark.parametrize("rule", WHOLE)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_rules_as_users_write_them_in_every_stage(rule: str, stage: int, n: int) -> None:
    for found in comm.simulate(lambda: trained(rule, transforms.zero(stage)), world_size=n, seed=n):
        assert_close(found, alone(rule), 1e-6)


@pytest.mark.law(19)
@pytest.mark.parametrize("stage", [None, *STAGES])
def test_muon_is_such_a_rule(stage: int | None) -> None:
    """Momentum on the owner or in shards, and the same updates."""

    def rule(grad: Tensor, mean: Tensor, step: int) -> tuple[Tensor, Tensor]:
        mean = mean.lerp(grad, 0.05)
        rows, columns = grad.shape
        return max(1, rows / columns) ** 0.5 * orthogonalize(grad.lerp(mean, 0.95)), mean

    mine = fds.per_matrix(torch.zeros_like, rule, lr=0.1, weight_decay=0.1, others=fds.adamw(0.1))
    ours = fds.muon(0.1, fds.adamw(0.1), dtype=torch.float32)

    def program(optimizer: Any) -> Any:
        zero = [] if stage is None else [transforms.zero(stage)]
        step = fds.compose(*zero)(fds.train_step(linear, optimizer))
        state = step.init(fresh())
        for count in range(3):
            state, _ = step(state, torch.arange(ROWS).tensor_split(comm.world().size)[comm.world().rank] * (count + 1))
        return step.params(state)

    n = 1 if stage is None else 3
    for found, expected in zip(*(comm.simulate(program, each, world_size=n) for each in (mine, ours)), strict=True):
        assert_close(found, expected, 1e-6)


@pytest.mark.law(21)
@given(rule=st.sampled_from(WHOLE), stage=st.sampled_from(STAGES), n=st.integers(1, 4))
def test_bytes(rule: str, stage: int, n: int) -> None:
    """2 · 4 · M in fp32, 3 · 4 · M with the params, M being what the matrices' owners lack."""
    sent = [sum(rank.values()) for rank in comm.simulate(update_sends, rule, stage, world_size=n)]
    layout, lacks = Layout.of(fresh(), n), 0
    for segment in layout.segments:
        for slot in segment.slots:
            matrix = segment.trainable and len(slot.shape) == 2 and slot.numel
            if matrix and (rule == "galore" or layout.paths[slot.leaf].startswith("blocks")):
                lacks += slot.numel - max(slice_of(slot.offset, slot.numel, r * segment.shard, segment.shard) for r in range(n))
    by_others = 0
    if rule == "shampoo" and stage and n > 1:  # LAMB's norms of all other leaves
        moved = [path for path, leaf in fds.tree.named(fresh()) if is_trainable(leaf)]
        by_others = 2 * 4 * 2 * (n - 1) * sum(not (path.startswith("blocks") and path.endswith("w")) for path in moved)
    assert sum(sent) == ({"galore": 2, "shampoo": 3}[rule] * 4 * lacks if stage else 0) + by_others
    assert lacks <= sum(leaf.numel() for leaf in fds.tree.leaves(fresh())) * (n - 1) / n


@given(stage=st.sampled_from((1, 2, 3)), n=st.integers(1, 4))
def test_each_matrix_has_one_owner_who_keeps_its_state(stage: int, n: int) -> None:
    def owned(step: fds.Step, state: fds.State) -> list[str]:
        held = next(found for found in state.optimizer.states if isinstance(found, MatrixStates))
        assert int(held.count) == 2
        return list(held.whole)

    found = comm.simulate(lambda: trained("galore", transforms.zero(stage), steps=2, show=owned), world_size=n)
    paths = [path for path, leaf in fds.tree.named(fresh()) if leaf.dim() == 2 and leaf.numel()]
    assert sorted(path for rank in found for path in rank) == sorted(paths)


@pytest.mark.law(37)
@given(
    rule=st.sampled_from(WHOLE),
    before=st.sampled_from((None, *STAGES)),
    after=st.sampled_from((None, *STAGES)),
    n=st.integers(1, 4),
    m=st.integers(1, 4),
)
def test_states_go_to_other_ranks(
    rule: str, before: int | None, after: int | None, n: int, m: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Saved after two steps by n ranks, loaded by m in another stage: the third step is the single-device run's."""
    folder = tmp_path_factory.mktemp("saved")

    def rows(count: int) -> Tensor:
        return (torch.arange(ROWS) * (count + 1) + 7 * count).tensor_split(comm.world().size)[comm.world().rank]

    def save(step: fds.Step, state: fds.State) -> None:
        fds.save(state, folder)

    def resume() -> Any:
        strategy = [] if after is None else [transforms.zero(after)]
        step = fds.compose(*strategy)(fds.train_step(linear, RULES[rule]))
        state = fds.load(folder, like=step.init(fresh()))
        return step.params(step(state, rows(2))[0])

    strategy = [] if before is None else [transforms.zero(before)]
    comm.simulate(lambda: trained(rule, *strategy, steps=2, show=save), world_size=1 if before is None else n)
    for found in comm.simulate(resume, world_size=1 if after is None else m):
        assert_close(found, alone(rule), 1e-6)


def test_names_in_checkpoints() -> None:
    """The path in the rule's state, then the matrix's; numbers are left out, and a second one of a name is counted."""

    def names(step: fds.Step, state: fds.State) -> set[str]:
        return {held.name for held in describe(as_tensors(state)) if held.name.endswith("/blocks.1.w")}

    assert trained("galore", steps=1, show=names) == {
        "params/blocks.1.w",
        "optimizer.basis/blocks.1.w",
        "optimizer.momentum/blocks.1.w",
    }
    found = trained("shampoo", steps=1, show=names)
    assert {name for name in found if name.startswith("optimizer")} == {
        "optimizer/blocks.1.w",
        "optimizer#1/blocks.1.w",
    }


@pytest.mark.sample(4)
@pytest.mark.law(20)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("n", [1, 2, 3])
def test_memory_is_predicted(stage: int, n: int) -> None:
    def make() -> fds.Step:
        return transforms.zero(stage)(fds.train_step(linear, RULES["galore"]))

    measured = comm.simulate(lambda: memory.measured(make().init(fresh())).optimizer, world_size=n)
    assert [memory.predicted(make, fresh(), world_size=n, rank=rank).optimizer for rank in range(n)] == measured


@pytest.mark.parametrize("stage", [None, 1, 3])
def test_what_a_rule_gets(stage: int | None) -> None:
    """Whole matrices in fp32, or in fp64 where a leaf is; the step counts from 1; params as they are before the update."""
    params = {"a": torch.randn(3, 4), "half": torch.randn(4, 5, dtype=torch.bfloat16), "wide": torch.randn(2, 6).double()}
    seen: list[tuple[Any, ...]] = []

    def init(matrix: Tensor) -> Tensor:
        assert any(torch.equal(matrix, leaf.double()) for leaf in params.values() if leaf.shape == matrix.shape)
        return torch.zeros(())

    def rule(grad: Tensor, state: Tensor, step: int, param: Tensor) -> tuple[Tensor, Tensor]:
        seen.append((grad.dtype, param.dtype, tuple(grad.shape), step))
        assert torch.equal(state + 1, torch.tensor(float(step)))
        return param, state + 1  # w ← w - lr · w

    def program() -> Any:
        strategy = [] if stage is None else [transforms.zero(stage)]
        optimizer = fds.per_matrix(init, rule, lr=0.5, others=fds.sgd(0.1))
        step = fds.compose(*strategy)(
            fds.train_step(lambda p, x: sum(leaf.sum().float() for leaf in p.values()) * x, optimizer)
        )
        state = step.init(params)
        for _ in range(2):
            state, _ = step(state, torch.ones(()))
        return step.params(state)

    n = 1 if stage is None else 2
    for found in comm.simulate(program, world_size=n):
        for path, leaf in params.items():
            assert torch.equal(found[path], leaf / 4)
    shapes = [tuple(leaf.shape) for leaf in params.values()]
    assert sorted(seen) == sorted((torch.float64, torch.float64, shape, step) for shape in shapes for step in (1, 2))


def _keep(grad: Tensor, state: Any, step: int) -> tuple[Tensor, Any]:
    return grad, state


def begun(optimizer: Any, *strategy: fds.Transform, steps: int = 0) -> None:
    step = fds.compose(*strategy)(fds.train_step(lambda p, x: (x @ p["w"]).sum(), optimizer))
    state = step.init({"w": torch.ones(4, 6)})
    for _ in range(steps):
        state, _ = step(state, torch.ones(2, 4))


def test_slices_of_tensor_parallelism_are_refused() -> None:
    """Until such leaves are given to an elementwise optimizer."""

    def program(optimizer: Any) -> None:
        begun(optimizer, transforms.tensor_parallel({"w": 1}, comm.world()))

    rule = fds.per_matrix(torch.zeros_like, _keep, lr=0.1, others=fds.sgd(0.1), name="mine")
    with pytest.raises(ValueError, match=r"mine: 'w' is the slice .*, but mine looks at whole leaves.*fds\.param_groups"):
        comm.simulate(program, rule, world_size=2)
    comm.simulate(program, fds.param_groups({"w": fds.adamw(0.1)}, rule), world_size=2)


def test_bad_input() -> None:
    def of(**given: Any) -> Any:
        return fds.per_matrix(**{"init": torch.zeros_like, "rule": _keep, "lr": 0.1, "others": fds.sgd(0.1), **given})

    with pytest.raises(TypeError, match="per_matrix: rule=3 is not callable"):
        of(rule=3)
    with pytest.raises(TypeError, match="per_matrix: init=None is not callable"):
        of(init=None)
    with pytest.raises(TypeError, match="neither an fds optimizer"):
        of(others=None)
    with pytest.raises(ValueError, match="lr=-1"):
        of(lr=-1)
    with pytest.raises(ValueError, match="matrices='x' matches no trained leaf"):
        begun(of(matrices="x"))
    wrong = of(rule=lambda grad, state, step: (grad.T, state), name="turned")
    with pytest.raises(ValueError, match=r"turned: for 'w' of shape \[4, 6\] it returned an update of shape \[6, 4\]"):
        begun(wrong, steps=1)


def _named(rule: str, matrices: Any, stacks: Any, leaf: Tensor) -> None:
    if rule == "muon":
        optimizer = fds.muon(0.1, fds.sgd(0.1), matrices=matrices, stacks=stacks)
    else:
        optimizer = fds.per_matrix(
            torch.zeros_like, _keep, lr=0.1, others=fds.sgd(0.1), matrices=matrices, stacks=stacks, name=rule
        )
    fds.train_step(lambda params, x: x, optimizer).init({"odd": leaf, "vector": torch.ones(3), "w": torch.ones(3, 3)})


@pytest.mark.parametrize("rule", ["muon", "per_matrix"])
@pytest.mark.parametrize("function", [False, True])
@pytest.mark.parametrize(
    ("what", "shape", "dtype", "message"),
    [
        (
            "matrices",
            (3, 4),
            torch.complex64,
            r"names the leaf 'odd' of shape \[3, 4\], which is complex.* leave it out of matrices=",
        ),
        ("matrices", (2, 3, 4), torch.complex64, r"names the leaf 'odd' of shape \[2, 3, 4\], which is complex"),
        ("matrices", (2, 3, 4), torch.float32, r"names the leaf 'odd' of shape \[2, 3, 4\].* name it in stacks="),
        ("matrices", (2, 3, 4, 5), torch.float32, r"takes leaves of 2 dims there: leave it out of matrices="),
        ("matrices", (4,), torch.float32, r"names no leaf of 2 dims, .*; it names 'odd' of shape \[4\]"),
        ("stacks", (2, 3, 4), torch.complex64, r"names the leaf 'odd' of shape \[2, 3, 4\], which is complex"),
        ("stacks", (3, 4), torch.float32, r"names no leaf of 3 dims, .*; it names 'odd' of shape \[3, 4\]"),
        ("stacks", (2, 3, 4, 5), torch.float32, r"takes leaves of 3 dims there: leave it out of stacks="),
    ],
)
def test_what_is_named_is_a_matrix(
    rule: str, function: bool, what: str, shape: tuple[int, ...], dtype: torch.dtype, message: str
) -> None:
    """Nothing that ``matrices`` or ``stacks`` names goes to ``others``, but for vectors beside matrices."""
    where: Any = (lambda path: path == "odd") if function else "odd"
    if function and "names no leaf" in message:
        return  # a function may choose nothing, as one that a program computes does
    given = {"matrices": None, "stacks": None, what: where}
    with pytest.raises(ValueError, match=f"^{rule}: {what}=.*{message}"):
        _named(rule, leaf=torch.ones(shape, dtype=dtype), **given)


def test_vectors_among_what_is_named_are_the_others() -> None:
    for shape, matrices, stacks in [((3, 4), "odd|vec", None), ((2, 3, 4), "", "odd|vec"), ((2, 3, 4), "w", "odd")]:
        _named("muon", matrices, stacks, torch.ones(shape))
    _named("muon", None, None, torch.ones(3, 4, dtype=torch.complex64))  # None is all real matrices
    elsewhere = fds.muon(0.1, fds.sgd(0.1), matrices="w|vec")  # another group has the matrix that the pattern names
    rule = fds.param_groups({"^w": fds.sgd(0.1)}, elsewhere)
    fds.train_step(lambda params, x: x, rule).init({"vector": torch.ones(3), "w": torch.ones(3, 3)})


@pytest.mark.parametrize("strategy", [[], [transforms.zero(1)]], ids=["one device", "zero(1)"])
@pytest.mark.parametrize("shape", [(3, 0), (0, 3), (0, 0)])
def test_matrices_without_elements(shape: tuple[int, int], strategy: list[fds.Transform]) -> None:
    """Muon leaves them alone and moves the others as without them."""

    def moved(**more: Tensor) -> Tensor:
        rule = fds.muon(0.1, fds.sgd(0.1))

        def loss(params: Any, x: Tensor) -> Tensor:
            return sum((params[path].sum() for path in more), (x @ params["w"]).square().mean())

        step = fds.compose(*strategy)(fds.train_step(loss, rule))
        state, _ = step(step.init({"w": torch.eye(3), **more}), torch.arange(6.0).view(2, 3))
        found: Tensor = step.params(state)["w"]
        return found

    wanted, *_ = comm.simulate(moved, world_size=2)
    for found in comm.simulate(lambda: moved(none=torch.zeros(shape)), world_size=2):
        assert torch.equal(found, wanted)


def test_a_planted_bug_of_empty_matrices_is_found() -> None:
    bug = Bug("the factor of no columns", "optim.matrix.muon:muon.factor", "rows / max(1, columns)", "rows / columns")
    with planted(bug), pytest.raises(ZeroDivisionError):
        test_matrices_without_elements((3, 0), [])
