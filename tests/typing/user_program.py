"""A user's program. Type checkers report the lines that end in a comment "error: code", and no others.

It is never run.
"""

from collections.abc import Callable
from typing import Any, assert_type

import torch
from torch import Tensor

import functional_ds as fds
from functional_ds import comm


def program(steps: int, rate: float = 0.1) -> float:
    """Any program."""
    return steps * rate


# -- worlds: results are a list of what the program returns, and its arguments are checked ----------------------------

assert_type(comm.simulate(program, 3, world_size=2), list[float])
assert_type(comm.simulate(program, 3, 0.5, world_size=2, seed=1), list[float])
assert_type(comm.spawn(program, 3, world_size=2), list[float])
assert_type(comm.debug.explore(program, 3, world_size=2), list[float])
assert_type(comm.symmetric(program, 3, world_size=2), float)
assert_type(comm.simulate(lambda: comm.world().rank, world_size=2), list[int])

comm.simulate(program, "3", world_size=2)  # error: arg-type
comm.simulate(program, world_size=2)  # error: arg-type
comm.simulate(program, 3, 0.5, 1, world_size=2)  # error: arg-type
comm.simulate(program, 3)  # error: call-arg
comm.simulate(program, 3, world_size="2")  # error: arg-type
comm.spawn(program, "3", world_size=2)  # error: arg-type
total: int = comm.simulate(program, 3, world_size=2)[0]  # error: assignment

# -- collectives: what goes in comes out, at once or pending ----------------------------------------------------------

x = torch.ones(4)
pair = (x, {"b": x})
assert_type(comm.all_reduce(x), Tensor)
assert_type(comm.all_reduce(pair), tuple[Tensor, dict[str, Tensor]])
assert_type(comm.start(comm.all_reduce, x), comm.Pending[Tensor])
assert_type(comm.start(comm.all_gather, pair).wait(), tuple[Tensor, dict[str, Tensor]])
assert_type(comm.all_gather(x, uneven=True), Tensor)
assert_type(comm.reduce_scatter(x, op="avg"), Tensor)
assert_type(comm.broadcast(x, 0), Tensor)
assert_type(comm.start(comm.reduce, x, 0), comm.Pending[Tensor])
assert_type(comm.gather(x), Tensor)
assert_type(comm.scatter(x if comm.world().rank == 0 else None, like=x), Tensor)
assert_type(comm.all_to_all(x), Tensor)
assert_type(comm.permute(x, [(0, 1)]), Tensor)
assert_type(comm.copy_to(x), Tensor)
assert_type(comm.start(comm.gather_from, x).then(len), comm.Pending[int])
assert_type(comm.start(comm.send, x, 1), comm.Pending[Tensor])
assert_type(comm.recv(x, 1), Tensor)
assert_type(comm.all_gather_object("name"), list[str])
assert_type(comm.broadcast_object(3), int)

comm.start(comm.all_reduce, x).sum()  # error: attr-defined
comm.start(comm.all_reduce, x) + x  # error: operator
comm.all_reduce(x).wait()  # error: attr-defined
comm.all_reduce(x, "dp")  # error: arg-type
comm.start(comm.all_reduce, x, "dp")  # error: arg-type
comm.all_gather(x, dims=0)  # error: call-arg
comm.start(comm.all_gather, x, dims=0)  # error: arg-type
comm.permute(x, [0, 1])  # error: list-item
comm.all_gather_object("name")[0] + 1  # error: operator

# -- groups and meshes ------------------------------------------------------------------------------------------------

mesh = comm.mesh(dp=2, tp=2)
assert_type(mesh, comm.Mesh)
assert_type(mesh["dp"], comm.Group)
assert_type(mesh["dp", "tp"], comm.Group)
assert_type(comm.world(), comm.Group)
assert_type(comm.world().rank, int)
comm.all_reduce(x, mesh["dp"])

mesh[0]  # error: index
print(mesh.dp)  # error: attr-defined
comm.mesh(dp="2")  # error: arg-type
comm.world().ranks = ()  # error: misc
print(comm.world.rank)  # error: attr-defined

# -- steps ------------------------------------------------------------------------------------------------------------

step = fds.train_step(lambda params, batch: (params["w"] * batch).sum(), fds.adamw(1e-2))
state = step.init({"w": x})
state, metrics = step(state, x)
fds.adamw("1e-2")  # error: arg-type
step.initialise({"w": x})  # error: attr-defined


# -- transforms: what a phase's function takes and returns is checked ---------------------------------------------------


def half(inner: Callable[[fds.Step, fds.State], float | Tensor], step: fds.Step, state: fds.State) -> float | Tensor:
    return inner(step, state) / 2


def lossy(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> fds.State:
    return state


def short(inner: Any, step: fds.Step) -> float:
    return 1.0


assert_type(fds.wrap("half", rate=half), fds.Transform)
fds.wrap("half", rate=fds.innermost(half))
fds.wrap("short", rate=short)  # error: arg-type
fds.wrap("lossy", update=lossy)  # error: arg-type
fds.wrap("unknown", rates=half)  # error: call-arg
