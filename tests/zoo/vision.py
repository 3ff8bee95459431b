"""Images: convolutions, normalisations, attention over patches."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .program import Classifier, Program, labelled, rows_of

IMAGE = labelled(3, 8, 8)


def lenet() -> nn.Module:
    return Classifier(
        nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 6, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(24, 3),
        )
    )


class Residual(nn.Module):
    def __init__(self, width: int, norm: type[nn.Module] = nn.GroupNorm) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = norm(2, width) if norm is nn.GroupNorm else norm(width, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.norm(self.first(x))))


def resnet() -> nn.Module:
    return Classifier(
        nn.Sequential(nn.Conv2d(3, 4, 3), Residual(4), Residual(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    )


def instance_norm() -> nn.Module:
    return Classifier(
        nn.Sequential(
            nn.Conv2d(3, 4, 3), Residual(4, nn.InstanceNorm2d), nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)
        )
    )


def batch_norm() -> nn.Module:
    return Classifier(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)))


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.depth = nn.Conv2d(3, 6, 3, groups=3)
        self.point = nn.Conv2d(6, 6, 1)
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(6, 2, 1), nn.SiLU(), nn.Conv2d(2, 6, 1), nn.Sigmoid())
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.hardswish(self.point(self.depth(x)))
        return self.out((x * self.gate(x)).mean((2, 3)))


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depth, self.norm = nn.Conv2d(width, width, 3, padding=1, groups=width), nn.LayerNorm(width)
        self.up, self.down, self.scale = (
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
            nn.Parameter(torch.full((width,), 0.1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depth(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.down(F.gelu(self.up(y)))).permute(0, 3, 1, 2)


def convnext() -> nn.Module:
    return Classifier(
        nn.Sequential(nn.Conv2d(3, 4, 2, stride=2), ConvNeXtBlock(4), ConvNeXtBlock(4), nn.Flatten(), nn.Linear(64, 3))
    )


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.up, self.out = nn.ConvTranspose2d(6, 4, 2, stride=2), nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.down1(x))
        b = self.up(F.relu(self.down2(a)))
        return F.mse_loss(self.out(torch.cat([a, b], 1)), x)


class PatchTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch, self.token = nn.Conv2d(3, 8, 4, stride=4), nn.Parameter(torch.randn(1, 1, 8) * 0.1)
        self.place = nn.Parameter(torch.randn(1, 5, 8) * 0.1)
        self.attention, self.norm, self.head = nn.MultiheadAttention(8, 2, batch_first=True), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.place
        y = self.norm(x)
        return self.head((x + self.attention(y, y, y, need_weights=False)[0])[:, 0])


class Upsampler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.PixelShuffle(2), nn.PReLU(3), nn.Conv2d(3, 3, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return F.l1_loss(self.net(x), F.interpolate(x, scale_factor=2, mode="bilinear"))


def volume() -> nn.Module:
    return Classifier(nn.Sequential(nn.Conv3d(1, 2, 2), nn.ELU(), nn.AvgPool3d(2), nn.Flatten(), nn.Linear(2, 3)))


def temporal() -> nn.Module:
    return Classifier(
        nn.Sequential(
            nn.Conv1d(2, 4, 2, dilation=1), nn.GELU(), nn.Conv1d(4, 4, 2, dilation=2), nn.GELU(), nn.Flatten(), nn.Linear(20, 3)
        )
    )


PROGRAMS = {
    "LeNet": Program(lenet, IMAGE),
    "residual, group norm": Program(resnet, IMAGE),
    "residual, instance norm": Program(instance_norm, IMAGE),
    "batch norm": Program(batch_norm, IMAGE, by_row=False),
    "squeeze and excite": Program(lambda: Classifier(SqueezeExcite()), IMAGE),
    "ConvNeXt": Program(convnext, IMAGE),
    "U-Net": Program(UNet, rows_of(3, 8, 8)),
    "vision transformer": Program(lambda: Classifier(PatchTransformer()), IMAGE),
    "pixel shuffle": Program(Upsampler, rows_of(3, 4, 4)),
    "3d convolutions": Program(volume, labelled(1, 3, 3, 3)),
    "temporal convolutions": Program(temporal, labelled(2, 8)),
}
