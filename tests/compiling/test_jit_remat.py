"""Law 58 for recomputation: the graph recomputes where the eager step does, keeps no more, and equals it bit for bit."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from functional_ds.compiling import JitWarning, StepGraph
from functional_ds.compiling.graphs.graph_nodes import PHASE, RECOMPUTED, is_view
from functional_ds.compiling.jitted.region_compiler import in_regions
from tests.compiling.test_jit import WIDTH, Run, assert_same, blocks, drawing, own_batch, run, squared
from tests.planting import Bug, planted

Chain = Sequence[Callable[[], Any]]

POLICIES = ["recompute", "recompute,inputs=offload", "recompute,matmuls=save", "recompute,matmuls=offload", "offload"]
PRECISIONS = {"fp32": [], "bf16": [lambda: T.mixed_precision("bf16")], "fp16, overflowing": [lambda: T.mixed_precision("fp16")]}
SLOTS = {"": [], "ema": [lambda: T.ema(0.9)]}


@st.composite
def chains(draw: Any) -> Chain:
    """Precision and means before ZeRO, then recomputation, inside or outside of another one or of compiled blocks."""
    policy = draw(st.sampled_from(POLICIES))
    inner = [lambda: T.remat("*", policy=policy)]
    compiled = [lambda: T.compiled("*", backend="aot_eager")] if "matmuls" not in policy else []
    around = draw(st.sampled_from([[], compiled, [lambda: T.remat("")]]))
    inner = draw(st.permutations([*inner, *around]))
    stage = draw(st.integers(0, 3))
    precision, slot = draw(st.sampled_from(list(PRECISIONS.values()))), draw(st.sampled_from(list(SLOTS.values())))
    ends = draw(st.sampled_from([[], [lambda: T.accumulate(2)], [lambda: T.accumulate(2), lambda: T.clip(1.0)]]))
    params = draw(st.sampled_from([None, "cpu"])) if stage == 3 else None
    ratio = 1.0 if params else draw(st.sampled_from([0.5, 1.0]))
    offloaded = draw(st.sampled_from([[], [lambda: T.offload("cpu", params, ratio=ratio)]]))
    return [*slot, *precision, *offloaded, lambda: T.zero(stage), *inner, *ends]


def both(chain: Chain, make: Callable[[], nn.Module], loss: Any, backend: str) -> tuple[Run, Run]:
    return run(True, [each() for each in chain], make, loss, backend=backend), run(
        False, [each() for each in chain], make, loss
    )


def two(*more: nn.Module) -> nn.Module:
    return blocks(*more, count=2)


@pytest.mark.law(58)
@settings(max_examples=max(1, settings.default.max_examples // 5), deadline=None)
@given(
    chain=chains(),
    ranks=st.integers(1, 2),
    loss=st.sampled_from([squared, drawing]),
    backend=st.sampled_from(["fx", "aot_eager"]),
)
def test_a_step_that_recomputes_and_offloads(chain: Chain, ranks: int, loss: Any, backend: str) -> None:
    for found, expected in comm.simulate(both, chain, two, loss, backend, world_size=ranks):
        assert found[2] == []
        assert_same(found, expected)


@pytest.mark.law(58)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("order", [1, -1], ids=["model around blocks", "blocks around model"])
def test_a_recomputed_model_whose_blocks_have_a_policy(policy: str, order: int) -> None:
    """The second run of the whole model saves what the first did, though only the first gathers params."""
    remats = [lambda: T.remat("*", policy=policy), lambda: T.remat("")][::order]
    for found, expected in comm.simulate(both, [lambda: T.zero(3), *remats], two, squared, "fx", world_size=2):
        assert found[2] == []
        assert_same(found, expected)


def bytes_that_offload_stores(stage: int) -> list[int]:
    """The host copies in the graph of a step whose blocks offload what they save."""
    apply, params = fds.functional(two())
    step = fds.jit(fds.compose(T.zero(stage), T.remat("*", policy="offload"))(fds.train_step(squared(apply), fds.sgd(0.1))))
    state = step.init(params)
    for i in range(2):
        state, _ = step(state, own_batch(i))
    nodes = step.graph(state, own_batch(0)).module.graph.nodes
    return [node.meta["val"].nbytes for node in nodes if node.target is torch.ops.aten._to_copy.default]


@pytest.mark.law(58)
def test_gathered_params_are_not_offloaded() -> None:
    """As in an eager step, in which they are gathered again."""
    whole, gathered = (comm.simulate(bytes_that_offload_stores, stage, world_size=2) for stage in (1, 3))
    assert gathered == whole


def offloaded_and_recomputed() -> tuple[Run, Run]:
    chain: Chain = [lambda: T.offload("cpu", "cpu"), lambda: T.zero(3), lambda: T.remat("*"), lambda: T.clip(1.0)]
    return both(chain, two, drawing, "fx")


@pytest.mark.law(58)
def test_on_real_processes() -> None:
    for found, expected in comm.spawn(offloaded_and_recomputed, world_size=2):
        assert found[2] == []
        assert_same(found, expected)


class Counted(nn.Module):
    """A block that computes with a buffer which it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([_Counting()])

    def forward(self, x: Any) -> Any:
        return self.inner[0](x)


