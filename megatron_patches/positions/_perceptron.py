"""The numbers of a network of one hidden layer, as PyTorch starts its linear layers."""

from __future__ import annotations

import math

import torch
from torch import nn


def perceptron(seed: int, *, inputs: int, width: int, outputs: int) -> nn.ModuleList:
    """`0.weight` [width, inputs], `0.bias` [width], `2.weight` [outputs, width], fp32.

    Uniform within 1 / sqrt(inputs of the layer). No `2.bias`: a constant a head, which softmax does not
    see and Adam would still move. The modules have no forward: they hold the names of a sequence.
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int, fan_in: int) -> nn.Parameter:
        values = torch.rand(size, generator=generator, device="cpu", dtype=torch.float32)
        return nn.Parameter((values * 2 - 1) * (1 / math.sqrt(fan_in)))

    layers = nn.ModuleList([nn.Module(), nn.Identity(), nn.Module()])
    layers[0].weight = draw(width, inputs, fan_in=inputs)
    layers[0].bias = draw(width, fan_in=inputs)
    layers[2].weight = draw(outputs, width, fan_in=width)
    return layers.to(torch.get_default_device())
