"""``fds.from_ds_config``: turns a DeepSpeed config into transforms, an optimizer, a schedule and batch sizes."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs

from functional_ds import comm
from functional_ds.optim.optimizer import Optimizer, PerParameter
from functional_ds.step.step import Transform

from .auto_values import auto_values
from .batch_sizes import BatchSizes, batch_sizes, check_world_size
from .canonical import canonical
from .config_reader import Config, Settings, read, source
from .explain import ConfigError, Explanation
from .keys.config_table import key_of
from .named_parts import optimizer_of, schedule_of
from .schedules.lr_scheduler import RateSchedule
from .transform_parts import transforms_of

__all__ = ["ConfigPlan", "from_ds_config"]


@attrs.frozen(eq=False)
class ConfigPlan:
    """A DeepSpeed config as transforms, an optimizer and a schedule.

    ``plan.transform(fds.train_step(loss_fn, plan.optimizer))`` is the step.

    Attributes:
        optimizer: the optimizer; None if the config names none.
        schedule: the learning rate of each update; None for a constant one.
        batch: how many rows there are in an update, a micro-batch and on a rank.
    """

    optimizer: Optimizer | PerParameter | None
    schedule: RateSchedule | None
    batch: BatchSizes
    _settings: Settings = attrs.field(alias="settings", repr=False)
    _transforms: Callable[[], Transform] = attrs.field(alias="transforms", repr=False)

    @property
    def transform(self) -> Transform:
        """All transforms, composed: precision, offloading, ZeRO, accumulation, clipping, the schedule.

        Raises:
            ConfigError: the folder of ``nvme_path`` is not there.
        """
        return self._transforms()

    def value(self, path: str) -> Any:
        """The value of any DeepSpeed key, from the config or DeepSpeed's default.

        Raises:
            KeyError: there is no such key.
        """
        key = key_of(path)
        return self._settings[path if key is None else key.path]

    def explain(self) -> Explanation:
        """The outcome of each key."""
        return self._settings.explanation()

    def to_ds_config(self) -> dict[str, Any]:
        """The complete config: numbers as numbers, "auto" replaced, new spellings, all batch sizes.

        Law: ``from_ds_config(plan.to_ds_config(), n)`` is the same plan, and DeepSpeed reads both alike.
        """
        return canonical(self._settings, self.batch)


def from_ds_config(
    config: Config,
    world_size: int,
    *,
    auto: Mapping[str, Any] | None = None,
    group: comm.Group | None = None,
    model: Any = None,
    lr: float | None = None,
    warn: bool = False,
) -> ConfigPlan:
    """Reads a DeepSpeed config with the semantics and defaults of DeepSpeed 0.19.8, and returns a plan.

    Every key is supported, ignored because it has no effect here, or unsupported, which raises an error; ``plan.explain()``
    lists which and why. Unknown names, duplicate keys and values of another type raise errors too, although DeepSpeed silently
    accepts many of them.

    Args:
        config: the path of a JSON file (Hjson if the package hjson is installed), a dict, or base64 text of JSON.
        world_size: the number of data-parallel ranks.
        auto: by path ("optimizer.params.lr"), replacements for "auto". For others, three sizes come from ``model``, and blocks
            in which DeepSpeed itself reads "auto" as its default have that.
        group: the data-parallel ranks, if they are not the whole world: ``mesh["dp"]``.
        model: a module with a Hugging Face ``config``, or such a config, for its hidden size. A module's leaf modules
            (``set_z3_leaf_modules``) are units of stage 3.
        lr: the learning rate of an optimizer that the config does not have, for a scheduler in it.
        warn: whether known names that DeepSpeed accepts and never reads give a warning instead of an error.

    Raises:
        ConfigError: the config is not JSON, or a key is unsupported; ``error.explanation`` has all keys, the message all
            unsupported ones.

    >>> plan = from_ds_config({"train_batch_size": 32, "bf16": {"enabled": True}, "zero_optimization": {"stage": "2"}}, 4)
    >>> plan.batch
    BatchSizes(train_batch_size=32, train_micro_batch_size_per_gpu=8, gradient_accumulation_steps=1, world_size=4)
    >>> print(plan.explain())
    supported:
      train_batch_size: 32 -> Rows: micro-batch 8 · accumulation 1 · ranks 4.
      bf16.enabled: True -> `T.mixed_precision('params=f32,compute=bf16,output=f32,reduce=bf16', ...)`.
      zero_optimization.stage: '2' -> `T.zero(2, world)`.
      gradient_clipping: left out -> `T.clip(1.0)`: DeepSpeed's default is 1.0.
    """
    check_world_size(world_size)
    settings = read(source(config), auto=auto_values(auto or {}, model), warn=warn)
    batch = batch_sizes(settings, world_size)
    rule, arguments = optimizer_of(settings)
    schedule, arguments = schedule_of(settings, rule, arguments, lr)
    steps = batch.gradient_accumulation_steps if batch else 1
    make = transforms_of(settings, world_size, group=group, steps=steps, rule=rule, model=model, schedule=schedule)
    optimizer = None
    if rule is not None and not settings.explanation().refused:
        optimizer = settings.attempt("optimizer.params", partial(rule.built, arguments))
    explanation = settings.explanation()
    if explanation.refused or batch is None:
        raise ConfigError.of(explanation)
    return ConfigPlan(optimizer, schedule, batch, settings, make)
