"""Folders and files that are refused: what would be loaded is not what was saved, or something else would be lost."""

import json
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import torch

import functional_ds as fds
from functional_ds import checkpointing, comm
from functional_ds import transforms as T
from functional_ds.checkpointing.directory import open_manifest
from functional_ds.checkpointing.manifest import MANIFEST
from functional_ds.jobs import JobError
from tests.refusals.refusal import Refusal, made, weights

LIKE = {"0": torch.ones(4), "1": torch.ones(4)}


def state(size: int = 2, **more: torch.Tensor) -> fds.State:
    return made().init({"w": torch.ones(3, size), **more})


def within(program: Callable[[Path], Any]) -> Callable[[], Any]:
    """The program with a new folder, which goes with it."""

    def run() -> Any:
        with tempfile.TemporaryDirectory() as folder:
            return program(Path(folder))

    return run


def saved(change: Callable[[Path], Any], like: Callable[[], fds.State] = state) -> Callable[[], Any]:
    """Loads the checkpoint ``'0'`` from a folder that was changed after it was saved."""

    def run(folder: Path) -> Any:
        fds.save(state(), folder)
        change(folder / "0")
        return fds.load(folder, like=like(), tag="0")

    return within(run)


def flip(place: Path) -> None:
    data = bytearray((place / "00000.bin").read_bytes())
    data[0] ^= 1
    (place / "00000.bin").write_bytes(data)


def lie(place: Path) -> None:
    """The manifest, with a good checksum, leaves an element out."""
    _, found = open_manifest(place.parent, "0")
    (chunk,) = found.tensors["params/w"].chunks
    short = attrs.evolve(found.tensors["params/w"], chunks=(attrs.evolve(chunk, numel=5),))
    (place / MANIFEST).write_bytes(attrs.evolve(found, tensors={**found.tensors, "params/w": short}).encode())


def pipe(place: Path) -> None:
    (place / "00000.bin").unlink()
    os.mkfifo(place / "00000.bin")


def of_another_library(folder: Path) -> None:
    (folder / "global_step10").mkdir()
    (folder / "latest").write_text("global_step10")
    fds.save(state(), folder)


def over_others(folder: Path) -> None:
    (folder / "logs").mkdir()
    (folder / "logs/notes.txt").write_text("kept")
    fds.save(state(), folder, tag="logs")


def two_savers(folder: Path) -> None:
    with checkpointing.Saver(folder):
        fds.save(state(), folder)


def on_one_rank(folder: Path) -> None:
    def program() -> None:
        rank = comm.world().rank
        begun = made(T.zero(3)).init(weights())
        fds.save(begun, folder / str(rank), group=comm.new_group([rank]))

    comm.simulate(program, world_size=2)


def of_other_programs(folder: Path) -> None:
    comm.simulate(lambda: fds.save(state(2 + comm.world().rank), folder), world_size=2)


def astray(folder: Path) -> None:
    fds.export(LIKE, folder, shard_bytes=16)
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["1"] = "../other.safetensors"
    index.write_text(json.dumps(content))
    fds.load_params(folder, like=LIKE)


def other_names(folder: Path) -> None:
    fds.export(LIKE, folder)
    fds.load_params(folder, like={"0": torch.ones(4), "2": torch.ones(4)})


def twice(folder: Path) -> None:
    for _ in range(2):
        fds.export(LIKE, folder)


class Harmful:
    def __reduce__(self) -> Any:
        return os.mkdir, ("harmed",)


def with_code(folder: Path) -> None:
    """A checkpoint in DeepSpeed's layout, one file of which would make a folder when it is opened."""
    place = folder / "global_step1"
    place.mkdir()
    (folder / "latest").write_text(place.name)
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"):
        torch.save({"optimizer_state_dict": {}, "client": Harmful()}, place / name)
    fds.from_deepspeed(folder, like=state())


