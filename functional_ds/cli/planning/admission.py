"""``why_refused``: whether a model can be trained on a mesh, and what to do instead."""

import re
from collections.abc import Iterator

from functional_ds.base import tree
from functional_ds.jobs.job import Job
from functional_ds.jobs.job_subject import Subject
from functional_ds.jobs.strategy import schedule_of, size

from .candidate import several


def not_admitted(subject: Subject, axis: str, ranks: int) -> str | None:
    """Why a model supports no ranks of an axis: the option, its value, and what to do instead; None if it does.

    Args:
        subject: the model.
        axis: "tp", "sp", "pp" or "ep".
        ranks: how many, above 1.
    """
    if axis == "tp":
        try:
            subject.layer_plan()
        except ValueError:
            more = "give tp_plan with the module, or a Hugging Face model with one"
            return f"tp={ranks}: the model does not define how layers are sliced: {more}"
    if axis == "sp" and subject.sequence is None:
        return (
            f"sp={ranks}: the model does not define how sequences are split: give sequence with the module, arguments of "
            "T.sequence, with attention over ranks such as fds.seq.ring(), or a Hugging Face model"
        )
    if axis == "ep" and subject.experts is None:
        return f"ep={ranks}: the model has no experts that are known: give experts with the module, a pattern of their paths"
    if axis == "pp" and subject.loss is None:
        return f"pp={ranks}: only shapes are known, and a pipeline needs the model: name a function or a Hugging Face config"
    return None


def why_refused(subject: Subject, job: Job) -> str | None:
    """Why a model does not support a candidate's axes: the option, its value, and what to do instead; None if it does.

    It uses what the model specifies about itself. Other errors come when the step is made.
    """
    return next(_reasons(subject, job), None)


def _reasons(subject: Subject, job: Job) -> Iterator[str]:
    tp, sp, pp, ep = (size(job, name) for name in ("tp", "sp", "pp", "ep"))
    for axis in sorted(several(job)):
        reason = not_admitted(subject, axis, size(job, axis))
        if reason is not None:
            yield reason
    if ep > 1 and subject.experts is not None:
        yield from _of_experts(subject, subject.experts, ep)
    if subject.config is None:
        return
    text = subject.config.get_text_config()
    heads, layers = getattr(text, "num_attention_heads", 0), getattr(text, "num_hidden_layers", 0)
    if heads % tp:
        yield f"tp={tp}: the model has {heads} attention heads, which do not divide by {tp}; use {_divisors(heads)}"
    if subject.tokens is not None and subject.tokens % sp:
        fits = _divisors(subject.tokens)
        yield f"sp={sp}: {subject.tokens} tokens of a row do not divide by {sp}; use {fits}, or another --seq"
    schedule, call = schedule_of(job), job.transform("pipeline")
    if schedule is not None and call is not None and 0 < layers < schedule.stages:
        name, stages = call.arguments["schedule"], schedule.stages
        yield f"pp={pp}: {name} has {stages} stages, and the model {layers} layers; use fewer ranks of pp"


def _of_experts(subject: Subject, pattern: str, ep: int) -> Iterator[str]:
    shapes = {path: leaf.shape for path, leaf in tree.named(subject.params) if re.search(pattern, path)}
    if not shapes:
        yield f"ep={ep}: experts={pattern!r} matches none of the model's parameters"
    for path, shape in shapes.items():
        if not shape or shape[0] % ep:
            count = shape[0] if shape else 0
            yield f"ep={ep}: {path!r} has {count} experts, which do not divide by {ep}; use {_divisors(count)}"


def _divisors(count: int) -> str:
    return ", ".join(str(divisor) for divisor in range(1, min(count, 4096) + 1) if count % divisor == 0) or "1"
