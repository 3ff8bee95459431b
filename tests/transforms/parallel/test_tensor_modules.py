"""Law 40 as a step: unmodified Hugging Face models on slices are plain PyTorch on one device."""

import warnings
from collections import Counter
from functools import cache
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm, pipelining
from functional_ds import transforms as T

transformers = pytest.importorskip("transformers")
FEW = settings.default.max_examples
TOLERANCE = 1e-4
VOCABULARY = 64
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
}
GPT2 = {
    "attn.c_attn": fds.tp.Packed(3),
    "attn.split_size": "local",
    "attn.c_proj": "rowwise",
    "mlp.c_fc": "colwise",
    "mlp.c_proj": "rowwise",
    "wte": "vocab",
}


def model_of(kind: str) -> nn.Module:
    """A tiny model with the same values on every rank."""
    torch.manual_seed(0)
    name, _, heads = kind.partition(" kv")
    kv = int(heads or 2)
    if name in ("llama", "tied llama", "biased llama"):
        more = {"tie_word_embeddings": name[0] == "t", "attention_bias": name[0] == "b", "mlp_bias": name[0] == "b"}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=kv, **more))
    elif name == "qwen3":
        config = transformers.Qwen3Config(**SIZES, num_key_value_heads=kv, head_dim=8, attn_implementation="eager")
        model = transformers.Qwen3ForCausalLM(config)  # eager attention repeats key-value heads by the module's count
    elif name == "mixtral":
        config = transformers.MixtralConfig(**SIZES, num_key_value_heads=kv, num_local_experts=4)
        model = transformers.MixtralForCausalLM(config)
    elif name == "deepseek":  # latent attention, shared experts, groups of experts
        sizes = {"moe_intermediate_size": 16, "q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 8, "num_key_value_heads": 4}
        routing = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
        rope = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "bos_token_id": 0, "eos_token_id": 1}
        model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**SIZES, **sizes, **routing, **rope))
    elif name == "phi3":  # fused projections, which are gathered
        model = transformers.Phi3ForCausalLM(
            transformers.Phi3Config(**SIZES, num_key_value_heads=kv, pad_token_id=0, eos_token_id=1)
        )
    else:
        drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 32}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **drops))
    for parameter in model.parameters():
        if parameter.dim() == 1:  # else norms are ones and biases zeros, and slices of them all alike
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model.train()  # type: ignore[no-any-return]


@cache
def functional_of(kind: str) -> tuple[fds.Apply, dict[str, Tensor]]:
    """The model as a function, and its params."""
    return fds.functional(model_of(kind))


@cache
def plan_of(kind: str, *, vocab: bool = False, sequence: bool = False) -> dict[str, Any]:
    """The model's own plan."""
    plan: dict[str, Any] = dict(GPT2) if kind == "gpt2" else dict(fds.tp.plan_of(model_of(kind)))
    layers = "transformer.h" if kind == "gpt2" else "model.layers"
    if sequence and kind == "mixtral":
        plan["mlp.gate"] = "replicated"  # the router acts on each token alone
    return plan | ({"lm_head": "vocab"} if vocab else {}) | ({layers: "sequence_parallel"} if sequence else {})


def tokens(rows: int = 4) -> Tensor:
    """The whole batch, a sequence of unequal labels: some are ignored."""
    return torch.randint(1, VOCABULARY, (rows, 8), generator=torch.Generator().manual_seed(5))


def labels_of(ids: Tensor) -> Tensor:
    """The next tokens, without some."""
    return ids[:, 1:].masked_fill(ids[:, 1:] % 5 == 0, -100).flatten()


