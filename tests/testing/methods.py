"""The library's transforms and optimizers, those of the docs and of the gallery, with what ``holds`` says of them."""

import importlib
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

import functional_ds as fds
from functional_ds import comm, seq, testing
from functional_ds import transforms as T
from tests.step.worked import defined, worked
from tests.testing import model_axes
from tests.testing.wrong_methods import descent

__all__ = ["METHODS", "SLICES", "Tested", "at_every_second", "trained_apart"]


@attrs.frozen
class Tested:
    """A method, what ``holds`` is told, and each law that is neither ok nor without a condition that the problem meets."""

    make: Any
    options: Mapping[str, Any] = attrs.field(factory=dict)
    but: Mapping[str, str] = attrs.field(factory=dict)

    def outcome(self, law: str) -> str:
        """What its row says."""
        needs = {"oracle": "oracle", "ranks": "by_ranks", "bytes": "sends"}.get(law)
        return self.but.get(law, "ok" if needs is None or needs in self.options else "not applicable")


def mean(grads: Any, memory: Any, group: comm.Group) -> Any:
    return comm.all_reduce(grads, group, op="avg"), memory


def by_torch(
    params: Any, batches: list[Any], make: Callable[[list[Tensor]], torch.optim.Optimizer], limit: float = float("inf")
) -> Any:
    """The oracle of an optimizer: torch's, with gradients clipped to a limit."""
    leaves, spec = fds.tree.flatten(params)
    for leaf in leaves:
        leaf.requires_grad_()
    optimizer = make(leaves)
    for batch in batches:
        optimizer.zero_grad()
        testing.Problem().loss(fds.tree.unflatten(spec, leaves), batch).backward()
        torch.nn.utils.clip_grad_norm_(leaves, limit)
        optimizer.step()
    return fds.tree.unflatten(spec, [leaf.detach() for leaf in leaves])


def torchs(name: str, limit: float = float("inf"), **options: Any) -> dict[str, Any]:
    """What ``holds`` is told of an optimizer that torch has, too."""
    return {"oracle": partial(by_torch, make=partial(getattr(torch.optim, name), **options), limit=limit)}


def beyond_sums(two: int, three: int) -> dict[str, Any]:
    """What ``holds`` is told of a method that sends so many bytes more in stages 1 to 3 on two ranks, and on three."""
    return {"sends": lambda stage, ranks: {2: two, 3: three}[ranks] if stage else 0}


def top_k() -> fds.Transform:
    return T.compressed_gradients(comm.codecs.TopK(1.0))


def one_bit() -> fds.Transform:
    return T.compressed_gradients(comm.codecs.OneBit(size=8))


def in_bf16(stage: int) -> fds.Transform:
    codec = comm.codecs.Cast(torch.bfloat16)
    return T.zero(stage, reduce_scatter=comm.codecs.compressed(comm.reduce_scatter, codec))


def combined(stage: int) -> fds.Transform:
    return T.zero(stage, aggregate=T.Combine(mean))


def in_every_second() -> fds.Transform:
    return T.every(2, T.clip(0.1))


def groups() -> Any:
    return fds.param_groups({"^0": fds.sgd(0.1)}, fds.adamw(0.05))


def cosine() -> fds.Transform:
    return T.schedule(T.warmup_cosine(2, 6))


APPLY, WEIGHTS = fds.functional(torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2)))


def module_loss(params: Any, batch: Tensor) -> Tensor:
    y: Tensor = APPLY(params, batch)
    return (y - torch.sin(2 * batch[:, :2])).square().mean()


def modules() -> testing.Problem:
    weights = torch.Generator().manual_seed(0)
    params = fds.tree.map(lambda leaf: torch.nn.Parameter(torch.randn(leaf.shape, generator=weights) / 2), WEIGHTS)
    return testing.Problem(params=params, loss=module_loss)


def one_bit_adam() -> Any:
    return fds.one_bit_adam(0.05, warmup=10)


def local_gradients() -> fds.Transform:
    return T.local_gradients(comm.world())


def warmup() -> fds.Transform:
    return T.schedule(T.warmup(3))


def muon() -> Any:
    return fds.muon(0.05, fds.adamw(0.05))


FLAT = dict.fromkeys(("unused leaves", "pipelines"), "not applicable")  # no layers, and all leaves are used
HALF = ("skipped steps", "bf16", "fp16")  # refused: it has a precision, or must come after it
CLIPS = ("clip before", "clip after")  # not applicable: the gradient's length does not matter
OWN_REDUCTION = dict.fromkeys(("replicated", "pipelines"), "not applicable")
KEPT_BY_RANK = dict.fromkeys(("slots", "checkpoints"), "refused")  # what a rank owes cannot be given to another

