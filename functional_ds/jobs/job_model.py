"""Models and losses that a job can name."""

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor

from functional_ds import comm
from functional_ds.base.weighted import Weighted
from functional_ds.jobs.entries.job_errors import JobError, within
from functional_ds.step.compose import compose
from functional_ds.step.step import Transform


def huggingface(
    config: str | dict[str, Any],
    *,
    folder: str = ".",
    attention: str | None = None,
    experts: bool = False,
    weights: bool = False,
) -> Any:
    """A causal language model of transformers, from its config.

    Args:
        config: a folder or name that has one, or its entries with ``model_type``.
        folder: what a path is relative to; the job's.
        attention: the attention implementation, such as "sdpa", or "fds_ring" for sequence parallelism.
        experts: whether its experts can be split over ranks.
        weights: whether to load the weights next to the config; otherwise they are drawn.

    Raises:
        JobError: transformers is not installed, or has no such config.
    """
    if find_spec("transformers") is None:
        raise JobError("it needs the package transformers, which is not installed: pip install transformers")
    transformers = import_module("transformers")
    more: dict[str, Any] = {"trust_remote_code": False}  # else transformers asks, where the config has code
    if attention is not None:
        more["attn_implementation"] = attention
    if attention is not None and attention.startswith("fds_"):
        import_module("functional_ds.parallel.sequence").register_attention()
    try:
        if isinstance(config, Mapping):
            if "model_type" not in config:
                raise JobError('it needs model_type, such as "llama"', entry="config")
            if weights:
                raise JobError(
                    "weights are read from the config's folder, which a table does not have", entry="weights", value=weights
                )
            model_config = transformers.AutoConfig.for_model(**config, use_cache=False)
        else:
            local = Path(folder, config)
            config = str(local) if local.exists() else config
            model_config = transformers.AutoConfig.from_pretrained(config, use_cache=False, trust_remote_code=False)
        models = transformers.AutoModelForCausalLM
        model = (
            models.from_pretrained(config, config=model_config, **more) if weights else models.from_config(model_config, **more)
        )
        if experts:
            model.set_experts_implementation(import_module("functional_ds.parallel.experts").register_experts())
    except (OSError, ValueError) as error:
        if isinstance(error, JobError):
            raise
        raise JobError(f"transformers cannot build it: {error}", entry="config", value=config) from error
    return model.train()


def pipeline_schedule(schedule: str, micro_batches: int, *, ranks: int, stages_per_rank: int | None = None) -> Any:
    """A published schedule by its name.

    Raises:
        JobError: the name is unknown, or has another number of stages per rank.
        ValueError: too few micro-batches.
    """
    table = import_module("functional_ds.pipelining.schedules.published")
    with within("schedule", value=schedule):
        return table.published(schedule, ranks, micro_batches, v=stages_per_rank)


def pipeline(
    schedule: str,
    micro_batches: int,
    group: comm.Group | None = None,
    *,
    stages_per_rank: int | None = None,
    by: Literal["blocks", "parameters", "measured"] = "blocks",
    blocks: str | None = None,
    resident: int | None = None,
    stages: Any = None,
) -> Transform:
    """``T.pipeline`` of the job's model, which ``pipelining.cut`` splits into as many stages as the schedule has.

    Args:
        schedule: such as "one_f_one_b".
        micro_batches: of a rank's rows.
        group: the ranks; None for the whole world.
        stages_per_rank: of "interleaved_one_f_one_b" and "breadth_first"; 2 by default.
        by: what stages share equally.
        blocks: a pattern of the blocks' paths.
        resident: in ZeRO stage 3, the number of stages whose params are whole at a time.
        stages: the model's; None before there is a model, to check the other arguments.
    """
    ranks = comm.world().size if group is None else group.size
    resolved = pipeline_schedule(schedule, micro_batches, ranks=ranks, stages_per_rank=stages_per_rank)
    if stages is None:
        return compose()
    made: Transform = import_module("functional_ds.transforms").pipeline(resolved, stages, group, resident=resident)
    return made


def next_token(logits_BTV: Any, targets_BT: Tensor) -> Weighted:
    """The cross-entropy of the logits in nats, summed over tokens, and their number."""
    if not isinstance(logits_BTV, Tensor) or logits_BTV.shape[:-1] != targets_BT.shape:
        shape = list(logits_BTV.shape) if isinstance(logits_BTV, Tensor) else type(logits_BTV).__name__
        raise JobError(
            f"next_token takes logits of shape {[*targets_BT.shape, 'vocabulary']}, and the model returned {shape}",
            entry="loss",
        )
    loss = F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), reduction="sum", ignore_index=-100)
    return Weighted(loss, (targets_BT != -100).sum())


def vocab_parallel(logits_BTV: Tensor, targets_BT: Tensor, *, label_smoothing: float = 0.0, z_loss: float = 0.0) -> Weighted:
    """The same for logits whose vocabulary ``tensor_parallel`` splits: ``fds.tp.cross_entropy``."""
    loss: Weighted = import_module("functional_ds.parallel.tensor").cross_entropy(
        logits_BTV, targets_BT, label_smoothing=label_smoothing, z_loss=z_loss
    )
    return loss
