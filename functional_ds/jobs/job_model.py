"""Models and losses that a job can name."""

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from functional_ds.base.weighted import Weighted

from .job_errors import JobError

__all__ = ["huggingface", "next_token", "vocab_parallel"]


def huggingface(config: str | dict[str, Any], *, folder: str = ".", attention: str | None = None, weights: bool = False) -> Any:
    """A causal language model of transformers, by its config.

    Args:
        config: a folder or name that has one, or its entries with ``model_type``.
        folder: what a path is relative to; the job's.
        attention: how it attends, such as "sdpa", or "fds_ring" for sequences that are cut.
        weights: whether to load the weights that lie beside the config; otherwise they are drawn.

    Raises:
        JobError: transformers is not installed, or knows no such config.
    """
    if find_spec("transformers") is None:
        raise JobError("it needs the package transformers, which is not installed: pip install transformers")
    transformers = import_module("transformers")
    more = {} if attention is None else {"attn_implementation": attention}
    if attention is not None and attention.startswith("fds_"):
        import_module("functional_ds.parallel.sequence").register_attention()
    try:
        if isinstance(config, Mapping):
            if "model_type" not in config:
                raise JobError('it needs model_type, such as "llama"', entry="config")
            if weights:
                raise JobError("weights lie beside a config in a folder; a table has none", entry="weights", value=weights)
            found = transformers.AutoConfig.for_model(**config, use_cache=False)
        else:
            local = Path(folder, config)
            config = str(local) if local.exists() else config
            found = transformers.AutoConfig.from_pretrained(config, use_cache=False)
        models = transformers.AutoModelForCausalLM
        model = models.from_pretrained(config, config=found, **more) if weights else models.from_config(found, **more)
    except (OSError, ValueError) as error:
        if isinstance(error, JobError):
            raise
        raise JobError(f"transformers cannot build it: {error}", entry="config", value=config) from error
    return model.train()


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
    """The same of logits whose vocabulary is cut by ``tensor_parallel``: ``fds.tp.cross_entropy``."""
    found: Weighted = import_module("functional_ds.parallel.tensor").cross_entropy(
        logits_BTV, targets_BT, label_smoothing=label_smoothing, z_loss=z_loss
    )
    return found
