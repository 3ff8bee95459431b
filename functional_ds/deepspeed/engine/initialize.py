"""``initialize``: makes an engine from a module, a config and perhaps an optimizer."""

import logging
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from functional_ds import comm
from functional_ds.base.marks import mark_sharers
from functional_ds.base.package_index import optional
from functional_ds.base.torch_private import FakeTensor
from functional_ds.deepspeed.config.config_reader import source
from functional_ds.deepspeed.config.ds_plan import ConfigPlan, from_ds_config
from functional_ds.deepspeed.config.explain import UsageError
from functional_ds.deepspeed.config.model.leaf_modules import get_z3_leaf_modules, mark_leaf_parameters
from functional_ds.deepspeed.utils.loaders import EngineLoader
from functional_ds.modules.functional import as_function
from functional_ds.optim.sgd import sgd
from functional_ds.step.train_step import train_step

from .common.config_scheduler import ConfigScheduler, cycled_on_host, named_scheduler
from .common.engine_counts import EngineCounts
from .common.optimizer_groups import LiveGroup, as_groups, groups_of_config, groups_of_optimizer, live_optimizer
from .ds_optimizer import EngineOptimizer
from .engine import DeepSpeedEngine
from .loop.engine_loop import EngineLoop, LossShare
from .loop.gathered_parameters import fill_again, own_parameters
from .loop.live_module import LiveModule, take_over
from .loop.zero_init import deferral_of, suspended, taken


