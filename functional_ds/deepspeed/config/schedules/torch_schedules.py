"""torch's learning-rate schedulers as functions of the number of updates."""

from typing import Any

import torch
from torch import Tensor

from functional_ds.deepspeed.config.keys.config_table import NOT_HERE


def why_not(name: str, params: dict[str, Any]) -> str | None:
    """Why a scheduler is unsupported, or None."""
    if name in NOT_HERE["schedulers"]:
        return f"{name}: {NOT_HERE['schedulers'][name]}"
    cls = getattr(torch.optim.lr_scheduler, name, None)
    base = torch.optim.lr_scheduler.LRScheduler
    if not (isinstance(cls, type) and issubclass(cls, base)) or cls is base:
        return f"neither DeepSpeed nor torch has a scheduler {name!r}; the nearest of DeepSpeed's is {{nearest!r}}"
    if name in ("OneCycleLR", "CyclicLR") and params.get("cycle_momentum", True) not in (False, "false"):
        return f"{name} would cycle momentum, which is fixed here; set cycle_momentum to false"
    return None


class TorchRates:
    """The rates of one of torch's schedulers, stepped once an update.

    It runs on the host, so it waits for a count on another device.

    Raises:
        TypeError: an argument that the scheduler does not have.

    >>> rates = TorchRates("StepLR", {"step_size": 2, "gamma": 0.5}, 1.0)
    >>> [rates(torch.tensor(k)).item() for k in (0, 3, 4, 1)]
    [1.0, 0.5, 0.25, 1.0]
    """

    def __init__(self, name: str, params: dict[str, Any], lr: float) -> None:
        self._optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=lr)
        self._scheduler = getattr(torch.optim.lr_scheduler, name)(self._optimizer, **params)
        self._rates = [self._now()]

    def __call__(self, updates: Tensor) -> Tensor:
        """The rate after so many updates."""
        while len(self._rates) <= int(updates):
            self._optimizer.step()
            self._scheduler.step()
            self._rates.append(self._now())
        return torch.tensor(self._rates[int(updates)], dtype=torch.float64, device=updates.device)

    def _now(self) -> float:
        return float(self._optimizer.param_groups[0]["lr"])
