"""The oracle: dense attention straight from the definition. Memory grows with queries x keys."""

from torch import Tensor

from megatron_patches.attention.problem import Problem, dense


def run(problem: Problem) -> Tensor:
    """`out_BHQD`; every method, dtype, mask and gradient, at quadratic memory."""
    return dense(problem)