@cache
def plainly(kind: str, steps: int = 2) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Losses, norms and params of plain PyTorch."""
    model, ids, found = model_of(kind), tokens(), []
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, eps=1e-3, weight_decay=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), labels_of(ids))
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        found.append((loss.item(), norm.item()))
    return found, {name: p.detach() for name, p in model.named_parameters()}


@attrs.frozen
class Run:
    """A strategy."""

    kind: str
    tp: int = 2
    dp: int = 1
    zero: int | None = None
    vocab: bool = False
    sequence: bool = False
    micro: int = 1
    remat: str | None = None
    fp32: bool = True
    steps: int = 2

    def step(self, mesh: comm.Mesh) -> tuple[fds.Step, Any]:
        """The step and its params."""
        apply, params = functional_of(self.kind)

        def loss(p: Any, ids: Tensor) -> fds.Weighted:
            logits = apply(p, input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
            labels = labels_of(ids)
            if self.vocab:
                return fds.tp.cross_entropy(logits, labels)
            return fds.Weighted(F.cross_entropy(logits, labels, reduction="sum"), (labels != -100).sum())

        strategy = [
            *([] if self.fp32 else [T.mixed_precision("bf16")]),
            *([] if self.zero is None else [T.zero(self.zero, mesh["dp"])]),
            *([] if self.remat is None else [T.remat(self.remat)]),
            *([] if self.micro == 1 else [T.accumulate(self.micro)]),
            T.tensor_parallel(plan_of(self.kind, vocab=self.vocab, sequence=self.sequence), mesh["tp"]),
            T.clip(0.1),
        ]
        return fds.compose(*strategy)(fds.train_step(loss, fds.adamw(1e-2, eps=1e-3, weight_decay=0.1))), params

    def __call__(self) -> Any:
        mesh = comm.mesh(dp=self.dp, tp=self.tp)
        step, params = self.step(mesh)
        state = step.init(params)
        ids, found = tokens().chunk(self.dp)[mesh["dp"].rank], []
        for _ in range(self.steps):
            with comm.ledger() as sent:
                state, metrics = step(state, ids)
            found.append((metrics["loss"].item(), metrics["grad_norm"].item()))
        whole = step.params(state)
        for path, leaf in fds.tree.named(whole):  # replicated leaves have equal bits, and so have gathered ones
            first = comm.broadcast(leaf.detach(), 0, mesh["tp"])
            assert torch.equal(first, leaf), path
        return found, whole, step.evaluate(state, ids).item(), sent

    @property
    def ranks(self) -> int:
        """Of the whole mesh."""
        return self.dp * self.tp


def agrees(run: Run) -> None:
    """Law 40: losses, norms and params."""
    expected, params = plainly(run.kind)
    for found, whole, _, _ in comm.simulate(run, world_size=run.ranks):
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=TOLERANCE, abs=TOLERANCE)
        assert whole.keys() == params.keys()
        for name, leaf in params.items():
            torch.testing.assert_close(whole[name], leaf, rtol=TOLERANCE, atol=TOLERANCE, msg=name)


KINDS = (
    "llama kv1",
    "llama kv2",
    "llama kv4",
    "tied llama",
    "biased llama",
    "qwen3 kv1",
    "qwen3 kv2",
    "gpt2",
    "mixtral",
    "phi3",
)


def runs(draw: Any) -> Run:
    kind, zero = draw(st.sampled_from(KINDS)), draw(st.sampled_from((None, 0, 1, 2, 3)))
    sequence = kind not in ("phi3", "deepseek") and draw(st.booleans())  # whose attention is not cut
    return Run(
        kind,
        tp=draw(st.sampled_from((1, 2, 4))),
        dp=1 if zero is None else draw(st.sampled_from((1, 2))),
        zero=zero,
        vocab=draw(st.booleans()),
        sequence=sequence,
        micro=draw(st.sampled_from((1, 2))),
        remat=draw(st.sampled_from((None, "model.layers.*", "model.layers.*.mlp")))
        if kind.startswith(("llama", "qwen3"))
        else None,
    )


@pytest.mark.law(40)
@settings(max_examples=FEW)
@given(run=st.composite(runs)())
def test_any_model_on_slices_is_plain_pytorch(run: Run) -> None:
    """Any plan, heads fewer than ranks, ZeRO, micro-batches, recomputation: the single-device step."""
    agrees(run)


@pytest.mark.law(40)
@pytest.mark.parametrize("kind", ["llama kv2", "qwen3 kv2", "gpt2"])
@pytest.mark.parametrize("sequence", [False, True])
def test_what_a_layer_sends(kind: str, sequence: bool) -> None:
    """Two all-reduces forward and two backward a layer; with the sequence cut, gathers and scatters of the same elements."""
    sends(kind, sequence)


def sends(kind: str, sequence: bool) -> None:
    """Law 40's volumes."""
    run, n, layers = Run(kind, sequence=sequence, vocab=kind != "gpt2", steps=1), 2, 2
    share = tokens().numel() * 32 * (n - 1) // n  # elements of an activation that a gather or a scatter sends
    replicated = sum(leaf.numel() for leaf in functional_of(kind)[1].values() if leaf.dim() == 1)
    for _, _, _, sent in comm.simulate(run, world_size=n):
        calls, elements = Counter[str](), Counter[str]()
        for row in sent.rows:
            if row.group == "tp/control":  # the first step compares batches
                continue
            calls[row.collective] += row.calls
            elements[row.collective] += row.elements
        ends = 2  # the embedding forward, the head backward
        loss, numbers = (2, 3 * tokens()[:, 1:].numel()) if run.vocab else (0, 0)
        blocks = 0 if sequence else 4 * layers
        summed = 1 if sequence or kind.startswith("qwen3") else 0  # of all gradients that are partial
        assert calls["all_reduce"] == blocks + ends + loss + summed + 1  # the norm
        rest = elements["all_reduce"] - (blocks + ends) * 2 * share - numbers * 2 * (n - 1) // n
        assert summed <= rest - 1 <= summed * 2 * replicated * (n - 1) // n
        if sequence:
            assert (calls["all_gather"], elements["all_gather"]) == (4 * layers, 4 * layers * share)
            assert (calls["reduce_scatter"], elements["reduce_scatter"]) == (4 * layers, 4 * layers * share)