LIBRARY = {
    "accumulate": Tested(partial(T.accumulate, 2)),
    "clip": Tested(partial(T.clip, 0.1), torchs("SGD", 0.1, lr=0.1, momentum=0.5) | beyond_sums(4, 8)),
    "codec bf16": Tested(partial(in_bf16, 2), {"within": 0.05}, OWN_REDUCTION),
    "combine 0": Tested(partial(combined, 0), {}, OWN_REDUCTION),
    "combine 3": Tested(partial(combined, 3), {}, OWN_REDUCTION),
    "compiled": Tested(partial(T.compiled, backend="eager"), {"problem": modules()}, FLAT),
    "compressed one bit": Tested(one_bit, {"within": 1.0}, OWN_REDUCTION | KEPT_BY_RANK),
    "compressed_gradients": Tested(top_k, {}, OWN_REDUCTION | KEPT_BY_RANK),
    "cosine": Tested(cosine),
    "ema": Tested(partial(T.ema, 0.9), {"oracle": descent}),
    "every": Tested(in_every_second),
    "mixed_precision": Tested(
        partial(T.mixed_precision, "bf16"), {"order": "before", "within": 0.05}, dict.fromkeys(HALF, "refused")
    ),
    "offload": Tested(partial(T.offload, "cpu"), {}, dict.fromkeys(HALF, "refused")),
    "one_bit_adam": Tested(
        local_gradients,
        {"optimizer": one_bit_adam},
        OWN_REDUCTION | KEPT_BY_RANK | dict.fromkeys((*CLIPS, "unused leaves"), "refused"),  # no rank has the whole gradient
    ),
    "remat": Tested(partial(T.remat, ""), {"problem": modules()}, FLAT),
    "replicated": Tested(partial(T.replicated, reduce=mean), {}, OWN_REDUCTION),
    "schedule": Tested(warmup),
    **{f"zero {stage}": Tested(partial(T.zero, stage), {}, OWN_REDUCTION) for stage in range(4)},
    "adagrad": Tested(partial(fds.adagrad, 0.05), torchs("Adagrad", lr=0.05)),
    "adam": Tested(partial(fds.adam, 0.05), torchs("Adam", lr=0.05)),
    "adamw": Tested(partial(fds.adamw, 0.05), torchs("AdamW", lr=0.05)),
    "groups": Tested(groups),
    "lamb": Tested(partial(fds.lamb, 0.05), beyond_sums(40, 56)),
    "lion": Tested(partial(fds.lion, 0.01), {}, dict.fromkeys(CLIPS, "not applicable")),
    "muon": Tested(muon, beyond_sums(32, 52)),  # each matrix to its owner, and back
    "sgd": Tested(partial(fds.sgd, 0.1, momentum=0.5), torchs("SGD", lr=0.1, momentum=0.5)),
}


def documented(name: str) -> fds.Transform:
    """The docs' transform; a function of this module, so that processes can make it."""
    return worked()[name]


DOCS: dict[str, dict[str, str]] = {
    "count_rows": {"slots": "wrong"},  # each rank counts its own rows, as the page says
    "ema": {"slots": "refused"},  # after zero its slot is a tree of flat tensors, of which no checkpoint knows the leaves
    "power_sgd": OWN_REDUCTION | KEPT_BY_RANK,
    "diagonal": {
        "accumulate after": "wrong",  # the curvature of a micro-batch
        "pipelines": "refused",  # a stage has not all of them
    },
    "ridge": {"pipelines": "refused"},  # the penalty would be of the last stage's params alone
    "sam": {"accumulate after": "wrong"},  # the sharpness of a micro-batch
    "scaled_input": {"pipelines": "refused"},  # the last stage's input is no batch
    "sign_gradient": {"clip after": "not applicable", "bf16": "wrong"},  # signs of rounded zeros
    "unit_gradient": {"clip after": "not applicable"},
}


# -- worked examples that take arguments, or other params ----------------------------------------------------------------------

RESEARCH = str(Path(__file__).parents[2] / "examples/research")


def flat_loss(params: Any, batch: Tensor) -> Tensor:
    y: Tensor = torch.tanh(batch @ params["hidden"] + params["bias"]) @ params["head"]
    return (y - torch.sin(2 * batch[:, :2])).square().mean()