@suspended()
def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[DeepSpeedEngine, EngineOptimizer | None, EngineLoader | None, Any]:
    """DeepSpeed's ``initialize``: makes an engine. All ranks get rank 0's params. Collective.

    Args:
        args: an object that may have ``deepspeed_config`` and ``local_rank``.
        model: the module. It stays usable; in stage 3 its parameters are empty, as in DeepSpeed.
        optimizer: torch's AdamW, Adam, SGD or Adagrad, one of ``deepspeed.ops``, or a function from ``model_parameters`` to
            one; None for the config's.
        model_parameters: what the config's optimizer trains: parameters, or dicts of groups; None for all.
        training_data: a data set, for a loader of micro-batches.
        lr_scheduler: one of torch's or DeepSpeed's, or a function from the optimizer to one; None for the config's.
        distributed_port: of rank 0's host, if MASTER_PORT is not set.
        mpu: raises an error if it has model-parallel ranks.
        dist_init_required: False raises an error in a process that is in no world yet.
        collate_fn: of the loader.
        config: a path, a dict or base64 text.
        mesh_param: raises an error if it has more than data-parallel ranks.
        config_params: the old name of ``config``.

    Returns:
        the engine, its optimizer, the loader, the scheduler; None for those that do not exist.

    Raises:
        ConfigError: the config is unsupported; names all such keys.
        ValueError: no model or no config, or two configs; an optimizer without a pure form; another optimizer's scheduler.

    >>> engine, optimizer, _, _ = initialize(
    ...     model=nn.Linear(2, 1),
    ...     config={
    ...         "train_batch_size": 4,
    ...         "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
    ...         "zero_optimization": {"stage": 1},
    ...     },
    ... )
    >>> loss = engine(torch.ones(4, 2)).square().mean()
    >>> _ = engine.backward(loss)
    >>> engine.step()
    >>> engine.global_steps, engine.get_lr()
    (1, [0.1])
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"initialize: pass the model, a torch.nn.Module; this is a {type(model).__name__}")
    _join(distributed_port, dist_init_required)
    settings = _config(args, config, config_params)
    world = comm.world()
    _refuse_model_parallel(mpu, mesh_param)
    client = _client_optimizer(optimizer, model_parameters)
    _refuse_foreign(lr_scheduler, client)
    if _is_pipeline(model):
        return _pipeline(model, settings, client, model_parameters, lr_scheduler, training_data, collate_fn)
    if lr_scheduler is None:
        lr_scheduler = cycled_on_host(settings)
    plan = _plan(settings, world.size, model, client, has_scheduler=lr_scheduler is not None)
    _set_log_level(plan)

    fill_again(model)
    sharers, deferral = _sharers(model), deferral_of(model)
    _move(model, sharers)
    made = None if deferral is None else taken(deferral, model, _device())
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = _groups(plan, client, model, model_parameters, names)
    trained: set[str] = set().union(*(group.paths for group in groups))
    parameters = dict(model.named_parameters())
    apply, params = as_function(model) if made is None else made
    for name, parameter in params.items():
        if name not in trained and groups:
            parameter.requires_grad_(False)
            parameters[name].requires_grad_(False)

    share = LossShare.of(plan)
    base = train_step(_no_loss, live_optimizer(groups) if groups else sgd(0.0))
    step = share.transform()(plan.transform(base))
    live = LiveModule(model, apply, parameters, plan.value("zero_optimization.stage") < 3)
    params = {name: mark_sharers(p, sharers[name]) if name in sharers else p for name, p in params.items()}
    state = step.init(params)
    del params, made, deferral
    loop = EngineLoop(step, state, live, share, plan.batch.gradient_accumulation_steps)
    live.show(step, state)
    own_parameters(loop, parameters, plan)
    if not live.shows:
        mark_leaf_parameters(get_z3_leaf_modules(model))

    counts = EngineCounts(loop.micro_batches, bool(plan.value("managed_gradient_accumulation")))
    facade = None
    if groups:
        facade = EngineOptimizer(groups, client, counts, loop, plan)
    counts.scheduler = _scheduler(plan, lr_scheduler, client or facade, groups, counts)
    engine = DeepSpeedEngine(model, plan, loop, counts, optimizer=facade, lr_scheduler=counts.scheduler)
    engine.collate_fn = collate_fn
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data)
    return engine, facade, engine.training_dataloader, counts.scheduler


def _is_pipeline(model: nn.Module) -> bool:
    is_pipeline = False
    with optional("functional_ds.pipelining"):
        from functional_ds.deepspeed.pipe.pipeline_module import PipelineModule

        is_pipeline = isinstance(model, PipelineModule)
    return is_pipeline


def _set_log_level(plan: ConfigPlan) -> None:
    if plan.value("log_level"):
        logging.getLogger("DeepSpeed").setLevel(str(plan.value("log_level")).upper())


def _pipeline(
    model: nn.Module, config: dict[str, Any], client: Any, given: Any, lr_scheduler: Any, data: Any, collate_fn: Any
) -> tuple[Any, Any, Any, Any]:
    from functional_ds.deepspeed.pipe.pipeline_engine import GivenOptimizer, pipeline_engine  # pipelining may be left out

    if client is None and lr_scheduler is not None:
        raise ValueError(
            "lr_scheduler: with a PipelineModule also pass the optimizer whose rates it sets, or name both in the config"
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    dicts = client.param_groups if client is not None else None if given is None else as_groups(given)
    if dicts is not None:
        trained = {id(p) for group in dicts for p in group["params"]}
        for parameter in model.parameters():
            if id(parameter) not in trained:
                parameter.requires_grad_(False)
    if client is not None:
        config = {name: block for name, block in config.items() if name != "optimizer"}
    if lr_scheduler is None:
        lr_scheduler = cycled_on_host(config)
    if lr_scheduler is not None:
        config = {name: block for name, block in config.items() if name != "scheduler"}

    def make(plan: ConfigPlan, counts: EngineCounts) -> GivenOptimizer:
        groups = _groups(plan, client, model, dicts, names)
        holder = client or SimpleNamespace(param_groups=[group.given for group in groups])
        counts.scheduler = _scheduler(plan, lr_scheduler, holder, groups, counts)
        return GivenOptimizer(counts, live_optimizer(groups), [group.given for group in groups])

    engine = pipeline_engine(
        model,  # type: ignore[arg-type]
        config,
        make=make if client is not None or "optimizer" in config else None,
        lr=None if client is None else float(client.param_groups[0]["lr"]),
        training_data=data,
        collate_fn=collate_fn,
    )
    _set_log_level(engine.plan)
    return engine, client, engine.training_dataloader, engine.lr_scheduler


def _no_loss(params: Any, batch: Any) -> Tensor:
    raise RuntimeError("an engine's step has no loss function; call engine(...), engine.backward(loss), engine.step()")


# -- what the arguments say ----------------------------------------------------------------------------------------------


def _join(port: int, required: bool | None) -> None:
    import os

    if comm.is_initialized():
        return
    if required is False:
        raise UsageError("dist_init_required=False, and this process is in no world yet: call init_distributed() before")
    if "WORLD_SIZE" in os.environ:
        os.environ.setdefault("MASTER_PORT", str(port))
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    comm.init_distributed()


def _config(args: Any, config: Any, config_params: Any) -> dict[str, Any]:
    given = config if config is not None else config_params
    for name in ("deepscale_config", "deepspeed_config"):
        from_args = getattr(args, name, None)
        if from_args is not None:
            if given is not None:
                raise UsageError(f"config: it is given twice, as args.{name} and as an argument; pass one of them")
            given = from_args
    if given is None:
        raise UsageError("config: pass it as config=, or by --deepspeed_config in args")
    return source(getattr(given, "config", given) if not isinstance(given, Mapping | str) else given)


def _refuse_model_parallel(mpu: Any, mesh: Any) -> None:
    kinds = ("model_parallel", "tensor_model_parallel", "pipeline_model_parallel")
    asks = (getattr(mpu, f"get_{parallelism}_world_size", None) for parallelism in kinds)
    sizes = [ask() for ask in asks if ask is not None]
    if any(size > 1 for size in sizes):
        raise ValueError(
            f"mpu: its model-parallel groups have {max(sizes)} ranks, and engines here are data-parallel; compose "
            "T.tensor_parallel or T.pipeline in a step of your own, with fds.from_ds_config(config, group=mesh['dp'])"
        )
    if mesh is not None and any(size > 1 for size in tuple(mesh)[1:]):
        raise ValueError(f"mesh_param={mesh}: engines here are data-parallel; compose T.sequence in a step of your own")


def _client_optimizer(optimizer: Any, model_parameters: Any) -> torch.optim.Optimizer | None:
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    if not callable(optimizer):
        raise UsageError(f"optimizer={optimizer!r} is neither an optimizer nor a function that makes one")
    made = optimizer(model_parameters)
    if not isinstance(made, torch.optim.Optimizer):
        raise UsageError(f"optimizer: the function returned a {type(made).__name__}, and not a torch optimizer")
    return made


def _refuse_foreign(scheduler: Any, client: torch.optim.Optimizer | None) -> None:
    """Raises an error for a scheduler of another optimizer, whose rates no update reads."""
    moved = getattr(scheduler, "optimizer", None)
    if isinstance(moved, torch.optim.Optimizer) and moved is not client:
        raise UsageError(
            f"lr_scheduler: {type(scheduler).__name__} sets the rates of another {type(moved).__name__} than the engine's; "
            "pass that optimizer, too, or a function from the engine's optimizer to a scheduler"
        )


def _plan(
    config: dict[str, Any], ranks: int, model: nn.Module, client: torch.optim.Optimizer | None, *, has_scheduler: bool
) -> ConfigPlan:
    lr = None
    if client is not None:  # arguments override the config
        config = {name: block for name, block in config.items() if name != "optimizer"}
        first = client.param_groups[0]
        lr = float(first.get("initial_lr", first["lr"]))
    if has_scheduler:
        config = {name: block for name, block in config.items() if name != "scheduler"}
    return from_ds_config(config, ranks, model=model, lr=lr, warn=True)


def _groups(
    plan: ConfigPlan, client: torch.optim.Optimizer | None, model: nn.Module, given: Any, names: Mapping[int, str]
) -> list[LiveGroup]:
    if client is not None:
        return groups_of_optimizer(client, names)
    if plan.optimizer is None:
        return []
    return groups_of_config(plan, as_groups(model.parameters() if given is None else given), names)


def _scheduler(plan: ConfigPlan, given: Any, optimizer: Any, groups: list[LiveGroup], counts: EngineCounts) -> Any:
    if given is not None:
        return given if hasattr(given, "step") or not callable(given) else given(optimizer)
    if plan.schedule is None or not groups:
        return None
    multiples = plan.value("scheduler.type") == "WarmupCosineLR"
    make = named_scheduler(plan.value("scheduler.type"), plan.value("scheduler.params"))
    return ConfigScheduler(plan.schedule, multiples, groups=groups, settle=counts.settle, make=make)


def _sharers(model: nn.Module) -> dict[str, tuple[tuple[int, ...], ...]]:
    """By name, experts' params that only some ranks share."""
    sharers: dict[str, tuple[tuple[int, ...], ...]] = {}
    with optional("functional_ds.parallel"):
        from functional_ds.deepspeed.moe.utils import expert_sharers

        sharers = expert_sharers(model)
    return sharers


def _device() -> torch.device:
    device = comm.world().world.device
    if device.type == "cpu" and not dist.is_initialized() and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())  # a program of one process, as DeepSpeed runs it
    return device


def _move(model: nn.Module, sharers: Mapping[str, tuple[tuple[int, ...], ...]]) -> None:
    """Moves params and buffers to the rank's device, with rank 0's values; experts' with their first rank's.

    A model that is on a device stays there. Params without values are left alone.
    """
    here = [x for x in (*model.parameters(), *model.buffers()) if not isinstance(x, FakeTensor)]
    if any(x.is_meta for x in here):
        raise UsageError(
            "initialize: the model has tensors on the meta device, which have no values; build it within zero.Init(), or give "
            "them values by to_empty(device=...) and load_state_dict"
        )
    if all(x.device.type == "cpu" for x in here):
        for x in here:
            x.data = x.data.to(_device())
    rank = comm.world().rank
    take_over({name: next(block for block in blocks if rank in block) for name, blocks in sharers.items()}, model)
