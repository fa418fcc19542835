from .initialize import (
    get_model_parallel_group,
    get_model_parallel_rank,
    get_model_parallel_world_size,
    get_pipe_parallel_group,
    get_pipe_parallel_rank,
    get_pipe_parallel_world_size,
    place,
)

__all__ = [
    "get_model_parallel_group",
    "get_model_parallel_rank",
    "get_model_parallel_world_size",
    "get_pipe_parallel_group",
    "get_pipe_parallel_rank",
    "get_pipe_parallel_world_size",
    "place",
]
