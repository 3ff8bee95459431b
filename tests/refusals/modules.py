"""Modules that are refused: what they do is no function of params and buffers."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm
from functional_ds import transforms as T
from tests.refusals.refusal import Refusal, made, rows, train


def hooked() -> None:
    net = nn.Linear(3, 3)
    net.weight.register_hook(lambda grad: grad / 10)
    fds.functional(net)


class Two(nn.Module):
    """Two layers, and something of the first one kept beside them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.how = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), how
        if how == "tied":
            self.b.weight.data = self.a.weight.data
        elif how == "buffer":
            self.register_buffer("mean", self.a.weight.data[0])
        elif how == "attribute":
            self.kept = self.a.weight.data
        elif how == "generator":
            self.stream = (each for each in range(3))
        elif how == "one dict":
            self.b.__dict__ = self.a.__dict__
        self.counts = [0]
        if how == "referred":
            self.last = lambda counts=self.counts: counts[-1]
        else:
            self.table = {"counts": self.counts}

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "clamp":
            with torch.no_grad():
                self.a.weight.clamp_(-0.1, 0.1)
        if self.how == "nested":
            self.counts[0] += 1
        elif self.how == "referred":
            self.counts = [*self.counts, 1]
        kept = self.kept.sum() if self.how == "attribute" else 0.0
        return self.b(self.a(x)) + kept  # type: ignore[no-any-return]


class Tallies(nn.Linear):
    """Counts its calls in a number."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x)


def between_steps(module: nn.Module, change: Callable[[Any], Any]) -> None:
    """Changes ``apply.module`` after a step."""
    apply, params = fds.functional(module)
    step = made(loss=lambda params, x: apply(params, x).square().mean())
    state, _ = step(step.init(params), rows())
    change(apply.module)
    step(state, rows())


class Counts(nn.Module):
    """Counts its calls in a buffer, to which a list refers, too."""

    def __init__(self, assigns: bool) -> None:
        super().__init__()
        self.inner, self.assigns = nn.Linear(3, 3), assigns
        self.register_buffer("count", torch.zeros(()))
        self.listed = [self.count]

    def forward(self, x: Tensor) -> Tensor:
        if self.assigns:
            self.count = self.count + 1
        else:
            self.listed[0].add_(1)
        return self.inner(x) * (1 + self.count)  # type: ignore[no-any-return]


class Changes(nn.Module):
    """Changes something of itself, or of its parameters, in forward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b, self.how = nn.Linear(3, 3), nn.Linear(3, 3), how
        self.last: Any = None
        self.whole = torch.zeros(4)
        self.part = self.whole[:2]
        if how == "set":
            self.held = {self.a.weight}
        elif how == "keys":
            self.held = {id(self.a.weight): 1.0}
        elif how == "class":
            self.a.weight = type("Scaled", (nn.Parameter,), {})(self.a.weight.data)

    def forward(self, x: Tensor) -> Tensor:
        found = self.b(self.a(x))
        if self.how == "graph":
            found, self.last = found + (0.0 if self.last is None else self.last), found
        elif self.how == "detached":
            self.last = self.a.weight.detach()
        elif self.how == "view":
            self.part.add_(1)
        elif self.how == "swap":
            self.a.weight, self.b.weight = self.b.weight, self.a.weight
        elif self.how == "flags":
            self.b.requires_grad_(False)
        elif self.how == "load":
            self.b.load_state_dict(self.a.state_dict())
        elif self.how == "version" and self.last != self.a.weight._version:
            self.last = self.a.weight._version
        elif self.how == "NumPy":
            self.a.weight.detach().numpy()[0] = 1.0
        elif self.how == "cond":
            return torch.cond(x.sum() > 0, self.a, self.b, (x,))  # type: ignore[no-any-return]
        elif self.how == "func":
            return torch.func.vjp(self.a, x)[1](found)[0]  # type: ignore[no-any-return]
        return found  # type: ignore[no-any-return]


class LeavesOut(nn.Linear):
    def parameters(self, recurse: bool = True) -> Any:
        return iter([self.weight])


