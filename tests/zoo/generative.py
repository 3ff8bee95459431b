"""Generative models, and layers that few use."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from .program import Classifier, Program, Regressor, generator, labelled, regression, rows_of


def with_noise(features: int) -> object:
    return lambda rows, seed: (rows_of(features)(rows, seed), rows_of(features)(rows, seed + 500))


class Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(4, 8), nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, noise = batch
        mean, log = self.encode(x).chunk(2, 1)
        back = self.decode(mean + (log / 2).exp() * noise)
        return F.mse_loss(back, x) + 0.1 * (mean**2 + log.exp() - log - 1).mean()


class Quantised(nn.Module):
    """The nearest code, with a straight-through gradient; most codes are not used."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.codes, self.decode = nn.Linear(4, 3), nn.Embedding(7, 3), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        z = self.encode(x)
        code = self.codes(torch.cdist(z, self.codes.weight).argmin(1))
        back = self.decode(z + (code - z).detach())
        return F.mse_loss(back, x) + F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())


class Coupling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.chunk(2, 1)
        scale, shift = self.net(a).chunk(2, 1)
        return torch.cat([b * scale.tanh().exp() + shift, a], 1), scale.tanh().sum(1)


class Flow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Coupling() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(len(x))
        for layer in self.layers:
            x, log = layer(x)
            total = total + log
        return ((x**2).sum(1) / 2 - total).mean()


class Diffusion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.time, self.net = nn.Embedding(10, 4), nn.Sequential(nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 4))
        self.register_buffer("alphas", torch.linspace(0.99, 0.5, 10).cumprod(0))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, noise = batch
        step = (x[:, 0].abs() * 10).long() % 10
        alpha = self.alphas[step][:, None]  # type: ignore[index]
        noisy = alpha.sqrt() * x + (1 - alpha).sqrt() * noise
        return F.mse_loss(self.net(torch.cat([noisy, self.time(step)], 1)), noise)


class Adversaries(nn.Module):
    """Both players of a GAN in one loss; each gets the gradients that its own step would."""

    def __init__(self) -> None:
        super().__init__()
        self.make, self.judge = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 5), nn.LeakyReLU(0.2), nn.Linear(5, 1))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        real, noise = batch
        fake = self.make(noise)
        judged = F.softplus(-self.judge(real)).mean() + F.softplus(self.judge(fake.detach())).mean()
        frozen = {name: p.detach() for name, p in self.judge.named_parameters()}
        return judged + F.softplus(-torch.func.functional_call(self.judge, frozen, fake)).mean()


class Weights(nn.Module):
    """Parametrised layers."""

    def __init__(self, dress: object) -> None:
        super().__init__()
        self.first, self.second = dress(nn.Linear(4, 5)), dress(nn.Linear(5, 2))  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Maxout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pieces, self.slopes = nn.Bilinear(4, 4, 6), nn.PReLU(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.slopes(self.pieces(x, x).view(-1, 3, 2).amax(2))


class Collections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.ParameterList([nn.Parameter(torch.randn(4, 4) / 2) for _ in range(3)])
        self.named = nn.ParameterDict({"scale": nn.Parameter(torch.ones(4)), "shift": nn.Parameter(torch.zeros(4))})
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(4, 2)})

    def forward(self, x: Tensor) -> Tensor:
        for item in self.items:
            x = torch.relu(x @ item) * self.named["scale"] + self.named["shift"]
        return self.heads["a"](x) - self.heads["b"](x)


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.temperature = nn.Sequential(nn.Linear(3, 6), nn.GELU(), nn.Linear(6, 4)), nn.Parameter(torch.tensor(0.5))

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        one, other = (F.normalize(self.net(x), dim=1) for x in batch)
        return F.cross_entropy(one @ other.T * self.temperature.exp(), torch.arange(len(one)))


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.out = nn.EmbeddingBag(13, 5, mode="mean"), nn.AdaptiveLogSoftmaxWithLoss(5, 12, [3, 7], div_value=1.5)

    def forward(self, batch: Tensor) -> Tensor:
        return self.out(self.bag(batch[:, :-1]), batch[:, -1]).loss


class Graph(nn.Module):
    """Two graph convolutions over a ring of five nodes, whose matrix is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        ring = torch.eye(5) + torch.eye(5).roll(1, 0)
        self.register_buffer("ring", ring.to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.stack([torch.sparse.mm(self.ring, torch.relu(self.first(row))) for row in x])  # type: ignore[arg-type]
        return (self.second(hidden) ** 2).mean()


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filter, self.out = nn.Parameter(torch.randn(3, dtype=torch.complex64)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=4))


class Adapters(nn.Module):
    """A frozen layer with a trained one of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(4, 4), nn.Linear(4, 1, bias=False), nn.Linear(1, 4, bias=False)
        self.base.requires_grad_(False)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.base(x) + self.up(self.down(x))))


class Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("waves", torch.randn(4, 6))
        self.net = nn.Sequential(nn.Linear(12, 5), nn.Mish(), nn.Linear(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        angles = 2 * math.pi * x @ self.waves  # type: ignore[operator]
        return self.net(torch.cat([angles.sin(), angles.cos()], 1))


class DeepSets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each, self.all = nn.Linear(3, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.all(torch.relu(self.each(x)).sum(1))


def bag_tokens(rows: int, seed: int) -> Tensor:
    return torch.randint(0, 12, (rows, 5), generator=generator(seed))


PAIR = regression(4, 2)

PROGRAMS = {
    "variational auto-encoder": Program(Variational, with_noise(4)),  # type: ignore[arg-type]
    "quantised auto-encoder": Program(Quantised, rows_of(4)),
    "normalising flow": Program(Flow, rows_of(4)),
    "diffusion": Program(Diffusion, with_noise(4)),  # type: ignore[arg-type]
    "adversaries": Program(Adversaries, with_noise(3)),  # type: ignore[arg-type]
    "weight norm": Program(lambda: Regressor(Weights(parametrizations.weight_norm)), PAIR),
    "orthogonal": Program(lambda: Regressor(Weights(parametrizations.orthogonal)), PAIR),
    "spectral norm": Program(lambda: Regressor(Weights(parametrizations.spectral_norm)), PAIR, by_row=False),
    "maxout": Program(lambda: Regressor(Maxout()), regression(4, 3)),
    "lists and dicts of parameters": Program(lambda: Regressor(Collections()), PAIR),
    "contrastive": Program(Siamese, with_noise(3), by_row=False),  # type: ignore[arg-type]
    "bags and adaptive softmax": Program(Bags, bag_tokens),
    "graph": Program(Graph, rows_of(5, 3)),
    "complex numbers": Program(lambda: Regressor(Complex()), PAIR),
    "double precision": Program(
        lambda: Regressor(nn.Linear(4, 2).double()), lambda rows, seed: tuple(x.double() for x in PAIR(rows, seed))
    ),
    "adapters": Program(lambda: Regressor(Adapters()), PAIR),
    "Fourier features": Program(lambda: Regressor(Fourier()), PAIR),
    "deep sets": Program(lambda: Classifier(DeepSets()), labelled(4, 3)),
}
