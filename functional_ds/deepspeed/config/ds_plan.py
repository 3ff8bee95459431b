"""``fds.from_ds_config``: turns a DeepSpeed config into transforms, an optimizer, a schedule and batch sizes."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs

from functional_ds import comm
from functional_ds.optim.optimizer import Optimizer, PerParameter
from functional_ds.step.step import Transform

from .config_reader import Config, Settings, read, source
from .explain import ConfigError, Explanation
from .keys.config_key import Fate
from .keys.config_table import key_of, nearest
from .named_parts import optimizer_of, schedule_of
from .schedules.lr_scheduler import RateSchedule
from .transform_parts import transforms_of

_TRAIN, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@attrs.frozen
class BatchSizes:
    """The sizes of a batch, in rows.

    Law: ``train_batch_size = train_micro_batch_size_per_gpu · gradient_accumulation_steps · world_size``.

    Attributes:
        train_batch_size: in an update, on all ranks.
        train_micro_batch_size_per_gpu: in a micro-batch, on one rank.
        gradient_accumulation_steps: micro-batches in an update.
        world_size: data-parallel ranks.
    """

    train_batch_size: int
    train_micro_batch_size_per_gpu: int
    gradient_accumulation_steps: int
    world_size: int

    @property
    def rows(self) -> int:
        """What a rank passes to a step: the rows of all its micro-batches."""
        return self.train_micro_batch_size_per_gpu * self.gradient_accumulation_steps


def batch_sizes(settings: Settings, world_size: int) -> BatchSizes | None:
    """The sizes by DeepSpeed's rules: quotients are rounded down, then the product is checked. None if they are invalid."""
    train, micro, steps = (settings[name] for name in (_TRAIN, _MICRO, _STEPS))
    if train is None and micro is None:
        settings.refuse(_TRAIN, f"the config must have `{_TRAIN}` or `{_MICRO}`; `{_STEPS}` alone gives neither")
        return None
    if train is None:
        steps = steps or 1
        train = micro * steps * world_size
    elif micro is None:
        steps = steps or 1
        micro = train // world_size // steps
    elif steps is None:
        steps = train // micro // world_size
    if min(micro, steps) < 1 or train != micro * steps * world_size:
        settings.refuse(
            _TRAIN,
            f"{train} rows are not {micro} rows of a micro-batch · {steps} micro-batches · {world_size} ranks = "
            f"{micro * steps * world_size}; change one of the three sizes",
        )
        return None
    for name in (_TRAIN, _MICRO, _STEPS):
        if name in settings:
            settings.note(name, Fate.BECAME, f"Rows: micro-batch {micro} · accumulation {steps} · ranks {world_size}.")
    return BatchSizes(train, micro, steps, world_size)


def check_world_size(world_size: int) -> None:
    """Raises an error for an invalid number of ranks."""
    if type(world_size) is not int or world_size < 1:
        raise ConfigError(f"world_size={world_size!r} must be the number of data-parallel ranks")


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


_RENAMED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        bool,
    ),
    "zero_optimization.cpu_offload": ("zero_optimization.offload_optimizer.device", lambda value: "cpu" if value else "none"),
    "zero_optimization.cpu_offload_param": ("zero_optimization.offload_param.device", lambda value: "cpu" if value else "none"),
}
_LEFT_OUT = ("optimizer.params", "zero_optimization.cpu_offload_use_pin_memory")


def canonical(settings: Settings, batch: BatchSizes) -> dict[str, Any]:
    """A dict that DeepSpeed reads like the config, without what it raises errors for or never reads."""
    config: dict[str, Any] = {}
    for path, value in settings.values.items():
        if _is_kept(settings, path):
            place, convert = _RENAMED.get(path, (_spelled(path), _as_json))
            _put(config, place, convert(value))
    return config | {name: getattr(batch, name) for name in (_TRAIN, _MICRO, _STEPS)}


def _is_kept(settings: Settings, path: str) -> bool:
    key = key_of(path)
    if path == "scheduler.params":  # of a scheduler of torch's, whose arguments have no paths of their own
        return "scheduler.type" in settings and not any(other.startswith("scheduler.params.") for other in settings.values)
    return path not in _LEFT_OUT and (key is None or key.fate is not Fate.REFUSED)


def _spelled(path: str) -> str:
    key = key_of(path)
    return f"{key.block}.{key.aliases[0]}" if key is not None and key.aliases else path


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _put(block: dict[str, Any], path: str, value: Any) -> None:
    *above, name = path.split(".")
    for key in above:
        block = block.setdefault(key, {})
    block[name] = value


_PARAMS = ("optimizer.params.", "scheduler.params.")


def auto_values(auto: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """By canonical path: the caller's values, then three sizes from the model's hidden size, as in transformers.

    Raises:
        ConfigError: an unknown path.
    """
    values: dict[str, Any] = {}
    hidden = None if model is None else _hidden_size(model)
    if hidden:
        values["zero_optimization.reduce_bucket_size"] = hidden * hidden
        values["zero_optimization.prefetch_bucket_size"] = int(0.9 * hidden * hidden)
        values["zero_optimization.param_persistence_threshold"] = 10 * hidden
    for path, value in auto.items():
        key = key_of(path)
        if key is None and not path.startswith(_PARAMS):
            raise ConfigError(f"auto: {path!r}: {nearest(path)}")
        values[path if key is None else key.path] = value
    return values


def _hidden_size(model: Any) -> int | None:
    """As in transformers: the largest of several, and a text model's if the whole has none. GPT's ``d_model`` too."""
    config = getattr(model, "config", model)
    for block in (config, getattr(config, "text_config", None)):
        sizes = [getattr(block, "hidden_size", None), *[max(getattr(block, "hidden_sizes", None) or (0,))]]
        hidden = next((int(size) for size in (*sizes, getattr(block, "d_model", None)) if size), None)
        if hidden is not None:
            return hidden
    return None
