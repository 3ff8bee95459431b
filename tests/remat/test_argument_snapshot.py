"""A function that runs again finds the objects among its arguments as its first run found them (law 28)."""

from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import functional_ds as fds
from functional_ds import comm, transforms


class Cache:
    """Keeps what layers give it, in each of the ways in which one can."""

    def __init__(self) -> None:
        self.last: Tensor | None = None
        self.every: list[Tensor] = []
        self.by_name: dict[str, list[Tensor]] = {"x": []}
        self.recent: deque[Tensor] = deque(maxlen=2)
        self.count = 0

    def add(self, x: Tensor) -> Tensor:
        self.last = x if self.last is None else self.last + x
        self.every.append(x)
        self.by_name["x"].append(x)
        self.recent.append(x)
        self.count += 1
        total: Tensor = self.last + sum(self.every) + sum(self.by_name["x"]) + sum(self.recent)
        return total * self.count


@pytest.mark.law(28)
@pytest.mark.parametrize("how", ["positional", "keyword", "list"])
@pytest.mark.parametrize("policy", ["recompute", "recompute,inputs=offload", "save"])
def test_a_cache_is_as_it_was(how: str, policy: str) -> None:
    torch.manual_seed(0)
    weights = [(0.05 * torch.randn(3, 3)).requires_grad_() for _ in range(3)]  # small, or tanh has no gradient

    def layer(x: Tensor, weight: Tensor, cache: Any) -> Tensor:
        return torch.tanh(cache[0].add(x @ weight) if isinstance(cache, list) else cache.add(x @ weight))

    def gradients(run: Any) -> tuple[Tensor, ...]:
        cache, y = Cache(), torch.ones(2, 3)
        for weight in weights:
            y = run(y, weight, cache=cache) if how == "keyword" else run(y, weight, [cache] if how == "list" else cache)
        found = torch.autograd.grad(y.sum(), weights)
        assert (cache.count, len(cache.every)) == (3, 3)  # a recomputation writes into copies
        return found

    torch.testing.assert_close(gradients(fds.remat(layer, policy=policy)), gradients(layer), rtol=0, atol=0)


@pytest.mark.law(28)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("stage", [None, 3])
def test_a_decoder_with_its_default_cache(attention: str, masked: bool, stage: int | None) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        attn_implementation=attention,
    )
    assert config.use_cache
    ids, mask = torch.randint(0, 32, (4, 6)), torch.ones(4, 6, dtype=torch.long)
    mask[0, :2] = 0

    def build() -> nn.Module:
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config)  # type: ignore[no-any-return]

    batch = transformers.BatchEncoding({"input_ids": ids, "labels": ids} | ({"attention_mask": mask} if masked else {}))
    net = build()
    net(**batch).loss.backward()
    want = {name: (p - p.grad).detach() for name, p in net.named_parameters()}

    def program() -> Any:
        apply, params = fds.functional(build())
        strategy = [transforms.remat("model.layers.*"), *([] if stage is None else [transforms.zero(stage)])]
        step = fds.compose(*reversed(strategy))(fds.train_step(lambda p, given: apply(p, **given).loss, fds.sgd(1.0)))
        state, _ = step(step.init(params), batch)
        return step.params(state)

    torch.testing.assert_close(comm.simulate(program, world_size=1)[0], want)
