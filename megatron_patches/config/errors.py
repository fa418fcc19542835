"""The one exception of this package."""

from __future__ import annotations

from collections.abc import Iterable

MOST = 50  # problems in one message


class ConfigError(ValueError):
    """A configuration that cannot be used: one readable line for each problem."""

    @classmethod
    def of(cls, problems: Iterable[str]) -> ConfigError:
        """One error for all `problems`, in their order, each once; of very many the first ones."""
        lines = list(dict.fromkeys(problems))
        more = [f"and {len(lines) - MOST} more"] if len(lines) > MOST else []
        return cls("\n".join([*lines[:MOST], *more]))
