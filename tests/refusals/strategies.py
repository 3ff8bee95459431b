"""Strategies that are refused: transforms and optimizers that would compute something else together."""

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

import functional_ds as fds
from functional_ds import comm, seq
from functional_ds import pipelining as pp
from functional_ds import transforms as T
from functional_ds.step.state.state import UpdateError
from tests.refusals.refusal import Refusal, made, rows, weights


def begin(*strategy: fds.Transform, rule: Any = None, ranks: int = 2) -> None:
    comm.simulate(lambda: made(*strategy, rule=rule).init(weights()), world_size=ranks)


def normed() -> fds.Optimizer:
    """Divides the gradients by their norm, which shards do not have."""

    def update(params: list[Tensor], grads: fds.Weighted, state: Any, rate: Any) -> tuple[list[Tensor], Any]:
        norm = torch.stack([g.norm() for g in grads.sum]).norm()
        return [p - 0.1 * g / norm for p, g in zip(params, grads.sum, strict=True)], state

    return fds.Optimizer(lambda params: (), update, "normed")


def kept() -> fds.Transform:
    """The gradient before, as the optimizer has its tensors."""

    def init(inner: Any, step: fds.Step, params: Any) -> fds.State:
        state: fds.State = inner(step, params)
        return state.put(kept=[torch.zeros_like(leaf) for leaf in step.trained(state)])

    def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
        return inner(step, state.put(kept=grads.sum), grads)

    return fds.wrap("kept", slot="kept", init=init, update=fds.innermost(update))


