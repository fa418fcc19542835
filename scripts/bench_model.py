"""A training step of the 162M model: learned bias, no bias, and a dense bias in every layer as authors do.

One thread, CPU time, the three attentions taken in turn on the same weights; ratios to the step without
any bias. Nothing is printed unless the losses of the two ways with a bias agree.

Example: python scripts/bench_model.py --lengths 512 --rounds 3
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_common as common  # first: it sets the threads
import torch
import torch.nn.functional as F
from bench_attention_variants import Inputs, authors
from torch import Tensor

from megatron_patches.attention import attend
from megatron_patches.standalone import model as engine_model
from megatron_patches.standalone.model import GPT
from megatron_patches.standalone.shape import ModelShape

TOLERANCE = 1e-4


def without_bias(q: Tensor, k: Tensor, v: Tensor, method: Any, **_: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def dense(q: Tensor, k: Tensor, v: Tensor, method: Any, **_: Any) -> Tensor:
    return authors(Inputs(q, k, v, method))


ATTENTIONS: dict[str, Callable[..., Tensor]] = {
    "no bias": without_bias,
    "chunked": attend,
    "authors": dense,
}


def step(model: GPT, optimizer: torch.optim.Optimizer, text: Tensor) -> float:
    loss = model(text[:, :-1], text[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(loss.detach())


def measure(method: str, length: int, rounds: int, layers: int) -> list[dict[str, Any]]:
    """Rows of one length; RuntimeError when the two ways with a bias disagree."""
    shape = ModelShape(layers, 768, 12, 50304, method, length, init_method="small_init")
    model = GPT(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    text = torch.randint(0, 50257, (1, length + 1), generator=torch.Generator().manual_seed(0))
    losses = {}
    for name, function in ATTENTIONS.items():
        vars(engine_model)["attend"] = function
        with torch.no_grad():
            losses[name] = float(model(text[:, :-1], text[:, 1:]))
    if abs(losses["chunked"] - losses["authors"]) > TOLERANCE * losses["chunked"]:
        raise RuntimeError(f"the losses differ: {losses}")

    def run(name: str) -> Callable[[], object]:
        def work() -> None:
            vars(engine_model)["attend"] = ATTENTIONS[name]
            step(model, optimizer, text)

        return work

    work = {name: run(name) for name in ATTENTIONS}
    for each in work.values():
        each()  # allocations of the first step
    seconds = common.interleaved(work, rounds=rounds, budget=1e9)
    vars(engine_model)["attend"] = attend
    base = statistics.median(seconds["no bias"])
    return [
        {
            "benchmark": "model",
            "method": method,
            "layers": layers,
            "length": length,
            "attention": name,
            "seconds": statistics.median(values),
            "ratio_to_no_bias": statistics.median(values) / base,
            "rounds": len(values),
            **common.machine(),
        }
        for name, values in seconds.items()
    ]


def main() -> int:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--method", default="kerple_log")
    made.add_argument("--lengths", type=int, nargs="+", default=[512, 2048])
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--layers", type=int, default=12, help="fewer for a quick look")
    made.add_argument("--output", type=Path, help="append JSON lines here")
    options = made.parse_args()
    rows = []
    for length in options.lengths:
        found = measure(options.method, length, options.rounds, options.layers)
        common.append(options.output, found)
        rows += [[r["length"], r["attention"], r["seconds"], r["ratio_to_no_bias"]] for r in found]
    title = f"training step, {options.layers} layers of 768, {options.method}, batch 1, float32"
    print(common.table(title, ["length", "attention", "CPU s", "no bias = 1"], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
