"""T5's bias with the fault that one of the fixes cures: queries are counted from 0."""

import math

import torch

from .initialize import get_model_parallel_rank, get_model_parallel_world_size


class ParallelRelativePositionBias(torch.nn.Module):
    def __init__(self, neox_args, scale, heads):
        super().__init__()
        self.num_buckets = neox_args.rpe_num_buckets
        self.max_distance = neox_args.rpe_max_distance
        self.scale = scale
        rank, size = get_model_parallel_rank(), get_model_parallel_world_size()
        count = heads // size
        whole = torch.randn(self.num_buckets, heads, generator=torch.Generator().manual_seed(3))
        self.weight = torch.nn.Parameter(whole[:, rank * count : (rank + 1) * count].clone())
        self._q_len_cached = self._rel_pos_bucket_cached = None

    def _relative_position_bucket(self, relative_position, num_buckets=32, max_distance=128):
        distance = (-relative_position).clamp(min=0)
        half = num_buckets // 2
        far = half + (
            torch.log(distance.clamp(min=1) / half) / math.log(max_distance / half) * half
        ).long().clamp(max=num_buckets - half - 1)
        return torch.where(distance < half, distance, far)

    def forward(self, q_len, k_len):
        if self._q_len_cached != (q_len, k_len):
            between = torch.arange(k_len)[None, :] - torch.arange(q_len)[:, None]
            self._q_len_cached = (q_len, k_len)
            self._rel_pos_bucket_cached = self._relative_position_bucket(
                between, num_buckets=self.num_buckets, max_distance=self.max_distance
            )
        return self.weight[self._rel_pos_bucket_cached].movedim(2, 0)[None] * self.scale
