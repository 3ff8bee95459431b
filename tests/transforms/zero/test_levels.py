"""Hierarchical collectives: their second levels start in one order on all ranks, whatever else is going on."""

from typing import Any

import pytest
import torch
from torch import Tensor

import functional_ds as fds
from functional_ds import comm, transforms
from functional_ds import pipelining as pp
from tests.transforms.rules import assert_close
from tests.transforms.test_compositions import FP32, Composition, alone, staged, together, trained
from tests.transforms.zero.test_config import Grid, agrees_with_one_device


@pytest.mark.sample(2)
@pytest.mark.law(19)
@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
@pytest.mark.parametrize("reshard", [True, False])
def test_units_that_are_fetched_again(prefetch: int, reshard: bool) -> None:
    """With hpZ a repeated gather skips the first level; if its second level went past earlier ones, ranks would swap units.

    Where units are of one size that is another loss, without an error.
    """
    chosen = {"stage": 3, "blocks": True, "hpz": True, "max_live_units": 1, "prefetch": prefetch, "reshard_last_units": reshard}
    for seed in range(5):
        agrees_with_one_device("branching", Grid(replicas=1, inter=2, intra=2), chosen, 1, seed)


@pytest.mark.sample(2)
@pytest.mark.law(19)
@pytest.mark.parametrize("hpz", [False, True])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_the_loss_may_communicate_inside_nodes(prefetch: int, hpz: bool) -> None:
    """The second level of a gather starts at no fixed place in the program, so it has a channel of its own."""

    def program(stage: int) -> Any:
        mesh = comm.mesh(inter=2, intra=2)

        def loss(p: Any, x: Tensor) -> Tensor:
            for weight in p.values():
                x = torch.tanh(x @ weight)
                x = x + comm.all_reduce(x.detach(), mesh["intra"])
            return x.square().mean()

        more: dict[str, Any] = {"intra_node": mesh["intra"], "prefetch": prefetch, "max_live_units": 1, "hpz": hpz}
        zero = transforms.zero(stage, mesh["inter", "intra"], **(more if stage == 3 else {}))
        step = zero(fds.train_step(loss, fds.sgd(0.1)))
        state, losses = step.init({f"h.{i}.w": torch.eye(4) * (i + 1) / 3 for i in range(5)}), []
        for _ in range(3):
            state, metrics = step(state, torch.ones(2, 4) * (comm.world().rank + 1) / 4)
            losses.append(metrics["loss"].item())
        return losses, step.params(state)

    losses, params = comm.simulate(program, 0, world_size=4)[0]
    for seed in range(5):
        for found, after in comm.simulate(program, 3, world_size=4, seed=seed):
            assert found == pytest.approx(losses, rel=1e-5)
            assert_close(after, params, 1e-5)


@pytest.mark.sample(1)
@pytest.mark.law(36)
@pytest.mark.parametrize(
    ("stage", "between"), [(0, "replicate"), (1, "intra_node"), (2, "replicate"), (3, "intra_node"), (3, "hpz")]
)
def test_pipelines_over_nodes(stage: int, between: str) -> None:
    """A rank reduces the gradients of several pipeline stages at once, all in one queue."""
    drawn = Composition(
        model="gated",
        rule="sgd",
        precision="fp32",
        zero=stage,
        options=(),
        dp=2,
        nodes=2,
        between=between,
        schedule=pp.zbv(2, 2),
        accumulate=2,
        remat=None,
        offload=None,
        clip=False,
        paced=False,
        ema=False,
        late=(),
    )
    made, params, whole = staged(drawn.model, 4)
    expected = trained(drawn, made, params, whole, alone(drawn))

    def program() -> Any:
        strategy, (index, of) = together(drawn, made, "")
        return trained(drawn, made, params, tuple(x.tensor_split(of)[index] for x in whole), strategy)

    for seed in range(3):
        for losses, _, after in comm.simulate(program, world_size=drawn.ranks, seed=seed):
            torch.testing.assert_close(losses, expected[0], rtol=FP32, atol=FP32)
            assert_close(after, expected[2], FP32)