def flat() -> testing.Problem:
    """The problem's first leaves as a dict, with the names of the gallery."""
    one, other = testing.Problem().params
    params = {"hidden": one["w"], "bias": one["b"], "head": other["w"]}
    return testing.Problem(params=params, loss=flat_loss)


def block_loss(params: Any, batch: Tensor) -> Tensor:
    return flat_loss({"hidden": params["blocks"][0], "bias": params["bias"], "head": params["head"]}, batch)


def blocks() -> testing.Problem:
    params = flat().params
    params = {"blocks": [params["hidden"]], "bias": params["bias"], "head": params["head"]}
    return testing.Problem(params=params, loss=block_loss)


def of_page(page: str, name: str, *args: Any) -> Any:
    """A function of a page, called; a group stands for the world."""
    return defined(page)[name](*args)


def over_world(page: str, name: str) -> Any:
    return defined(page)[name](comm.world())


def lars() -> Any:
    return fds.per_leaf(torch.zeros_like, defined("docs/optimizers.md")["lars"], lr=1.0)


def squashed() -> fds.Transform:
    return fds.wrap("squashed", view=defined("docs/steps.md")["squashed"])


def gallery(file: str) -> Any:
    """A file of the gallery, as a module."""
    sys.path.insert(0, RESEARCH)
    try:
        return importlib.import_module(file)
    finally:
        sys.path.remove(RESEARCH)


def researched(file: str, name: str, *args: Any, **options: Any) -> Any:
    """A function of a file of the gallery, called."""
    return getattr(gallery(file), name)(*args, **options)


def own_zero() -> fds.Transform:
    return gallery("own_zero").owned_in_turn(comm.world())  # type: ignore[no-any-return]


def noise_scale() -> fds.Transform:
    """It compares micro-batches with the batch."""
    return fds.compose(researched("noise_scale", "noise_scale", 0.9), T.accumulate(2))


def trained_apart(
    params: Any,
    batches: list[list[Any]],
    meet: Callable[[list[list[Tensor]], int], list[list[Tensor]]] = lambda own, count: own,
    combine: Callable[[list[list[Tensor]]], list[list[Tensor]]] = lambda grads: grads,
) -> list[Any]:
    """Each rank's params after sgd with momentum in plain PyTorch, where ranks combine gradients, or meet after an update."""
    ranks, loss = range(len(batches[0])), testing.Problem().loss
    spec, own = fds.tree.flatten(params)[1], [fds.tree.leaves(params) for _ in ranks]
    speeds = [[torch.zeros_like(leaf) for leaf in own[0]] for _ in ranks]
    for count, rows in enumerate(batches, 1):
        own = [[leaf.detach().requires_grad_() for leaf in leaves] for leaves in own]
        losses = [loss(fds.tree.unflatten(spec, own[rank]), rows[rank]) for rank in ranks]
        grads = combine([[*torch.autograd.grad(losses[rank], own[rank])] for rank in ranks])
        for rank in ranks:
            speeds[rank] = [0.5 * speed + grad for speed, grad in zip(speeds[rank], grads[rank], strict=True)]
            own[rank] = [leaf.detach() - 0.1 * speed for leaf, speed in zip(own[rank], speeds[rank], strict=True)]
        own = meet(own, count)
    return [fds.tree.unflatten(spec, leaves) for leaves in own]


def at_every_second(own: list[list[Tensor]], count: int) -> list[list[Tensor]]:
    """Local SGD."""
    means = [torch.stack(leaves).mean(0) for leaves in zip(*own, strict=True)]
    return own if count % 2 else [means for _ in own]


def in_pairs(own: list[list[Tensor]], count: int) -> list[list[Tensor]]:
    """A matching of two workers is their mean."""
    return at_every_second(own, 2)


def post_local(own: list[list[Tensor]], count: int) -> list[list[Tensor]]:
    """In the first update, and in every third."""
    return own if count > 1 and count % 3 else at_every_second(own, 2)


def with_neighbours(own: list[list[Tensor]], count: int) -> list[list[Tensor]]:
    n = len(own)
    around = [(own[(rank - 1) % n], own[rank], own[(rank + 1) % n]) for rank in range(n)]
    return [[torch.stack(leaves).mean(0) for leaves in zip(*three, strict=True)] for three in around]


def by_majority(grads: list[list[Tensor]]) -> list[list[Tensor]]:
    votes = [torch.stack(leaves).sign().sum(0).sign() for leaves in zip(*grads, strict=True)]
    return [votes for _ in grads]


def gossip() -> fds.Transform:
    file = gallery("gossip")
    return fds.compose(T.apart(comm.world()), file.gossip(file.ring))


