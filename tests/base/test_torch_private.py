"""Each private thing of torch that the library uses still does what is needed; the failing test's name says which does not."""

import ast
import copy
import functools
import importlib
import re
import weakref
import zlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from functional_ds import comm
from functional_ds.base import torch_private as private
from functional_ds.base import torch_replaced as replaced
from functional_ds.base.marks import is_compiled
from functional_ds.comm.backends import torch_groups as groups
from functional_ds.compiling import torch_compiler
from tests.planting import Bug, planted

CHECKS: dict[str, Callable[[], None]] = {}
FOLDERS = [Path(importlib.import_module(f"functional_ds{part}").__path__[0]) for part in ("", ".comm", ".transforms")]


def checks(*names: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Registers a check of these entries."""

    def register(check: Callable[[], None]) -> Callable[[], None]:
        CHECKS.update(dict.fromkeys(names, check))
        return check

    return register


@checks("FakeTensor", "FakeTensorMode", "has_values", "is_fake")
def fake_tensors_have_shapes_and_no_memory() -> None:
    with private.FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(2**40, 3)
        y = x @ torch.ones(3, 2)
    assert isinstance(y, private.FakeTensor)
    assert private.is_fake(y)
    assert not private.is_fake(torch.ones(1))
    assert private.has_values(torch.ones(1))
    assert not any(map(private.has_values, (y, torch.ones(1, device="meta"))))
    assert (y.shape, y.device.type) == ((2**40, 2), "cpu")


@checks("CPU_ATTENTION", "CPU_ATTENTION_BACKWARD")
def attention_on_the_cpu_has_a_kernel() -> None:
    seen = []

    class Seen(private.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append((func, [x.shape for x in args if isinstance(x, Tensor)]))
            return func(*args, **(kwargs or {}))

    query, key, value = (torch.ones(2, 4, size, 8, requires_grad=True) for size in (3, 5, 5))
    with Seen():
        torch.nn.functional.scaled_dot_product_attention(query, key, value).sum().backward()
    shapes = dict(seen)
    assert shapes[private.CPU_ATTENTION] == [query.shape, key.shape, value.shape]
    assert shapes[private.CPU_ATTENTION_BACKWARD][:4] == [query.shape, query.shape, key.shape, value.shape]


@checks("CUDA_ATTENTION", "CUDA_ATTENTION_BACKWARD")
def attention_on_cuda_takes_grouped_heads_and_gives_the_log_sum_exp() -> None:
    with private.FakeTensorMode():
        query, key, value = (torch.ones(2, h, 16, 8, device="cuda", dtype=torch.bfloat16) for h in (4, 2, 2))
        out, lse, *_ = private.CUDA_ATTENTION(query, key, value, 0.0, True, False, scale=0.5)
        assert (out.shape, lse.shape, lse.dtype) == (query.shape, query.shape[:3], torch.float32)
        none = torch.empty(0, dtype=torch.uint64, device="cuda")
        args = out, query, key, value, out, lse, None, None, 16, 16, 0.0, True, none, none
        assert [g.shape for g in private.CUDA_ATTENTION_BACKWARD(*args, scale=0.5)] == [query.shape, key.shape, value.shape]


@checks("GROUPED_PRODUCT")
def grouped_products_have_shapes_in_every_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        rows, weights = torch.ones(8, 16, dtype=dtype), torch.ones(2, 16, 24, dtype=dtype)
        ends = torch.tensor([3, 8], dtype=torch.int32)
        for a, b in ((rows, weights), (weights.mT, rows.T), (rows.T, torch.ones(8, 24, dtype=dtype)), (weights.mT, weights)):
            offs = None if a.dim() == b.dim() == 3 else ends
            with private.FakeTensorMode(allow_non_fake_inputs=True) as mode:
                x, y = mode.from_tensor(a), mode.from_tensor(b)
                found = private.GROUPED_PRODUCT(x, y, offs)
            expected = private.GROUPED_PRODUCT(a, b, offs)
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype)


@checks("FakeTensorConverter")
def a_converter_without_memory() -> None:
    class Forgets(private.FakeTensorConverter):
        def set_tensor_memo(self, t: Any, v: Any) -> None:
            pass

    mode = private.FakeTensorMode(allow_non_fake_inputs=True)
    mode.fake_tensor_converter = Forgets()
    with mode:
        assert weakref.getweakrefcount(torch.empty(2) + 1) == 0


@checks("DataDependentOutputException", "DynamicOutputShapeException", "UnsupportedFakeTensorException")
def fake_tensors_say_what_needs_values() -> None:
    with private.FakeTensorMode():
        x = torch.ones(3)
        with pytest.raises(private.DataDependentOutputException):
            x.sum().item()
        with pytest.raises(private.DynamicOutputShapeException):
            x.nonzero()
    assert issubclass(private.UnsupportedFakeTensorException, RuntimeError)


@checks("is_transformed")
def transformed_tensors_are_known() -> None:
    known: list[bool] = []
    torch.func.vmap(lambda x: known.append(private.is_transformed(x)) or x)(torch.ones(2))
    assert known == [True]
    assert not private.is_transformed(torch.ones(2))


@checks("in_torch_func")
def transforms_are_seen() -> None:
    seen: list[bool] = []
    torch.func.vmap(lambda x: seen.append(private.in_torch_func()) or x)(torch.ones(2))
    assert seen == [True]
    assert not private.in_torch_func()


@checks("below_level", "grad_level", "leaf_at_level")
def a_backward_pass_has_a_level() -> None:
    """Which leaves were unused is known, and gradients have graphs, within torch.func's transforms and outside of them."""

    def grad(x: Tensor) -> Tensor:
        with private.grad_level() as level:
            leaves = [private.leaf_at_level(x, level) for _ in range(2)]
            found, unused = torch.autograd.grad((leaves[0] ** 3).sum(), leaves, create_graph=True, allow_unused=True)
            assert unused is None
            return private.below_level(found, level)

    x = torch.tensor([1.0, 2.0])
    assert torch.func.jacrev(lambda x: grad(x).sum())(x).tolist() == [6.0, 12.0]
    assert torch.func.vmap(torch.func.grad(grad))(x).tolist() == [6.0, 12.0]
    assert torch.func.jvp(grad, (x,), (torch.ones(2),))[1].tolist() == [6.0, 12.0]
    y = x.clone().requires_grad_()
    assert torch.autograd.grad(grad(y).sum(), y)[0].tolist() == [6.0, 12.0]
    assert not x.requires_grad


@checks("READ_NUMBER")
def numbers_are_read_by_one_operator() -> None:
    seen = []

    class Seen(private.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    three = torch.tensor(3)
    with Seen():
        assert three.item() == 3
    assert seen == [private.READ_NUMBER]


@checks("unset_fake_temporarily", "detect_fake_mode")
def a_fake_mode_can_be_seen_and_left() -> None:
    assert private.detect_fake_mode() is None
    with private.FakeTensorMode() as mode:
        assert private.detect_fake_mode() is mode
        with private.unset_fake_temporarily() as outer:
            assert outer is mode
            assert torch.ones(2).sum().item() == 2
        assert isinstance(torch.ones(2), private.FakeTensor)


class _Sees(private.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(private.schema_of(func).name)
        return func(*args, **(kwargs or {}))


@checks("TorchDispatchMode", "mode_left", "schema_of", "disable_dispatch_modes", "quick_call_of", "UNDECLARED_VIEWS")
def a_dispatch_mode_sees_operators() -> None:
    x = torch.ones(2, requires_grad=True)
    with _Sees() as seen:
        (x * 2).sum().backward()  # type: ignore[no-untyped-call]
        with private.disable_dispatch_modes():
            x.detach().exp()
    assert "aten::mul" in seen.names
    assert seen.names.count("aten::mul") == 2, "the backward pass is seen, too"
    assert "aten::exp" not in seen.names
    above = _Sees()
    with seen:
        with replaced.mode_left(seen) as left, above:
            assert left
            x.detach().exp()
        with above, replaced.mode_left(seen) as left:
            assert not left
        x.detach().log()
    assert above.names.count("aten::exp") == 1
    assert ("aten::exp" in seen.names, "aten::log" in seen.names) == (False, True)
    schema = private.schema_of(torch.ops.aten.add_.Tensor)
    assert schema.is_mutable
    assert [argument.name for argument in schema.arguments] == ["self", "other", "alpha"]
    assert [x.alias_info is not None and x.alias_info.is_write for x in schema.arguments] == [True, False, False]
    given = torch.ones(4)
    for view, args in zip(private.UNDECLARED_VIEWS, (([2, 2],), ([2, 2], [2, 1]), ()), strict=True):
        assert view(given, *args).data_ptr() == given.data_ptr()
    assert private.quick_call_of(torch.ops.aten.add.Tensor)(torch.ones(2), torch.ones(2), alpha=2).tolist() == [3, 3]


class _Counts(Tensor):
    calls = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _Counts.calls += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class _Listens(torch.overrides.TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@checks("disable_torch_function", "disable_torch_function_subclass")
def torch_functions_can_be_called_unheard() -> None:
    x, before = torch.ones(2).as_subclass(_Counts), _Counts.calls
    with private.disable_torch_function_subclass():
        assert x.shape == (2,)
    with _Listens() as mode, private.disable_torch_function():
        torch.add(x, 1)
    assert (mode.calls, _Counts.calls) == (0, before)
    assert x.shape == (2,)
    assert _Counts.calls == before + 1


@checks("saved_tensors_hooks_in_force")
def the_innermost_hooks_are_found() -> None:
    def pack(x: Tensor) -> Any:
        return x

    def unpack(x: Any) -> Tensor:
        return x  # type: ignore[no-any-return]

    assert private.saved_tensors_hooks_in_force() is None
    hooks = torch.autograd.graph.saved_tensors_hooks
    with hooks(unpack, pack), hooks(pack, unpack):
        assert private.saved_tensors_hooks_in_force() == (pack, unpack)
    assert private.saved_tensors_hooks_in_force() is None


@checks("run_backward")
def a_backward_pass_without_checks() -> None:
    x, w = torch.ones(2, requires_grad=True), torch.full((2,), 3.0, requires_grad=True)
    y = x * w
    private.run_backward([y], [torch.ones(2)], [x], keep_graph=True)
    assert (x.grad, w.grad) == (x.grad, None)
    private.run_backward([torch.autograd.graph.get_gradient_edge(y)], [torch.ones(2)], [x], keep_graph=False)
    assert x.grad is not None
    assert x.grad.tolist() == [6.0, 6.0], "gradients add up"


@checks("gradients")
def gradients_by_leaves_that_override_torch() -> None:
    class Overriding(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError("torch asked the leaf")

    x, unused = torch.ones(2, requires_grad=True), torch.ones(2).as_subclass(Overriding)
    with private.disable_torch_function_subclass():
        unused.requires_grad_()
    found, none = private.gradients([x * 3], [torch.ones(2)], [x, unused])
    assert none is None
    assert found is not None
    assert found.tolist() == [3.0, 3.0]


@checks("held_elsewhere")
def what_cpp_holds_counts_as_a_reference() -> None:
    held = [torch.ones(2, requires_grad=True) for _ in range(3)]
    assert private.held_elsewhere(held) == [False, False, False]
    other, product = held[0], held[1] * held[1]  # autograd holds the leaf
    assert private.held_elsewhere(held) == [True, True, False]
    del other, product
    assert private.held_elsewhere(held) == [False, False, False]


@checks("in_dual_level")
def forward_mode_levels_are_seen() -> None:
    assert not private.in_dual_level()
    with forward_ad.dual_level():
        assert private.in_dual_level()
    assert not private.in_dual_level()


@checks("has_tangent")
def tangents_are_seen() -> None:
    x = torch.ones(2)
    assert not private.has_tangent(x)
    with forward_ad.dual_level():
        assert private.has_tangent(forward_ad.make_dual(x, x))
        assert not private.has_tangent(x)
    seen = []
    torch.func.jvp(lambda y: seen.append(private.has_tangent(y)) or y * 2, (x,), (x,))
    assert seen == [True]
    torch.func.jvp(torch.func.vmap(lambda y: seen.append(private.has_tangent(y)) or y), (x,), (x,))
    torch.func.jvp(torch.func.vmap(lambda y: seen.append(private.has_tangent(y.detach())) or y), (x,), (x,))
    assert seen == [True, True, False]


@checks("outside_functorch")
def transforms_can_be_left() -> None:
    def f(x: Tensor) -> Tensor:
        with private.outside_functorch() as transforms:
            assert len(transforms) == 2
            plain = Doubled.apply(torch.ones(2, requires_grad=True))  # a function that no transform takes
        with private.outside_functorch():
            assert type(plain.grad_fn).__name__ == "DoubledBackward"
        return (x * plain).sum()

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    assert torch.func.vmap(torch.func.grad(f))(torch.ones(3, 2)).tolist() == [[2.0, 2.0]] * 3


@checks("backward_pass")
def each_backward_pass_has_a_number() -> None:
    seen, x = [private.backward_pass()], torch.ones(1, requires_grad=True)
    y, z = x * 2, x * 3

    def inside(grad: Tensor) -> None:
        seen.append(private.backward_pass())
        torch.autograd.grad(z, x)
        seen.append(private.backward_pass())

    y.register_hook(inside)
    z.register_hook(lambda grad: seen.append(private.backward_pass()))
    torch.autograd.grad(y, x)
    assert seen[0] == private.backward_pass() == -1
    assert seen[1] == seen[3] != seen[2]
    assert -1 not in seen[1:]


@checks("at_backward_end")
def work_is_done_when_the_whole_backward_pass_is_over() -> None:
    seen, x = [], torch.ones(1, requires_grad=True)
    y = x * 2
    x.register_post_accumulate_grad_hook(lambda leaf: seen.append("leaf"))
    y.register_hook(lambda grad: private.at_backward_end(lambda: seen.append("end")))
    y.backward()
    assert seen == ["leaf", "end"]


@checks("storage_id")
def views_share_a_storage() -> None:
    x, y = torch.ones(4), torch.ones(4)
    assert private.storage_id(x) == private.storage_id(x[1:]) == private.storage_id(x.detach().untyped_storage())
    assert private.storage_id(x) != private.storage_id(y)
    empty, other = torch.empty(0), torch.empty(0, device="meta")
    assert len({private.storage_id(t) for t in (x, y, empty, other)}) == 4
    with private.FakeTensorMode():
        z = torch.ones(2)
        assert private.storage_id(z) == private.storage_id(z.view(2, 1))


@checks("pytree_node_of")
def classes_that_torchs_pytrees_know() -> None:
    flatten, unflatten = private.pytree_node_of(dict) or pytest.fail("dict is unknown")
    children, context = flatten({"x": 1})
    assert unflatten(list(children), context) == {"x": 1}
    assert private.pytree_node_of(int) is None


@checks("hooks_of")
def hooks_of_a_leaf() -> None:
    leaf = nn.Parameter(torch.ones(2))
    assert private.hooks_of(leaf) == []
    handles = [leaf.register_hook(lambda grad: grad), leaf.register_post_accumulate_grad_hook(lambda p: None)]
    assert len(private.hooks_of(leaf)) == 2
    for handle in handles:
        handle.remove()
    assert private.hooks_of(leaf) == []


@checks("hooks_of_optimizer")
def hooks_of_an_optimizer() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    assert private.hooks_of_optimizer(optimizer) == []
    optimizer.register_step_pre_hook(lambda *_: None)
    optimizer.register_step_post_hook(lambda *_: None)
    assert len(private.hooks_of_optimizer(optimizer)) == 2


@checks("mark_parameter")
def tensors_are_parameters() -> None:
    tensor = torch.ones(2)
    assert not isinstance(tensor, nn.Parameter)
    private.mark_parameter(tensor)
    assert isinstance(tensor, nn.Parameter)


@checks("below_autograd")
def views_below_autograd_are_tensors_of_their_own() -> None:
    flat = torch.zeros(4)
    with private.below_autograd():
        views = [flat[:2].view(2, 1), torch.as_strided(flat, (2,), (1,), 2)]
    for view in views:
        assert view._base is None
        view.fill_(1.0)
    assert (flat.tolist(), private.version_of(flat)) == ([1.0] * 4, 0)
    assert [private.version_of(view) for view in views] == [1, 1]
    flat.requires_grad_()
    with private.below_autograd():
        assert not flat[:2].requires_grad


@checks("has_late_hooks")
def hooks_after_accumulation() -> None:
    leaf = nn.Parameter(torch.ones(2))
    leaf.register_hook(lambda grad: grad)
    assert not private.has_late_hooks(leaf)
    leaf.register_post_accumulate_grad_hook(lambda p: None)
    assert private.has_late_hooks(leaf)


@checks("graph_number")
def nodes_of_a_thread_are_counted() -> None:
    x = torch.ones(2, requires_grad=True)
    assert private.graph_number(x) == -1
    first = private.graph_number(x * 2)
    assert private.graph_number((x * 2).sum() + 1) == first + 3


@checks("node_number")
def a_backward_pass_knows_its_node() -> None:
    found = []
    x = torch.ones(2, requires_grad=True)
    assert private.node_number() is None
    y = x * 2
    z = y + 1
    number = private.graph_number(z)
    y.register_hook(lambda grad: found.append(private.node_number()))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: found.append(private.node_number()) or t):
        w = z.exp()
    w.sum().backward()
    assert found[0] == number + 1, found


@checks("version_of")
def writes_count() -> None:
    x = torch.ones(4)
    view, before = x[:2], private.version_of(x)
    view.add_(1)
    assert private.version_of(x) == private.version_of(view) == before + 1


@checks("parameters_of", "buffers_of")
def a_module_stores_its_own() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2))
    norm = module[0]
    assert not private.parameters_of(module)
    assert set(private.parameters_of(norm)) == {"weight", "bias"}
    assert set(private.buffers_of(norm)) == {"running_mean", "running_var", "num_batches_tracked"}
    other = nn.Parameter(torch.zeros(2))
    private.parameters_of(norm)["weight"] = other
    private.buffers_of(norm)["running_mean"] = torch.full((2,), 5.0)
    assert norm.weight is other
    assert dict(module.named_buffers())["0.running_mean"].tolist() == [5.0, 5.0]


@checks("non_persistent_buffers_of")
def a_module_knows_what_it_does_not_save() -> None:
    module = nn.Module()
    module.register_buffer("saved", torch.zeros(1))
    module.register_buffer("made", torch.zeros(1), persistent=False)
    assert private.non_persistent_buffers_of(module) == {"made"}


@checks("refresh_flat_weights")
def an_rnn_uses_its_current_parameters() -> None:
    rnn, x = nn.RNN(1, 1, bias=False), torch.ones(1, 1)
    for name in dict(private.parameters_of(rnn)):
        private.parameters_of(rnn)[name] = nn.Parameter(torch.zeros(1, 1))
    private.refresh_flat_weights(rnn)
    assert rnn(x)[0].tolist() == [[0.0]]


class _Lazy(Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError("it has no values")


@checks("make_wrapper_subclass")
def a_tensor_without_memory() -> None:
    made = private.make_wrapper_subclass(_Lazy, (2, 3), dtype=torch.bfloat16, device=torch.device("cpu"), requires_grad=True)
    assert isinstance(made, _Lazy)
    assert (made.shape, made.dtype, made.device.type, made.requires_grad) == ((2, 3), torch.bfloat16, "cpu", True)
    assert made.is_leaf


@checks("foreach_copy_", "foreach_add_")
def many_tensors_in_one_call() -> None:
    into = [torch.zeros(2, dtype=torch.float64), torch.zeros(3)]
    private.foreach_copy_(into, [torch.ones(2), torch.full((3,), 2.0)])
    private.foreach_add_(into, [torch.ones(2, dtype=torch.float64), torch.ones(3)])
    assert [x.tolist() for x in into] == [[2.0] * 2, [3.0] * 3]


@checks("unscale_")
def what_is_not_finite_is_found() -> None:
    for bad, expected in ((1.0, 0.0), (float("inf"), 1.0), (float("nan"), 1.0)):
        grads, found = [torch.full((2,), 6.0), torch.tensor([bad])], torch.zeros(1)
        private.unscale_(grads, found, torch.full((1,), 0.5))
        assert (grads[0].tolist(), found.item()) == ([3.0, 3.0], expected)


@checks("new_process_group")
def a_process_group_by_its_name() -> None:
    dist = torch.distributed
    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        everyone: Any = dist.group.WORLD
        everyone.bound_device_id = torch.device("cuda", 0)  # as if NCCL had connected it; the new group must not split it
        pg = groups.new_process_group([0], "mine", timeout=timedelta(seconds=7))
        assert everyone.bound_device_id == torch.device("cuda", 0)
        everyone.bound_device_id = None
        assert (pg.group_name, pg.size(), dist.get_process_group_ranks(pg)) == ("mine", 1, [0])
        x = torch.ones(1)
        dist.all_reduce(x, group=pg)
        with pytest.raises(ValueError, match="already been created"):
            groups.new_process_group([0], "mine", timeout=timedelta(seconds=7))
    finally:
        comm.destroy_process_group()


@checks("cuda_without_a_driver", "lift_on_the_host")
def modes_see_cuda() -> None:
    class Seen(private.TorchDispatchMode):
        found: list[str] = []  # noqa: RUF012

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if (device := (kwargs or {}).pop("device", None)) is not None:
                self.found.append(f"{func} {device.type}")
            return func(*args, **(kwargs or {}))

    with replaced.cuda_without_a_driver(), replaced.lift_on_the_host(), Seen():
        torch.empty(1, device="cuda")
        torch.tensor([1.0], device="cuda:0")
    assert Seen.found == ["aten.empty.memory_format cuda", "aten._to_copy.default cuda"]


@checks("instead_of_engine")
def backward_passes_can_be_watched() -> None:
    found = []

    def watched(run: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(len(outputs))
        return run(outputs, *args, **kwargs)

    x = torch.ones(2, requires_grad=True)
    with replaced.instead_of_engine(watched):
        x.sum().backward()
        torch.autograd.grad([x.sum(), x.prod()], x)
        private.run_backward([x.sum()], [torch.ones(())], [x], keep_graph=False)
    x.sum().backward()
    assert found == [1, 2, 1]


@checks("instead_of_make_wrapper_subclass")
def tensors_without_memory_can_be_watched() -> None:
    found = []

    def watched(make: Any, cls: Any, *args: Any, **kwargs: Any) -> Tensor:
        found.append(kwargs["device"])
        return make(cls, *args, **kwargs)  # type: ignore[no-any-return]

    with replaced.instead_of_make_wrapper_subclass(watched):
        a_tensor_without_memory()
    a_tensor_without_memory()
    assert found == [torch.device("cpu")]


@checks("instead_of_grouping")
def optimizers_ask_for_groups() -> None:
    found = []

    def seen(groups: dict[Any, Any]) -> dict[Any, Any]:
        found.extend(groups)
        return groups

    x = nn.Parameter(torch.ones(2))
    x.grad = torch.ones(2)
    with replaced.instead_of_grouping(seen):
        torch.optim.AdamW([x], fused=True).step()
    assert found == [(torch.device("cpu"), torch.float32)]


@checks("fake_tensors_as_if_on")
def autograd_takes_fake_tensors_for_the_hosts() -> None:
    with replaced.fake_tensors_as_if_on(torch.device("cpu")), private.FakeTensorMode():
        x = torch.empty(2, device="cuda:0")
        assert (x.device.type, torch.relu(x).device.type) == ("cuda", "cuda")


@checks("later_work")
def a_work_can_be_a_function() -> None:
    found = []
    work = torch.distributed.Work.unbox(replaced.later_work(lambda timeout: not found.append(timeout)))  # type: ignore[attr-defined,func-returns-value]
    work.wait()
    assert len(found) == 1


@checks("dispatch_modes")
def modes_are_listed() -> None:
    with private.FakeTensorMode() as mode:
        assert private.dispatch_modes() == [mode]
    assert private.dispatch_modes() == []


@private.constant_when_compiled
def _length(word: str) -> int:
    return zlib.crc32(word.encode()) % 7


@checks("constant_when_compiled", "compiler_backend", "keep_saved_tensors", "recompile_reasons", "refuse_graph_breaks")
def the_compiler_does_as_blocks_need() -> None:
    """A constant is taken while it traces; a graph is counted; it says why it compiled anew; a graph break raises."""
    graphs: list[Any] = []
    backend = torch_compiler.compiler_backend("aot_eager", mode=None, options=None, dynamic=False)

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return backend(graph, inputs)

    def function(x: Tensor, breaks: bool = False) -> Tensor:
        if breaks:
            print("a word")
        return x.exp().exp() * _length("four")

    compiled = torch.compile(function, backend=count, dynamic=False, isolate_recompiles=True)
    x = torch.ones(2, requires_grad=True)
    with torch_compiler.keep_saved_tensors():
        y = compiled(x).sum()
        for _ in range(2):
            assert torch.autograd.grad(y, x, retain_graph=True)[0].isfinite().all()
    compiled(torch.ones(3, requires_grad=True))
    assert len(graphs) == 2
    assert "size mismatch" in torch_compiler.recompile_reasons(function.__code__)[-1]
    with torch_compiler.refuse_graph_breaks(True), pytest.raises(Exception, match="print"):
        compiled(x, breaks=True)
    assert callable(torch_compiler.compiler_backend("inductor", mode="max-autotune", options=None, dynamic=False))


def test_compiled_functions_are_known() -> None:
    def function(x: Tensor) -> Tensor:
        return x

    module = nn.Linear(2, 2)
    assert is_compiled(torch.compile(function, backend="eager"))
    assert is_compiled(torch.compile(module, backend="eager"))
    assert is_compiled(copy.deepcopy(torch.compile(module, backend="eager")))

    class Forwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.compile(module, backend="eager")

        def __getattr__(self, name: str) -> Any:
            return getattr(super().__getattr__("inner"), name) if name != "inner" else super().__getattr__(name)

    wrapper = functools.wraps(torch.compile(function, backend="eager"))(lambda x: x)
    others = function, module, torch.compiler.disable(function), torch.compiler.allow_in_graph(function)
    assert not any(map(is_compiled, (*others, wrapper, Forwards())))


@pytest.mark.parametrize("name", [*private.__all__, *groups.__all__, *torch_compiler.__all__])
def test_entry(name: str) -> None:
    """Does what the library needs of it."""
    CHECKS[name]()


def test_every_check_is_of_an_entry() -> None:
    """None is left over."""
    assert CHECKS.keys() == {*private.__all__, *groups.__all__, *replaced.__all__, *torch_compiler.__all__}


def frames_of_a_mode() -> None:
    """Neither the mode nor what it calls is compiled, as with torch's own."""
    from torch._dynamo.utils import counters

    compiled = []
    for base in (private.AnyDispatchMode, private.TorchDispatchMode):

        class Adds(base):  # type: ignore[misc, valid-type]
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                torch.ones(2).exp()
                return func(*args, **(kwargs or {}))

        def function(x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return x.sin()

        torch._dynamo.reset()
        counters.clear()
        with Adds():
            torch.compile(function, backend="eager")(torch.ones(2))
        compiled.append(dict(counters["frames"]))
    assert compiled[0] == compiled[1]
    counters.clear()


def test_dispatch_modes_are_not_compiled() -> None:
    frames_of_a_mode()
    code = "dynamo.set_code_exec_strategy(cast(Any, run).__code__, skips)"
    bug = Bug("modes are compiled", "base.torch_private:TorchDispatchMode.__init_subclass__", code, "pass")
    with planted(bug), pytest.raises(AssertionError):
        frames_of_a_mode()


def test_the_store_of_the_default_group() -> None:
    """ProcessWorld asks torch's default group for its store, which is that of ``init_process_group``."""
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    try:
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        torch.distributed.group.WORLD.get_group_store().set("key", "value")  # type: ignore[union-attr]
        assert store.num_keys() > 0
    finally:
        comm.destroy_process_group()


# -- nobody else uses anything private --------------------------------------------------------------------------------

DOCUMENTED = {"_replace", "_asdict", "_fields", "_make", "_getframe", "_current_frames", "_exit"}  # of namedtuple, sys and os
PYTHONS = {
    "comm/worlds/rng_state.py": {"_showwarnmsg_impl", "_filters_mutated"},  # of the module warnings
    "functional_ds/parallel/experts/experts_registry.py": {"_is_expert_parallel", "_apply_gate"},  # as transformers' own do
}


OURS = ("base/torch_private.py", "base/torch_replaced.py", "comm/backends/torch_groups.py", "compiling/torch_compiler.py")


def _sources() -> Iterator[tuple[str, ast.Module]]:
    for folder in FOLDERS:
        for file in sorted(folder.rglob("*.py")):
            name = file.relative_to(folder.parent).as_posix()
            if not name.endswith(OURS):
                yield name, ast.parse(file.read_text())


def _own_names() -> set[str]:
    """Every private name that the library defines."""
    found: set[str] = set()
    for _, tree in _sources():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
                if isinstance(node, ast.Name):
                    found.add(node.id)
                elif isinstance(node.value, ast.Name) and node.value.id in ("self", "found", "deferred", "cls"):
                    found.add(node.attr)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
    return {name for name in found if re.match(r"_[^_]", name)}


def _foreign(tree: ast.Module, own: set[str]) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            parts = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            if not (node.module or "").startswith("functional_ds") and any(re.match(r"_[^_]", part) for part in parts):
                yield node.lineno, f"from {node.module} import {', '.join(alias.name for alias in node.names)}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if any(re.match(r"_[^_]", part) for part in alias.name.split(".")):
                    yield node.lineno, f"import {alias.name}"
        elif isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr):
            text = ast.unparse(node)
            if text.split(".")[0] in ("torch", "nn", "dist", "optree") or node.attr not in own | DOCUMENTED:
                yield node.lineno, text


def test_nothing_else_private_is_used() -> None:
    """Private names of other libraries stand in the files that say so alone."""
    own = _own_names() - {"_cdata", "_version", "_schema", "_parameters", "_buffers", "_modules", "_execution_engine", "_C"}
    own |= {"_version"}  # saved_tensors has a field of that name; torch's is `version_of`
    found = [
        f"{name}:{line}: {text}"
        for name, tree in _sources()
        for line, text in _foreign(tree, own)
        if text.rpartition(".")[2] not in PYTHONS.get(name, ())
    ]
    assert not found, "\n".join(found)


def test_the_search_finds_private_names() -> None:
    """In imports, in chains from torch, and on values."""
    source = "import torch._C\nfrom torch._guards import x\ntorch._foreach_add_(a, b)\nt.untyped_storage()._cdata\nself._mine\n"
    assert [line for line, _ in _foreign(ast.parse(source), {"_mine"})] == [1, 2, 4, 3]
