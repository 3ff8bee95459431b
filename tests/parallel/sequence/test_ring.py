"""Ring attention is attention to the whole sequence (law 43), whatever the layout (law 44), in the fewest messages."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from functional_ds import comm, seq
from functional_ds.step.axes import with_axis
from functional_ds.step.pass_scope import Pass
from tests.parallel.sequence.attention_cases import Case, cases, run

Layout = seq.SequenceLayout


def _ring(case: Case, *, save: bool = False) -> Callable[[comm.Group], Callable[..., Tensor]]:
    return lambda group: seq.ring(group, layout=case.layout, save_blocks=save)


@pytest.mark.law(43)
@given(cases(), st.booleans())
def test_a_ring_is_the_whole_attention_in_as_few_messages(case: Case, save: bool) -> None:
    """P - 1 forward; gradients in P - 1 more, and keys in P - 1 again unless they were saved."""
    hops, size = case.ranks - 1, case.rows * case.heads[1] * sum(case.sizes) * case.length // case.ranks
    for forward, backward in run(case, _ring(case, save=save)):
        assert (forward.calls, forward.elements) == (hops, hops * size)
        more = hops if save else 2 * hops
        assert (backward.calls, backward.elements) == (more, more * size)


@pytest.mark.law(44)
@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_single(kind: str, dtype: torch.dtype) -> None:
    """The error of many ranks is that of one: parts are merged, and gradients travel, in fp32."""

    def error(ranks: int) -> float:
        case = Case(ranks, Layout(kind), 64, rows=1, dtype=torch.float32)
        q, k, v, grad = (x.to(dtype) for x in case.inputs())
        wide = [x.double().requires_grad_() for x in (q, k, v)]
        o = seq.attention(*wide, causal=True)
        exact = [o, *torch.autograd.grad((o * grad.double()).sum(), wide)]

        def program() -> list[Tensor]:
            group = comm.world()
            own = [case.own(x, group.rank).requires_grad_() for x in (q, k, v)]
            with comm.ledger() as book:
                o = seq.ring(group, layout=case.layout)(*own, causal=True)
                found = [o, *torch.autograd.grad((o * case.own(grad, group.rank)).sum(), own)]
            assert book.bytes == (2 * 2 + 4) * (ranks - 1) * k.numel() * 2 // ranks
            return [x.detach() for x in found]

        found = comm.simulate(program, world_size=ranks)
        pairs = [
            (mine, case.own(whole, rank)) for rank, own in enumerate(found) for mine, whole in zip(own, exact, strict=True)
        ]
        assert all(mine.dtype == dtype for mine, _ in pairs)
        return max((mine.double() - whole).abs().max().item() for mine, whole in pairs)

    assert error(8) <= 1.5 * error(1) + torch.finfo(dtype).eps


def test_its_messages_suit_nccl() -> None:
    case = Case(4, Layout("zigzag"), 16)
    run(case, _ring(case), rules="nccl")
    run(case, _ring(case, save=True), rules="nccl")


def test_a_message_travels_while_the_block_before_is_computed_with() -> None:
    events: list[str] = []

    def program() -> None:
        with pytest.MonkeyPatch.context() as patch:
            from functional_ds.parallel.sequence import blockwise

            def watched(original: Callable[..., object], name: str) -> Callable[..., object]:
                def call(*args: object, **kwargs: object) -> object:
                    if comm.world().rank == 0:
                        events.append(name)
                    return original(*args, **kwargs)

                return call

            if comm.world().rank == 0:
                patch.setattr(comm, "start", watched(comm.start, "start"))
                patch.setattr(comm.Pending, "wait", watched(comm.Pending.wait, "wait"))
                patch.setattr(blockwise, "attend", watched(blockwise.attend, "compute"))
            x = torch.ones(1, 1, 2, 8)
            seq.ring(comm.world(), layout="zigzag")(x, x, x)

    comm.simulate(program, world_size=3)
    assert events == ["start", "compute", "wait", "start", "compute", "wait", "compute"]


def test_masked_blocks_are_not_computed() -> None:
    """Contiguous pieces: rank r computes with the r + 1 blocks up to its own; the last rank's are all needed."""
    found = comm.simulate(_computed, world_size=4)
    assert found == [1, 2, 3, 4]


