"""Law 28 for functions: policies as data, offload and partition, recomputation that skips operations."""

import threading
import weakref
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import functional_ds as fds
from functional_ds import comm
from functional_ds.base.device_streams import Arrival, CopyStream
from functional_ds.remat import saved_tensors
from functional_ds.remat.policy import Keep, RematPolicy
from functional_ds.remat.saved_tensors import TensorStore, compact
from functional_ds.testing import DTYPES, Inputs, Leaf, assert_same, inputs, leaves, seeds, world_sizes
from tests.planting import Bug, planted

KEPT = (Keep.SAVE, Keep.OFFLOAD, Keep.PARTITION)


@st.composite
def policies(draw: st.DrawFn) -> RematPolicy:
    """Any policy that is not refused."""
    rest = draw(st.sampled_from(Keep))
    fates = st.sampled_from(Keep if rest is Keep.RECOMPUTE else KEPT)
    names = draw(st.dictionaries(st.sampled_from(("attn_out", "mlp.out", "h")), fates))
    return RematPolicy(rest, draw(st.none() | st.sampled_from(KEPT)), draw(st.none() | fates), names)


@given(policies())
def test_a_policy_is_its_text(policy: RematPolicy) -> None:
    """``parse ∘ str = id``, and equal policies hash alike."""
    assert RematPolicy.parse(str(policy)) == policy
    assert hash(RematPolicy.parse(str(policy))) == hash(policy)
    assert RematPolicy.parse(policy) is policy
    assert repr(policy) == f"RematPolicy.parse('{policy}')"


def test_what_is_no_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="'inputs' is a word of policies"):
        RematPolicy(names={"inputs": Keep.SAVE})
    with pytest.raises(TypeError, match="neither a RematPolicy nor text"):
        RematPolicy.parse(3)  # type: ignore[arg-type]


