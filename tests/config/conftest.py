"""Files and shorthands for the configuration tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from config_files import MINIMAL

from megatron_patches.config import Config, ConfigError, compose


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """write(text, name="run.yml") -> path of a new YAML file."""

    def write_file(text: str, name: str = "run.yml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


@pytest.fixture
def config(write: Callable[..., Path]) -> Callable[..., Config]:
    """config(text="", *overrides) -> the minimal configuration with `text` added."""

    def make(text: str = "", *overrides: str) -> Config:
        return compose([write(MINIMAL + text)], overrides)

    return make


@pytest.fixture
def refusal(config: Callable[..., Config]) -> Callable[..., str]:
    """refusal(text, *overrides) -> the message with which the configuration is refused."""

    def message(text: str = "", *overrides: str) -> str:
        with pytest.raises(ConfigError) as caught:
            config(text, *overrides)
        shown = str(caught.value)
        assert "pydantic" not in shown.lower() and "errors.pydantic.dev" not in shown
        return shown

    return message