def local_sgd() -> fds.Transform:
    def average(step: fds.Step, state: fds.State) -> fds.State:
        leaves, spec = fds.tree.flatten(state.params)
        means = comm.all_reduce([leaf.clone() for leaf in leaves], op="avg")
        return fds.tree.replace(state, params=fds.tree.unflatten(spec, means))

    return fds.compose(T.apart(comm.world()), T.every(2, average))


def majority(stage: int | None = None) -> fds.Transform:
    vote = defined("docs/phases.md")["majority"]
    return T.replicated(reduce=vote, name="majority") if stage is None else T.zero(stage, aggregate=T.Combine(vote))


def matched(group: comm.Group) -> fds.Transform:
    file = gallery("gossip")
    return file.gossip(file.matching, group)  # type: ignore[no-any-return]


def post_local_sgd(group: comm.Group) -> fds.Transform:
    file = gallery("gossip")
    return file.gossip(file.complete, group, every=3, until=1)  # type: ignore[no-any-return]


def top_k_of_replicas() -> fds.Transform:
    mesh = comm.mesh(replicas=comm.world().size, inner=1)
    return fds.compose(T.zero(1, mesh["inner"]), researched("compression", "top_k_between", mesh["replicas"], 1.0))


def outputs(params: Any, batch: Tensor) -> Tensor:
    """Of the standard problem's model."""
    for layer, own in zip(testing.Problem().layers or (), params, strict=True):
        batch = layer(own, batch)
    return batch


def of_two(params: Any, batch: Tensor) -> Tensor:
    return researched("ensemble", "of_members", flat_loss)(params, batch)  # type: ignore[no-any-return]


def two_members() -> testing.Problem:
    params = {path: torch.stack([leaf, leaf.flip(0)]) for path, leaf in flat().params.items()}
    return testing.Problem(params=params, loss=of_two)


FRAGMENTS = (("0.w", "1.scale"), ("0.b", "1.w", "1.b"))
BY_RANKS = {
    **dict.fromkeys(("stages", "replicated", "clip before", "clip after", "slots"), "not applicable"),
    **dict.fromkeys(("unused leaves", "pipelines"), "not applicable"),
}
SIGNS = {"bf16": "wrong"}  # of rounded numbers
EXAMPLES = {
    "ademamix": Tested(partial(of_page, "docs/quickstart-optimizer.md", "ademamix", 0.05)),
    "data_parallel": Tested(partial(over_world, "docs/phases.md", "data_parallel"), {}, OWN_REDUCTION),
    "galore": Tested(partial(of_page, "docs/optimizers.md", "galore")),
    "lars": Tested(lars),
    "layerwise": Tested(partial(of_page, "docs/optimizers.md", "layerwise", 0.05, 0.5, ("^0", "^1"))),
    "local_sgd": Tested(local_sgd, {"by_ranks": partial(trained_apart, meet=at_every_second)}, BY_RANKS),
    "majority": Tested(majority, {"by_ranks": partial(trained_apart, combine=by_majority)}, BY_RANKS | SIGNS),
    "majority 3": Tested(partial(majority, 3), {"by_ranks": partial(trained_apart, combine=by_majority)}, BY_RANKS | SIGNS),
    "power_sgd 3": Tested(partial(of_page, "docs/phases.md", "power_sgd", 1, 3), {}, OWN_REDUCTION | KEPT_BY_RANK),
    "round_robin": Tested(partial(over_world, "docs/phases.md", "round_robin"), {}, OWN_REDUCTION),
    "shampoo": Tested(partial(of_page, "docs/optimizers.md", "shampoo"), {"problem": blocks()}, FLAT),
    "squashed": Tested(squashed, {"problem": flat()}, FLAT),
    "research asam": Tested(partial(researched, "sharpness", "sam", 0.05, adaptive=True), {}, {"accumulate after": "wrong"}),
    "research distilled": Tested(partial(researched, "teacher", "distilled", outputs, 0.5, 0.8), {}, {"pipelines": "refused"}),
    "research ensemble": Tested(partial(researched, "ensemble", "clip_members", 2, 0.05), {"problem": two_members()}, FLAT),
    "research matching": Tested(
        matched, {"axis": "outer", "by_ranks": partial(trained_apart, meet=in_pairs)}, {"pipelines": "not applicable"}
    ),
    "research post-local": Tested(
        post_local_sgd, {"axis": "outer", "by_ranks": partial(trained_apart, meet=post_local)}, {"pipelines": "not applicable"}
    ),
    "research sparsity": Tested(partial(researched, "sparsity", "sparsity")),
    "research stale": Tested(partial(researched, "stale", "stale", 1)),
    "research top_k": Tested(top_k_of_replicas, {}, OWN_REDUCTION),
    "research gossip": Tested(gossip, {"by_ranks": partial(trained_apart, meet=with_neighbours)}, BY_RANKS),
    "research diloco": Tested(partial(researched, "diloco", "diloco", 2), {"axis": "outer"}, {"pipelines": "not applicable"}),
    "research dp_sgd": Tested(partial(researched, "dp_sgd", "dp_sgd", 0.5, 0.5), {"problem": flat()}, FLAT),
    "research mup": Tested(
        partial(researched, "mup", "adam", 0.05, 64, scaled=True), {"problem": flat()}, FLAT | SIGNS
    ),  # Adam's first update is a sign
    "research noise_scale": Tested(noise_scale, {}, {"slots": "wrong"}),  # the rows of a micro-batch depend on the ranks
    "research own_zero": Tested(own_zero, {}, OWN_REDUCTION),
    "research power_sgd": Tested(partial(researched, "compression", "power_sgd", 8), {}, OWN_REDUCTION | KEPT_BY_RANK),
    "research sam": Tested(partial(researched, "sharpness", "sam", 0.05), {}, {"accumulate after": "wrong"}),
    "research soap": Tested(
        partial(researched, "soap", "soap", 0.05, 2, eps=1e-3), {"problem": flat(), "within": 0.02}, FLAT
    ),  # QR of singular matrices
    "research sophia": Tested(
        partial(researched, "sophia", "sophia", 2), {}, {"accumulate after": "wrong", "pipelines": "refused"}
    ),
    "research streaming": Tested(
        partial(researched, "streaming_diloco", "streaming", 2, FRAGMENTS, delay=1, mix=0.5),
        {"axis": "outer"},
        {"pipelines": "not applicable"},
    ),
}


