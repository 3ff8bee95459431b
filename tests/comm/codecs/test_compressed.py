"""Law 38 for codecs and error feedback, and what a compressed collective is: the plain one of what the codec makes."""

from collections.abc import Callable, Sequence
from math import ceil
from typing import Any

import attrs
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor

from functional_ds import comm, tree
from functional_ds.comm.backends.reduction import fold
from functional_ds.testing import ADDABLE, COMPLEX, DTYPES, FLOATING, Inputs, assert_same, inputs, seeds, world_sizes

U = 2.0**-24  # the rounding of fp32
LOSSLESS = (comm.codecs.Cast(torch.float32), comm.codecs.Cast(torch.bfloat16), comm.codecs.TopK(1.0))  # on small integers
CODECS = (
    comm.codecs.Cast(),
    comm.codecs.Blocks(8, size=4),
    comm.codecs.Blocks(4, size=2),
    comm.codecs.Blocks(),
    comm.codecs.OneBit(size=3),
    comm.codecs.TopK(0.3),
)

floats = st.floats(allow_nan=False, allow_infinity=False, width=32)
vectors = st.lists(floats | st.integers(-9, 9).map(float), max_size=40)


def through(codec: comm.codecs.Codec, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """C(x) for a row, or for each of several."""
    rows = x if x.dim() == 2 else x[None]
    return codec.decode(codec.encode(rows), rows.shape[1], dtype or x.dtype).reshape(x.shape)


def exactly(x: Tensor) -> list[int]:
    """The integers that a tensor holds."""
    return [int(value) for value in x.flatten().tolist()]


# -- codecs -----------------------------------------------------------------------------------------------------------


@pytest.mark.law(38)
@given(values=vectors, bits=st.sampled_from((8, 4)), size=st.sampled_from((2, 4, 6, 256)), dtype=st.sampled_from(FLOATING))
@example(values=[torch.finfo(torch.float32).max, -1e38], bits=8, size=256, dtype=torch.float32)
@example(values=[-torch.finfo(torch.float32).max, 1e38], bits=4, size=256, dtype=torch.float32)
@example(values=[190 * 2.0**-149, 2.0**-149], bits=8, size=256, dtype=torch.float32)
def test_blocks_err_by_half_a_step(values: list[float], bits: int, size: int, dtype: torch.dtype) -> None:
    """|x - C(x)| ≤ absmax/254 in each block (4 bits: absmax/14), for all finite values.

    fp32 adds, in units of absmax: the scale's rounding and the quotient's (u/254 and u), the product's (u), a double's cast
    (u), and at most 4u where the scale is held below what would overflow: less than 8u. Below 127 · 2⁻¹²⁶ all is lost.
    """
    x = torch.tensor(values, dtype=dtype)
    assume(bool(x.isfinite().all()))
    codec = comm.codecs.Blocks(bits, size=size)
    found = through(codec, x, torch.float32).double()
    for block, other in zip(x.double().split(size), found.split(size), strict=True):
        most = block.abs().max().item() if block.numel() else 0.0
        bound = most if most < codec.top * 2.0**-126 * (1 + 2 * U) else most / (2 * codec.top) + most * 8 * U
        assert (block - other).abs().le(bound).all(), (block, other)


@pytest.mark.law(38)
@given(seed=seeds(), bits=st.sampled_from((8, 4)), power=st.integers(-90, 90), count=st.integers(0, 41))
def test_blocks_are_exact_on_their_grid(seed: int, bits: int, power: int, count: int) -> None:
    """C(x) = x, bitwise, where each block's absmax is 127 (or 7) times a power of two, of which all values are multiples."""
    codec = comm.codecs.Blocks(bits, size=4)
    x = torch.randint(-codec.top, codec.top + 1, (count,), generator=torch.Generator().manual_seed(seed)).float()
    x[::4] = codec.top
    assert_same(through(codec, x * 2.0**power), x * 2.0**power)


@pytest.mark.law(38)
@given(seed=seeds(), count=st.integers(1, 60), fraction=st.floats(0.01, 1.0))
def test_top_k_contracts(seed: int, count: int, fraction: float) -> None:
    """‖x - C(x)‖² ≤ (1 - k/m) ‖x‖², in integers; k = ⌈fraction · m⌉ values are x's, the others zero."""
    codec = comm.codecs.TopK(fraction)
    x = torch.randint(-50, 51, (count,), generator=torch.Generator().manual_seed(seed)).float()
    found = through(codec, x)
    k = codec.kept(count)
    assert k == ceil(fraction * count) == codec.encode(x[None])[0].shape[1]
    assert ((found == x) | (found == 0)).all()
    assert count * sum(v * v for v in exactly(x - found)) <= (count - k) * sum(v * v for v in exactly(x))


@pytest.mark.law(38)
@given(seed=seeds(), blocks=st.integers(0, 4), rest=st.sampled_from((1, 2, 4)))
def test_one_bit_keeps_what_its_sign_and_mean_keep(seed: int, blocks: int, rest: int) -> None:
    """‖x - C(x)‖² = ‖x‖² - ‖x‖₁²/d in each block of d values, also a short last one, in integers: means of 1, 2 or 4 values
    are exact quarters."""
    x = torch.randint(-50, 51, (4 * blocks + rest,), generator=torch.Generator().manual_seed(seed)).float()
    found = through(comm.codecs.OneBit(size=4), x)
    for block, other in zip(x.split(4), found.split(4), strict=True):
        values, lost = exactly(block), exactly((block - other) * 4)
        squares = sum(v * v for v in values)
        assert len(values) * sum(v * v for v in lost) == 16 * (len(values) * squares - sum(map(abs, values)) ** 2)


@given(values=vectors, codec=st.sampled_from(CODECS), n=st.integers(1, 4), dtype=st.sampled_from(FLOATING))
def test_rows_are_encoded_one_by_one(values: list[float], codec: comm.codecs.Codec, n: int, dtype: torch.dtype) -> None:
    """C([x, y]) = [C(x), C(y)], in the dtype and shape that is asked for; payload row i is that of row i alone."""
    rows = torch.stack([torch.tensor(values, dtype=dtype) * (i + 1) for i in range(n)])
    payload = codec.encode(rows)
    for i, row in enumerate(rows):
        for part, alone in zip(payload, codec.encode(row[None]), strict=True):
            assert_same(part[i], alone[0])
        assert_same(through(codec, rows)[i], through(codec, row))


@given(
    values=st.lists(st.floats(-8, 8, width=16), min_size=1, max_size=20),
    at=st.integers(0, 99),
    bad=st.sampled_from((float("inf"), float("-inf"), float("nan"))),
    codec=st.sampled_from(CODECS),
    dtype=st.sampled_from(FLOATING),
)
def test_what_is_not_finite_is_not_hidden(
    values: list[float], at: int, bad: float, codec: comm.codecs.Codec, dtype: torch.dtype
) -> None:
    """A row with an inf or a NaN decodes to one with either; blocks do as a whole, and the other blocks stay finite."""
    x = torch.tensor(values, dtype=dtype)
    at %= len(values)
    x[at] = bad
    found = through(codec, x)
    assert not found.isfinite().all()
    if isinstance(codec, comm.codecs.Blocks):
        expected = torch.tensor([i // codec.size == at // codec.size for i in range(len(values))])
        assert torch.equal(found.isnan(), expected)
        assert torch.equal(found.isfinite(), ~expected)


@given(size=st.integers(0, 700), block=st.sampled_from((2, 256)))
def test_payloads_are_as_small_as_promised(size: int, block: int) -> None:
    """Bytes of a row of m fp32 values."""

    def sent(codec: comm.codecs.Codec) -> int:
        return sum(part.nbytes for part in codec.encode(torch.ones(1, size)))

    scales = 4 * ceil(size / block)
    assert sent(comm.codecs.Cast(torch.float16)) == 2 * size
    assert sent(comm.codecs.Blocks(8, size=block)) == size + scales
    assert sent(comm.codecs.Blocks(4, size=block)) == ceil(size / 2) + scales
    assert sent(comm.codecs.OneBit(size=block)) == ceil(size / 8) + scales
    assert sent(comm.codecs.TopK(0.1)) == 8 * ceil(0.1 * size)


# -- collectives ------------------------------------------------------------------------------------------------------


def simulate(case: Inputs, program: Callable[[Any], Any]) -> list[Any]:
    return comm.simulate(lambda: program(case.of(comm.world().rank)), world_size=case.size, seed=case.seed)


def carried_out(requests: Sequence[comm.table.Request[Any]], later: bool) -> list[Any]:
    if not later:
        return [request.run() for request in requests]
    return [pending.wait() for pending in [request.start() for request in requests]]


@given(
    case=inputs(cut=True, dtypes=DTYPES),
    codec=st.sampled_from(LOSSLESS),
    tiled=st.booleans(),
    later=st.booleans(),
)
def test_a_lossless_codec_changes_no_gather(case: Inputs, codec: comm.codecs.Codec, tiled: bool, later: bool) -> None:
    """compressed(AG, id) = AG, bitwise: any tree, dtypes, dims, tiled or not, asynchronous or not."""
    options = {"dim": case.dim if tiled else 0, "tiled": tiled}

    def program(x: Any) -> None:
        pair = [
            comm.table.prepare(gather, x, **options)
            for gather in (comm.codecs.compressed(comm.all_gather, codec), comm.all_gather)
        ]
        assert_same(*carried_out(pair, later))

    simulate(case, program)


@given(
    case=inputs(cut=True, dtypes=ADDABLE),
    codec=st.sampled_from(LOSSLESS),
    op=st.sampled_from(("sum", "avg", "max", "min", "product")),
    later=st.booleans(),
)
def test_a_lossless_codec_changes_no_reduction(case: Inputs, codec: comm.codecs.Codec, op: str, later: bool) -> None:
    """compressed(RS, id) = RS and compressed(AR, id) = AR, bitwise, for all ops that the dtypes have."""
    dtypes = {leaf.dtype for leaf in tree.leaves(case.leaves)}
    assume(op != "avg" or dtypes <= {*FLOATING, *COMPLEX})
    assume(op not in ("max", "min") or not dtypes & set(COMPLEX))

    def program(x: Any) -> None:
        for reduce, options in ((comm.reduce_scatter, {"dim": case.dim}), (comm.all_reduce, {})):
            pair = [comm.table.prepare(f, x, op=op, **options) for f in (comm.codecs.compressed(reduce, codec), reduce)]
            assert_same(*carried_out(pair, later), bits=op not in ("max", "min"))

    simulate(case, program)


def drawn(rank: int, count: int, seed: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed + rank))


@pytest.mark.law(38)
@given(
    n=st.integers(2, 5), size=st.integers(0, 9), codec=st.sampled_from(CODECS), dtype=st.sampled_from(FLOATING), seed=seeds()
)
def test_what_compressed_collectives_compute(
    n: int, size: int, codec: comm.codecs.Codec, dtype: torch.dtype, seed: int
) -> None:
    """AG(C(x)); the fold of C(piece), each value encoded once whatever n is; AG(C(RS(C(x)))); alike on all ranks, bitwise."""
    xs = [drawn(rank, n * size, seed).to(dtype) for rank in range(n)]
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    received = [[through(codec, x.view(n, size)[rank], wide) for x in xs] for rank in range(n)]
    pieces = [fold(parts, "sum").to(dtype) for parts in received]
    gathered = torch.cat([through(codec, x) for x in xs])
    total = torch.cat([through(codec, piece) for piece in pieces])

    def program() -> Any:
        x = xs[comm.world().rank]
        return [comm.codecs.compressed(f, codec)(x) for f in (comm.all_gather, comm.reduce_scatter, comm.all_reduce)]

    for rank, found in enumerate(comm.simulate(program, world_size=n, seed=seed)):
        assert_same(found, [gathered, pieces[rank], total])


@pytest.mark.law(38)
@given(n=st.integers(2, 6), size=st.integers(1, 9), seed=seeds())
def test_the_mean_errs_no_more_on_more_ranks(n: int, size: int, seed: int) -> None:
    """|RS_int8 - RS| ≤ Σ_r absmax_r/254, so for the mean absmax/254; fp32 sums of n terms add n² u absmax."""
    xs = [drawn(rank, n * size, seed) for rank in range(n)]
    most = torch.stack(xs).abs().max().item()
    exact = torch.stack(xs).double().sum(0).view(n, size)
    scatter = comm.codecs.compressed(comm.reduce_scatter, comm.codecs.Blocks(8))
    for rank, found in enumerate(comm.simulate(lambda: scatter(xs[comm.world().rank]), world_size=n)):
        bound = n * (most / 254 + most * 8 * U) + n * n * most * U
        assert (found.double() - exact[rank]).abs().max() <= bound


@given(
    n=st.sampled_from((1, 2, 4)),  # where it makes no difference when a mean is divided
    dtype=st.sampled_from((torch.float32, torch.float64, torch.complex64)),
    op=st.sampled_from(("sum", "avg")),
)
def test_gradients_pass_straight_through(n: int, dtype: torch.dtype, op: str) -> None:
    """The transpose is the plain collective's, bitwise; integer leaves beside it have none."""

    def program(*wrapped: Callable[..., Any]) -> list[Any]:
        rank, found = comm.world().rank, []
        for collective in wrapped:
            x = drawn(rank, 2 * n, 0).to(dtype).requires_grad_()
            reducing = "all_gather" not in str(collective)
            tree_of = {"x": x, "n": torch.arange(n)} if not reducing or op == "sum" else {"x": x}
            y = collective(tree_of, op=op) if reducing else collective(tree_of)
            out = drawn(7 + rank, y["x"].numel(), 1).to(dtype)
            (grad,) = torch.autograd.grad(y["x"], x, out, create_graph=True)
            found.append(grad.detach())
        return found

    plain = (comm.all_gather, comm.reduce_scatter, comm.all_reduce)
    for codec in (comm.codecs.Blocks(8), comm.codecs.OneBit()):
        narrow = [comm.codecs.compressed(f, codec) for f in plain]
        for found, expected in zip(
            comm.simulate(program, *narrow, world_size=n), comm.simulate(program, *plain, world_size=n), strict=True
        ):
            assert_same(found, expected)


def test_a_maximum_has_no_gradient() -> None:
    def program() -> None:
        x = torch.ones(2, requires_grad=True)
        comm.codecs.compressed(comm.reduce_scatter, comm.codecs.Blocks(8))(x, op="max").sum().backward()

    with pytest.raises(ValueError, match="no transpose"):
        comm.simulate(program, world_size=2)


@given(n=world_sizes(5), size=st.integers(0, 40), block=st.sampled_from((4, 256)))
def test_the_ledger_shows_the_payload(n: int, size: int, block: int) -> None:
    """int8 sends a quarter of fp32's bytes, and scales: (n-1)(m + 4⌈m/block⌉) a gather or a scatter of pieces of m."""

    def program() -> dict[str, int]:
        x, codec = torch.ones(n * size), comm.codecs.Blocks(8, size=block)
        with comm.ledger() as book:
            comm.codecs.compressed(comm.all_gather, codec)(x[:size])
            comm.codecs.compressed(comm.reduce_scatter, codec)(x)
        with comm.ledger() as whole:
            comm.codecs.compressed(comm.all_reduce, codec)(x)
        return {**{row.collective: row.bytes for row in book.rows}, "together": whole.bytes}

    piece = (n - 1) * (size + 4 * ceil(size / block))
    for sent in comm.simulate(program, world_size=n):
        if n > 1:
            assert sent == {"all_gather": piece, "all_to_all": piece, "together": 2 * piece}


def test_one_rank_sends_nothing_and_loses_nothing() -> None:
    x = torch.tensor([1.0, 1e-9])
    assert_same(comm.codecs.compressed(comm.all_reduce, comm.codecs.Blocks(4))(x), x)


def test_bad_input_is_refused() -> None:
    makes: list[tuple[Callable[[], Any], str]] = [
        (lambda: comm.codecs.Cast(torch.int8), "int8 is not a floating-point dtype"),
        (lambda: comm.codecs.Blocks(7), "bits"),
        (lambda: comm.codecs.Blocks(4, size=3), "size=3"),
        (lambda: comm.codecs.OneBit(size=0), "size"),
        (lambda: comm.codecs.TopK(0.0), "fraction=0.0"),
        (lambda: comm.codecs.compressed(comm.broadcast, comm.codecs.Cast()), "no compressed form"),
    ]
    for make, message in makes:
        with pytest.raises(ValueError, match=message):
            make()
    with pytest.raises(TypeError, match="encode"):
        comm.codecs.compressed(comm.all_gather, "int8")  # type: ignore[arg-type]
    scatter, gather = (
        comm.codecs.compressed(comm.reduce_scatter, comm.codecs.Blocks(8)),
        comm.codecs.compressed(comm.all_gather, comm.codecs.Blocks(8)),
    )
    feedback = comm.codecs.ErrorFeedback(comm.codecs.OneBit())
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: scatter(torch.ones(3)), "a group of 2 needs a multiple of 2"),
        (lambda: scatter(torch.ones(2), op="median"), "op='median' is unknown"),
        (lambda: scatter(torch.ones(2, dtype=torch.int64), op="avg"), "op='avg' of an integer"),
        (lambda: gather(torch.ones(())), "a scalar has no dim"),
        (lambda: feedback.all_reduce(torch.ones(2), feedback.init(torch.ones(2)), op="max"), "use sum or avg"),
        (lambda: feedback.all_reduce(torch.ones(2), feedback.init([torch.ones(2)])), "make one with init"),
    ]
    for program, message in cases:
        with pytest.raises(ValueError, match=message):
            comm.simulate(program, world_size=2)
    with pytest.raises(TypeError, match="uneven"):
        comm.simulate(lambda: gather(torch.ones(2), uneven=True), world_size=2)


