"""Laws 1, 2 and 15: sharding is a bijection."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm
from functional_ds.base.marks import is_trainable
from functional_ds.sharding.grouping import by_block
from functional_ds.sharding.layout import Layout, shard, unshard

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.bool, torch.uint8)


@st.composite
def params(draw: st.DrawFn) -> dict[str, Tensor]:
    """A tree with any dtypes, shapes (empty and scalar too), strides and frozen leaves, in some blocks."""
    found: dict[str, Tensor] = {}
    for i in range(draw(st.integers(1, 6))):
        dtype = draw(st.sampled_from(DTYPES))
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        value = (torch.randn(shape, generator=torch.Generator().manual_seed(i)) * 9).to(dtype)
        if len(shape) >= 2 and draw(st.booleans()):
            value = value.transpose(0, 1)
        if draw(st.booleans()):
            value = nn.Parameter(value, requires_grad=False)
        found[f"{draw(st.sampled_from(('blocks.0', 'blocks.1', 'head')))}.{i}"] = value
    return found


@pytest.mark.law(1)
@given(tree=params(), n=st.integers(1, 9), unit_of=st.sampled_from((None, lambda path: "all", lambda path: path)))
def test_unshard_inverts_shard(tree: dict[str, Tensor], n: int, unit_of: object) -> None:
    """unshard(shard(t)) = t, bitwise, for any tree, dtype, unit partition and n; dtypes and frozen marks stay."""
    layout = Layout.of(tree, n, unit_of)  # type: ignore[arg-type]
    back = unshard([shard(tree, layout, rank) for rank in range(n)], layout)
    assert list(back) == list(tree)
    for path, leaf in tree.items():
        assert torch.equal(back[path], leaf)
        assert back[path].dtype == leaf.dtype
        assert not is_trainable(leaf) or is_trainable(back[path])


@pytest.mark.law(2)
@given(tree=params(), n=st.integers(1, 5))
def test_gathering_shards_gives_the_value(tree: dict[str, Tensor], n: int) -> None:
    """AG ∘ shard = id on a replicated value."""
    layout = Layout.of(tree, n)

    def program() -> bool:
        own = shard(tree, layout, comm.world().rank)
        back = layout.unflatten(comm.all_gather([x.detach() for x in own]))
        return all(torch.equal(back[path], leaf) for path, leaf in tree.items())

    assert all(comm.simulate(program, world_size=n))


@pytest.mark.law(15)
@given(size=st.integers(0, 40), a=st.integers(1, 4), b=st.integers(1, 4))
def test_sharding_over_two_axes(size: int, a: int, b: int) -> None:
    """Sharding over (a, b) = sharding over b of the sharding over a, padding aside."""
    tree = {"w": torch.arange(1.0, size + 1)}
    both = Layout.of(tree, a * b)
    together = torch.cat([shard(tree, both, rank)[0] for rank in range(a * b)])
    outer = Layout.of(tree, a)
    nested = []
    for i in range(a):
        part = {"w": shard(tree, outer, i)[0]}
        inner = Layout.of(part, b)
        nested += [shard(part, inner, j)[0] for j in range(b)]
    assert together[together != 0].tolist() == torch.cat(nested)[torch.cat(nested) != 0].tolist()


@given(tree=params(), n=st.integers(1, 9))
def test_shards_are_equal_and_padding_is_bounded(tree: dict[str, Tensor], n: int) -> None:
    """Every rank has shards of the same sizes; padding is less than n elements and 16 bytes a leaf."""
    layout = Layout.of(tree, n)
    for segment in layout.segments:
        filled = sum(slot.numel for slot in segment.slots)
        room = n + len(segment.slots) * max(1, 16 // segment.dtype.itemsize)
        assert filled <= n * segment.shard < filled + room
    sizes = {tuple(x.numel() for x in shard(tree, layout, rank)) for rank in range(n)}
    assert len(sizes) == 1


def test_units_are_blocks_then_the_rest() -> None:
    tree = {name: torch.ones(2) for name in ("wte", "h.0.w", "h.0.b", "h.1.w", "h.1.b", "ln_f")}
    assert [unit.name for unit in Layout.of(tree, 2).units] == ["rest", "h.0", "h.1"]
    assert by_block("a.b") == "rest"


def test_refuses_what_is_no_tensor() -> None:
    with pytest.raises(TypeError, match=r"params: the leaf at 'a\.1' is float 2\.0, not a tensor"):
        Layout.of({"a": [torch.ones(1), 2.0]}, 2)


def test_refuses_a_rank_or_shards_that_do_not_fit() -> None:
    tree = {"w": torch.ones(3)}
    layout = fds.Layout.of(tree, 2)
    with pytest.raises(ValueError, match="rank=2 is out of range"):
        shard(tree, layout, 2)
    with pytest.raises(ValueError, match="1 ranks' shards for a layout of 2"):
        unshard([shard(tree, layout, 0)], layout)


@given(tree=params(), n=st.integers(1, 5), start=st.integers(0, 3))
def test_leaves_are_views_of_the_flat_tensor_wherever_it_lies(tree: dict[str, Tensor], n: int, start: int) -> None:
    """packed(views(flat)) = flat up to what lies between the leaves, which is zero; a write into a view is one into flat."""
    layout = Layout.of(tree, n)
    for segment in layout.segments:
        leaves = [tree[layout.paths[slot.leaf]].detach() for slot in segment.slots]
        flat = torch.ones(start + segment.size, dtype=segment.dtype)[start:]
        for view, leaf in zip(segment.views(flat), leaves, strict=True):
            view.copy_(leaf)
        assert all(
            torch.equal(flat[s.offset :][: s.numel].view(s.shape), x) for s, x in zip(segment.slots, leaves, strict=True)
        )
        packed = segment.packed([x.contiguous() for x in leaves], segment.dtype, flat.device)
        assert packed is not None
        assert packed.shape == flat.shape
        assert all(map(torch.equal, segment.views(packed), leaves))
        assert packed.count_nonzero() == sum(int(leaf.count_nonzero()) for leaf in leaves)
        assert segment.packed(leaves[1:], segment.dtype, flat.device) is None
        if not all(leaf.is_contiguous() for leaf in leaves):
            assert segment.packed(leaves, segment.dtype, flat.device) is None