def _computed() -> int:
    count = 0

    class Counts(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: object, types: object, args: tuple[object, ...] = (), kwargs: object = None
        ) -> object:
            nonlocal count
            count += "flash_attention" in str(func)
            return func(*args, **(kwargs or {}))  # type: ignore[operator, dict-item]

    x = torch.ones(1, 1, 2, 8)
    with Counts():
        seq.ring(comm.world())(x, x, x, causal=True)
    return count


def test_bits_do_not_depend_on_the_interleaving() -> None:
    case = Case(3, Layout("striped"), 12)

    def program() -> list[Tensor]:
        *inputs, grad = (case.own(x, comm.world().rank) for x in case.inputs())
        leaves = [x.requires_grad_() for x in inputs]
        o = seq.ring(comm.world(), layout="striped")(*leaves, causal=True)
        return [o.detach(), *torch.autograd.grad((o * grad).sum(), leaves)]

    comm.debug.explore(program, world_size=3, seeds=5)


@pytest.mark.parametrize("save", [False, True])
def test_many_ranks_on_shapes(save: bool) -> None:
    def program() -> tuple[int, int, int]:
        q, k = (torch.empty(1, heads, 4, 8, device="meta", requires_grad=True) for heads in (4, 2))
        with comm.ledger() as book:
            o = seq.ring(comm.world(), layout="zigzag", save_blocks=save)(q, k, k, causal=True)
            torch.autograd.grad(o.sum(), [q, k])
        return book.calls, book.elements, k.numel()

    calls, elements, size = comm.simulate(program, world_size=64, shapes_only=True)[3]
    assert calls == 63 * (2 if save else 3)
    assert elements == calls * 2 * size


def test_the_steps_axis_is_taken_where_no_group_is_given() -> None:
    case = Case(2, Layout("zigzag"), 8, documents=((0, 0, 0, 1, 1, 1, -1, -1),))
    plain = Case(2, Layout("zigzag"), 8, documents=case.documents)

    def program() -> tuple[Tensor, Tensor]:
        group = comm.world()
        q, k, v, _ = (case.own(x, group.rank) for x in case.inputs())
        axis = seq.SequenceAxis(group, case.layout, case.length, documents=case.numbers())
        with Pass(trains=False):
            found = with_axis("sp", axis, lambda _: seq.ring()(q, k, v, causal=True))(None)
        return found, seq.ring(group, layout="zigzag")(q, k, v, **plain.arguments())

    for found, expected in comm.simulate(program, world_size=2):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("make", [seq.ring, seq.gathered])
@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda make, x: make(comm.world(), layout="zigzag")(x, x, x), "6 positions .* multiple of 4; append 2"),
        (lambda make, x: make(comm.world())(x, x[:, :, :2], x[:, :, :2]), "3 queries and 2 keys"),
        (lambda make, x: make(comm.world())(x, x[:, :3], x[:, :3]), "4 query heads do not divide among 3 key-value heads"),
        (lambda make, x: make(comm.world())(x, x, x.double()), "cast them to one dtype"),
        (
            lambda make, x: make(comm.world())(x, x, x, documents=torch.zeros(2, 3).long()),
            r"\[2, 3\]; it must be \[2 or 1, 6\]",
        ),
        (lambda make, x: make(comm.world())(x, x, x, documents=[2, 2]), "add up to 4, not to 6"),
        (lambda make, x: make(comm.world())(x, x, x, window=3), "window=3, causal=False"),
        (lambda make, x: make(comm.world())(x[0], x[0], x[0]), "each must be"),
        (lambda make, x: make(comm.world())(x, x[:1], x[:1]), "must agree"),
        (lambda make, x: make(None)(x, x, x), "pass a group, or run it in a step with T.sequence"),
        (lambda make, x: make(None, layout="zigzag")(x, x, x), "layout='zigzag' without a group"),
    ],
)
def test_what_does_not_fit_is_refused(make: Callable[..., object], call: Callable[..., object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        comm.simulate(lambda: call(make, torch.ones(2, 4, 3, 8)), world_size=2)


def test_documents_of_the_layout_and_of_the_call_must_agree() -> None:
    x = torch.ones(1, 1, 4, 8)
    layout = Layout.per_document([5, 3])
    with pytest.raises(ValueError, match=r"documents=\[4, 4\], and the layout has those of lengths \[5, 3\]"):
        comm.simulate(lambda: seq.ring(comm.world(), layout=layout)(x, x, x, documents=[4, 4]), world_size=2)