# -- error feedback ---------------------------------------------------------------------------------------------------


def fed(
    values: Sequence[Any], feedback: comm.codecs.ErrorFeedback, reduce: str, dim: int
) -> tuple[list[Any], comm.codecs.Residual]:
    """Each step's result, and the residual after the last."""
    residual, found = feedback.init(values[0]), []
    options = {"dim": dim} if reduce == "reduce_scatter" else {}
    for x in values:
        before = tree.map(torch.clone, (x, residual))
        total, after = getattr(feedback, reduce)(x, residual, **options)
        assert_same((x, residual), before)  # pure
        found.append(total)
        residual = after
    return found, residual


@pytest.mark.law(38)
@given(
    case=inputs(cut=True, dtypes=(torch.float32, torch.float64), max_leaves=2, sizes=st.integers(1, 4)),
    codec=st.sampled_from(
        (comm.codecs.TopK(0.3), comm.codecs.TopK(0.01), comm.codecs.OneBit(size=4), comm.codecs.Cast(torch.bfloat16))
    ),
    steps=st.integers(1, 4),
    reduce=st.sampled_from(("all_reduce", "reduce_scatter")),
)
def test_error_feedback_owes_what_it_left_out(case: Inputs, codec: comm.codecs.Codec, steps: int, reduce: str) -> None:
    """Σ C(pₜ) = Σ gₜ + e₀ - e_T, exactly: summed over the ranks, with what each still owes of its values and of its piece.

    Integers of at most 3 have room in fp32 for a few binary digits after the point, which means over 4 values need: hence
    each leaf is repeated 4 times, so that blocks are full.
    """

    def of(rank: int) -> list[Any]:
        values = [case.of(rank, name=str(step)) for step in range(steps)]
        return tree.map(lambda x: x.repeat_interleave(4, 0), values) if isinstance(codec, comm.codecs.OneBit) else values  # type: ignore[no-any-return]

    def program() -> Any:
        return fed(of(comm.world().rank), comm.codecs.ErrorFeedback(codec), reduce, case.dim)

    n = case.size
    results = comm.simulate(program, world_size=n, seed=case.seed)
    structure = tree.structure(of(0)[0])
    given_ = [tree.leaves(x) for rank in range(n) for x in of(rank)]
    for place in range(structure.num_leaves):
        full = [tree.leaves(residual.own)[place] for _, residual in results]
        expected = sum(leaves[place] for leaves in given_) - sum(full)
        late = torch.cat([tree.leaves(residual.piece)[place] for _, residual in results])
        told = [sum(tree.leaves(total)[place] for total in found) for found, _ in results]
        if reduce == "all_reduce":
            expected = expected - late[: expected.numel()].view(expected.shape)
            assert all(torch.equal(x, told[0]) for x in told)
            assert torch.equal(told[0], expected)
        else:
            assert torch.equal(torch.cat(told, case.dim), expected)