class _Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm, self.scale = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Buffer(torch.ones(WIDTH))

    def forward(self, x: Any) -> Any:
        found = torch.tanh(self.norm(self.linear(x)) * self.scale.clone()) * 2
        self.scale.mul_(2)
        return torch.tanh(found * self.scale)


@pytest.mark.law(58)
def test_buffers() -> None:
    """A block that runs again computes with the buffer that its first run has found, and writes it once."""
    found, expected = both([lambda: T.remat("*")], Counted, squared, "fx")
    assert found[2] == []
    assert_same(found, expected)


# -- memory ------------------------------------------------------------------------------------------------------------


def graph_of(stage: int, *more: Callable[[], Any]) -> StepGraph:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
    apply, params = fds.functional(nn.Sequential(*layers))
    step = fds.jit(fds.compose(T.zero(stage), *(each() for each in more))(fds.train_step(squared(apply), fds.sgd(0.1))))
    state, _ = step(step.init(params), own_batch(0, 64))
    return step.graph(state, own_batch(1, 64))


def peak(graph: StepGraph) -> int:
    return max(now.bytes for now in graph.live().values())


@pytest.mark.law(58)
@pytest.mark.parametrize("stage", [0, 3])
def test_what_is_recomputed_is_not_kept(stage: int) -> None:
    """The graph holds no more than one without, less by what the blocks keep, and computes as much again."""

    def program() -> tuple[int, int, int, int]:
        plain, again = graph_of(stage), graph_of(stage, lambda: T.remat("*"))
        tanhs = [n for n in again.module.graph.nodes if RECOMPUTED in n.meta and n.target is torch.ops.aten.tanh.default]
        return peak(plain), peak(again), len(tanhs), str(again).count(", again")

    size = 64 * WIDTH * 4
    for plain, again, tanhs, shown in comm.simulate(program, world_size=2):
        assert again <= plain - 2 * size  # of 8 activations 4 stay, and one block's are made again
        assert tanhs >= 4
        assert shown >= tanhs


@pytest.mark.law(58)
def test_no_region_computes_first_and_again() -> None:
    """Compilers merge equal kernels of a region, and would keep what is recomputed."""
    graph = comm.simulate(graph_of, 0, lambda: T.remat("*"), world_size=1)[0]
    _, regions = in_regions(graph.module.graph, lambda region: lambda *given: given)
    recomputing = 0
    for region in regions:
        kernels = [node for node in region.module.graph.nodes if node.all_input_nodes and not is_view(node)]
        runs = {node.meta[RECOMPUTED] for node in kernels if RECOMPUTED in node.meta}
        assert len(runs) <= 1
        assert not (runs and any(node.meta.get(PHASE) == "forward" for node in kernels))
        recomputing += len(runs)
    assert recomputing == 4


@pytest.mark.law(58)
def test_torchs_generator_stays_eager() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", JitWarning)
        found, expected = both([lambda: T.remat("*")], lambda: two(nn.Dropout(0.5)), squared, "fx")
    assert "draws random numbers anew" in found[2][0]
    assert_same(found, expected)


REGION, REGIONS, REWIND = "remat.region", "compiling.jitted.region_compiler", "remat.rerun"
BUGS: list[tuple[Callable[[], Any], Bug]] = [
    (
        partial(test_what_is_recomputed_is_not_kept, 0),
        Bug(
            "a graph keeps all activations",
            "remat.region:run",
            "is_trial()",
            "is_trial() or recorder().records",
        ),
    ),
    (
        test_no_region_computes_first_and_again,
        Bug(
            "regions go on through recomputation",
            "compiling.jitted.region_compiler:_Builder.add",
            "again != self._again",
            "False",
        ),
    ),
    *(
        (
            law,
            Bug(
                "a traced view doesn't own what it gathers",
                "transforms.zero.lazy_params:LazyParams.view",
                "isinstance(self.source, WholeParams)",
                "not self.source.frees",
            ),
        )
        for law in (
            test_gathered_params_are_not_offloaded,
            partial(test_a_recomputed_model_whose_blocks_have_a_policy, "offload", 1),
        )
    ),
    (
        test_buffers,
        Bug(
            "a second run finds what the first has written",
            "remat.rerun:Rewind.once",
            "traced or _is_small(b) or version_of(b) != versions[key]",
            "False and version_of(b) != versions[key]",
            JitWarning,
        ),
    ),
]


@pytest.mark.parametrize(("law", "bug"), BUGS, ids=[bug.name for _, bug in BUGS])
def test_a_bug_is_seen(law: Callable[[], Any], bug: Bug) -> None:
    with planted(bug), pytest.raises(bug.shows):
        law()
