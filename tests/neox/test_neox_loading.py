"""What GPT-NeoX is kept from loading, and from training with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from neox_tools import make_args

from megatron_patches.config import ConfigError


class Harmful:
    def __reduce__(self) -> Any:
        return print, ("executed",)


class Engine:
    """Notes what DeepSpeed is asked to load."""

    def __init__(self) -> None:
        self.loaded: list[Any] = []

    def load_checkpoint(self, path: str, tag: Any) -> None:
        self.loaded.append((path, tag))


@pytest.fixture
def load(neox, alone, tmp_path):
    """load(**arguments) -> what the engine was asked, from the run in `load.run`."""
    from megatron import training

    def call(iteration: int | None = None, **changes: Any) -> list[Any]:
        args = make_args(load=str(call.run), **changes)  # type: ignore[attr-defined]
        engine = Engine()
        training.load_checkpoint(args, engine, None, None, iteration=iteration)
        return engine.loaded

    call.run = tmp_path / "run"  # type: ignore[attr-defined]
    return call


def step(run: Path, number: int, content: Any = None, **config: Any) -> Path:
    folder = run / f"global_step{number}"
    (folder / "configs").mkdir(parents=True)
    torch.save(
        {"module": {}} if content is None else content, folder / "mp_rank_00_model_states.pt"
    )
    if config:
        (folder / "configs" / "run.yml").write_text(yaml.safe_dump(config))
    return folder


def test_plain_files_are_loaded(load):
    step(load.run, 3)
    (load.run / "latest").write_text("global_step3")
    assert load() == [(str(load.run), None)]
    assert load(iteration=3) == [(str(load.run), 3)]


def test_nothing_saved_yet_is_a_start(load):
    load.run.mkdir()
    assert load() == [(str(load.run), None)]


def test_code_is_not_loaded(load, capsys):
    step(load.run, 3)
    step(load.run, 5, {"module": Harmful()})
    (load.run / "latest").write_text("global_step3")
    assert load() == [(str(load.run), None)]
    with pytest.raises(ConfigError, match=r"global_step5.*would run code \(builtins\.print\)"):
        load(iteration=5)
    (load.run / "latest").write_text("global_step5")
    with pytest.raises(ConfigError, match="would run code"):
        load()
    assert "executed" not in capsys.readouterr().out


def test_a_step_named_as_the_run(load):
    folder = step(load.run, 3)
    load.run = folder
    with pytest.raises(ConfigError, match=r"write load: .*run and iteration: 3"):
        load()


@pytest.mark.parametrize(
    ("stored", "now", "key"),
    [
        ({"pos-emb": "kerple_power"}, {"pos_emb": "kerple_log"}, "pos_emb"),
        (
            {"pos_emb": "kerple_log", "num_attention_heads": 8},
            {"pos_emb": "kerple_log"},
            "num_attention_heads",
        ),
        ({"pos_emb": "rpe", "rpe_num_buckets": 16}, {"pos_emb": "rpe"}, "rpe_num_buckets"),
    ],
)
def test_weights_of_another_model(load, stored, now, key):
    shape = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    step(load.run, 1, **{**shape, **stored})
    with pytest.raises(ConfigError, match=rf"trained with {key}: "):
        load(iteration=1, **now)


def test_another_spelling_is_the_same_method(load):
    from megatron_patches.positions import aliases

    alias, name = next(iter(aliases().items()))
    args = make_args(pos_emb=name)
    shape = {
        key: getattr(args, key) for key in ("num_layers", "hidden_size", "num_attention_heads")
    }
    step(load.run, 1, pos_emb=alias, position_options={}, **shape)
    assert load(iteration=1, pos_emb=name)


def test_an_optimizer_that_trains_nothing(neox):
    from megatron import training

    args = make_args(no_load_optim=True, train_iters=5)
    with pytest.raises(ConfigError, match="finetune: true"):
        training.pretrain(args)