def test_without_feedback_what_is_left_out_is_lost() -> None:
    """Why the residual: top-k alone never tells of the smaller value."""
    plain, feedback = (
        comm.codecs.compressed(comm.all_reduce, comm.codecs.TopK(0.5)),
        comm.codecs.ErrorFeedback(comm.codecs.TopK(0.5)),
    )
    x = torch.tensor([4.0, 1.0, 4.0, 1.0])

    def program() -> tuple[Tensor, Tensor]:
        found, _ = fed([x] * 8, feedback, "all_reduce", 0)
        return sum(plain(x) for _ in range(8)), sum(found)  # type: ignore[return-value]

    without, with_ = comm.simulate(program, world_size=2)[0]
    assert without.tolist() == [64.0, 0.0, 64.0, 0.0]
    assert with_[1] > 0
    assert (with_ - 16 * x).abs().max() <= 16


# -- processes --------------------------------------------------------------------------------------------------------


@attrs.frozen
class Halved:
    """A codec of one's own."""

    def encode(self, rows: Tensor) -> Sequence[Tensor]:
        return [(rows / 2).to(torch.float16)]

    def decode(self, payload: Sequence[Tensor], size: int, dtype: torch.dtype) -> Tensor:
        return payload[0].to(dtype) * 2


def everything() -> list[Any]:
    rank, found = comm.world().rank, []
    x = {"w": drawn(rank, 600, 3).view(20, 30), "half": drawn(rank, 8, 4).bfloat16(), "n": torch.arange(6) + rank}
    for codec in (*CODECS, Halved()):
        gather, scatter, reduce = (
            comm.codecs.compressed(f, codec) for f in (comm.all_gather, comm.reduce_scatter, comm.all_reduce)
        )
        pending = [comm.start(call, x) for call in (gather, scatter, reduce)]
        found += [one.wait() for one in pending]
        found += [gather(x["w"], dim=1), scatter(x, op="max"), reduce(x["w"], op="avg")]
        found += fed([x, x, x], comm.codecs.ErrorFeedback(codec), "all_reduce", 0)
    return found


@pytest.mark.law(18)
def test_processes_give_the_bits_of_the_simulator() -> None:
    for here, there in zip(comm.simulate(everything, world_size=2), comm.spawn(everything, world_size=2), strict=True):
        assert_same(there, here)
