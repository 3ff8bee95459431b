"""Law 55: the bytes of ranks of whole meshes, from shapes alone."""

from typing import Any

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

import functional_ds as fds
from functional_ds import comm, memory
from functional_ds import transforms as T
from functional_ds.step.axes import axis
from tests.memory.test_predict import same
from tests.parallel import whole_models as wm
from tests.parallel.test_whole_meshes import Mesh, meshes
from tests.parallel.whole_models import Ways


def agrees(ways: Ways, mesh: Mesh, bf16: bool) -> None:
    """Predicted bytes are those that the last rank and the first hold after a step."""
    model = wm.pure_stages(ways) if mesh.pp > 1 else wm.pure_loss(ways)
    params = wm.pure_params(ways)

    def make(*more: fds.Transform) -> fds.Step:
        balance = [T.balance(0.05, {f"layer {i}": wm.EXPERTS for i in range(2)})] if ways.biased else []
        plan = wm.pure_plan(ways)
        chain, _, _ = mesh.strategy(plan, *balance, T.clip(0.1), *more, stages=model, bf16=bf16, mixture=ways.mixture)
        return chain(fds.train_step(model, fds.adamw(1e-2), seed=3))  # type: ignore[no-any-return]

    def held() -> memory.Memory:
        sizes: list[int] = []
        step = make(memory.noted(sizes))
        rows = comm.mesh(dp=mesh.dp, pp=mesh.pp, sp=mesh.sp, tp=mesh.tp)["dp"]
        batch = {name: leaf.chunk(rows.size)[rows.rank] for name, leaf in wm.batch_of(0).items()}
        state, _ = step(step.init(params), batch)
        return memory.measured(state, gradients=sizes[-1])

    found = comm.simulate(held, world_size=mesh.ranks)
    for rank in (0, mesh.ranks - 1):
        same(memory.predicted(make, params, world_size=mesh.ranks, rank=rank), found[rank])


CASES = {
    "experts and slices, ZeRO-3": (Ways(mixture=True), Mesh(dp=2, tp=2, ep=2, zero=3), True),
    "cut sequences and slices": (Ways(along=True), Mesh(sp=2, tp=2, zero=1), True),
    "a pipeline with experts": (Ways(mixture=True), Mesh(dp=2, pp=2, ep=2, zero=2, micro=2), False),
}


@pytest.mark.law(55)
@pytest.mark.parametrize("case", CASES)
def test_ranks_of_a_mesh_are_predicted(case: str) -> None:
    """Params, masters, optimizer, gradients and the rest."""
    agrees(*CASES[case])


@pytest.mark.law(55)
@settings(max_examples=max(1, settings.default.max_examples // 10))
@given(data=st.data())
def test_ranks_of_any_mesh_are_predicted(data: st.DataObject) -> None:
    """Up to eight ranks of dp x pp x sp x tp with experts inside of dp."""
    mixture, draw = data.draw(st.booleans()), data.draw
    ways = Ways("ring", draw(st.booleans()), mixture, mixture and draw(st.booleans()))
    mesh, bf16 = meshes(draw, key_heads=ways.key_heads, mixture=mixture), draw(st.booleans())
    note(f"{ways} {mesh} bf16={bf16}")
    agrees(ways, mesh, bf16)


@pytest.mark.law(55)
@pytest.mark.parametrize("ep", [1, 2])
def test_what_experts_gather_is_predicted(ep: int) -> None:
    """In stage 3 units of dense leaves come over dp, and those of experts over edp: nothing where no rank has the same."""
    params = {f"{i}.{name}": torch.ones(shape) for i in range(3) for name, shape in (("w", (16, 16)), ("experts", (4, 8, 16)))}

    def loss(p: Any, x: Any) -> Any:
        for i in range(3):
            x = torch.tanh(x @ p[f"{i}.w"] + comm.all_reduce(p[f"{i}.experts"].sum(), axis("ep").group))
        return x.square().mean()

    def make() -> fds.Step:
        mesh = comm.mesh(dp=2).split("dp", edp=2 // ep, ep=ep)
        chain = T.zero(3, mesh["edp", "ep"]), T.experts("experts", mesh["ep"], edp=mesh["edp"])
        return fds.compose(*chain)(fds.train_step(loss, fds.sgd(0.1)))

    def most() -> int:
        step = make()
        state = step.init(params)
        with memory.recorded() as run:
            for _ in range(2):
                state, _ = step(state, torch.ones(4, 16))
        return run.events.peak("all_gather")

    found = comm.simulate(most, world_size=2)
    assert found == [memory.predicted(make, params, world_size=2, rank=rank).gathered for rank in range(2)]
