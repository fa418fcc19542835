"""Against numbers of the methods' own public code: bias, output and every gradient, in float64.

A file of `tests/goldens/rivals/` belongs to the method of its name. Its metadata holds the cases as JSON:
set-up ("h4": batch 2 with 4 heads, "h12": batch 1 with 12 heads; 48 tokens, head size 16), or `heads` and
`head_dim` of inputs that the golden holds itself as `input.NAME`, and options. `tolerances` are for single
tensors, in place of the file's `tolerance`; `window` is an argument of `attend`.
Tensors are named `CASE/...`: `param.NAME`, then what must come out: `out`, `grad.NAME` of sum(out * g),
`bias` [H, 48, 48], `table` with its `distances`, `bias_rows` with the query positions `rows`; of methods
that rewrite scores `scores` and `weights` (after the softmax) [B, H, 48, 48], of the first samples;
`log_gate` [B, H, 48] of the input `x`, `start.NAME` of a parameter before anything is loaded; `q` and `k` as
the method's transform leaves them. `positions` [48] are those of queries and keys, which else are counted;
the whole text then has `total_length` tokens (in the metadata of the case).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from megatron_patches.attention import attend
from megatron_patches.positions import build

GOLDENS = Path(__file__).parents[1] / "goldens" / "rivals"
HEADS = {"h4": 4, "h12": 12}
LENGTH, HEAD_DIM = 48, 16


def read(name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    with safe_open(GOLDENS / f"{name}.safetensors", "pt") as file:
        return file.metadata() or {}, {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118


NAMES = sorted({file.stem for file in GOLDENS.glob("*.safetensors")} - {"inputs"})


def cases_with(key: str) -> list[Any]:
    """`(method, case)` of all cases whose golden holds `key`."""
    return [
        pytest.param(name, case, id=f"{name}-{case}")
        for name in NAMES
        for case in json.loads(read(name)[0]["cases"])
        if f"{case}/{key}" in read(name)[1]
    ]


def cases_that_start(name: str) -> list[Any]:
    """`(method, case)` of those whose golden holds start values."""
    cases = {key.partition("/")[0] for key in read(name)[1] if "/start." in key}
    return [pytest.param(name, case, id=f"{name}-{case}") for case in sorted(cases)]


class Golden:
    """One case: its inputs, what its authors' code returns, and our method with its parameters."""

    def __init__(self, name: str, case: str) -> None:
        metadata, tensors = read(name)
        self.facts = json.loads(metadata["cases"])[case]
        self.tolerance = float(metadata["tolerance"])
        self.tensors = {
            key.removeprefix(f"{case}/"): value
            for key, value in tensors.items()
            if key.startswith(f"{case}/")
        }
        heads = self.facts.get("heads") or HEADS[self.facts["setup"]]
        head_dim = self.facts.get("head_dim", HEAD_DIM)
        self.method = build(
            name,
            heads=heads,
            head_dim=head_dim,
            hidden_size=head_dim * heads,
            **self.facts["options"],
        ).to_float64_()
        start = self.facts.get("params", case)
        self.start = {k: p.detach().clone() for k, p in self.method.named_parameters()}
        for key, parameter in self.method.named_parameters():
            if "out" in self.tensors or f"{start}/param.{key}" in tensors:
                parameter.data.copy_(tensors[f"{start}/param.{key}"])

    def inputs(self) -> dict[str, Tensor]:
        if "setup" not in self.facts:
            return {key: self.tensors[f"input.{key}"].double() for key in "qkvg"}
        inputs = read("inputs")[1]
        found = {key: inputs[f"{self.facts['setup']}.{key}"].double() for key in "qkvgx"}
        if (
            self.facts.get("channels") == "neighbours"
        ):  # pairs (0, 1), (2, 3), ... against our halves
            order = [*range(0, HEAD_DIM, 2), *range(1, HEAD_DIM, 2)]
            found |= {key: found[key][..., order] for key in "qk"}
        return found

    def transformed(self, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Queries and keys at the golden's positions."""
        return self.method.transform(
            given["q"],
            given["k"],
            self.tensors["positions"],
            total_length=self.facts.get("total_length"),
        )

    def attend(self, given: dict[str, Tensor], impl: str) -> Tensor:
        window = tuple(self.facts["window"]) if "window" in self.facts else None
        gates = self.method.decay(given["x"]) if self.method.gated else None
        q, k, far = given["q"], given["k"], "positions" in self.tensors
        if far:
            q, k = self.transformed(given)
        return attend(
            q, k, given["v"], self.method, impl=impl, window=window, transformed=far, gates=gates
        )

    def same(self, key: str, ours: Tensor) -> None:
        expected = self.tensors[key].double()
        if key in ("grad.q", "grad.k") and self.facts.get("channels") == "neighbours":
            expected = expected[..., [*range(0, HEAD_DIM, 2), *range(1, HEAD_DIM, 2)]]
        largest = expected.abs().max()
        assert ours.shape == expected.shape and largest > 1e-3, key
        error = (ours - expected).abs().max() / largest
        allowed = self.facts.get("tolerances", {}).get(key, self.tolerance)
        assert error <= allowed, (key, float(error))


def shifted(bias: Tensor, own: Tensor) -> Tensor:
    """Less its value at distance 0: a constant that softmax does not see, and codes choose freely."""
    return bias - own


def test_every_golden_has_its_method_and_says_where_it_is_from():
    assert NAMES
    for name in NAMES:
        metadata, tensors = read(name)
        assert metadata["source"]
        cases = json.loads(metadata["cases"])
        assert {key.partition("/")[0] for key in tensors} == set(cases)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
@pytest.mark.parametrize(("name", "case"), cases_with("out"))
def test_output_and_gradients(name, case, impl):
    golden = Golden(name, case)
    given = golden.inputs()
    leaves = {key: given[key].requires_grad_() for key in "qkvx" if key in given}
    leaves |= dict(golden.method.named_parameters())
    out = golden.attend(given, impl)
    golden.same("out", out)
    (out * given["g"]).sum().backward()
    found = {key for key in golden.tensors if key.startswith("grad.")}
    assert {f"grad.{key}" for key, _ in golden.method.named_parameters()} <= found
    for key in found:
        golden.same(key, leaves[key.removeprefix("grad.")].grad)


@pytest.mark.parametrize(("name", "case"), cases_with("log_gate"))
def test_log_decay(name, case):
    golden = Golden(name, case)
    log_decay, _ = golden.method.decay(golden.inputs()["x"])
    golden.same("log_gate", log_decay)


@pytest.mark.parametrize(("name", "case"), [c for n in NAMES for c in cases_that_start(n)])
def test_start_values(name, case):
    golden = Golden(name, case)
    for key in (key for key in golden.tensors if key.startswith("start.")):
        golden.same(key, golden.start[key.removeprefix("start.")])


@pytest.mark.parametrize(("name", "case"), cases_with("q"))
def test_transformed_queries_and_keys(name, case):
    golden = Golden(name, case)
    given = golden.inputs()
    for key, ours in zip("qk", golden.transformed(given), strict=True):
        golden.same(key, ours)


@pytest.mark.parametrize(("name", "case"), cases_with("table"))
def test_table(name, case):
    golden = Golden(name, case)
    distance, method = golden.tensors["distances"], golden.method
    assert distance[0] == 0
    golden.tensors["table"] = shifted(
        golden.tensors["table"].double(), golden.tensors["table"][:, :1].double()
    )
    golden.same("table", shifted(method.bias(distance), method.bias(distance[:1])))
    single = build(
        method.name,
        heads=method.heads,
        head_dim=HEAD_DIM,
        hidden_size=HEAD_DIM * method.heads,
        **golden.facts["options"],
    )
    golden.same("table", shifted(single.bias(distance), single.bias(distance[:1])))


@pytest.mark.parametrize(
    ("name", "case", "key"),
    [
        pytest.param(*case.values, key, id=f"{case.id}-{key}")
        for key in ("bias", "bias_rows")
        for case in cases_with(key)
    ],
)
def test_bias_of_whole_rows(name, case, key):
    golden = Golden(name, case)
    theirs = golden.tensors[key].double()
    rows = golden.tensors.get("rows", torch.arange(LENGTH))
    distance = rows[:, None] - torch.arange(theirs.shape[-1])
    own = rows[None, :, None].expand(theirs.shape[0], -1, 1)
    golden.tensors[key] = shifted(theirs, theirs.gather(2, own)) * (distance >= 0)
    ours = golden.method.bias(distance.clamp(min=0), rows)
    golden.same(key, shifted(ours, ours.gather(2, own)) * (distance >= 0))


def rewritten(golden: Golden) -> tuple[Tensor, Tensor]:
    """Scores [B, H, 48, 48] after a method of tier "content", and who sees whom."""
    given, method = golden.inputs(), golden.method
    rows = torch.arange(LENGTH)
    distance = rows[:, None] - rows
    scores = method.score(
        given["q"] @ given["k"].mT / HEAD_DIM**0.5,
        distance.clamp(min=0),
        rows,
        query_BHQD=given["q"],
        visible_QK=distance >= 0,
    )
    return scores, distance >= 0


@pytest.mark.parametrize(("name", "case"), cases_with("weights"))
def test_weights_of_whole_rows(name, case):
    golden = Golden(name, case)
    scores, visible = rewritten(golden)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    golden.same("weights", weights[: len(golden.tensors["weights"])])


@pytest.mark.parametrize(("name", "case"), cases_with("scores"))
def test_scores_of_whole_rows(name, case):
    golden = Golden(name, case)
    scores, visible = rewritten(golden)
    theirs = golden.tensors["scores"].double()

    def own(values: Tensor) -> Tensor:
        return values.diagonal(dim1=-2, dim2=-1)[..., None]

    golden.tensors["scores"] = shifted(theirs, own(theirs)) * visible
    golden.same("scores", shifted(scores, own(scores)) * visible)
