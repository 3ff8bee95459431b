"""``functional_ds.deepspeed.comm``: a program that is written for torch.distributed gives the same with it."""

import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist

from functional_ds import comm
from functional_ds.deepspeed import comm as dist


def program(there: Any) -> list[Any]:
    """Calls of torch.distributed, on two ranks; what each leaves in its tensors."""
    rank, n = there.get_rank(), there.get_world_size()
    mine = torch.tensor([1.0 + rank, 10.0 * rank])
    found: list[Any] = []

    def say(*tensors: torch.Tensor) -> None:
        found.append([each.tolist() for each in tensors])

    for op in (there.ReduceOp.SUM, there.ReduceOp.MAX, there.ReduceOp.MIN, there.ReduceOp.PRODUCT):
        x = mine.clone()
        there.all_reduce(x, op)
        say(x)
    x = mine.clone()
    there.broadcast(x, src=1)
    say(x)
    x = mine.clone()
    there.reduce(x, dst=1)
    say(*([x] if rank == 1 else []))
    pieces = [torch.empty(2) for _ in range(n)]
    there.all_gather(pieces, mine)
    say(*pieces)
    whole = torch.empty(n * 2)
    there.all_gather_into_tensor(whole, mine)
    say(whole)
    piece = torch.empty(1)
    there.reduce_scatter_tensor(piece, mine)
    say(piece)
    there.reduce_scatter(piece, list(mine.clone().chunk(n)))
    say(piece)
    arrived = torch.empty(2)
    there.all_to_all_single(arrived, mine)
    say(arrived)
    sent, got = [[1, 2], [3, 0]][rank], [[1, 3], [2, 0]][rank]
    rows = torch.empty(sum(got))
    there.all_to_all_single(rows, torch.arange(3.0) + 10 * rank, got, sent)
    say(rows)
    gathered = [torch.empty(2) for _ in range(n)] if rank == 0 else None
    there.gather(mine, gathered, dst=0)
    say(*(gathered or []))
    piece = torch.empty(2)
    there.scatter(piece, [torch.full((2,), float(i)) for i in range(n)] if rank == 1 else None, src=1)
    say(piece)
    x = mine.clone()
    if rank == 0:
        there.send(mine, 1)
    else:
        there.recv(x, 0)
    say(x)
    other = torch.empty(2)
    for work in there.batch_isend_irecv([there.P2POp(there.isend, mine, 1 - rank), there.P2POp(there.irecv, other, 1 - rank)]):
        work.wait()
    say(other)
    objects: list[Any] = [None] * n
    there.all_gather_object(objects, {"rank": rank})
    found.append(objects)
    words = ["from", rank]
    there.broadcast_object_list(words, src=1)
    found.append(words)
    x = mine.clone()
    there.all_reduce(x, async_op=True).wait()
    say(x)
    alone = there.new_group([1])
    found.append([there.get_rank(alone), there.get_world_size(alone), there.get_global_rank(alone, 0) if rank else 1])
    there.barrier()
    return found


def joined() -> list[Any]:
    """A process without a launcher, and one that MPI has started, become a world of one."""
    dist.destroy_process_group()
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    with pytest.raises(ValueError, match="is in no world yet"):
        dist.init_distributed(dist_init_required=False)
    dist.init_distributed("gloo" if torch.cuda.is_available() else "nccl")
    dist.init_distributed("gloo")
    found: list[Any] = [torch_dist.get_rank(), torch_dist.get_world_size(), dist.get_local_rank(), dist.get_backend()]
    dist.destroy_process_group()
    os.environ.update(OMPI_COMM_WORLD_RANK="0", OMPI_COMM_WORLD_SIZE="1", OMPI_COMM_WORLD_LOCAL_RANK="0")
    dist.init_distributed("gloo", timeout=None)
    return [*found, dist.is_initialized(), os.environ["WORLD_SIZE"], dist.get_world_size()]


def by_torch() -> tuple[list[Any], list[Any], list[Any]]:
    """The program with torch.distributed itself, and with ours over the same processes; then each process alone."""
    ours: ModuleType = dist
    return program(torch_dist), program(ours), joined()


