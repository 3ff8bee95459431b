"""Draws by a key on slices: those that say no places are refused, whatever they are drawn for."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T

SAYS_NOTHING = (
    r"the draw 'hidden' is for a tensor of shape \[.*\] that differs on the ranks \d and \d of 'tp', and has no places"
)


class Block(nn.Module):
    """Dropout of what is whole before and after, and of the hidden features."""

    def __init__(self, *, zeros: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        if zeros:
            nn.init.zeros_(self.up.weight), nn.init.zeros_(self.up.bias)

    def forward(self, x: Tensor, key: fds.Key | None, says: bool) -> Tensor:
        x = x if key is None else key.dropout(x, 0.5, "x")
        hidden = self.up(x)
        whole = comm.world().size == 1 or fds.step.axes.axis("tp") is None
        places = fds.tp.places(hidden, -1) if says and not whole else None
        hidden = hidden if key is None else key.dropout(hidden, 0.5, "hidden", places=places)
        y = self.down(hidden.tanh())
        return y if key is None else x + key.dropout(y, 0.5, "y")


def trained(*, tp: int = 2, dp: int = 1, says: bool, strategy: Any = (), zeros: bool = False, alone: bool = False) -> Any:
    """Losses of three steps, and the weights."""
    apply, params = fds.functional(Block(zeros=zeros))
    mesh = comm.mesh(dp=1 if alone else dp, tp=1 if alone else tp)
    cut = T.tensor_parallel({"up": "colwise", "down": "rowwise"}, mesh["tp"])
    chain = [] if alone else [T.zero(1, mesh["dp"]), *strategy, cut]
    loss = lambda p, x, key: (apply(p, x, key, says) - 1).square().mean()  # noqa: E731
    step = fds.compose(*chain)(fds.train_step(loss, fds.sgd(0.1), seed=3))
    state, losses = step.init(params), []
    for index in range(3):
        batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(index))
        state, metrics = step(state, batch if alone else batch.chunk(dp)[mesh["dp"].rank])
        losses.append(metrics["loss"].item())
    return losses, step.params(state)


STRATEGIES = [(), (T.accumulate(2),), (T.remat("*"),)]


@pytest.mark.law(49)
@given(tp=st.sampled_from((1, 2, 4)), dp=st.sampled_from((1, 2)), says=st.booleans(), strategy=st.sampled_from(STRATEGIES))
def test_one_devices_draws_or_a_refusal(tp: int, dp: int, says: bool, strategy: Any) -> None:
    """Without places the draw for a slice is refused on every rank; with them losses and weights are the single device's."""
    program = lambda: trained(tp=tp, dp=dp, says=says, strategy=strategy)  # noqa: E731
    if tp > 1 and not says:
        with pytest.raises(ValueError, match=SAYS_NOTHING):
            comm.simulate(program, world_size=tp * dp)
        return
    expected = comm.simulate(lambda: trained(says=True, alone=True), world_size=1)[0]
    for losses, params in comm.simulate(program, world_size=tp * dp):
        assert losses == pytest.approx(expected[0], rel=1e-5)
        torch.testing.assert_close(params, expected[1])


def draws_for_zeros_are_looked_at_again() -> None:
    """A layer that begins at zero has equal slices in the first step."""
    with pytest.raises(ValueError, match=SAYS_NOTHING):
        comm.simulate(lambda: trained(says=False, zeros=True), world_size=2)


def test_draws_for_zeros_are_looked_at_again() -> None:
    draws_for_zeros_are_looked_at_again()


def test_places_may_come_with_the_key() -> None:
    """``key.at`` says them to functions that take a key and no places; ``places={}`` says that ranks draw alike."""

    def program() -> float:
        def loss(p: Any, x: Tensor, key: fds.Key) -> Tensor:
            hidden = fds.tp.column(x, p["up"])
            key.dropout(hidden, 0.5, "alike", places={})
            hidden = key.at(places=fds.tp.places(hidden, -1)).dropout(hidden, 0.5, "hidden")
            return fds.tp.row(hidden, p["down"]).square().sum()

        up, down = torch.arange(8.0).view(4, 2), torch.arange(8.0).view(2, 4)
        step = T.tensor_parallel({"up": "colwise", "down": "rowwise"})(fds.train_step(loss, fds.sgd(0.0)))
        return step(step.init({"up": up, "down": down}), torch.ones(2, 2))[1]["loss"].item()

    one, two, four = (comm.simulate(program, world_size=n)[0] for n in (1, 2, 4))
    assert one == two == four


def _on_a_process(says: bool) -> Any:
    try:
        return trained(says=says)[0]
    except ValueError as error:
        return str(error)


def test_on_processes() -> None:
    """As on simulated ranks."""
    refused = comm.spawn(_on_a_process, False, world_size=2)
    assert all("has no places" in each for each in refused)
    assert comm.spawn(_on_a_process, True, world_size=2) == [pytest.approx(trained(says=True, alone=True)[0])] * 2
