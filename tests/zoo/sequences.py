"""Sequences: recurrent networks, attention, mixtures of experts."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .program import Classifier, Program, labelled, tokens

SERIES = labelled(5, 4)
VOCABULARY = 13


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: object) -> None:
        super().__init__()
        self.rnn = kind(4, 5, batch_first=True, **options)  # type: ignore[arg-type]
        self.out = nn.Linear(10 if options.get("bidirectional") else 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x)[0].mean(1))


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = c = x.new_zeros(len(x), 5)
        for step in x.unbind(1):
            h, c = self.cell(step, (h, c))
        return self.out(h)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.GRU(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        lengths = 1 + (x[:, 0, 0] > 0).long() * 3
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.out(self.rnn(packed)[1][-1])


class Language(nn.Module):
    """Next-token loss of a network from embeddings to embeddings, with the embedding as the head."""

    def __init__(self, net: nn.Module, width: int = 8) -> None:
        super().__init__()
        self.embed, self.net, self.head = nn.Embedding(VOCABULARY, width), net, nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, batch: Tensor) -> Tensor:
        logits = self.head(self.net(self.embed(batch[:, :-1])))
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.net = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x, mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1]), is_causal=True)


class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.net = nn.Embedding(VOCABULARY, 8), nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, VOCABULARY)

    def forward(self, batch: Tensor) -> Tensor:
        x = self.embed(batch)
        return F.cross_entropy(self.out(self.net(x, x[:, :-1])).flatten(0, 1), batch[:, 1:].flatten())


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24, bias=False), nn.Linear(8, 8, bias=False)
        self.register_buffer("angles", torch.outer(torch.arange(8.0), 10.0 ** -torch.arange(2.0)), persistent=False)

    def turn(self, x: Tensor) -> Tensor:
        angles = self.angles[: x.shape[2]]  # type: ignore[index]
        a, b = x.chunk(2, -1)
        return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(self.turn(q), self.turn(k), v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class LinearAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.elu(self.q(x)) + 1, F.elu(self.k(x)) + 1, self.v(x)
        state = torch.einsum("btd,bte->btde", k, v).cumsum(1)
        return torch.einsum("btd,btde->bte", q, state) / (q * k.cumsum(1)).sum(-1, keepdim=True)


class Experts(nn.Module):
    """Each token goes to one expert; some experts get none."""

    def __init__(self) -> None:
        super().__init__()
        self.route, self.experts = nn.Linear(8, 4), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        gate, which = self.route(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            mask = which == index
            y = y.masked_scatter(mask[..., None], expert(x[mask])) if mask.any() else y
        return x + gate[..., None] * y


class Depth(nn.Module):
    """Blocks that are used in an order of their own, one of them twice, and one of them never."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for index in (2, 0, 2, 1):
            x = x + torch.tanh(self.blocks[index](x))
        return x


class CTC(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.GRU(4, 5, batch_first=True), nn.Linear(5, 4)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        scores = self.out(self.rnn(x)[0]).log_softmax(-1).transpose(0, 1)
        ones = torch.ones(len(x), dtype=torch.long)
        return F.ctc_loss(scores, y[:, None] + 1, ones * x.shape[1], ones)


PROGRAMS = {
    "RNN": Program(lambda: Classifier(Recurrent(nn.RNN)), SERIES),
    "LSTM, both ways, two layers": Program(lambda: Classifier(Recurrent(nn.LSTM, num_layers=2, bidirectional=True)), SERIES),
    "LSTM, projected": Program(lambda: Classifier(Recurrent(nn.GRU, num_layers=2)), SERIES),
    "LSTM cells": Program(lambda: Classifier(Cells()), SERIES),
    "packed sequences": Program(lambda: Classifier(Packed()), SERIES),
    "transformer encoder": Program(lambda: Language(Encoder()), tokens()),
    "transformer": Program(Seq2Seq, tokens()),
    "rotary attention": Program(lambda: Language(Rotary()), tokens()),
    "linear attention": Program(lambda: Language(LinearAttention()), tokens()),
    "mixture of experts": Program(lambda: Language(Experts()), tokens()),
    "blocks out of order": Program(lambda: Language(Depth()), tokens()),
    "CTC": Program(CTC, SERIES),
}
