"""The report: gaps, bands, kernels of several runs, and what its filters compare."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import retrieval_row_cases
from analysis_rows import kernel, make, study, training
from test_analysis_report import ROOT, Tree, page_of

from megatron_patches.analysis.report import Extras, report
from megatron_patches.analysis.retrieval_markup import headings
from megatron_patches.analysis.sections import Source
from megatron_patches.analysis.svg import plain
from megatron_patches.analysis.training_rows import append_training


def test_a_hole_is_not_bridged_and_bands_are_explained() -> None:
    lost = {"status": "failed", "message": "out of memory"}
    rows = [
        make(row.method, row.seed, 1024, None, **lost)
        if (row.method, row.eval_length) == ("alibi", 1024)
        else row
        for row in study()
    ]
    page, root = page_of(rows)
    lines = [n for n in root.all("g") if n.attributes.get("class", "").startswith("line ")]
    drawn = [
        [c.attributes["data-length"] for c in line.all("circle")]
        for line in lines
        if line.attributes["data-method"] == "alibi"
    ]
    assert drawn == [["512"], ["2048"]]
    assert "not drawn: alibi at 1024 (failed: out of memory)" in page
    assert "band: ± one standard deviation (n - 1) over them" in page
    keys = [n for n in root.all("g") if n.attributes.get("class", "").startswith("key ")]
    assert [n.attributes["data-method"] for n in keys].count("alibi") == 1


def test_both_parts_of_kernels_and_all_their_runs_are_there() -> None:
    both = [kernel(h, method="both", weight=[0.5] * 64) for h in (0, 1)]
    other = [kernel(0, step=400), kernel(0, dataset="two", config_sha="a")]
    other.append(kernel(0, dataset="two", config_sha="b"))
    page, root = page_of(study(), [*both, kernel(0), *other])
    charts = [n.attributes["aria-label"] for n in root.all("svg")]
    expected = {f"both, step 100, {part}" for part in ("bias", "weight")}
    assert expected | {"kerple_log, step 100", "kerple_log, step 400"} <= set(charts)
    titles = [n.text for n in root.all("h2")]
    assert {"books, learned kernels, step 100", "books, learned kernels, step 400"} <= set(titles)
    assert "kernels of two runs (step 100, config_sha a and step 100, config_sha b)" in page
    assert "the weight is not counted: both" in page


def test_links_and_sections_carry_the_same_filters() -> None:
    sliding = [
        make("alibi", 1, n, 20.0, protocol="sliding", stride=256, data="d", config_sha="alibi1")
        for n in (512, 1024)
    ]
    side = [make("alibi", 1, n, 21.0, data="e") for n in (512, 1024)]
    page = report(
        [Source("rows.jsonl", [*sliding, *side])],
        Extras(training=[training("alibi", 1, train_length=128, global_batch=16)]),
    )
    root = Tree(page).root
    (nav,) = root.all("nav")
    links = {n.all("a")[0].attributes["href"][1:]: n for n in nav.all("li") if not n.all("ul")}
    names = ("data-dataset", "data-protocol", "data-trained")
    sections = root.all("section")
    assert len(links) == len(sections) == 4
    for section in sections:
        link = links[section.attributes["id"]]
        for name in names:
            assert link.attributes.get(name) == section.attributes.get(name)
    (early,) = [n for n in sections if "early-token" in n.all("h2")[0].text]
    assert early.attributes["data-protocol"] == "nonoverlap sliding"


def test_variants_of_a_method_have_boxes_of_their_own() -> None:
    window = {"options": {"sliding_window_width": 512}}
    rows = [*study(), *(make("alibi", 1, n, 25.0, **window) for n in (512, 1024, 2048))]
    _, root = page_of(rows)
    boxes = [n.attributes["value"] for n in root.all("input") if n.attributes["name"] == "variant"]
    assert boxes == ["alibi", "alibi, window 512"]
    tagged = {n.attributes.get("data-variant") for n in root.all("tr", "g")}
    assert set(boxes) | {"kerple_log", "learned"} <= tagged
    for table in root.all("table")[:2]:
        own = [n for n in table.all("tr") if n.attributes.get("data-variant") == boxes[1]]
        assert [n.attributes["data-method"] for n in own] == ["alibi"] * len(own) and own
    assert not [n for n in page_of(study())[1].all("input") if n.attributes["name"] == "variant"]


def test_questions_with_one_title_are_told_apart() -> None:
    first = retrieval_row_cases.study()[0]
    later = dataclasses.replace(first, step=first.step + 100)
    other = dataclasses.replace(first, split="test")
    names = headings([[first], [later], [other]])
    assert names[0].endswith(f"step {first.step}") and names[1].endswith(f"step {first.step + 100}")
    assert len(set(names)) == 3 and names[2].endswith("split test")


def test_figures_of_failed_trainings_are_named(tmp_path: Path) -> None:
    path = tmp_path / "training.jsonl"
    append_training(path, [training("alibi", 1, status="failed", message="loss is not finite")])
    append_training(path, [training("alibi", 1, dataset="code")])
    script = ROOT / "scripts" / "figures.py"
    done = subprocess.run(
        [sys.executable, str(script), "--training", str(path), "--output", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and "training-code.png" in done.stdout
    assert done.stderr == (
        "no figure of training on books: not drawn: alibi, seed 1 (failed after 100 steps: loss is not "
        "finite)\n"
    )


def test_ticks_are_printed_short_and_right() -> None:
    assert [plain(value) for value in (22.5, 10_000.0, 150_000.0, 3e5, 1e29, 0.0)] == [
        *("22.5", "10000", "1.5e5", "3e5", "1e29", "0"),
    ]