class SetsAux(nn.Linear):
    aux: Any

    def forward(self, input: Tensor) -> Tensor:
        found = super().forward(input)
        self.aux = found.sum()
        return found


def read_from_module() -> None:
    net = SetsAux(3, 3)
    net.aux = torch.zeros(())
    apply, params = fds.functional(net)
    step = made(loss=lambda params, x: apply(params, x).sum() + apply.module.aux)
    step(step.init(params), rows())


def shared_between_two() -> None:
    encoder = nn.Linear(3, 3)
    trees = {name: fds.functional(nn.Sequential(encoder, nn.Linear(3, 3)))[1] for name in "ab"}
    made().init(trees)


def scripted() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        train(torch.jit.script(nn.Linear(3, 3)), T.zero(1))


def with_copies() -> None:
    apply, params = fds.functional(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    step = made(loss=lambda params, x: apply(params, x).sum())
    step(step.init({path: leaf.detach().clone() for path, leaf in params.items()}), rows())


class Memory(nn.Module):
    """Writes a large buffer for batches of more than four rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_buffer("memory", torch.zeros(1 << 16))

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 4:
            self.memory.add_(1)
        return self.inner(x)  # type: ignore[no-any-return]


def deferred() -> Any:
    def build() -> nn.Module:
        net = nn.Linear(3, 3)
        net.weight.detach().numpy()[:] = 0
        return net

    return fds.deferred(build)


REFUSALS = [
    Refusal(
        what="a hook on a parameter (`register_hook`)",
        error=ValueError,
        says="the parameter 'weight' has a hook",
        advises=r"on a view.*fds.wrap\(..., reduce=",
        why="It would not run: gradients are values of a step.",
        instead="Register the hook on a view, in `forward`, or change gradients in a transform around `reduce`.",
        program=hooked,
    ),
    Refusal(
        what="weights tied by `.data`",
        error=ValueError,
        says="'a.weight' and 'b.weight' share memory, which training would part",
        advises="b.weight = a.weight",
        why="Each would be trained alone.",
        instead="Assign the parameter itself: `b.weight = a.weight`.",
        program=lambda: train(Two("tied")),
    ),
    Refusal(
        what="modules that have one `__dict__`",
        error=ValueError,
        says="the modules 'a' and 'b' have one __dict__",
        advises="put one module in both places",
        why="Steps run a copy of the module, in which each would have its own.",
        instead="Put one module in both places, or share parameters and buffers one by one.",
        program=lambda: train(Two("one dict")),
    ),
    Refusal(
        what="a list or dict that `forward` writes, as an attribute and inside of another attribute",
        error=RuntimeError,
        says="'counts' and 'table.counts' are one list, and a state would have two",
        advises="keep one of them, or make both attributes of modules themselves",
        why="A state has trees, whose parts are not shared.",
        instead="Keep one of them; attributes that are one list or dict stay one.",
        program=lambda: train(Two("nested")),
    ),
    Refusal(
        what="an attribute that `forward` sets anew, and to whose list or dict another object or a function refers",
        error=RuntimeError,
        says="its attribute 'counts' is another list, and something else in it refers to the one before",
        advises="write into it in place, or refer to it by its name alone",
        why="The one before would be in no state.",
        instead="Write into it in place, or let the function read the attribute.",
        program=lambda: train(Two("referred")),
    ),
    Refusal(
        what="a buffer in a weight's memory",
        error=ValueError,
        says="'a.weight' and 'mean' share memory, and training would change only one",
        advises="memory of its own",
        why="The update makes new weights, and the buffer would keep the old ones.",
        instead="Give the buffer separate memory, or compute it in `forward`.",
        program=lambda: train(Two("buffer")),
    ),
    Refusal(
        what="an attribute made of a weight, read in `forward`",
        error=RuntimeError,
        says="'kept' shared memory with the parameter 'a.weight'",
        advises="use the parameter itself",
        why="It would keep the values from before the training.",
        instead="Read the parameter itself.",
        program=lambda: train(Two("attribute")),
    ),
    Refusal(
        what="a weight that `forward` writes (`clamp_`, `.data`)",
        error=RuntimeError,
        says="Two wrote into its parameter 'a.weight' in place",
        advises=r"parametrize.*fds.wrap\(..., update=",
        why="Params are an input of the step, and the write would be lost.",
        instead="Use a parametrization, or change weights after the update, in a transform around `update`.",
        program=lambda: train(Two("clamp")),
    ),
    Refusal(
        what="`nn.Embedding(max_norm=...)`",
        error=RuntimeError,
        says="Embedding wrote into its parameter 'weight' in place",
        advises=r"parametrize.*fds.wrap\(..., update=",
        why="It writes its weight in `forward`.",
        instead="Renormalise in a parametrization, or after the update.",
        program=lambda: train(nn.Embedding(4, 3, max_norm=0.1), batches=(torch.arange(4),)),
    ),
    Refusal(
        what="a module compiled by `torch.compile`",
        error=TypeError,
        says=r"compiled by torch.compile, so its parameters would be named _orig_mod\.",
        advises="pass the module itself, and compile blocks by T.compiled or the step by fds.jit",
        why="Its parameters would have other names than the module's, in states and files.",
        instead="Pass the module itself; compile blocks by `T.compiled`, or the step by `fds.jit`.",
        program=lambda: fds.functional(torch.compile(nn.Linear(3, 2), backend="eager")),  # type: ignore[arg-type]
    ),
    Refusal(
        what="a lazy module that has not run",
        error=ValueError,
        says="has no shape yet",
        advises="call the module once on an example",
        why="Its parameters have no shape.",
        instead="Call it once on an example.",
        program=lambda: train(nn.LazyLinear(3)),
    ),
    Refusal(
        what="an attribute that cannot be copied (a generator, a lock)",
        error=TypeError,
        says="Two cannot be copied, because the attribute 'stream' is a generator",
        advises="make it in forward, or keep it outside",
        why="Steps run a copy of the module.",
        instead="Make it in `forward`, or keep it outside of the module.",
        program=lambda: train(Two("generator")),
    ),
    Refusal(
        what="a buffer that `forward` assigns and a list refers to",
        error=RuntimeError,
        says="a call assigned its buffer 'count'",
        advises="write it in place, or refer to it by its name",
        why="The list would keep the old tensor.",
        instead="Write the buffer in place, or refer to it by its name.",
        program=lambda: train(Counts(assigns=True)),
    ),
    Refusal(
        what="a buffer that a list refers to, written under `remat`",
        error=RuntimeError,
        says="a call under remat wrote its buffer 'count'",
        advises="refer to it by its name",
        why="A recomputation puts old values back by name, and the list would see the new one.",
        instead="Refer to the buffer by its name.",
        program=lambda: train(Counts(assigns=False), T.remat("")),
    ),
    Refusal(
        what="a large buffer that is first written in a later step",
        error=RuntimeError,
        says="the buffer 'memory' was written in place, and was not in the first step",
        advises="let the module assign a new tensor",
        why="The state before the step would change with it.",
        instead="Assign a new tensor to the buffer.",
        program=lambda: train(Memory(), batches=(rows(4), rows(8))),
    ),
    Refusal(
        what="a module with BatchNorm whose state was made of copies of its parameters",
        error=RuntimeError,
        says="does not have its buffers|would be lost",
        advises=r"step.init\(params, modules=apply\)",
        why="The running statistics would have no place in the state.",
        instead="Call `step.init(params, modules=apply)`, or `apply.module.eval()`.",
        program=with_copies,
    ),
    Refusal(
        what="a scripted module, under ZeRO",
        error=RuntimeError,
        says="the parameter 'weight' went straight into .* a compiled function",
        advises="view_as",
        why="It takes no lazy parameter, so gradients would be lost.",
        instead="Use the module that was scripted.",
        program=scripted,
    ),
    Refusal(
        what="a deferred module that computes its weights with NumPy",
        error=RuntimeError,
        says=r"\.numpy\(\) of a tensor of shape \[3, 3\], whose values are computed later",
        advises=r"copy_\(torch.from_numpy",
        why="The values do not exist yet, and what NumPy does is not recorded.",
        instead="Use torch's operations, or `weight.copy_(torch.from_numpy(...))`.",
        program=deferred,
    ),
    Refusal(
        what="an attribute with a graph that a later step reads",
        error=RuntimeError,
        says="'last' was computed, with a graph, in an earlier pass",
        advises="detach",
        why="The graph is gone, and its params have moved.",
        instead="Keep `.detach().clone()`.",
        program=lambda: train(Changes("graph"), batches=(rows(), rows())),
    ),
    Refusal(
        what="an attribute that `forward` sets, read from `apply.module`",
        error=RuntimeError,
        says="'aux' of apply.module is not what a call has set",
        advises="let forward return",
        why="A call changes a copy of the module.",
        instead="Return the value from `forward`, along with the output.",
        program=read_from_module,
    ),
    Refusal(
        what="an attribute or buffer that `forward` sets to `weight.detach()`",
        error=RuntimeError,
        says="set 'last' to the memory of its parameter 'a.weight'",
        advises="clone",
        why="The update changes that memory, and ZeRO frees it.",
        instead="Set it to `.detach().clone()`, or read the parameter itself.",
        program=lambda: train(Changes("detached")),
    ),
    Refusal(
        what="a write into one of two attributes in one memory, or into a view of a buffer",
        error=RuntimeError,
        says="'part', which shares memory with its 'whole'",
        advises="keep one of them",
        why="Each is a separate value here, and the other would not change.",
        instead="Keep one, and take the view in `forward`.",
        program=lambda: train(Changes("view")),
    ),
    Refusal(
        what="parameters that `forward` swaps",
        error=RuntimeError,
        says="set its parameter 'a.weight' to another tensor",
        advises="choose between parameters",
        why="Params keep their places.",
        instead="Choose between them by a number.",
        program=lambda: train(Changes("swap")),
    ),
    Refusal(
        what="`requires_grad_()` in `forward`",
        error=RuntimeError,
        says="changed requires_grad of a parameter in forward",
        advises="functional_call",
        why="A step trains the same params throughout.",
        instead="Use detached parameters, or a step for each part.",
        program=lambda: train(Changes("flags")),
    ),
    Refusal(
        what="`load_state_dict` in `forward`, under ZeRO",
        error=RuntimeError,
        says="the module Changes calls load_state_dict in forward",
        advises=r"buffers \(register_buffer\)",
        why="It writes into parameters.",
        instead="Keep the copy in buffers, or load between steps.",
        program=lambda: train(Changes("load"), T.zero(1)),
    ),
    Refusal(
        what="a write into a parameter through NumPy, in the first step of `zero(3)`",
        error=RuntimeError,
        says="the loss wrote into the parameter 'a.weight'",
        advises="change params after the update",
        why="The write would be lost with the unit's memory.",
        instead="Change weights after the update, in a transform around `update`.",
        program=lambda: comm.simulate(train, Changes("NumPy"), T.zero(3), world_size=2),
    ),
    Refusal(
        what="`_version` of a parameter, read under ZeRO",
        error=RuntimeError,
        says="the loss reads _version",
        advises="Compute it in each step",
        why="It is the same in each step, so a cache by it would never be renewed.",
        instead="Compute the value in each step, or count steps in a buffer.",
        program=lambda: train(Changes("version"), T.zero(1)),
    ),
    Refusal(
        what="`torch.cond`, or `torch.compile(fullgraph=True)`, around parameters, under ZeRO",
        error=RuntimeError,
        says="has torch trace code",
        advises="a Python if or torch.where",
        why="torch cannot trace the placeholders of parameters.",
        instead="Choose by a Python `if` or `torch.where`; compile with `fullgraph=False`.",
        program=lambda: train(Changes("cond"), T.zero(1)),
    ),
    Refusal(
        what="`torch.func` in a layer under `remat`",
        error=RuntimeError,
        says="a function under remat uses torch.func",
        advises="leave the layer out of remat",
        why="torch lets none of its transforms run where hooks take what autograd saves.",
        instead="Leave the layer out of `remat`, or use `torch.autograd.grad(..., create_graph=True)`.",
        program=lambda: train(Changes("func"), T.remat("", policy="recompute")),
    ),
    Refusal(
        what="a subclass of `nn.Parameter`",
        error=ValueError,
        says="'a.weight' of Changes is a Scaled",
        advises="use nn.Parameter",
        why="Plain tensors take the place of parameters, and what the class does would be lost.",
        instead="Use `nn.Parameter`, and a parametrization.",
        program=lambda: train(Changes("class")),
    ),
    Refusal(
        what="a table by `id(parameter)`, or by parameters",
        error=ValueError,
        says="the keys of 'held' in Changes",
        advises="names as keys",
        why="Other tensors take the place of parameters.",
        instead="Use their names as keys.",
        program=lambda: train(Changes("keys")),
    ),
    Refusal(
        what="a parameter in a set, or in an object that hides it",
        error=ValueError,
        says="(the keys of 'held' in Changes|holds the parameter)",
        advises="names",
        why="A call could not put the step's params there.",
        instead="Refer to it by an attribute, a list or the values of a dict.",
        program=lambda: train(Changes("set")),
    ),
    Refusal(
        what="a module whose `parameters()` leaves some out",
        error=ValueError,
        says="leaves out 'bias'",
        advises="requires_grad=False",
        why="PyTorch's optimizer would not train those.",
        instead="Freeze them: `requires_grad=False`.",
        program=lambda: train(LeavesOut(3, 3)),
    ),
    Refusal(
        what="trained leaves in one memory, as of two modules with a common part",
        error=ValueError,
        says="share memory, and the step would train each alone",
        advises="ModuleDict",
        why="Tied parameters would diverge.",
        instead="Put the modules into one `nn.ModuleDict`.",
        program=shared_between_two,
    ),
    Refusal(
        what="a buffer that is changed on `apply.module` after `step.init`",
        error=RuntimeError,
        says="the buffer 'running_mean' was changed on apply.module after step.init",
        advises=r"with_values\({'running_mean': value}\)",
        why="A step reads and writes the state's buffers.",
        instead="Change the state's: `state.put(buffers=state.slots['buffers'].with_values({name: value}))`.",
        program=lambda: between_steps(nn.BatchNorm1d(3), lambda module: module.running_mean.fill_(1.0)),
    ),
    Refusal(
        what="a tensor or number that `forward` sets, changed on `apply.module`",
        error=RuntimeError,
        says="the attribute 'count', which forward sets, was changed on apply.module",
        advises=r"with_values\({'count': value}\)",
        why="The state has the value that counts, and `apply.module` the one that it was built with.",
        instead="Change the state's: `state.put(buffers=state.slots['buffers'].with_values({name: value}))`.",
        program=lambda: between_steps(Tallies(), lambda module: setattr(module, "count", 7)),
    ),
    Refusal(
        what="a weight of `apply.module` that is written",
        error=RuntimeError,
        says="the parameter 'weight' of apply.module was written, and has no values there",
        advises="before fds.functional, or change params in a transform",
        why="A step's params are in its state.",
        instead="Write it before `fds.functional`, or change params in a transform around `update`.",
        program=lambda: between_steps(nn.Linear(3, 3), lambda module: nn.init.zeros_(module.weight)),
    ),
    Refusal(
        what="`requires_grad_(False)` on `apply.module`",
        error=RuntimeError,
        says="requires_grad of the parameter 'weight' of apply.module was changed",
        advises="before fds.functional",
        why="A step trains the same params throughout.",
        instead="Freeze parameters before `fds.functional`, or train parts by separate steps.",
        program=lambda: between_steps(nn.Linear(3, 3), lambda module: module.requires_grad_(False)),
    ),
    Refusal(
        what="a layer of `apply.module` that is replaced, added or removed, if it has parameters",
        error=RuntimeError,
        says="the parameter '0.weight' of apply.module was replaced, added or removed",
        advises="call it again",
        why="The state has params and optimizer states of the layers that were there.",
        instead="Change the module, and call `fds.functional` and `step.init` again.",
        program=lambda: between_steps(nn.Sequential(nn.Linear(3, 3)), lambda module: module.__setitem__(0, nn.Linear(3, 3))),
    ),
]