def over(name: str, problem: testing.Problem, sends: Callable[[int], int] | None = None) -> dict[str, Any]:
    """What ``holds`` is told of a method over an axis of a model, which sends as many bytes along it in any stage."""
    return {"axis": name, "problem": problem} | ({} if sends is None else {"sends": lambda stage, ranks: sends(ranks)})


def exchanged(elements: int, times: int = 1) -> Callable[[int], int]:
    """The bytes of a rank that sends (n - 1)/n of so many elements so many times."""
    return lambda ranks: 4 * times * elements * (ranks - 1) // ranks


ring = over("sp", model_axes.sequences(seq.ring), exchanged(12 * 8 * 8 * 2, 3))  # keys and values
ulysses = over(
    "sp", model_axes.sequences(partial(seq.ulysses, None)), lambda ranks: exchanged(12 * 8 * 8 * 4, 2)(ranks) // ranks
)
SLICES = {"up": "colwise", "bias": "colwise", "down": "rowwise"}
NO_STAGES = {"pipelines": "not applicable"}
OVER_AXES = {
    "experts": Tested(model_axes.experts, over("ep", model_axes.mixture()), FLAT | {"replicated": "not applicable"}),
    "pipeline": Tested(model_axes.pipeline, over("pp", model_axes.stage_problem()), FLAT | {"accumulate before": "refused"}),
    "sequence ring": Tested(partial(T.sequence, layout="zigzag"), ring, FLAT),
    "sequence ulysses": Tested(T.sequence, ulysses, FLAT),
    "tensor_parallel": Tested(
        partial(T.tensor_parallel, SLICES), over("tp", model_axes.tensors(), exchanged(24 * 4, 2)), NO_STAGES
    ),
    "tensor_parallel vocab": Tested(
        partial(T.tensor_parallel, model_axes.vocabulary_plan), over("tp", model_axes.vocabulary()), FLAT
    ),
    "own features": Tested(
        model_axes.features, over("tp", model_axes.flat_problem(), exchanged(24 * 4 + 64, 2)), FLAT
    ),  # the sum, and gradients
    "own positions": Tested(
        model_axes.own_positions, over("sp", model_axes.prefix_problem(), lambda ranks: 4 * 12 * 4 * (ranks - 1)), FLAT
    ),
    "own slices": Tested(
        model_axes.slices, over("tp", model_axes.flat_problem(model_axes.sliced_loss), exchanged(24 * 4, 2)), FLAT
    ),
}
METHODS = (
    LIBRARY
    | OVER_AXES
    | {f"docs {name}": Tested(partial(documented, name), {}, DOCS.get(name, {})) for name in worked()}
    | EXAMPLES
)
