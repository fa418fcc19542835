"""ALiBi and rotary with their limits: a cache that grows once, rounding, a table that ends."""

import torch


class AliBi(torch.nn.Module):
    def __init__(self, num_heads, mp_size=1, mp_rank=0):
        super().__init__()
        count = num_heads // mp_size
        slopes = 2.0 ** (-8.0 / num_heads * torch.arange(1, num_heads + 1))
        self.register_buffer("slopes", slopes[mp_rank * count : (mp_rank + 1) * count])
        self.cached_seq_len = None

    def bias(self, seq_len_q, seq_len_k, device, dtype):
        if self.cached_seq_len is None or self.cached_seq_len < seq_len_k:
            self.cached_seq_len = 4 * self.cached_seq_len if self.cached_seq_len else seq_len_k
            at = torch.arange(self.cached_seq_len)
            distance = torch.tril(at[:, None] - at).to(device, dtype)
            self.cached_matrix = -distance * self.slopes.to(device, dtype)[:, None, None]
        return self.cached_matrix[:, seq_len_k - seq_len_q : seq_len_k, :seq_len_k]

    def forward(self, x):
        assert self.cached_seq_len is None or x.shape[-1] <= 4 * self.cached_seq_len
        return x + self.bias(x.shape[-2], x.shape[-1], x.device, x.dtype)


class RotaryEmbedding(torch.nn.Module):
    def __init__(self, dim, base, max_seq_len):
        super().__init__()
        self.max_seq_len = max_seq_len
        rates = base ** (-torch.arange(0, dim, 2) / dim)
        angle = torch.arange(max_seq_len)[:, None] * rates
        turned = torch.cat([angle, angle], -1)[:, None, None]
        self.cos, self.sin = turned.cos(), turned.sin()

    def forward(self, x, first=0):
        """x [length, batch, heads, dim] at positions `first` and following."""
        last = first + x.size(0)
        assert last <= self.max_seq_len, "longer than the table"
        left, right = x.chunk(2, dim=-1)
        turned = torch.cat([-right, left], dim=-1)
        return x * self.cos[first:last] + turned * self.sin[first:last]
