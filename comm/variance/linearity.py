"""Tables of torch's linear operators, by name.

A partial sum ``x = Σ x_r`` is held as ``x_r`` on rank r; ``f(x) = Σ f(x_r)`` holds only for linear ``f``.
"""

from functools import cache

# f(x + y) = f(x) + f(y), jointly in all tensors.
SUMS = frozenset({"add", "sub", "rsub", "lerp"})

# The same for operators that move elements and do not add one tensor's elements to another's.
MOVES = frozenset(
    [
        *("adaptive_avg_pool2d", "alias", "as_strided", "avg_pool2d", "avg_pool3d", "cat", "clone", "col2im"),
        *("complex", "conj", "conj_physical", "constant_pad_nd", "contiguous", "copy", "cumsum", "detach", "diag"),
        *("diag_embed", "diagonal", "expand", "fft_c2c", "fft_c2r", "fft_r2c", "flip", "im2col", "imag"),
        *("index_add", "index_copy", "index_put", "lift", "lift_fresh", "mean", "movedim", "narrow", "neg"),
        *("neg_view", "pad", "permute", "positive", "real", "repeat", "reshape", "reshape_alias", "resolve_conj"),
        *("resolve_neg", "roll", "scatter_add", "select", "select_scatter", "slice", "slice_scatter", "split"),
        *("split_with_sizes", "squeeze", "stack", "sum", "t", "to", "to_copy", "trace", "transpose", "tril", "triu"),
        *("unbind", "unfold", "unsafe_view", "unsqueeze", "upsample_nearest1d", "upsample_nearest2d", "view"),
        *("view_as_complex", "view_as_real", "view_copy", "where", "write"),
    ]
)

# Those that keep all elements and add none up, so that what was added to each row is still in each row.
KEEPS = frozenset(
    [
        *("alias", "as_strided", "clone", "conj", "contiguous", "copy", "detach", "flip", "lift", "lift_fresh", "movedim"),
        *("narrow", "neg", "permute", "positive", "reshape", "reshape_alias", "resolve_conj", "resolve_neg", "roll", "select"),
        *("slice", "split", "split_with_sizes", "squeeze", "t", "to", "to_copy", "transpose", "unbind", "unfold"),
        *("unsafe_view", "unsqueeze", "view", "view_as_complex", "view_as_real", "view_copy"),
    ]
)

# Linear in each tensor while the others are constant.
PRODUCTS = frozenset({"mul", "mm", "bmm", "mv", "dot", "vdot", "matmul", "outer", "ger", "kron", "convolution", "grouped_mm"})

# Linear in the first tensor; the others are scales, or indices.
SCALES = frozenset(
    {"div", "true_divide", "index", "index_select", "gather", "take", "embedding", "masked_fill", "masked_scatter"}
)

# The arguments that are terms or elements of the result: a replicated value among them is counted n times in a sum over n
# ranks. ``cat``, ``stack`` and writes are not listed, since a part without such elements may be taken later.
TERMS = {
    **dict.fromkeys(SUMS, (0, 1)),
    "where": (1, 2),
    "masked_fill": (2,),
    "constant_pad_nd": (2,),
    **dict.fromkeys(("index_put", "masked_scatter"), (0, 2)),
    **dict.fromkeys(("index_add", "index_copy", "scatter_add"), (0, 3)),
    **dict.fromkeys(("select_scatter", "slice_scatter"), (0, 1)),
}

# The first tensor plus a product of the others.
SUMS_OF_PRODUCTS = frozenset({"addmm", "baddbmm", "addbmm", "addmv", "addr", "addcmul"})

# Operators whose tensors play different parts; ``copy`` reads its second alone.
UNLIKE = SUMS_OF_PRODUCTS | TERMS.keys() | {"copy"}

# Operators that combine a random draw with a value.
DRAWN_INTO = frozenset({"mul", "add", "sub", "rsub", "div", "where", "masked_fill", "addcmul", "native_dropout"})

# Operators for which it matters that ranks may pass different ones of several replicated values.
ARITHMETIC = SUMS | PRODUCTS | SCALES | SUMS_OF_PRODUCTS | DRAWN_INTO

_CONSTANTS = frozenset({"arange", "empty", "eye", "fill", "full", "linspace", "ones", "scalar_tensor", "zero", "zeros"})


@cache
def makes_constants(name: str) -> bool:
    """Whether the results depend only on shapes and plain numbers.

    >>> makes_constants("zeros_like"), makes_constants("new_empty"), makes_constants("mul")
    (True, True, False)
    """
    return name.removeprefix("new_").partition("_")[0] in _CONSTANTS or name in _CONSTANTS