def test_a_program_for_torch_distributed() -> None:
    simulated = comm.simulate(program, dist, world_size=2)
    for rank, (theirs, ours, alone) in enumerate(comm.spawn(by_torch, world_size=2, backend="gloo")):
        assert ours == theirs == simulated[rank]
        assert alone == [0, 1, 0, "gloo", True, "1", 1]


def test_leaves_of_a_model_are_written_in_place() -> None:
    def on_rank() -> tuple[bool, list[float]]:
        weight = torch.nn.Parameter(torch.full((2,), float(comm.get_rank())))
        kept = weight.data_ptr()
        dist.broadcast(weight, src=1)
        return weight.requires_grad and weight.data_ptr() == kept, weight.tolist()

    assert comm.simulate(on_rank, world_size=2) == [(True, [1.0, 1.0])] * 2


def test_several_tensors_at_once() -> None:
    def on_rank() -> tuple[int, list[float]]:
        x, y, wide = torch.ones(2), torch.ones(3), torch.empty(4)
        with comm.ledger() as book:
            dist.all_reduce_coalesced([x, y])
        dist.all_gather_coalesced([wide], [x])
        outs = [torch.empty(1), torch.empty(2)][:: 1 if comm.get_rank() == 0 else -1]
        dist.all_to_all(outs, [torch.ones(1 + (comm.get_rank() + i) % 2) * i for i in range(2)])
        return book.calls, [*y.tolist(), *wide.tolist(), outs[0].sum().item()]

    found = comm.simulate(on_rank, world_size=2)
    assert [calls for calls, _ in found] == [1, 1]
    assert found[0][1][:7] == [2.0] * 7


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: dist.all_reduce(x, dist.ReduceOp.BXOR), "ranks' values combine by ReduceOp.SUM"),
        (lambda x: dist.all_gather([x], x), "tensor_list: 1 where the group needs 2"),
        (lambda x: dist.all_gather_into_tensor(x, x), "elements of output_tensor: 3 where the group needs 6"),
        (lambda x: dist.all_to_all_single(x, x), "3 rows, which is not a multiple of 2 ranks"),
        (lambda x: dist.broadcast(x, 0, dist.new_group([1])), "src=0 is not one of the group's ranks"),
        (lambda x: dist.all_gather_coalesced([x], [x]), "elements of output_tensors: 3 where the group needs 6"),
        (lambda x: dist.all_gather_coalesced([x], [x, x]), "output_tensors: 1 where the group needs 2"),
        (lambda _: dist.get_global_rank(None, 2), "group_rank=2 is not a place in a group of 2 ranks"),
        (lambda _: dist.get_global_rank(None, -1), "group_rank=-1 is not a place"),
        (dist.recv, "receiving from any rank is unsupported"),
        (lambda _: dist.configure("missing.json"), "neither a file nor base64"),
        (lambda x: dist.all_reduce(x, group="dp"), "is not a group"),
    ],
)
def test_refusals(call: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message.replace("(", r"\(")):
        comm.simulate(call, torch.ones(3), world_size=2)


def test_the_log_says_what_was_called(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    config.write_text('{"train_batch_size": 1, "comms_logger": {"enabled": true}}')

    def on_rank() -> tuple[bool, dict[str, Any] | None, bool]:
        assert not dist.has_comm_data()
        dist.configure({"comms_logger": {"enabled": False}})  # DeepSpeed would switch it on
        assert not comm.world().world.ledgers
        dist.configure(str(config))
        for _ in range(3):
            dist.all_reduce(torch.ones(4))
        had, summary = dist.has_comm_data(), dist.log_summary(show_straggler=True, return_dict=True)
        dist.reset_log()
        return had, summary, dist.has_comm_data()

    for had, summary, has in comm.simulate(on_rank, world_size=2):
        assert had
        assert not has
        assert summary is not None
        row = summary["summary"]["all_reduce"][16]
        assert row["count"] == 3
        assert row["total_latency_ms"] == pytest.approx(3 * row["avg_latency_ms"])
        assert summary["straggler_analysis"]["all_reduce"]["slowest_rank"] in (0, 1)
    assert capsys.readouterr().out.count("busbw") == 1  # on rank 0
