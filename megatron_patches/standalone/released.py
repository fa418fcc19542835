"""Checkpoints that others released: what the manifest says of them, and whether a folder is one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_patches.config import Config, ConfigError, check_standalone, compose
from megatron_patches.config.reading import read_file
from megatron_patches.positions import resolve

if TYPE_CHECKING:
    from megatron_patches.standalone.model import GPT

_SHARED_KEYS = frozenset({"where", "layouts", "checkpoints"})
_LAYOUT_KEYS = frozenset({"layers", "hidden_size", "heads", "dtype", "files", "tensors"})
_ENTRY_KEYS = frozenset(
    {"method", "dataset", "layout", "configs", "overrides", "position_tensors", "perplexity"}
    | {"archive", "sha256", "seed", "published"}
)


@dataclass(frozen=True)
class Figure:
    """A published perplexity: mean over seeds and standard deviation (None: not published)."""

    length: int
    perplexity: float
    std: float | None


@dataclass(frozen=True)
class Layout:
    """Shape of the model, and its files: layer number -> tensor -> shape, without the position method's."""

    layers: int
    hidden_size: int
    heads: int
    dtype: str
    blocks: frozenset[int]
    files: dict[int, dict[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Released:
    """One checkpoint of the manifest; `entry` is its text there, `where` who has the archive."""

    name: str
    method: str
    dataset: str
    layout: Layout
    configs: tuple[str, ...]
    overrides: tuple[str, ...]
    position_tensors: dict[str, tuple[int, ...]]
    sha256: str | None
    where: str
    figures: tuple[Figure, ...]
    entry: dict[str, Any]

    def config(self, root: Path, overrides: tuple[str, ...] = ()) -> Config:
        """The configuration; `root` is the repository. ConfigError if it is not the entry's model."""
        made = compose([root / file for file in self.configs], [*self.overrides, *overrides])
        check_standalone(made)
        said = {
            "pos_emb": (made.pos_emb, self.method),
            "dataset": (made.dataset, self.dataset),
            "num_layers": (made.num_layers, self.layout.layers),
            "hidden_size": (made.hidden_size, self.layout.hidden_size),
            "num_attention_heads": (made.num_attention_heads, self.layout.heads),
            "precision": (made.torch_dtype_name, self.layout.dtype),
        }
        for key, (composed, listed) in said.items():
            if composed != listed:
                raise ConfigError(
                    f"{self.name}: its configuration has {key} {composed!r}, the manifest {listed!r}"
                )
        return made

    def file_names(self) -> list[str]:
        return [f"layer_{number:02d}-model_00-model_states.pt" for number in self.layout.files]

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape, by its name in `GPT`."""
        found: dict[str, tuple[int, ...]] = {}
        for number, shapes in self.layout.files.items():
            own = self.position_tensors if number in self.layout.blocks else {}
            found |= {f"sequential.{number}.{key}": s for key, s in {**shapes, **own}.items()}
        return found


def read_manifest(path: Path) -> dict[str, Released]:
    """The checkpoints by name, in the file's order. Raises ConfigError that names what is wrong."""
    content = {entry.key: entry.value for entry in read_file(path)}
    try:
        _only(content, _SHARED_KEYS)
        layouts = {name: _layout(values) for name, values in content["layouts"].items()}
        return {
            name: _released(name, values, layouts, str(content["where"]))
            for name, values in content["checkpoints"].items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: not a manifest of checkpoints: {error!r}") from error


def _only(mapping: dict[str, Any], keys: frozenset[str]) -> None:
    if unknown := sorted(set(mapping) - keys):
        raise ValueError(f"unknown keys {', '.join(unknown)}")


def _shapes(mapping: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {key: tuple(int(side) for side in shape) for key, shape in mapping.items()}


def _layout(values: dict[str, Any]) -> Layout:
    _only(values, _LAYOUT_KEYS)
    files = {
        int(number): _shapes(values["tensors"][kind])
        for kind, numbers in values["files"].items()
        for number in numbers
    }
    return Layout(
        layers=int(values["layers"]),
        hidden_size=int(values["hidden_size"]),
        heads=int(values["heads"]),
        dtype=str(values["dtype"]),
        blocks=frozenset(values["files"]["block"]),
        files=dict(sorted(files.items())),
    )


def _released(
    name: str, values: dict[str, Any], layouts: dict[str, Layout], where: str
) -> Released:
    _only(values, _ENTRY_KEYS)
    return Released(
        name=name,
        method=resolve(values["method"]),
        dataset=str(values["dataset"]),
        layout=layouts[values["layout"]],
        configs=tuple(values["configs"]),
        overrides=tuple(values["overrides"]),
        position_tensors=_shapes(values["position_tensors"]),
        sha256=values["sha256"],
        where=where,
        figures=tuple(
            Figure(length, float(mean), None if std is None else float(std))
            for length, (mean, std) in sorted((int(k), v) for k, v in values["perplexity"].items())
        ),
        entry=values,
    )


# ---- is it the checkpoint? -------------------------------------------------------------------


def stored_settings(released: Released, folder: Path) -> tuple[tuple[str, ...], list[str]]:
    """Overrides from the configuration files that came with the weights (the run's seed), and notes.

    Raises CheckpointError when they describe another model. What they do not say is not checked.
    """
    from megatron_patches.standalone.weights import CheckpointError

    values, notes = {}, []
    for file in sorted([*folder.glob("configs/*.yml"), *folder.glob("global_step*/configs/*.yml")]):
        try:
            values.update({entry.key: entry.value for entry in read_file(file)})
        except ConfigError as error:
            notes.append(f"not compared: {str(error).removeprefix(f'{folder}/').splitlines()[0]}")
    if isinstance(values.get("pos_emb"), str):
        values["pos_emb"] = resolve(values["pos_emb"])
    expected = {
        "pos_emb": released.method,
        "num_layers": released.layout.layers,
        "hidden_size": released.layout.hidden_size,
        "num_attention_heads": released.layout.heads,
    }
    for key, listed in expected.items():
        if values.get(key, listed) != listed:
            raise CheckpointError(
                f"the configuration beside the weights has {key} {values[key]!r}, {released.name} of "
                f"the manifest {listed!r}"
            )
    if isinstance(seed := values.get("seed"), int):
        return (f"seed={seed}",), notes
    return (), [*notes, "its seed is not known: config.yml keeps that of the base file"]


def check_files(released: Released, folder: Path) -> None:
    """Every layer's file is there and no other; every tensor has the listed name, shape and dtype."""
    import torch

    from megatron_patches.standalone.weights import CheckpointError, read_shards
    from megatron_patches.training.untrusted import damaged

    there = {file.name for file in folder.glob("layer_*.pt")}
    wanted = set(released.file_names())
    problems = [f"{name}: missing" for name in sorted(wanted - there)]
    problems += [f"{name}: one too many" for name in sorted(there - wanted)]
    problems += [f"{name}: damaged" for name in sorted(there & wanted) if damaged(folder / name)]
    if not problems:
        state = read_shards(folder)[0]
        shapes = released.tensors()
        problems += [f"{key}: missing" for key in sorted(set(shapes) - set(state))]
        problems += [f"{key}: one too many" for key in sorted(set(state) - set(shapes))]
        for key in sorted(set(state) & set(shapes)):
            found = (tuple(state[key].shape), str(state[key].dtype).removeprefix("torch."))
            if found != (shapes[key], released.layout.dtype):
                problems.append(f"{key}: {found}, expected {(shapes[key], released.layout.dtype)}")
            elif not torch.isfinite(state[key]).all():
                problems.append(f"{key}: holds NaN or infinite values")
    if problems:
        more = f" and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise CheckpointError(
            f"not {released.name} of the manifest: {'; '.join(problems[:8])}{more}"
        )


def check_values(model: GPT, *, accept_outside: bool) -> list[str]:
    """A line on each position parameter. Raises CheckpointError for values above a method's limit.

    The lower limits are the same for all KERPLE kernels, so they tell nothing apart; and the authors'
    optimizer may leave a value outside that their forward pass cuts, as ours does.
    """
    from megatron_patches.standalone.weights import CheckpointError

    method = model.position_method
    lines = []
    for name, parameter in method.named_parameters():
        low, high = method.bounds.get(name, (float("-inf"), float("inf")))
        below, above = int((parameter < low).sum()), int((parameter > high).sum())
        line = f"{name}: {parameter.min():.4g} to {parameter.max():.4g} over {parameter.numel()}"
        if above and not accept_outside:
            raise CheckpointError(
                f"{line} heads, {above} of them above {method.name}'s limit of {high:g}: the checkpoint "
                "of another method? --accept-outside takes it, should the authors' optimizer have "
                "left them there (the forward pass uses the limit)"
            )
        outside = f"; {below + above} outside [{low:g}, {high:g}], used as the limit"
        lines.append(line + (outside if below + above else ""))
    return lines
