"""Arguments that all ranks of a group must give alike are compared with the calls that they are for."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from functional_ds import comm, moe, seq, tp
from functional_ds.comm.agreement.alike import alike

N = 2


def mine() -> bool:
    return comm.world().rank == 1


def pieces(layout: str) -> Tensor:
    x = torch.randn(1, 4, 4 * N, 8, generator=torch.Generator().manual_seed(0))
    return x[:, :, seq.SequenceLayout(layout).positions(4 * N, N, comm.world().rank)]


def other_causality(way: Callable[..., Any] = seq.ring) -> Tensor:
    x = pieces("contiguous")
    return way(group=comm.world())(x, x, x, causal=mine())  # type: ignore[no-any-return]


def other_layout(way: Callable[..., Any] = seq.ring) -> Tensor:
    layout = "zigzag" if mine() else "contiguous"
    x = pieces(layout)
    return way(group=comm.world(), layout=layout)(x, x, x)  # type: ignore[no-any-return]


def other_window() -> Tensor:
    x = pieces("contiguous")
    return seq.gathered(comm.world())(x, x, x, causal=True, window=2 + mine())


def other_documents() -> Tensor:
    x = pieces("contiguous")
    return seq.ring(comm.world())(x, x, x, documents=torch.arange(4 * N)[None] // (2 + mine()))


def other_key_heads() -> Tensor:
    x = pieces("contiguous")
    keys = x[:, : 2 + 2 * mine()]
    return seq.ulysses(group=comm.world())(x, keys, keys)


def other_labels() -> Tensor:
    return tp.cross_entropy(torch.zeros(3, 2), torch.tensor([0, 3, mine()]), group=comm.world()).mean()


def other_smoothing() -> Tensor:
    smooth = 0.1 + 0.1 * mine()
    return tp.cross_entropy(torch.zeros(3, 2), torch.tensor([0, 3, 1]), group=comm.world(), label_smoothing=smooth).mean()


def other_tokens() -> Tensor:
    return tp.embed(torch.tensor([0, 3, mine()]), torch.ones(2, 3), group=comm.world())


def other_choices() -> Tensor:
    k = 1 + mine()
    routing = moe.Routing(torch.arange(k).repeat(3, 1), torch.ones(3, k) / k, N)
    return moe.exchange(lambda rows, groups: rows, torch.ones(3, 4), routing=routing, group=comm.world(), way="all_to_all")


PROGRAMS: dict[Callable[..., Any], str] = {
    other_causality: r"ring attention\(.*causal=(True|False).*ring attention\(.*causal=(True|False)",
    other_layout: r"layout=SequenceLayout\(kind='(zigzag|contiguous)'",
    other_window: r"gathered attention\(.*window=[23].*window=[23]",
    other_documents: r"documents=int64\[1, 8\] with CRC-32 \w{8}",
    other_key_heads: r"ulysses\(heads=\(4, [24]\)",
    other_labels: r"tp.cross_entropy\(labels=int64\[3\] with CRC-32 \w{8}",
    other_smoothing: r"label_smoothing=0.[12]",
    other_tokens: r"tp.embed\(ids=int64\[3\] with CRC-32 \w{8}",
    other_choices: r"moe.exchange\(experts=2, k=[12]",
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("rules", [None, "nccl"])
def test_it_is_named(program: Callable[[], Any], rules: Any) -> None:
    """Each of these gave numbers, which were wrong."""
    with pytest.raises(comm.errors.MismatchError, match=PROGRAMS[program]) as caught:
        comm.simulate(program, world_size=N, rules=rules)
    assert "test_alike.py:" in str(caught.value)


@pytest.mark.parametrize("way", [seq.gathered, seq.ulysses])
def test_all_ways_of_attention_compare(way: Callable[..., Any]) -> None:
    for program in (other_causality, other_layout):
        with pytest.raises(comm.errors.MismatchError, match=r"(gathered attention|ulysses)"):
            comm.simulate(program, way, world_size=N)


def in_processes() -> list[str]:
    """What checked processes say, and that other ones go on."""
    found = []
    for program in PROGRAMS:
        try:
            with comm.debug.checked():
                program()
        except comm.errors.MismatchError as error:
            found.append(str(error))
        comm.debug.monitored_barrier()
    other_labels()
    return found


def test_checked_processes_name_it() -> None:
    for told in comm.spawn(in_processes, world_size=N):
        assert len(told) == len(PROGRAMS)
        assert all("test_alike.py:" in said for said in told)


def test_without_values_it_is_named() -> None:
    def program() -> None:
        x = torch.empty(1, 4, 4, 8, device="meta")
        seq.ring(comm.world())(x, x, x, causal=mine())

    with pytest.raises(comm.errors.MismatchError, match=r"causal=False.*causal=True"):
        comm.simulate(program, world_size=N, shapes_only=True)


def test_it_ends_with_the_block() -> None:
    """What a rank calls after it is not made for it; a block inside of another has its own arguments."""

    def program() -> list[float]:
        here, found = comm.world(), []
        with alike("outer", here, number=1):
            with alike("inner", here, number=2):
                found.append(comm.all_reduce(torch.ones(1), here).item())
            found.append(comm.all_reduce(torch.ones(1), here).item())
        if mine():
            with alike("lone", here.world.group([here.rank], "lone"), number=3):
                pass
        with alike("different", comm.new_group([0, 1], "other"), number=here.rank):
            found.append(comm.all_reduce(torch.ones(1), here).item())
        with pytest.raises(KeyError), alike("failing", here, number=here.rank):
            raise KeyError
        return [*found, comm.all_reduce(torch.ones(1), here).item()]

    assert comm.simulate(program, world_size=N) == [[2.0] * 4] * 2