def latest() -> fds.Transform:
    """The params after each update, not copied."""

    def init(inner: Any, step: fds.Step, params: Any) -> fds.State:
        state: fds.State = inner(step, params)
        return state.put(latest=step.trained(state))

    def update(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
        state, metrics = inner(step, state, grads)
        return state.put(latest=step.trained(state)), metrics

    return fds.wrap("latest", slot="latest", init=init, update=update)


def after_one(*strategy: fds.Transform) -> None:
    step = made(*strategy)
    step(step.init(weights()), rows())


def mean(grads: list[Tensor], memory: Any, group: comm.Group) -> tuple[list[Tensor], Any]:
    return comm.all_reduce(grads, group, op="avg"), memory


def undivided() -> None:
    """An optimizer whose state is one tensor for all leaves, and a loss that leaves one out."""
    rule = fds.Optimizer(lambda params: torch.zeros(9), lambda p, g, s, r: (p, s), "odd", elementwise=True)
    step = made(rule=rule)
    step(step.init(weights() | {"head": torch.ones(3)}), rows())


def slices() -> None:
    def program() -> None:
        mesh = comm.mesh(tp=2)
        made(T.tensor_parallel({"w": 1}, mesh["tp"]), rule=fds.lamb(0.1)).init(weights())

    comm.simulate(program, world_size=2)


def two_ranks(batch: Tensor | None, plan: Any = None) -> None:
    """Dropout between two linears, cut over two ranks; without a batch each rank has its own."""
    layers = nn.Sequential(OrderedDict(up=nn.Linear(3, 4), drop=nn.Dropout(0.5), down=nn.Linear(4, 3)))
    apply, params = fds.functional(nn.Sequential(OrderedDict(layers=nn.Sequential(layers))))

    def program() -> None:
        cut = T.tensor_parallel(plan or {"up": "colwise", "down": "rowwise"})
        step = made(cut, loss=lambda p, x: apply(p, x).square().mean())
        step(step.init(params), rows() * comm.world().rank if batch is None else batch)

    comm.simulate(program, world_size=2)


def drawn_on_slices() -> None:
    """Dropout by a key of hidden features, which are cut over two ranks."""

    def loss(p: Any, x: Tensor, key: fds.Key) -> Tensor:
        return fds.tp.row(key.dropout(fds.tp.column(x, p["up"]), 0.5, "hidden"), p["down"]).square().mean()

    def program() -> None:
        step = made(T.tensor_parallel({"up": "colwise", "down": "rowwise"}), loss=loss)
        step(step.init({"up": torch.arange(12.0).view(4, 3), "down": torch.ones(3, 4)}), rows())

    comm.simulate(program, world_size=2)


def summed_whole() -> None:
    """A weight whose gradients are summed by a word, and which all of two ranks use alike."""

    def program() -> None:
        step = made(T.tensor_parallel({"w": "replicated_with_grad_allreduce"}))
        step(step.init(weights()), rows())

    comm.simulate(program, world_size=2)


def counted_positions() -> None:
    """A table of positions, which a loss counts from 0 on each of two ranks."""

    def loss(params: Any, batch: Any) -> fds.Weighted:
        tokens = batch["input_ids"]
        x = params["w"][tokens] * (tokens * torch.arange(tokens.shape[1]))[..., None]
        return fds.Weighted(x.square().sum(), tokens.numel())

    def program() -> None:
        step = made(T.zero(0), T.sequence(tokenwise=True), loss=loss)
        step(step.init(weights()), torch.arange(8)[None] % 3)

    comm.simulate(program, world_size=2)


def experts(before: Any, *, edp: bool = True, router: bool = False) -> None:
    """A stack of four experts over 2 x 2 ranks, after what ``before`` makes of the mesh."""
    gate = nn.Module()
    gate.experts = nn.Parameter(torch.ones(4, 3))
    apply, params = fds.functional(gate)

    def program() -> None:
        mesh = comm.mesh(dp=4).split("dp", edp=2, ep=2)
        cut = T.experts("experts", mesh["ep"], edp=mesh["edp"] if edp else None)
        made(*before(mesh), cut).init(params if router else {"experts": torch.ones(4, 3)}, modules=apply if router else None)

    comm.simulate(program, world_size=4)


def penalised_experts() -> None:
    """Two experts on two ranks, which exchange rows, and a penalty on each rank's own."""

    def program() -> None:
        mesh = comm.mesh(dp=2).split("dp", edp=1, ep=2)

        def loss(params: Any, x: Tensor) -> Tensor:
            mine = comm.all_to_all(x, mesh["ep"]) * params["experts"]
            return comm.all_to_all(mine, mesh["ep"]).sum() + params["experts"].square().sum()

        step = made(T.zero(1, mesh["edp", "ep"]), T.experts("experts", mesh["ep"]), loss=loss)
        step(step.init({"experts": torch.ones(2, 1)}), torch.ones(2, 1))

    comm.simulate(program, world_size=2)


def listed_experts() -> None:
    """Experts that are leaves of their own."""
    leaves = {"experts": [{"up": torch.ones(3, 3)} for _ in range(2)]}

    def program() -> None:
        mesh = comm.mesh(dp=2).split("dp", edp=1, ep=2)
        made(T.zero(1, mesh["edp", "ep"]), T.experts("experts", mesh["ep"])).init(leaves)

    comm.simulate(program, world_size=2)


def mean_of_positions() -> None:
    """A loss of each sequence's mean, over two ranks that have half of its positions each."""

    def loss(params: Any, batch: Any) -> fds.Weighted:
        tokens = batch["input_ids"]
        means = (params["w"][tokens] * tokens[..., None]).mean(1)
        return fds.Weighted(means.square().sum(), len(means))

    def program() -> None:
        step = made(T.zero(0), T.sequence(tokenwise=True), loss=loss)
        step(step.init(weights()), torch.arange(8)[None] % 3)

    comm.simulate(program, world_size=2)


def half_of_a_sequence() -> None:
    """Attention over two of the four ranks that have a part of the sequence each."""

    def program() -> None:
        mesh = comm.mesh(ring=2, heads=2)
        attend = seq.ring(mesh["ring"])

        def loss(params: Any, batch: Any) -> fds.Weighted:
            x = params["w"][batch["input_ids"]][:, None]
            return fds.Weighted(attend(x, x, x).sum(), batch["input_ids"].numel())

        step = made(T.zero(0), T.sequence(mesh["ring", "heads"]), loss=loss)
        step(step.init(weights()), torch.arange(8)[None] % 3)

    comm.simulate(program, world_size=4)


def stages_of_a_sequence() -> None:
    """Two stages over two ranks of a sequence each, of which the second means over positions that one rank has."""

    def mixed(params: Any, x: Tensor) -> Tensor:
        return x + x.mean(1, keepdim=True) * params["w"]

    def program() -> None:
        mesh, params = comm.mesh(pp=2, sp=2), [{"w": torch.ones(3)} for _ in range(2)]
        two = pp.stages(
            [lambda p, batch: batch["x"] * p["w"], mixed], params, loss=lambda y, batch: fds.Weighted(y.sum(), y.numel())
        )
        schedule, cut = pp.one_f_one_b(2, 2), T.sequence(mesh["sp"], dims={"x": 1})
        strategy = T.zero(1, mesh["sp"]), T.pipeline(schedule, two, mesh["pp"]), cut
        step = fds.compose(*strategy)(fds.train_step(two, fds.sgd(0.1)))
        step(step.init(params), {"x": torch.ones(2, 4, 3)})

    comm.simulate(program, world_size=4)


def clipped_by_rank() -> None:
    step = made(T.local_gradients(), T.clip(1.0), rule=fds.one_bit_adam(0.1, 1))
    step(step.init(weights()), rows())


def stages(count: int = 2) -> tuple[Any, Any]:
    params = [{"w": torch.eye(3)} for _ in range(count)]
    return pp.stages([lambda p, x: x @ p["w"]] * count, params, loss=lambda y, batch: y.mean()), params


def another_loss() -> None:
    model, params = stages()
    step = T.pipeline(pp.gpipe(2, 2), model)(fds.train_step(lambda params, x: x.sum(), fds.sgd(0.1)))
    comm.simulate(lambda: step(step.init(params), rows()), world_size=2)


def coupled_in_a_pipeline() -> None:
    def unit(grads: Any, memory: Any, group: comm.Group) -> Any:
        means = [comm.all_reduce(grad, group, op="avg") for grad in grads]
        return [mean / torch.stack([x.norm() for x in means]).norm() for mean in means], memory

    def program() -> None:
        params, mesh = [{"w": torch.ones(2), "b": torch.ones(2)} for _ in range(2)], comm.mesh(dp=1, pp=2)
        model = pp.stages([lambda p, x: x * p["w"] + p["b"]] * 2, params, loss=lambda y, batch: y.mean())
        parts = T.replicated(mesh["dp"], reduce=unit), T.pipeline(pp.gpipe(2, 2), model, mesh["pp"])
        fds.compose(*parts)(fds.train_step(model, fds.sgd(0.1))).init(params)

    comm.simulate(program, world_size=2)


def penalty_in_a_pipeline() -> None:
    def ridge(inner: Any, step: fds.Step, state: fds.State, params: Any, batch: Any) -> Any:
        loss, metrics = inner(step, state, params, batch)
        penalty = sum(leaf.square().sum() for leaf in fds.tree.leaves(params))
        return fds.Weighted(loss.sum + penalty * loss.weight, loss.weight), metrics

    model, params = stages()
    step = fds.compose(T.pipeline(pp.gpipe(2, 2), model), fds.wrap("ridge", loss=ridge))(fds.train_step(model, fds.sgd(0.1)))
    comm.simulate(lambda: step(step.init(params), rows()), world_size=2)


def accumulated_pipeline() -> None:
    model, _ = stages()
    fds.compose(T.accumulate(2), T.pipeline(pp.gpipe(2, 2), model))(fds.train_step(model, fds.sgd(0.1)))


class Doubled(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * 2


class Does(nn.Module):
    """Two layers with something between them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second, self.how = nn.Linear(3, 3), nn.Linear(3, 3), how

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        if self.how == "branches" and y.sum() > 0:
            y = -y
        if self.how == "function":
            y = Doubled.apply(y).tanh()
        if self.how == "writes":
            y = x.add_(y)
        return self.second(y)  # type: ignore[no-any-return]


def cut(how: str) -> None:
    pp.cut(Does(how), ["second"], loss=lambda y, batch: y.mean(), example=rows())


def another_state() -> None:
    T.zero(1)(made())(made().init(weights()), rows())


def uneven() -> None:
    step = made(T.accumulate(3))
    step(step.init(weights()), rows(4))


def other_models() -> None:
    comm.simulate(lambda: made(T.zero(1)).init({"w": torch.ones(3, 2 + comm.world().rank)}), world_size=2)


def norm_too_early() -> None:
    """A transform that takes the norm of gradients before they are reduced."""

    def gradients(inner: Any, step: fds.Step, state: fds.State, batch: Any, carry: Any, last: bool) -> Any:
        after, grads, metrics = inner(step, state, batch, carry, last)
        step.norm(after, grads.sum)
        return after, grads, metrics

    mean = T.replicated(reduce=lambda grads, memory, group: (comm.all_reduce(grads, group, op="avg"), memory))
    step = made(mean, fds.wrap("normed", gradients=gradients))
    step(step.init(weights()), rows())


def clamped_in_place(inner: Any, step: fds.Step, state: fds.State, grads: fds.Weighted) -> Any:
    state, metrics = inner(step, state, grads)
    for leaf in fds.tree.leaves(state.params):
        leaf.clamp_(-1, 1)
    return state, metrics


def writes_beside_a_loss_scale() -> None:
    step = made(fds.wrap("clamped", update=clamped_in_place), T.mixed_precision("fp16"))
    step(step.init(weights()), rows())


def another_rate() -> None:
    """Rank 1 has another learning rate."""
    comm.simulate(lambda: made(T.zero(1), rule=fds.adamw(0.1 / (1 + comm.world().rank))).init(weights()), world_size=2)


REFUSALS = [
    Refusal(
        what="`step.norm` of gradients in a phase `gradients`, with `replicated` or `compressed_gradients`",
        error=ValueError,
        says="step.norm is asked within the phase gradients",
        advises=r"use reduced, grads = step\.reduce\(state, grads\) first",
        why="Each rank has the gradients of its rows alone there.",
        instead="`reduced, grads = step.reduce(after, grads)`, then `step.norm(reduced, grads.sum)`.",
        program=norm_too_early,
    ),
    Refusal(
        what="a custom `update` that writes params or its slot in place, with a loss scale",
        error=ValueError,
        says=r"its update writes state\.params\.w in place",
        advises="put a new tensor into the state",
        why="A skipped step must leave them as they were.",
        instead="Put new tensors into the state; or use `state.skip`, and declare `traits=[Trait.HEEDS_SKIPS]`.",
        program=writes_beside_a_loss_scale,
    ),
    Refusal(
        what="an `update` that puts the params themselves into its slot in the first step",
        error=ValueError,
        says="the slot 'latest' shares memory with the params, and the next update writes into it",
        advises=r"keep a copy, tensor\.clone\(\)",
        why="The next update would change what the slot keeps.",
        instead="Put `tensor.clone()` into the slot; at `init` the library copies.",
        program=lambda: after_one(latest()),
    ),
    Refusal(
        what="two transforms that divide a batch over the same ranks, or `apart` and one of these",
        error=ValueError,
        says=r"replicated\(mean, world\) and zero\(1, world\) both divide the ranks \[0, 1\]",
        advises="give each its own axis of a mesh",
        why="The second would reduce the first one's sums, or shards as if they were whole leaves.",
        instead="Leave one out, or give each its own axis of a mesh.",
        program=lambda: begin(T.replicated(reduce=mean), T.zero(1)),
    ),
    Refusal(
        what="another optimizer, learning rate, transform, schedule, seed or version on one of the ranks that train together",
        error=ValueError,
        says=r"have different steps. optimizer: rank 0 has adamw\(lr=0.1,.*; rank 1 has adamw\(lr=0.05,",
        advises="Compose the same step on every rank",
        why="Each rank would update its shard by its own rule, or wait for messages that never come.",
        instead="Compose the same step on every rank; batches and losses may be a rank's own.",
        program=another_rate,
    ),
    Refusal(
        what="a state that another strategy made",
        error=ValueError,
        says="it is the state of another strategy",
        advises=r"fds.load\(folder, like=step.init",
        why="What its transforms keep is missing, or would be dropped.",
        instead="Carry the values over: `fds.save`, then `fds.load(folder, like=step.init(params))`.",
        program=another_state,
    ),
    Refusal(
        what="two `zero`, or a transform of `view` before it",
        error=ValueError,
        says="this step has another view already",
        advises="use one zero, and put it before",
        why="Each replaces how params are stored.",
        instead="Use one `zero`, before transforms that wrap `view`.",
        program=lambda: made(T.zero(1), T.zero(3)),
    ),
    Refusal(
        what="two transforms for data parallelism",
        error=ValueError,
        says="this step has a transform that reduces gradients already",
        advises="use either",
        why="Gradients would be summed twice.",
        instead="Use one of `zero`, `replicated`, `local_gradients`, `compressed_gradients`.",
        program=lambda: begin(T.zero(1), T.compressed_gradients(comm.codecs.OneBit())),
    ),
    Refusal(
        what="`local_gradients` with an optimizer that does not sum over ranks",
        error=ValueError,
        says="params would drift apart",
        advises=r"use fds.one_bit_adam or fds.zero_one_adam, or T.zero\(0\)",
        why="Params would drift apart.",
        instead="Use `fds.one_bit_adam`, `fds.zero_one_adam`, or `T.zero(0)`.",
        program=lambda: begin(T.local_gradients()),
    ),
    Refusal(
        what="a transform after `offload` that keeps a slot and whose `update` is innermost",
        error=ValueError,
        says=r"put it after kept, whose update is innermost and so runs once for each piece",
        advises="put it after kept",
        why="Each piece of the update would get the whole slot.",
        instead="Compose `offload` after it.",
        program=lambda: made(T.offload("cpu"), kept()).init(weights()),
    ),
    Refusal(
        what="`offload` after `zero`",
        error=ValueError,
        says="offload",
        advises="put it before zero",
        why="Each rank would offload all of the state.",
        instead="Compose `offload` before `zero`.",
        program=lambda: made(T.zero(1), T.offload("cpu")),
    ),
    Refusal(
        what="`ema` after `zero` or `mixed_precision`",
        error=ValueError,
        says="this step stores params in its own way already",
        advises="put ema before mixed_precision, offload and zero",
        why="The average would be of what is stored, not of the params.",
        instead="Compose `ema` first.",
        program=lambda: made(T.zero(1), T.ema(0.9)),
    ),
    Refusal(
        what="an optimizer that needs whole leaves, under ZeRO",
        error=ValueError,
        says="normed.* is not elementwise",
        advises="Clip with T.clip; .*fds.per_matrix.*fds.PerParameter",
        why="It would get shards.",
        instead="Use `T.clip`, `fds.per_matrix` or `fds.PerParameter`.",
        program=lambda: begin(T.zero(1), rule=normed()),
    ),
    Refusal(
        what="`muon` or `per_matrix`, where `matrices=` names a complex matrix or a leaf of more dims",
        error=ValueError,
        says="names the leaf 'w' of shape .3, 2., which is complex",
        advises="leave it out of matrices=, so that others= updates it",
        why="The rule is for real matrices, and the leaf would go to `others`.",
        instead="Leave it out of `matrices=`; name stacks of matrices in `stacks=`.",
        program=lambda: made(rule=fds.muon(0.1, fds.sgd(0.1), matrices="w")).init({"w": torch.ones(3, 2) * 1j}),
    ),
    Refusal(
        what='params of which two leaves have one path, as `{"a.b": t, "a": {"b": u}}`',
        error=ValueError,
        says=r"the leaves at .'a'..'b'. and .'a.b'. have one path, 'a.b'",
        advises="rename one of the keys",
        why="Units, optimizers and checkpoints name leaves by their paths.",
        instead="Rename one of the keys.",
        program=lambda: made().init({"a.b": torch.ones(2), "a": {"b": torch.ones(3)}}),
    ),
    Refusal(
        what="LAMB or Muon on slices of tensor parallelism",
        error=ValueError,
        says="over 2 ranks, but lamb looks at whole leaves",
        advises="param_groups",
        why="Norms of slices are not the leaf's.",
        instead="Give those leaves another optimizer by `fds.param_groups`.",
        program=slices,
    ),
    Refusal(
        what="`nn.Dropout` in training, between layers that tensor parallelism cuts",
        error=RuntimeError,
        says="the loss drew from torch's random generator",
        advises=r"key.dropout\(x, p, name, places=fds.tp.places\(x, dim\)\)",
        why="Each rank would draw another mask than a single device.",
        instead="Draw by the step's `Key` with `fds.tp.places`, or set the probability to 0.",
        program=lambda: two_ranks(rows()),
    ),
    Refusal(
        what="tensor-parallel ranks with different batches",
        error=ValueError,
        says=r"the ranks \[1\] have another batch than rank 0",
        advises="mesh\\['dp'\\].rank",
        why="They compute parts of one batch's activations, whose sum would mean nothing.",
        instead="Give rows by the place in `mesh['dp']`, and all ranks of `mesh['tp']` the same.",
        program=lambda: two_ranks(None),
    ),
    Refusal(
        what="`key.dropout` of a slice, without `places=`",
        error=ValueError,
        says=r"the draw 'hidden' is for a tensor of shape \[4, 2\] that differs on the ranks 0 and 1",
        advises=r"places=fds.tp.places\(x, dim\)",
        why="Each rank would draw the mask of the first slice.",
        instead="Say which features the rank has: `places=fds.tp.places(x, dim)`.",
        program=drawn_on_slices,
    ),
    Refusal(
        what='`"replicated_with_grad_allreduce"` in a plan, of a leaf that acts on what is whole',
        error=ValueError,
        says=r"for 'w', and all ranks of 'world' have the same gradients of it",
        advises="use 'replicated' for it",
        why="Each rank has the whole gradient, and their sum is as many times too large as there are ranks.",
        instead='Say `"replicated"`, or leave it out of the plan.',
        program=summed_whole,
    ),
    Refusal(
        what="two keys of a plan that contradict each other, neither more specific than the other",
        error=ValueError,
        says=r"'layers.0.up' matches '\*.up': 'colwise' and '0.\*': 'replicated'",
        advises="is more specific: add one that is",
        why="Which of them holds for the layer is not said.",
        instead="Add a key that is more specific than both.",
        program=lambda: two_ranks(rows(), {"0.*": "replicated", "*.up": "colwise"}),
    ),
    Refusal(
        what="a layer's weight that a plan splits or keeps otherwise than the layer",
        error=ValueError,
        says="'layers.0.up.bias' is 'replicated', and its Linear 'layers.0.up' is 'colwise'",
        advises="give the layer the word",
        why="A layer is run as its word says, with the collectives that slices of all its params need.",
        instead="Give the layer the word, and its params none.",
        program=lambda: two_ranks(rows(), {"up": "colwise", "up.bias": "replicated"}),
    ),
    Refusal(
        what='a layer of a `"sequence_parallel"` list that the plan does not slice',
        error=ValueError,
        says="is in a sequence_parallel list and is not split",
        advises="'replicated'} if it acts on each token alone",
        why="It would see a part of the sequence.",
        instead='Slice the module that contains it, or add `"replicated"` for it if it acts on each token alone.',
        program=lambda: two_ranks(rows(), {"layers": "sequence_parallel"}),
    ),
    Refusal(
        what="layers on slices that reshape to whole heads, or meet layers that are whole",
        error=ValueError,
        says=r"'layers.0.down' \(Linear\) fails on slices over the 2 ranks of 'world'",
        advises="Layers that meet must be split alike",
        why="Torch's own error names shapes, and not whose they are.",
        instead='Cut layers that meet alike, and say `"local"` of attributes that count heads.',
        program=lambda: two_ranks(rows(), {"up": "colwise", "down": "replicated"}),
    ),
    Refusal(
        what="a model over sequences that counts positions itself, or has a convolution or recurrence along them",
        error=ValueError,
        says="where tokens change their places within a rank.* something else acts along the sequence",
        advises="pass it the batch's position_ids",
        why="It would see each rank's piece alone.",
        instead="Pass `position_ids` of the batch; models with other mixers than attention cannot be split.",
        program=counted_positions,
    ),
    Refusal(
        what="attention over a part of the ranks that share a sequence",
        error=ValueError,
        says=r"the pieces on the 2 ranks of 'ring' have 4 positions together, and the sequence of .* T\.sequence 8 on 4",
        advises=r"Leave the group out; for Ulysses over a ring pass two",
        why="It would attend to a part of each sequence.",
        instead="Leave the group out, or use `fds.seq.ulysses(fds.seq.ring(mesh['ring']), mesh['heads'])`.",
        program=half_of_a_sequence,
    ),
    Refusal(
        what="a loss over split sequences that is not a sum over tokens: a mean of positions, a preference loss",
        error=ValueError,
        says="the loss is not a sum over tokens",
        advises="sum over the ranks what goes into it",
        why="It would be another loss on each number of ranks.",
        instead='Return `fds.Weighted(sum, tokens)`, or `comm.all_reduce` over the group of `axis("sp")` what goes into it.',
        program=mean_of_positions,
    ),
    Refusal(
        what="a pipeline over split sequences whose stages have plain attention, or none",
        error=ValueError,
        says="no function of the loss asked for the sequence axis",
        advises="for a loss without attention pass tokenwise=True",
        why="Attention would see the positions of one rank alone.",
        instead="Use `fds.seq.ring()` or `fds.seq.ulysses(...)`; for stages without attention `T.sequence(tokenwise=True)`.",
        program=stages_of_a_sequence,
    ),
    Refusal(
        what="a module's router among the leaves of `T.experts`, or experts that send nothing among their ranks",
        error=ValueError,
        says="belongs to a Module without a stack of matrices",
        advises="begin with what the experts alone have",
        why="Each rank would choose among its own experts.",
        instead="Begin the pattern with `experts`, and let the model's experts use `fds.moe.exchange`.",
        program=lambda: experts(lambda mesh: [T.zero(1, mesh["edp", "ep"])], router=True),
    ),
    Refusal(
        what="experts that are leaves of a list, under `T.experts`",
        error=ValueError,
        says=r"'experts\.0\.up' of shape \[3, 3\] is one expert's in the list 'experts'",
        advises="put the list into one tree",
        why="Experts are split along dim 0 of a stack; each of these leaves would be split itself.",
        instead="Stack them (`torch.stack`, for modules `fds.moe.StackedExperts`), and call them by `fds.moe.each_expert`.",
        program=listed_experts,
    ),
    Refusal(
        what="a loss that reads experts outside their exchange, such as a penalty on all params",
        error=ValueError,
        says="the loss reads the leaf 'experts' in addition to what it sends among the ranks of 'ep'",
        advises=r"comm.all_reduce\(term, axis\('ep'\).group\)",
        why="Each rank has a part of the experts, so the term would count too little for them.",
        instead="Decay weights in the optimizer, or sum the experts' part of the term over `ep`.",
        program=penalised_experts,
    ),
    Refusal(
        what="experts without a transform that sums gradients",
        error=ValueError,
        says="experts.* no transform before it sums their gradients",
        advises="put zero before it",
        why="Each rank has its own rows, so dense leaves would drift apart.",
        instead="Use `T.zero(stage, group)` before `T.experts`.",
        program=lambda: experts(lambda mesh: []),
    ),
    Refusal(
        what="experts over other ranks than those of `zero`",
        error=ValueError,
        says="the leaf 'experts' is shared within the blocks .* but data parallelism is over the ranks",
        advises="pass the two axes into which mesh.split splits that of zero",
        why="The gradients of some of the ranks would not be summed.",
        instead='Pass `ep` and `edp` of `mesh.split("dp", edp=..., ep=...)`, and `T.zero` the two together.',
        program=lambda: experts(lambda mesh: [T.zero(1, mesh["edp", "ep"])], edp=False),
    ),
    Refusal(
        what="experts with a transform that keeps all params the same",
        error=ValueError,
        says="'experts' holds other experts on other ranks",
        advises=r"use T.zero\(0, ...\) in its place",
        why="Its ranks would combine the gradients of different experts.",
        instead="Use `T.zero`.",
        program=lambda: experts(lambda mesh: [T.compressed_gradients(comm.codecs.OneBit(), mesh["edp", "ep"])]),
    ),
    Refusal(
        what="a loss that leaves params out, with an optimizer whose state is not per leaf",
        error=UpdateError,
        says="odd cannot skip leaves, because its state has",
        advises="unused='zeros'",
        why="The state of what was left out cannot be kept as it was.",
        instead="Pass `unused='zeros'`, or give those leaves a separate optimizer.",
        program=undivided,
    ),
    Refusal(
        what="rows that do not divide into micro-batches",
        error=ValueError,
        says="4 rows, which do not divide into 3 micro-batches",
        advises="use a multiple of 3 rows on each rank",
        why="Micro-batches of different sizes would weigh the same.",
        instead="Pass a multiple of `k` rows on each rank.",
        program=uneven,
    ),
    Refusal(
        what="other params on other ranks",
        error=ValueError,
        says=r"ranks \[1\] of group 'world' have other leaves, shapes, dtypes or frozen leaves than rank 0",
        advises="build the same model on every rank",
        why="Shards would be parts of different tensors.",
        instead="Build the same model on every rank.",
        program=other_models,
    ),
    Refusal(
        what="`accumulate` before `pipeline`",
        error=ValueError,
        says="it replaces the gradients, which another transform of this step wraps already",
        advises="put pipeline before it",
        why="A pipeline runs micro-batches itself.",
        instead="Compose `pipeline` first.",
        program=accumulated_pipeline,
    ),
    Refusal(
        what="a transform under `pipeline` whose phase `loss` reads params",
        error=ValueError,
        says=r"a transform's phase loss reads '1\.w' for 'loss': in a pipeline it has the leaves of the last stage alone",
        advises="add its gradient, or the metric, in the phase update",
        why="The last rank has only the last stage's leaves, so a term of all params would differ from a single device's.",
        instead="Add its gradient in the phase `update`, where each rank has the leaves of its stages.",
        program=penalty_in_a_pipeline,
    ),
    Refusal(
        what="a `reduce` of `replicated` or `Combine` that couples leaves, in a pipeline",
        error=ValueError,
        says="so it must treat each leaf by itself",
        advises=r"compute what depends on all leaves in the phase update, where step.norm is of all stages",
        why="A rank has the leaves of its stages only, so the result would depend on where the model is cut.",
        instead="Leave out `T.pipeline`, or use `step.norm` in the phase `update`.",
        program=coupled_in_a_pipeline,
    ),
    Refusal(
        what="a pipeline whose step has another loss function",
        error=ValueError,
        says="this step is a pipeline, so its loss function must be the stages themselves",
        advises=r"train_step\(stages, optimizer\)",
        why="The stages have their own loss, and the other one would be ignored.",
        instead="Write `fds.train_step(stages, optimizer)`.",
        program=another_loss,
    ),
    Refusal(
        what="`pp.cut` of a module that branches on values of tensors",
        error=ValueError,
        says=r"strategies\.py:\d+: __bool__ reads a tensor's value",
        advises="move it into a module of its own",
        why="A stage would repeat the example's branch for every batch.",
        instead="Use `torch.where`, or put the branch into a separate module.",
        program=lambda: cut("branches"),
    ),
    Refusal(
        what="`pp.cut` through a custom `autograd.Function`",
        error=ValueError,
        says="comes from code that is not seen from outside, such as an autograd.Function",
        advises="put it into a module of its own",
        why="The recorded operations would lack it.",
        instead="Put it into a separate module, which runs as a whole.",
        program=lambda: cut("function"),
    ),
    Refusal(
        what="`pp.cut` of a module that writes into its input",
        error=ValueError,
        says="writes into one of the module's inputs",
        advises="clone it first",
        why="Every stage takes its inputs from the batch, where the write would be missing.",
        instead="Clone the input first.",
        program=lambda: cut("writes"),
    ),
]
