"""Configuration: NeoX's flat keys, composed from YAML layers into one checked, frozen `Config`."""

from .batch import Batch, batch_arithmetic, data_parallel_size
from .compose import compose, from_mapping
from .errors import ConfigError
from .schema import UNNAMED, Config
from .standalone import check_standalone
from .store import (
    FUNCTION,
    another_run,
    config_sha,
    contradictions,
    dump,
    load_run_config,
    run_config_file,
)

__all__ = [
    "Batch",
    "FUNCTION",
    "Config",
    "ConfigError",
    "UNNAMED",
    "another_run",
    "batch_arithmetic",
    "check_standalone",
    "compose",
    "config_sha",
    "contradictions",
    "data_parallel_size",
    "dump",
    "from_mapping",
    "load_run_config",
    "run_config_file",
]
