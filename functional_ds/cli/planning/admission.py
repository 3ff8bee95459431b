"""``why_refused``: whether a model can be trained on a mesh at all, and what would do."""

import re
from collections.abc import Iterator

from functional_ds.base import tree

from .candidate import Candidate
from .subject import Subject

__all__ = ["why_refused"]


def why_refused(subject: Subject, candidate: Candidate) -> str | None:
    """Why a model does not admit a candidate's axes: the option, its value, and what would do; None where it does.

    It knows what the model says of itself. What else refuses a step is found when the step is made.
    """
    return next(_reasons(subject, candidate), None)


def _reasons(subject: Subject, candidate: Candidate) -> Iterator[str]:
    tp, sp, pp, ep = candidate.tp, candidate.sp, candidate.pp, candidate.ep
    heads = getattr(getattr(subject.config, "get_text_config", lambda: None)(), "num_attention_heads", None)
    if tp > 1 and subject.tp_plan is None:
        yield (
            f"--tp {tp}: nobody says how layers are cut: give tp_plan beside the module, or a Hugging Face model with one"
        )
    if tp > 1 and heads is not None and heads % tp:
        yield f"--tp {tp}: the model has {heads} attention heads, which do not divide by {tp}; use {_divisors(heads)}"
    if sp > 1 and subject.sequence is None:
        yield (
            f"--sp {sp}: nobody says how sequences are cut: give sequence beside the module, arguments of T.sequence, with "
            "attention over ranks such as fds.seq.ring(), or a Hugging Face model"
        )
    if sp > 1 and subject.config is not None and subject.tokens is not None and subject.tokens % sp:
        yield f"--sp {sp}: {subject.tokens} tokens of a row do not divide by {sp}; use {_divisors(subject.tokens)}, or another --seq"
    if ep > 1 and subject.experts is None:
        yield f"--ep {ep}: the model has no experts, or nobody says which they are: give experts beside the module, a pattern"
    if ep > 1 and subject.experts is not None:
        yield from _of_experts(subject, subject.experts, ep)
    if pp > 1 and subject.stages is None:
        yield f"--pp {pp}: only shapes are known, and a pipeline needs the model: a function or a Hugging Face config"
    if pp > 1 and candidate.recompute:
        yield f"--pp {pp}: --recompute: blocks of a pipeline's stages are not recomputed here; leave out one of the two"
    if pp > 1 and subject.config is not None:
        blocks = getattr(subject.config.get_text_config(), "num_hidden_layers", None)
        stages = candidate.axes.pipeline(candidate.micro_batches).stages
        if blocks is not None and blocks < stages:
            yield f"--pp {pp}: {candidate.schedule} has {stages} stages, and the model {blocks} layers; use fewer ranks of pp"


def _of_experts(subject: Subject, pattern: str, ep: int) -> Iterator[str]:
    found = {path: leaf.shape for path, leaf in tree.named(subject.params) if re.search(pattern, path)}
    if not found:
        yield f"--ep {ep}: experts={pattern!r} matches none of the model's parameters"
    for path, shape in found.items():
        if not shape or shape[0] % ep:
            count = shape[0] if shape else 0
            yield f"--ep {ep}: {path!r} has {count} experts, which do not divide by {ep}; use {_divisors(count)}"


def _divisors(count: int) -> str:
    return ", ".join(str(each) for each in range(1, min(count, 4096) + 1) if count % each == 0) or "1"
