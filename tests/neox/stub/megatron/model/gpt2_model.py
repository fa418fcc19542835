"""Layers as specs, handed one T5 bias; `RelayLayer` stands for layers without an `rpe`."""

import math

import torch
from deepspeed.pipe import LayerSpec

from megatron.mpu.layers import ParallelRelativePositionBias

from .transformer import ParallelTransformerLayerPipe


def mask_func(scores, mask):
    return scores.masked_fill(mask, -10000.0)


def _turn(args):
    return args[0].transpose(0, 1), *args[1:]


class RelayLayer(torch.nn.Module):
    def __init__(self, neox_args):
        super().__init__()

    def forward(self, args):
        return args


class Pipe(torch.nn.Module):
    """What the model takes from DeepSpeed's pipeline."""

    def __init__(self, layers):
        super().__init__()
        built = [layer.build() for layer in layers if isinstance(layer, LayerSpec)]
        self.sequential = torch.nn.ModuleList(built)

    def get_tied_weights_and_groups(self):
        return []


class GPT2ModelPipe(Pipe):
    def __init__(
        self, neox_args, num_tokentypes=0, parallel_output=True, topology=None, use_cache=False
    ):
        self.neox_args, self.use_cache = neox_args, use_cache
        self.specs = []
        self.init_specs()
        super().__init__(self.specs)
        self.cache = []

    def clear_cache(self):
        self.cache = []

    def init_specs(self):
        args = self.neox_args
        shared = None
        if args.pos_emb == "rpe":
            scale = math.sqrt(args.hidden_size // args.num_attention_heads)
            shared = ParallelRelativePositionBias(args, scale, args.num_attention_heads)
        self.specs = [_turn]
        for number, kind in enumerate(args.attention_config):
            if kind in ("gmlp", "amlp", "rwkv", "mamba"):
                self.specs.append(LayerSpec(RelayLayer, args))
                continue
            self.specs.append(
                LayerSpec(
                    ParallelTransformerLayerPipe,
                    neox_args=args,
                    attention_mask_func=mask_func,
                    init_method=None,
                    output_layer_init_method=None,
                    layer_number=number,
                    rpe=shared,
                    rotary=args.pos_emb == "rotary",
                    use_cache=self.use_cache,
                )
            )
        self.specs.append(_turn)
        self.specs.append(LayerSpec(torch.nn.LayerNorm, args.hidden_size))

    def forward(self, args):
        """(hidden [batch, length, hidden], mask) -> hidden."""
        args = _turn(args)
        for layer in self.sequential[:-1]:
            args = layer(args)
        return self.sequential[-1](_turn(args)[0])