@pytest.mark.law(28)
@given(leaf=leaves(DTYPES), seed=seeds(), expands=st.booleans())
def test_flat_and_back_is_the_tensor(leaf: Leaf, seed: int, expands: bool) -> None:
    """``restore ∘ compact = id``, bitwise, for any dtype and way to lie in memory; nothing is repeated in the flat piece."""
    tensor = leaf.fill(seed)
    tensor = tensor.unsqueeze(0).expand(3, *tensor.shape) if expands else tensor
    flat, form = compact(tensor)
    assert_same(form.restore(flat), tensor)
    assert (flat.dim(), flat.is_contiguous()) == (1, True)
    assert flat.numel() <= max(tensor.numel() // (3 if expands else 1), 0)
    if leaf.memory == "transposed":
        assert form.restore(flat).stride() == tensor.stride()


@pytest.mark.law(28)
@given(case=inputs(sizes=world_sizes(4), dtypes=DTYPES))
def test_away_and_back_is_the_value(case: Inputs) -> None:
    """Offload then fetch = id, partition then gather = id, bitwise; a rank holds 1/n and padding."""

    def program(_: Any) -> None:
        store = TensorStore(comm.world())
        for leaf in fds.tree.leaves(case.of(0)):
            for how in KEPT:
                kept = store.keep(leaf, how)
                assert store.keep(leaf, how) is kept or how is Keep.SAVE  # one that is kept twice is kept once
                assert_same([kept.get(), kept.get()], [leaf, leaf])
                elements = compact(leaf)[0].numel()
                if how is Keep.PARTITION:
                    assert kept.held == -(-elements // case.size) * leaf.element_size()
                if how is Keep.OFFLOAD:
                    assert kept.held == kept.whole == elements * leaf.element_size()

    case.simulate(program)


# -- functions ----------------------------------------------------------------------------------------------------------


def awkward(x: Tensor, both: dict[str, Any], *, w: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Trees in and out, work in place before and after a matrix product, dropout, results with several outputs."""
    h = fds.checkpoint_name(x @ w, "product")
    h = torch.nn.functional.dropout(h, 0.5).mul(both["scale"][0])
    h.add_(1)
    h = torch.relu_(h @ w)
    h = fds.checkpoint_name(torch.nn.functional.layer_norm(h, (4,)), "norm")
    frozen = (h * both["frozen"]).sort(-1).values
    return torch.tanh(frozen) @ w, {"h": h.exp(), "x": x}


def outcome(function: Any, *, dtype: torch.dtype, autocast: bool, wanted: int = 1) -> Any:
    """Values, the gradients of some backward passes, and where the generator stands."""
    g = torch.Generator().manual_seed(1)
    x, w, s = (torch.randn(n, 4, generator=g, dtype=dtype).requires_grad_() for n in (3, 4, 1))
    torch.manual_seed(9)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y, more = function(x * 2, {"scale": [s * 1], "frozen": torch.ones(4, dtype=dtype)}, w=w)
        loss = y.float().square().sum() + more["h"].sum() + more["x"].sum()
    grads = [torch.autograd.grad(loss, (x, w, s), retain_graph=i + 1 < wanted) for i in range(wanted)]
    return y.detach(), more["h"].detach(), grads, torch.rand(1)


@pytest.mark.law(28)
@given(
    policy=policies(),
    n=st.integers(1, 3),
    dtype=st.sampled_from((torch.float32, torch.bfloat16)),
    autocast=st.booleans(),
    wanted=st.integers(1, 2),
    nested=st.none() | policies(),
)
def test_remat_is_the_function(
    policy: RematPolicy, n: int, dtype: torch.dtype, autocast: bool, wanted: int, nested: RematPolicy | None
) -> None:
    """Value, gradients (twice where asked) and the generator's state are the function's, bit for bit; also remat of remat."""
    names = dict(zip(("product", "norm"), policy.names.values(), strict=False))
    policy = RematPolicy(policy.default, policy.inputs, policy.matmuls, names)

    def program() -> Any:
        group = comm.world()
        function = fds.remat(awkward, policy=policy, group=group if policy.partitions else None)
        if nested is not None:
            outer = RematPolicy(nested.default, nested.inputs, nested.matmuls)
            function = fds.remat(function, policy=outer, group=group if outer.partitions else None)
        return outcome(function, dtype=dtype, autocast=autocast, wanted=wanted)

    expected = outcome(awkward, dtype=dtype, autocast=autocast, wanted=wanted)
    for found in comm.simulate(program, world_size=n):
        assert_same(found, expected)


class Seen(TorchDispatchMode):
    """The operations that ran, and how often."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("policy", "again"),
    [
        ("recompute", {"sin": 1, "mm": 2, "exp": 1}),
        ("recompute,matmuls=save", {"sin": 1, "mm": 0, "exp": 1}),
        ("recompute,a=offload", {"sin": 1, "mm": 1, "exp": 1}),
        ("recompute,b=save", {"sin": 1, "mm": 2, "exp": 0}),
        ("recompute,a=save,matmuls=offload", {"sin": 1, "mm": 0, "exp": 1}),
        ("save", {"sin": 0, "mm": 0, "exp": 0}),
        ("offload", {"sin": 0, "mm": 0, "exp": 0}),
    ],
)
def test_what_is_kept_is_not_computed_again(policy: str, again: dict[str, int]) -> None:
    """A second run leaves out the operation that gave a kept value, and no other."""
    w = torch.randn(4, 4, requires_grad=True)

    def block(x: Tensor) -> Tensor:
        x = fds.checkpoint_name(x.sin() @ w, "a").cos()
        return fds.checkpoint_name((x @ w).exp(), "b").sigmoid().tanh()

    def counts(function: Any) -> tuple[dict[str, int], dict[str, int]]:
        with Seen() as forward:
            y = function(torch.randn(3, 4)).sum()
        with Seen() as backward:
            torch.autograd.grad(y, w)
        return {name: forward.ran.count(name) for name in again}, {name: backward.ran.count(name) for name in again}

    alone, found = counts(block), counts(fds.remat(block, policy=policy))
    assert found[0] == alone[0] == {"sin": 1, "mm": 2, "exp": 1}
    assert found[1] == {name: alone[1][name] + more for name, more in again.items()}


def test_views_of_a_named_value_are_its_own() -> None:
    """A name on a view keeps what the operation gave; so does one on a product of three axes, which torch reshapes."""
    w = torch.randn(4, 4, requires_grad=True)

    def block(x: Tensor) -> Tensor:
        first = fds.checkpoint_name((x @ w).transpose(1, 2), "a").exp()
        return fds.checkpoint_name(torch.nn.functional.linear(first.transpose(1, 2), w, w[0]), "b").exp()

    def grads(function: Any) -> Any:
        return torch.autograd.grad(function(x).sum(), w)

    x = torch.randn(2, 3, 4)
    with Seen() as alone:
        expected = grads(block)
    for policy in ("recompute,a=save,b=offload", "recompute,a=offload,b=save"):
        with Seen() as seen:
            assert_same(grads(fds.remat(block, policy=policy)), expected)
        assert seen.ran.count("mm") + seen.ran.count("addmm") == alone.ran.count("mm") + alone.ran.count("addmm")


def test_a_kept_value_that_was_changed_in_place() -> None:
    """Inside it is computed again; outside it is an error, as torch's own is."""
    w = torch.randn(3, 3, requires_grad=True)
    x = torch.randn(2, 3)
    grown = fds.remat(lambda x: (x @ w).add_(1).exp(), policy="recompute,matmuls=save")
    assert_same(torch.autograd.grad(grown(x).sum(), w), torch.autograd.grad(((x @ w) + 1).exp().sum(), w))

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ w
        return y, y.exp()

    y, z = fds.remat(both, policy="recompute,matmuls=save")(x)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(z.sum(), w)
    with pytest.raises(ValueError, match=r"'a' cannot be kept: it was changed in place"):
        fds.remat(lambda x: fds.checkpoint_name((x @ w).add_(1), "a").exp(), policy="recompute,a=save")(x)
    with pytest.raises(ValueError, match=r"'a' cannot be kept: no differentiated operation made it"):
        fds.remat(lambda x: fds.checkpoint_name(x.sin(), "a") @ w, policy="recompute,a=save")(x)


@pytest.mark.law(28)
@pytest.mark.parametrize("how", ["save", "offload"])
@pytest.mark.parametrize("what", ["matmuls", "a"])
def test_a_kept_value_that_was_changed_through_a_view_with_its_own_version(what: str, how: str) -> None:
    """As torch's own GRUs do on a CPU: gradients of the values that the function saw."""
    w = torch.randn(3, 6, requires_grad=True)
    cell = nn.GRUCell(3, 3)

    def block(x: Tensor) -> Tensor:
        low, high = fds.checkpoint_name(x @ w, "a").unsafe_chunk(2, 1)
        return cell(low.sigmoid_() * high.tanh_())

    def grads(function: Any) -> Any:
        return torch.autograd.grad(function(x).square().sum(), [w, *cell.parameters()])

    x = torch.randn(2, 3)
    assert_same(grads(fds.remat(block, policy=f"recompute,{what}={how}")), grads(block))


def test_a_further_result_that_was_changed_in_place() -> None:
    """The operation is run again, though what was named is as it was."""
    w = torch.randn(4, 4, requires_grad=True)

    def block(x: Tensor) -> Tensor:
        spread, mean = torch.std_mean(x @ w, -1)
        both = fds.checkpoint_name(spread, "a") * mean.exp()
        mean.add_(1)
        return both

    def grads(function: Any) -> Any:
        return torch.autograd.grad(function(x).square().sum(), w)

    x = torch.randn(3, 4)
    assert_same(grads(fds.remat(block, policy="recompute,a=save")), grads(block))


@pytest.mark.parametrize("policy", ["recompute", "recompute,inputs=offload", "offload"])
def test_inputs_that_are_changed_in_place(policy: str) -> None:
    """Gradients of the values that the function saw, or an error; never of others."""
    w = torch.randn(3, requires_grad=True)
    x = w * 2
    y = fds.remat(lambda x: x.exp() * x, policy=policy)(x).sum()
    with torch.no_grad():
        x.add_(1)
    if policy == "recompute":
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(y, w)
    else:
        (found,) = torch.autograd.grad(y, w)
        again = (w * 2).exp() * (w * 2)
        assert_same(found, torch.autograd.grad(again.sum(), w)[0])


@attrs.define(eq=False)
class LateCopies(CopyStream):
    """Copies to the host that are made as late as a GPU's stream may make them."""

    pending: list[tuple[Tensor, Tensor]] = attrs.field(factory=list)

    def to_host(self, tensor: Tensor) -> Tensor:
        self.pending.append((torch.full_like(tensor, 7), tensor))
        return self.pending[-1][0]

    def hold_device(self) -> None:
        pending, self.pending = self.pending, []
        for host, tensor in pending:
            host.copy_(tensor)

    def to_device(self, host: Tensor) -> Arrival:
        self.hold_device()
        return super().to_device(host.clone())


@pytest.mark.law(28)
@pytest.mark.parametrize(
    ("policy", "written"),
    [
        ("offload", "xhy"),
        ("save,product=offload", "h"),
        ("recompute,inputs=offload", "xh"),
        ("recompute,product=offload", "h"),
        ("recompute,matmuls=offload", "h"),
    ],
)
def test_what_is_being_copied_to_the_host_is_not_written_into(
    policy: str, written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in the function nor after it: the gradients are those without any write."""
    monkeypatch.setattr(saved_tensors, "CopyStream", LateCopies)

    def smooth(x: Tensor) -> Tensor:
        return 2 * x if "recompute" in policy else x.sin()  # what a second run saves must not be written into

    def block(x: Tensor, *, w: Tensor, written: str) -> Tensor:
        h = fds.checkpoint_name(smooth(x) @ w, "product")
        y = smooth(h)
        with torch.no_grad():
            for name, tensor in (("x", x), ("h", h)):
                if name in written:
                    tensor.add_(1)
        return (y @ w).exp()

    def grads(function: Any, written: str) -> Any:
        w, x = (torch.linspace(0.1, 1, n).view(-1, 3).requires_grad_() for n in (9, 6))
        y = function(x * 1, w=w, written=written)
        if "y" in written:
            with torch.no_grad():
                y.zero_()
        return torch.autograd.grad(y, (w, x), torch.ones(2, 3))

    assert_same(grads(fds.remat(block, policy=policy), written), grads(block, ""))


def test_the_graph_holds_what_it_says_and_dies() -> None:
    """Without the graph nothing is left, though no backward pass ran and the garbage collector did not."""
    import gc

    w, held = torch.randn(3, 3, requires_grad=True), []

    def block(x: Tensor) -> Tensor:
        y = fds.checkpoint_name(x @ w, "a")
        held.append(weakref.ref(y.untyped_storage()))
        return fds.checkpoint_name(torch.nn.functional.layer_norm(y.exp(), (3,)), "b").sin()

    gc.disable()
    try:
        for policy in ("recompute", "recompute,a=save,b=save", "recompute,matmuls=save", "offload", "recompute,inputs=offload"):
            y = fds.remat(block, policy=policy)(w * 1)
            assert (held[-1]() is not None) == ("save" in policy)
            del y
            assert held[-1]() is None
    finally:
        gc.enable()


def test_a_backward_pass_in_another_thread() -> None:
    """As a device's is: the inner remat of a second run knows that it is one, and keeps nothing."""
    w = torch.randn(4, 4, requires_grad=True)
    inner = fds.remat(lambda x: fds.checkpoint_name(x @ w, "a").exp(), policy="recompute,a=offload")
    y = fds.remat(lambda x: inner(x.sin()).cos(), policy="recompute,inputs=offload")(w * 1).sum()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(torch.autograd.grad(y, w)))
    thread.start()
    thread.join()
    assert_same(found[0], torch.autograd.grad(((w * 1).sin() @ w).exp().cos().sum(), w))


def test_without_gradients_nothing_is_kept() -> None:
    with torch.no_grad(), fds.remat_report() as report:
        y = fds.remat(lambda x: fds.checkpoint_name(x.exp(), "a"), policy="recompute,nobody=save")(torch.ones(3))
    assert y.tolist() == torch.ones(3).exp().tolist()
    assert report.rows == []


def test_bad_input() -> None:
    with pytest.raises(TypeError, match="is not callable"):
        fds.remat(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="is not a tensor"):
        fds.checkpoint_name((torch.ones(2),), "a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no value is named 'a'; there is none"):
        fds.remat(lambda x: x.exp(), policy="recompute,a=save")(torch.ones(2, requires_grad=True) * 1)
    assert fds.checkpoint_name(torch.ones(2), "a").tolist() == [1, 1]


def conjugated(policy: str | None) -> list[Any]:
    """Gradients of a block that saves a tensor and its conjugate, which share memory."""

    def block(w: Tensor, x: Tensor) -> Tensor:
        z = x * w
        return (z * z.conj() * z).real.sum() + (z.imag * z.conj().imag).sum()

    w = torch.tensor([1 + 2j, 3 - 1j], requires_grad=True)
    x = torch.tensor([2 + 1j, 1 - 1j], requires_grad=True)
    (block if policy is None else fds.remat(block, policy=policy))(w * 1, x * 1).backward()
    return [w.grad.tolist(), x.grad.tolist()]  # type: ignore[union-attr]


@pytest.mark.law(28)
@pytest.mark.parametrize("policy", ["save", "offload", "recompute", "recompute,inputs=offload"])
def test_a_tensor_and_its_conjugate(policy: str) -> None:
    assert conjugated(policy) == conjugated(None)


def test_conjugates_that_are_one_are_seen() -> None:
    bug = Bug("z is its conjugate", "remat.saved_tensors:TensorStore.keep", "(tensor.is_conj(), tensor.is_neg())", "()")
    with planted(bug), pytest.raises(AssertionError):
        test_a_tensor_and_its_conjugate("offload")
