"""What each implementation of attention does for each method, found by doing it on small problems.

A cell says `yes` when the outputs (and gradients) agree with the float64 reference, and otherwise why it
was refused. Also prints what `auto` takes. `--interpret` runs the Triton kernels on the CPU.

Example: python scripts/attention_support.py --implementations reference chunked
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path

# Running a file puts its own folder on the path, not the repository, which may not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
if "--interpret" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import torch  # noqa: E402

from megatron_patches.attention import IMPLEMENTATIONS, attend  # noqa: E402
from megatron_patches.attention.selection import PREFERENCES  # noqa: E402
from megatron_patches.positions import PositionMethod, build, names  # noqa: E402

HEADS, DIM, LENGTH = 2, 16, 17
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


@dataclass(frozen=True)
class Case:
    """One column: a kind of call."""

    name: str
    dtype: torch.dtype = torch.float32
    gradients: bool = False
    queries: int = LENGTH


CASES = (
    Case("forward"),
    Case("backward", gradients=True),
    Case("cache", queries=1),
    Case("float64", torch.float64),
    Case("bfloat16", torch.bfloat16),
    Case("float16", torch.float16),
)


def method_of(name: str) -> PositionMethod:
    return build(name, heads=HEADS, head_dim=DIM, hidden_size=HEADS * DIM, max_length=64)


def compute(name: str, impl: str, case: Case, device: str) -> list[torch.Tensor]:
    """Output and, if asked for, the gradients of q, k, v and the method's parameters."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, HEADS, n, DIM) for n in (case.queries, LENGTH, LENGTH)]
    q, k, v = (torch.randn(s, generator=generator).to(device, case.dtype) for s in shapes)
    method = method_of(name).to(device)
    if case.dtype == torch.float64:
        method.to_float64_()
    hidden = torch.randn(1, LENGTH, HEADS * DIM, generator=generator).to(device, case.dtype)

    def gates() -> tuple[torch.Tensor, torch.Tensor | None] | None:
        found = method.decay(hidden)
        if found is None or found[1] is None:
            return found
        return found[0], found[1][:, :, -case.queries :]

    if not case.gradients:
        with torch.no_grad():
            return [attend(q, k, v, method, impl=impl, gates=gates())]
    leaves = [t.requires_grad_() for t in (q, k, v)] + list(method.parameters())
    out = attend(q, k, v, method, impl=impl, gates=gates())
    return [out, *torch.autograd.grad(out.sum(), leaves)]


def cell(name: str, impl: str, case: Case, device: str) -> str:
    """`yes`, `WRONG`, or the reason of the refusal."""
    try:
        found = compute(name, impl, case, device)
    except ValueError as error:
        return str(error).split("cannot do this: ")[-1]
    exact = Case(case.name, torch.float64, case.gradients, case.queries)
    wanted = compute(name, "reference", exact, "cpu")
    for a, b in zip(found, wanted, strict=True):
        apart = float((a.detach().cpu().double() - b.detach()).abs().max())
        if not apart / max(1.0, float(b.abs().max())) < TOLERANCE[case.dtype]:
            return "WRONG"
    return "yes"


def main() -> int:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--implementations", nargs="+", default=IMPLEMENTATIONS, choices=IMPLEMENTATIONS
    )
    made.add_argument("--methods", nargs="+", default=names(), choices=names())
    made.add_argument("--device", default="cpu")
    made.add_argument("--interpret", action="store_true", help="Triton's interpreter, on the CPU")
    made.add_argument("--auto", action="store_true", help="print what `auto` prefers, run nothing")
    options = made.parse_args()
    if options.auto:
        return print_preferences()
    torch.set_num_threads(1)
    methods = [n for n in options.methods if method_of(n).place == "attention"]
    wrong = False
    for impl in options.implementations:
        where = f"{options.device}, interpreted" if options.interpret else options.device
        print(f"`{impl}` on {where}:\n")
        print("| method | " + " | ".join(case.name for case in CASES) + " |")
        print("|---|" + "---|" * len(CASES))
        reasons: dict[str, int] = {}
        for name in methods:
            cells = []
            for case in CASES:
                text = cell(name, impl, case, options.device)
                wrong |= text == "WRONG"
                if text not in ("yes", "WRONG"):
                    text = f"no ({reasons.setdefault(text, len(reasons) + 1)})"
                cells.append(text)
            print(f"| {name} | " + " | ".join(cells) + " |")
        for reason, number in reasons.items():
            print(f"\n({number}) {reason}")
        print()
    return int(wrong)


def print_preferences() -> int:
    print("`auto` takes the first of these that does not refuse:\n")
    print("| device | gradients | tries |\n|---|---|---|")
    for (device, gradients), order in PREFERENCES.items():
        print(f"| {device} | {'yes' if gradients else 'no'} | {', '.join(order)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
