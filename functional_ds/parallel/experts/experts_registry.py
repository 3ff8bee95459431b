"""Expert parallelism for unmodified Hugging Face models, through transformers' registry of expert functions."""

from typing import Any

from torch import Tensor

from functional_ds import comm
from functional_ds.step.axes import SUMS_EXPERTS, axis
from functional_ds.step.pass_scope import current_pass

from .grouped import RowGroups, grouped_linear
from .router_bias import count_choices
from .routing import Routing
from .token_exchange import exchange


def register_experts(name: str = "fds_experts") -> str:
    """Registers an implementation of experts in transformers, for the whole process; returns its name.

    A model built with ``experts_implementation=name``, or after ``model.set_experts_implementation(name)``, then exchanges
    tokens over the ranks of the running step (``T.experts``). Its expert params are this rank's E / P, split along dim 0; if
    they are also split over tensor-parallel ranks, those are the running step's (``axis("tp")``). Outside of a step, or without
    such axes, it computes all experts, as transformers' own implementations do. The router is the model's.

    Args:
        name: for the configuration.

    Raises:
        ValueError: transformers has another function of this name.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS  # an optional dependency, and slow

    known = ALL_EXPERTS_FUNCTIONS.get(name)
    if known not in (None, experts_forward):
        raise ValueError(f"name={name!r}: transformers has other experts of this name; choose another")
    ALL_EXPERTS_FUNCTIONS.register(name, experts_forward)
    return name


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """A transformers module's experts in any of its layouts: with or without gates and biases, transposed or not."""
    if module._is_expert_parallel:
        raise ValueError(
            "this model has transformers' own expert parallelism on; load it without a tp_plan or enable_expert_parallel, and "
            "cut its experts by T.experts"
        )
    first = module.gate_up_proj if module.has_gate else module.up_proj
    pass_ = current_pass()
    tp = None if pass_ is not None and pass_.slots.get(SUMS_EXPERTS) else _cut_over(module)

    def linear(rows: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
        return grouped_linear(rows, weight.mT if module.is_transposed else weight, groups)

    def bias_of(which: str, groups: RowGroups, rows: int) -> Tensor:
        return getattr(module, which).index_select(0, groups.expert_of_row(rows))  # type: ignore[no-any-return]

    def f(rows: Tensor, groups: RowGroups) -> Tensor:
        hidden = linear(rows if tp is None else comm.copy_to(rows, tp), first, groups)
        if module.has_bias:
            hidden = hidden + bias_of("gate_up_proj_bias" if module.has_gate else "up_proj_bias", groups, len(rows))
        hidden = module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden)
        out = linear(hidden, module.down_proj, groups)
        out = out if tp is None else comm.reduce_from(out, tp)
        if module.has_bias:
            out = out + bias_of("down_proj_bias", groups, len(rows))
        return module.post_expert_norm(out) if module.has_post_expert_norm else out

    routing = Routing(top_k_index, top_k_weights, module.num_experts)
    count_choices(module, routing)
    return exchange(f, hidden_states, routing=routing).to(hidden_states.dtype)


def _cut_over(module: Any) -> comm.Group | None:
    """The ranks over which each expert is split; None if experts are whole."""
    whole = getattr(module, "intermediate_dim", getattr(module, "intermediate_size", None))
    here = module.down_proj.shape[1 if module.is_transposed else 2]
    if whole is None or here == whole:
        return None
    tp_axis = axis("tp")
    group = getattr(tp_axis, "group", tp_axis)
    ranks = group.size if isinstance(group, comm.Group) else 1
    if here * ranks != whole:
        raise ValueError(
            f"down_proj has shape {list(module.down_proj.shape)}: {here} of the {whole} rows of an expert, and the step "
            f"has {ranks} tensor-parallel ranks; split experts by T.tensor_parallel over its group, or leave them whole"
        )
    return group  # type: ignore[no-any-return]
