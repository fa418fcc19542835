"""Refuses to start without a GPU."""

import torch


def initialize_megatron(neox_args, allow_no_cuda=False):
    assert allow_no_cuda or torch.cuda.is_available(), "no GPU"
