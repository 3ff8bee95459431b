"""What ranks declare of their values: compared bit by bit when checked, and free otherwise."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from functional_ds import comm, tree
from functional_ds.testing import Inputs, inputs, seeds, world_sizes

DECLARE: tuple[Callable[..., Any], ...] = (comm.replicated, comm.invariant, comm.varying, comm.partial)


def rank() -> int:
    return comm.world().rank


def error_of(program: Callable[[], Any], world_size: int = 2, seed: int = 0) -> str:
    """What a checked simulation says."""
    with pytest.raises(comm.errors.VarianceError) as caught:
        comm.simulate(program, world_size=world_size, seed=seed, variance=True)
    return str(caught.value)


# -- what they hold to -------------------------------------------------------------------------------------------------


@pytest.mark.law(51)
@given(inputs(sizes=world_sizes(4)), st.data())
def test_equal_holds_iff_all_bits_are_equal(case: Inputs, data: Any) -> None:
    """Of any tree, dtype and layout; one changed bit on one rank is found, and its place named."""
    odd = data.draw(st.integers(0, case.size - 1))
    places = [place for place, leaf in enumerate(tree.leaves(case.of(0))) if leaf.numel()]
    spoilt = data.draw(st.sampled_from([-1, *places]))

    def program(declare: Any) -> Any:
        leaves, spec = tree.flatten(case.of(0))
        if rank() == odd and spoilt >= 0:
            raw = leaves[spoilt].clone(memory_format=torch.contiguous_format)
            raw.view(-1).view(torch.uint8)[-1] ^= 1
            leaves[spoilt] = raw
        return declare(tree.unflatten(spec, leaves))

    for declare in (comm.replicated, comm.invariant):
        if spoilt < 0 or case.size == 1:
            comm.simulate(program, declare, world_size=case.size, variance=True)
        else:
            said = error_of(lambda declare=declare: program(declare), case.size)
            other = odd if odd else 1
            assert re.search(rf"on rank 0 and .* on rank {other}, as do 1 of \d+ elements", said)
    comm.simulate(program, comm.varying, world_size=case.size, variance=True)
    comm.simulate(program, comm.partial, world_size=case.size, variance=True)


def test_the_error_names_leaf_ranks_element_values_and_line() -> None:
    def program() -> None:
        x = torch.zeros(2, 3)
        x[1, 2] = rank() // 2
        comm.replicated({"block": [torch.ones(1), x]}, comm.mesh(dp=2, tp=2)["dp"])

    said = error_of(program, 4)
    assert re.fullmatch(
        r"'block\.1' \(float32\[2, 3\]\), replicated along group 'dp' \[0, 2\], by comm\.replicated at "
        r"test_declarations\.py:\d+, differs between its ranks: element \[1, 2\] is 0\.0 on rank 0 and 1\.0 on rank 2, as do "
        r"1 of 6 elements.*",
        said,
    )


def test_values_that_look_alike_are_shown_by_their_bits() -> None:
    bits = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32)
    said = error_of(lambda: comm.replicated(bits[rank()].view(torch.float32)))
    assert "is nan (0000c07f) on rank 0 and nan (0100c07f) on rank 1" in said


def test_where_values_began_to_differ_is_named() -> None:
    def program() -> None:
        x = comm.replicated(torch.ones(3))
        y = x * (rank() + 1)
        comm.replicated(y + 1)

    pattern = r"; they differ since ranks 0 and 1 get different values from mul at test_declarations\.py:\d+$"
    assert re.search(pattern, error_of(program))


# -- gradients ---------------------------------------------------------------------------------------------------------


def differentiated(declare: Any, use: Any) -> Any:
    def program() -> Any:
        w = torch.ones(2, requires_grad=True)
        (use(declare(w)) * (1 + rank())).sum().backward()
        return w.grad

    return program


@pytest.mark.parametrize("declare", [comm.invariant, comm.partial])
def test_a_gradient_that_must_be_equal_and_is_not(declare: Any) -> None:
    said = error_of(differentiated(declare, lambda w: w))
    assert said.startswith(f"the gradient of float32[2], {declare.__name__} along group 'world' [0, 1], by comm.")
    assert "element [0] is 1.0 on rank 0 and 2.0 on rank 1" in said


@pytest.mark.parametrize("declare", [comm.replicated, comm.varying])
def test_a_gradient_that_may_differ(declare: Any) -> None:
    comm.simulate(differentiated(declare, lambda w: w), world_size=2, variance=True)


def summed(x: Tensor) -> Tensor:
    return comm.copy_to(comm.reduce_from(x))


@pytest.mark.parametrize(("declare", "use"), [(comm.invariant, comm.copy_to), (comm.partial, summed)])
def test_gradients_that_are_equal(declare: Any, use: Any) -> None:
    found = comm.simulate(differentiated(declare, use), world_size=3, variance=True)
    assert [grad.tolist() for grad in found] == [[6.0, 6.0]] * 3


def test_a_gradient_that_never_comes_is_zero() -> None:
    def program(zero: bool) -> None:
        w = torch.ones(2, requires_grad=True)
        known = comm.invariant(w)
        if rank() == 0:
            (known * (0 if zero else 5)).sum().backward()

    comm.simulate(program, True, world_size=2, variance=True)
    assert "element [0] is 5.0 on rank 0 and 0.0 on rank 1" in error_of(lambda: program(False))


def test_gradients_of_several_passes() -> None:
    """Each pass is compared by itself."""

    def program() -> None:
        w = comm.invariant(torch.ones(2, requires_grad=True))
        for turn in range(3):
            (w * (1 + (rank() if turn == 1 else 0))).sum().backward()

    said = error_of(program)
    assert said.startswith("the gradient of float32[2]")
    assert "1.0 on rank 0 and 2.0 on rank 1" in said


# -- ranks that do not do the same -------------------------------------------------------------------------------------


@given(seeds())
def test_different_declarations_are_named_whatever_the_interleaving(seed: int) -> None:
    def program() -> None:
        comm.barrier()
        (comm.replicated if rank() else comm.partial)(torch.ones(3))
        comm.barrier()

    said = error_of(program, 2, seed)
    assert re.fullmatch(
        r"the ranks of group 'world' \[0, 1\] came to different declarations: rank 0 to comm\.partial of \[float32\[3\]\] at "
        r"test_declarations\.py:\d+, rank 1 to comm\.replicated of \[float32\[3\]\] at test_declarations\.py:\d+",
        said,
    )


def test_different_shapes_are_named() -> None:
    assert "rank 1 to comm.replicated of [float32[2]]" in error_of(lambda: comm.replicated(torch.ones(1 + rank())))


def test_a_rank_that_never_comes_is_named_and_nobody_waits() -> None:
    def program() -> None:
        if rank() != 1:
            comm.invariant(torch.ones(3))

    said = error_of(program, 3)
    assert said.startswith("ranks [1] never came to comm.invariant of [float32[3]] at test_declarations.py:")
    assert "and ranks [0, 2] did" in said


def test_two_ranks_with_the_same_are_named() -> None:
    said = error_of(lambda: comm.varying({"mask": torch.ones(3) * (rank() % 2)}, distinct=True), 4)
    assert said.startswith("'mask' (float32[3]) is the same on ranks 0 and 2 of group 'world', bit for bit; comm.varying(")
    comm.simulate(lambda: comm.varying(torch.ones(3) * rank(), distinct=True), world_size=3, variance=True)


# -- what they cost ----------------------------------------------------------------------------------------------------


def untouched(declare: Any, world_size: int) -> None:
    """The same object, no node of a graph, no hook, nothing sent, nothing waited for."""

    def program() -> None:
        x = torch.ones(3, requires_grad=True)
        y = x * (1 + rank())
        node = y.grad_fn
        pair = [x, y]
        with comm.ledger() as book:
            assert declare(pair) is pair
            assert declare(y) is y
            if rank() == 0:
                declare(y)  # nobody waits
        assert pair[0] is x
        assert y.grad_fn is node
        assert not book.rows
        for leaf in pair:
            assert not leaf._backward_hooks

    comm.simulate(program, world_size=world_size)


@pytest.mark.parametrize("declare", DECLARE, ids=lambda declare: declare.__name__)
@pytest.mark.parametrize("world_size", [1, 2])
def test_nothing_happens_unless_checked(declare: Any, world_size: int) -> None:
    untouched(declare, world_size)


def in_processes() -> list[Any]:
    """Declarations that are wrong, in a world that does not check."""
    x = torch.ones(2, requires_grad=True)
    return [declare(x * (1 + rank())).tolist() for declare in DECLARE]


def test_processes_do_not_check() -> None:
    assert comm.spawn(in_processes, world_size=2) == [[[1.0, 1.0]] * 4, [[2.0, 2.0]] * 4]


def test_results_are_those_of_a_run_that_does_not_check() -> None:
    """Collectives, asynchronous ones and messages too."""

    def program() -> Any:
        x = torch.arange(4.0).requires_grad_()
        pending = comm.start(comm.all_reduce, x * (1 + rank()))
        y = comm.all_gather(comm.reduce_scatter(x * (1 + rank()))) * pending.wait()
        other = comm.batch_p2p([comm.Send(y, 1 - rank()), comm.Recv(y, 1 - rank())])[1]
        (grad,) = torch.autograd.grad((other * y).sum(), x)
        return [y.detach(), grad, torch.rand(2)]

    with_seed = [comm.simulate(program, world_size=2, variance=checks) for checks in (False, True)]
    for plain, checked in zip(*with_seed, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(plain, checked, strict=True))


def test_values_without_bits_are_refused() -> None:
    with pytest.raises(ValueError, match="shapes_only=True and variance=True: tensors have no values"):
        comm.simulate(lambda: None, world_size=2, shapes_only=True, variance=True)


def test_what_is_no_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match=re.escape("replicated: every leaf must be a tensor; ['a'] is int 3")):
        comm.simulate(lambda: comm.replicated({"a": 3}), world_size=2, variance=True)


def test_a_failure_says_what_was_wrong_before() -> None:
    """It is still that failure."""

    def program() -> None:
        comm.replicated(torch.ones(1) * rank())
        comm.barrier()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        comm.simulate(program, world_size=2, variance=True)
    assert "before that: float32[1], replicated along group 'world' [0, 1]" in caught.value.__notes__[-1]


@given(seeds())
def test_the_same_is_said_whatever_the_interleaving(seed: int) -> None:
    """Of several contradictions the first in the program."""

    def program() -> None:
        group = comm.mesh(dp=2, tp=2)["tp"]
        x = comm.invariant(torch.ones(2), group)
        for _ in range(2):
            comm.barrier()
            comm.replicated(x * rank(), group)
            comm.all_reduce(x, group)

    first = "float32[2], replicated along group 'tp' [0, 1], by comm.replicated at test_declarations.py:"
    assert error_of(program, 4, seed).startswith(first)
