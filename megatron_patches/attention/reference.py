"""The oracle: dense attention straight from the definition. Memory grows with queries x keys."""

from torch import Tensor

from megatron_patches.attention.problem import Problem, dense


def refuses(problem: Problem) -> str | None:
    """Nothing is refused: the oracle must answer every question."""
    return None


def run(problem: Problem) -> Tensor:
    """`out_BHQD`; every method, dtype, mask and gradient, at quadratic memory."""
    return dense(problem)