@pytest.mark.law(54)
def test_stages_of_a_hugging_face_model() -> None:
    """dp × pp × tp, 8 ranks: ZeRO-3, a pipeline that cuts the model between its layers, and sequence parallelism."""
    kind = "qwen3 kv1"

    def program() -> Any:
        mesh, module = comm.mesh(dp=2, pp=2, tp=2), model_of(kind)
        module.config.use_cache = False

        def loss(out: Any, ids: Tensor) -> fds.Weighted:
            logits, labels = out.logits[:, :-1].flatten(0, 1), labels_of(ids)
            return fds.Weighted(F.cross_entropy(logits, labels, reduction="sum"), (labels != -100).sum())

        model, params = pipelining.cut(module, ["model.layers.1"], example=tokens(2), loss=loss)
        strategy = [
            T.zero(3, mesh["dp"]),
            T.pipeline(pipelining.one_f_one_b(2, 2), model, mesh["pp"]),
            T.tensor_parallel(plan_of(kind, sequence=True), mesh["tp"]),
            T.clip(0.1),
        ]
        step = fds.compose(*strategy)(fds.train_step(model, fds.adamw(1e-2, eps=1e-3, weight_decay=0.1)))
        state, found = step.init(params), []
        for _ in range(2):
            state, metrics = step(state, tokens().chunk(2)[mesh["dp"].rank])
            found.append((metrics["loss"].item(), metrics["grad_norm"].item()))
        return found

    for found in comm.simulate(program, world_size=8):
        for ours, theirs in zip(found, plainly(kind)[0], strict=True):
            assert ours == pytest.approx(theirs, rel=TOLERANCE)


def test_half_precision_and_evaluation() -> None:
    """bf16 with fp32 masters over dp × tp learns as one device does, and evaluates to the loss that training would see."""
    expected, _ = plainly("llama kv2")
    for found, _, loss, _ in comm.simulate(Run("llama kv2", dp=2, zero=2, fp32=False), world_size=4):
        assert [each[0] for each in found] == pytest.approx([each[0] for each in expected], rel=2e-2)
        assert loss < found[-1][0]


def test_a_model_that_checkpoints_itself() -> None:
    """Hugging Face's own recomputation runs the layers again in their ways."""

    def program(group: bool) -> float:
        model = model_of("llama kv2")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
        apply, params = fds.functional(model)
        step = fds.train_step(lambda p, ids: apply(p, input_ids=ids, labels=ids, use_cache=False).loss, fds.adamw(1e-2))
        step = T.tensor_parallel(plan_of("llama kv2", sequence=True))(step) if group else step
        state = step.init(params)
        for _ in range(2):
            state, metrics = step(state, tokens())
        return metrics["loss"].item()

    expected = program(False)
    assert comm.simulate(lambda: program(True), world_size=2) == [pytest.approx(expected, rel=1e-5)] * 2


def test_a_teacher_of_the_same_module_stays_whole() -> None:
    """The step's params are slices; other params of the same module, whole, run as they are."""
    torch.manual_seed(0)
    apply, params = fds.functional(nn.Sequential(nn.Embedding(4, 6), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 6)))
    teacher = {name: 2 * leaf.detach() for name, leaf in params.items()}

    def loss(p: Any, ids: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = apply(teacher, ids)
        return (apply(p, ids) - wanted).square().mean()

    def program(*strategy: fds.Transform) -> float:
        step = fds.compose(*strategy)(fds.train_step(loss, fds.sgd(0.1)))
        state, _ = step(step.init(params), torch.tensor([0, 3]))
        return step(state, torch.tensor([1, 3]))[1]["loss"].item()

    plan = {"0": "vocab", "1": "colwise", "3": "rowwise"}
    assert comm.simulate(lambda: program(T.tensor_parallel(plan)), world_size=2) == [pytest.approx(program(), rel=1e-5)] * 2


def test_layers_that_would_see_a_part_of_the_sequence_are_refused() -> None:
    """DeepSeek's plan leaves its attention whole: it must not run on a part of the sequence."""
    with pytest.raises(
        ValueError, match=r"'model.layers.0.self_attn.kv_a_proj_with_mqa.weight' is in a sequence_parallel list"
    ):
        comm.simulate(Run("deepseek", sequence=True), world_size=2)


def test_a_split_by_a_whole_size_is_refused_by_name() -> None:
    """GPT-2 splits its fused projection by a number of its own, which a plan must say."""

    def program() -> None:
        model = model_of("gpt2")
        apply, params = fds.functional(model)
        plan = {key: word for key, word in GPT2.items() if key not in ("attn.split_size", "wte")}
        step = T.tensor_parallel(plan)(fds.train_step(lambda p, x: apply(p, x).logits.sum(), fds.sgd(0.1)))
        step(step.init(params), torch.ones(2, 4, dtype=torch.int64))

    words = r"GPT2Attention\) fails on slices .*values to unpack.*attributes .* may be 'local', such as .*'split_size'"
    with pytest.raises(ValueError, match=words):
        comm.simulate(program, world_size=2)
