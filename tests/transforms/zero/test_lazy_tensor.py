"""What the loss sees of a parameter is the parameter, whichever of torch's functions it calls."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T

CASTS: dict[str, Callable[[Tensor], Tensor]] = {
    "type": lambda w: w.type(torch.float32),  # DeepSeek-V3's router, in half precision
    "type by name": lambda w: w.type("torch.FloatTensor"),
    "type by keyword": lambda w: w.type(dtype=torch.float32),
    "to": lambda w: w.to(torch.float32),
    "float": lambda w: w.float(),
    "type_as": lambda w: w.type_as(torch.ones(())),
}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("cast", CASTS)
def test_casts_keep_the_gradient(cast: str, stage: int) -> None:
    def program() -> list[float]:
        def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
            assert params["w"].type() == "torch.BFloat16Tensor"
            return (CASTS[cast](params["w"]) * x.float()).sum()

        step = fds.compose(T.mixed_precision("bf16"), T.zero(stage))(fds.train_step(loss, fds.sgd(0.5)))
        state, _ = step(step.init({"w": torch.ones(2)}), torch.tensor([1.0, 3.0]))
        return step.params(state)["w"].tolist()  # type: ignore[no-any-return]

    assert comm.simulate(program, world_size=2) == [[0.5, -0.5]] * 2