def without_an_order(folder: Path) -> None:
    """DeepSpeed's checkpoint of stage 0 with two param groups."""
    place = folder / "global_step1"
    place.mkdir()
    (folder / "latest").write_text(place.name)
    optimizer = {"state": {}, "param_groups": [{"params": [0]}, {"params": [1]}]}
    content = {"module": {"w": torch.zeros(2), "b": torch.zeros(2)}, "buffer_names": [], "param_shapes": None}
    torch.save({**content, "optimizer": optimizer}, place / "mp_rank_00_model_states.pt")
    fds.from_deepspeed(folder, like=state())


def names_a_command(folder: Path) -> None:
    (folder / "job.toml").write_text('steps = 1\nmodel = "os:getcwd"\noptimizer = {sgd = 0.1}\n')
    fds.run_job(fds.load_job(folder / "job.toml"))


def nested(folder: Path) -> None:
    (folder / "job.json").write_text("[" * 1000)
    fds.load_job(folder / "job.json")


def sparse(place: Path) -> None:
    os.truncate(place / MANIFEST, 1 << 40)


def with_a_users_object(folder: Path) -> None:
    from functional_ds import deepspeed

    engine, *_ = deepspeed.initialize(
        model=torch.nn.Linear(2, 1),
        config={"train_batch_size": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        engine.save_checkpoint(folder, client_state={"own": Harmful()})
    engine.load_checkpoint(folder)


REFUSALS = [
    Refusal(
        what="a checkpoint of another structure than `like`",
        error=checkpointing.StructureError,
        says="another structure than like",
        advises="allow_missing=",
        why="Leaves would keep the values that they were made with.",
        instead="Say what may differ: `only=`, `allow_missing=`, `allow_extra=`.",
        program=saved(lambda place: None, lambda: state(head=torch.ones(3))),
    ),
    Refusal(
        what="a data file that was changed",
        error=checkpointing.DamagedError,
        says=r"00000\.bin is damaged in the block",
        advises="load another tag",
        why="Its checksum is not that of what was saved.",
        instead="Load another tag, or none: then the newest whole checkpoint is loaded.",
        program=saved(flip),
    ),
    Refusal(
        what="a manifest that leaves elements out, or has them twice",
        error=checkpointing.DamagedError,
        says="no chunk for its elements 5 to 6",
        advises="load another tag",
        why="Uninitialised memory would be loaded.",
        instead="Load another tag.",
        program=saved(lie),
    ),
    Refusal(
        what="a pipe or a device instead of a file",
        error=checkpointing.DamagedError,
        says=r"00000\.bin cannot be read: .*is not a file of bytes",
        advises="load another tag",
        why="Reading it would wait forever.",
        instead="Load another tag.",
        program=saved(pipe),
    ),
    Refusal(
        what="a save into another library's folder",
        error=checkpointing.CheckpointError,
        says="was not written by this library",
        advises="give checkpoints a folder of their own",
        why="The other library would no longer find its checkpoint.",
        instead="Give checkpoints a separate folder; `fds.from_deepspeed` reads DeepSpeed's.",
        program=within(of_another_library),
    ),
    Refusal(
        what="DeepSpeed's checkpoint of stage 0 with several param groups, without `order=`",
        error=checkpointing.StructureError,
        says="whose file does not name the optimizer's parameters",
        advises="Pass order=",
        why="The file numbers the optimizer's parameters, and moments would go to others.",
        instead="Pass the names in each group: `order=[[...], [...]]`; `engine.load_checkpoint` takes its own optimizer's.",
        program=within(without_an_order),
    ),
    Refusal(
        what="a tag whose path is taken by something else",
        error=checkpointing.CheckpointError,
        says="tag='logs': .* exists and is not a checkpoint of this tag",
        advises="choose another tag, or move it away",
        why="It would be overwritten.",
        instead="Choose another tag, or move it away.",
        program=within(over_others),
    ),
    Refusal(
        what="`fds.save` into a folder of which a `Saver` is open",
        error=checkpointing.BusyError,
        says="a Saver of this process is open here",
        advises="save with it, or into another folder",
        why="Two savers would delete each other's files.",
        instead="Save with the `Saver` (`fit`'s, perhaps), or into another folder.",
        program=within(two_savers),
    ),
    Refusal(
        what="a save by some of the ranks that hold shards",
        error=checkpointing.CheckpointError,
        says="no rank has the elements",
        advises="call save on all ranks of the state",
        why="The checkpoint would lack the others' shards.",
        instead="Call `fds.save` on all ranks.",
        program=within(on_one_rank),
    ),
    Refusal(
        what="a save of different states on different ranks",
        error=checkpointing.CheckpointError,
        says=r"on rank 1 and .* on rank 0|on rank 0 and .* on rank 1",
        advises="is this the state of one step on all ranks",
        why="The checkpoint would be a mixture.",
        instead="Save the state of one step on all ranks, or give each rank its own group and folder.",
        program=within(of_other_programs),
    ),
    Refusal(
        what="a safetensors index that names a file outside of its folder",
        error=ValueError,
        says="names the file '../other.safetensors', which is not in its folder; nothing was opened",
        advises="Put the file there",
        why="A model from elsewhere could have any file read.",
        instead="Put the file into the folder of its index.",
        program=within(astray),
    ),
    Refusal(
        what="a safetensors file with other names than `like`",
        error=ValueError,
        says="its leaves and the file have not the same names",
        advises="see rename=, allow_missing=, allow_extra=",
        why="Leaves would keep the values that they were made with.",
        instead="Pass `rename=`, `allow_missing=` or `allow_extra=`.",
        program=within(other_names),
    ),
    Refusal(
        what="an export over files that are there",
        error=FileExistsError,
        says="exist",
        advises="pass overwrite=True",
        why="They would be lost.",
        instead="Pass `overwrite=True`, or another path.",
        program=within(twice),
    ),
    Refusal(
        what="a class that is not known in a file of DeepSpeed's",
        error=checkpointing.CheckpointError,
        says="unpickling them could run code: .*mkdir",
        advises="safe_globals",
        why="Unpickling could run code.",
        instead="Allow a class that you trust: `torch.serialization.safe_globals`.",
        program=within(with_code),
    ),
    Refusal(
        what="an object that `save_checkpoint` had to pickle, in an engine's `client_state`",
        error=checkpointing.CheckpointError,
        says=r"to unpickle them can run any code: client_state\['own'\], a .*Harmful",
        advises="pass allow_pickle=True",
        why="Unpickling can run any code.",
        instead="Save plain values, tensors or arrays, or pass `allow_pickle=True` for a folder that you trust.",
        program=within(with_a_users_object),
    ),
    Refusal(
        what="a job that names a function beyond its folder, `torch.nn`, `torch.optim` and the library",
        error=JobError,
        says="a job may not name 'os:getcwd'",
        advises=r"pass allow_import=\['os'\], or --allow-import os",
        why="A job from elsewhere could run any command.",
        instead="Pass `allow_import=[...]` to `load_job`, or `--allow-import`, for a module that you trust.",
        program=within(names_a_command),
    ),
    Refusal(
        what="a manifest of more than 1 GiB",
        error=checkpointing.DamagedError,
        says="it has 1,099,511,627,776 bytes, and at most 1,073,741,824 are read",
        advises="load another tag",
        why="A sparse file may say that it is larger than any memory.",
        instead="Load another tag; without a tag, the newest whole checkpoint is loaded.",
        program=saved(sparse),
    ),
    Refusal(
        what="a job, config or index of more than 64 MiB, or with blocks nested deeper than 64",
        error=JobError,
        says="it is not JSON: its blocks are nested deeper than 64",
        advises="64",
        why="Reading it would take all memory, or all of Python's stack.",
        instead="Write it flatter, or in several files.",
        program=within(nested),
    ),
]
