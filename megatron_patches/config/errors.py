"""The one exception of this package."""

from __future__ import annotations

from collections.abc import Iterable


class ConfigError(ValueError):
    """A configuration that cannot be used: one readable line for each problem."""

    @classmethod
    def of(cls, problems: Iterable[str]) -> ConfigError:
        """One error for all `problems`, in their order, each once."""
        return cls("\n".join(dict.fromkeys(problems)))
