"""Retrieval as table, heat map and HTML: numbers by hand, nothing missing in silence."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from retrieval_row_cases import make, study

from megatron_patches.analysis.failures import Failure, append_failures
from megatron_patches.analysis.heatmap import heat_map
from megatron_patches.analysis.jsonl import RowError
from megatron_patches.analysis.render import to_csv, to_latex, to_markdown
from megatron_patches.analysis.retrieval_grid import collect_retrieval, questions, shown
from megatron_patches.analysis.retrieval_markup import retrieval_markup
from megatron_patches.analysis.retrieval_rows import append_retrieval
from megatron_patches.analysis.retrieval_tables import retrieval_table

ROOT = Path(__file__).resolve().parents[2]
EVIL = "</svg><script>bad()</script>\"'&"


# --- table ----------------------------------------------------------------------------------------


def test_the_table_averages_over_depths_then_seeds() -> None:
    text = to_markdown(retrieval_table(study()))
    # t(0.975, 2) = 4.302653; the seeds' means 1.5, 2.5, 3.5 have a standard deviation of 1, so half
    # the interval is 4.302653 / sqrt(3) = 2.484138; of 0.5, 1, 1.5 it is half of that.
    assert "| alibi | **2.500±2.484** | **1.000±1.242** |" in text
    assert "| learned | 0.250±0.000 | refused [1] |" in text
    assert "[1] refused: cannot read 1024" in text
    assert (
        "Gain over the control (nats per answer token): copy (text), books, trained on 512" in text
    )
    assert "depths 0, 1, 2 questions of 4 answer tokens a cell" in text
    assert "over 3 seeds (t)" in text
    assert "2.484" in to_latex(retrieval_table(study()))
    assert "alibi,512,2.500,2.5,1.0,3,yes" in to_csv(retrieval_table(study()))


def test_other_values_and_one_seed() -> None:
    one = [row for row in study() if row.seed == 1]
    text = to_markdown(retrieval_table(one, value="token_accuracy", methods=["learned", "alibi"]))
    assert "one seed: no interval" in text
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert lines[1:] == [
        "| learned | **0.6250** | refused [1] |",
        "| alibi | **0.6250** | **0.6250** |",
    ]


def test_a_seed_without_all_depths_is_left_out_and_named() -> None:
    rows = [row for row in study() if (row.seed, row.eval_length, row.depth) != (3, 512, 1.0)]
    rows = [row for row in rows if (row.method, row.seed, row.depth) != ("alibi", 2, 0.0)]
    rows.append(make("alibi", 2, 1024, 0.0, None))
    text = to_markdown(retrieval_table(rows))
    # Of alibi at 512 seed 1 is left, at 1024 seeds 1 and 3.
    assert "| alibi | 1.500 [1] | **1.000±6.353** [2] |" in text
    assert "[1] 1 of 3 seeds; 1 of 2 depths" in text
    assert "[2] 2 of 3 seeds; refused: cannot read 1024" in text
    # Two seeds win over one, whatever the mean.
    assert "| learned | **0.250±0.000** [3] |" in text


def test_nobody_is_best_at_nothing() -> None:
    rows = [make(name, 1, 512, 0.5, gain) for name, gain in (("a", 0.0), ("b", -0.1))]
    text = to_markdown(retrieval_table(rows))
    assert "| a | 0.0000 |" in text and "| b | -0.1000 |" in text


def test_small_numbers_keep_no_sign_of_nothing() -> None:
    assert shown(-0.00001, 4) == "0.0000"
    assert shown(-0.00051, 4) == "-0.0005"


# --- groups ---------------------------------------------------------------------------------------


def test_questions_are_told_apart() -> None:
    rows = study() + [make("alibi", 1, 512, 0.0, 1.0, source="random", questions="asked-2")]
    assert [len(group) for group in questions(rows)] == [1, 24]
    with pytest.raises(RowError, match="differ in: .*source"):
        collect_retrieval(rows)


def test_two_configurations_of_one_label_are_refused() -> None:
    rows = [make("a", 1, 512, d, 1.0, config_sha=sha) for d, sha in ((0.0, "one"), (1.0, "two"))]
    with pytest.raises(RowError, match="a, seed 1: results of two configurations"):
        collect_retrieval(rows)


def test_no_rows() -> None:
    with pytest.raises(RowError, match="no rows"):
        collect_retrieval([])
    with pytest.raises(RowError, match="no rows of rotary"):
        collect_retrieval(study(), ["rotary"])


# --- heat map -------------------------------------------------------------------------------------


def panels(**settings):
    figure = heat_map(study(), **settings)
    return {axes.get_title(loc="left"): axes for axes in figure.axes}


def test_each_cell_prints_its_number_on_its_grey() -> None:
    found = panels()
    assert list(found) == ["alibi", "learned"]
    texts = {t.get_position(): t.get_text() for t in found["alibi"].texts}
    # Across: 512, 1024; down: depth 0, then 1.
    assert texts == {(0, 0): "2.000", (0, 1): "3.000", (1, 0): "0.000", (1, 1): "2.000"}
    assert [label.get_text() for label in found["alibi"].get_yticklabels()] == ["0", "1"]
    greys = {
        (int(p.get_x() + 0.5), int(p.get_y() + 0.5)): p.get_facecolor()[0]
        for p in found["alibi"].patches
    }
    # The highest of all panels is darkest, and none is darker than its number can stand on.
    assert greys[0, 1] == pytest.approx(0.15) and greys[1, 0] == 1.0
    assert greys[0, 0] == pytest.approx(1 - 0.85 * 2 / 3)
    ink = {t.get_position(): t.get_color() for t in found["alibi"].texts}
    assert ink[0, 1] == "white" and ink[1, 0] == "black"


def test_cells_without_scores_are_hatched_and_named() -> None:
    axes = panels()["learned"]
    hatched = {(p.get_x() + 0.5, p.get_y() + 0.5) for p in axes.patches if p.get_hatch()}
    assert hatched == {(1, 0), (1, 1)}
    texts = {t.get_position(): t.get_text() for t in axes.texts}
    assert texts[1, 0] == "refused" and texts[0, 0] == "0.250"
    rows = [row for row in study() if (row.method, row.depth) != ("alibi", 1.0)]
    absent = heat_map(rows).axes[0]
    assert {t.get_text() for t in absent.texts if t.get_position()[1] == 1} == {"–"}
    assert not any(p.get_hatch() for p in absent.patches)


def with_two_seeds_short():
    """Of alibi at 512 and depth 1, seed 1 is left: gain 2; seed 2 failed, of seed 3 there is no row."""
    cell = ("alibi", 512, 1.0)
    rows = [r for r in study() if (r.method, r.eval_length, r.depth) != cell or r.seed == 1]
    return [*rows, make("alibi", 2, 512, 1.0, None, status="failed", message="out of memory")]


def test_a_mean_over_some_seeds_says_so() -> None:
    figure = heat_map(with_two_seeds_short(), notes=["failed: a step"])
    texts = {t.get_position(): t.get_text() for t in figure.axes[0].texts}
    assert texts == {(0, 0): "2.000", (0, 1): "2.000\n1/3", (1, 0): "0.000", (1, 1): "2.000"}
    foot = figure.texts[-1].get_text().replace("\n", " ")
    assert "fewer than 3 seeds: alibi at 512 (failed: out of memory; no row)" in foot
    assert foot.endswith("failed: a step")
    assert "fewer than" not in heat_map(study()).texts[-1].get_text()


def test_a_mean_over_some_seeds_says_so_in_the_report() -> None:
    page = str(retrieval_markup(with_two_seeds_short()))
    assert page.count("2.000*</text>") == 1 and page.count("*</text>") == 1
    assert "fewer than 3 seeds: alibi at 512 (failed: out of memory; no row)" in page
    assert "*</text>" not in str(retrieval_markup(study()))


def test_the_command_names_failures(rows: Path, tmp_path, capsys, monkeypatch) -> None:
    words = {"study": "toy", "command": "python x.py", "exit_code": 1, "message": "no", "log": "l"}
    run_of = {"method": "rotary", "dataset": "books", "seed": 2, "train_length": 512}
    words |= {**run_of, "config_sha": "feed", "when": "w", "run": "rotary-books-2"}
    steps = ["retrieval valid window 8", "eval nonoverlap valid", "retrieval test", "train"]
    append_failures(tmp_path / "failed.jsonl", [Failure(step=step, **words) for step in steps])
    code, text, _ = run(capsys, monkeypatch, rows, "--tasks", "copy")
    named = [line.split(", ")[1] for line in text.splitlines() if line.startswith("failed: ")]
    assert (code, [name.split(":")[0] for name in named]) == (0, [steps[0], steps[3]])


def test_shares_have_a_scale_of_their_own() -> None:
    axes = panels(value="exact", methods=["alibi"])["alibi"]
    assert {t.get_text() for t in axes.texts} == {"0.5000"}
    assert {round(p.get_facecolor()[0], 3) for p in axes.patches} == {round(1 - 0.85 / 2, 3)}


def test_a_gain_below_zero_is_white_and_said() -> None:
    rows = [make("a", 1, 512, 0.0, -0.5), make("a", 1, 512, 1.0, 0.5)]
    axes = heat_map(rows).axes[0]
    assert {t.get_position(): t.get_text() for t in axes.texts}[0, 0] == "-0.5000"
    assert sorted(p.get_facecolor()[0] for p in axes.patches) == [pytest.approx(0.15), 1.0]
    opacities = re.findall(r'fill-opacity="([0-9.]+)"', retrieval_markup(rows))
    assert opacities == ["0.000", "0.450"]
    assert heat_map(rows[:1]).axes[0].patches[0].get_facecolor()[0] == 1.0


def test_nothing_to_draw() -> None:
    with pytest.raises(RowError, match="every cell was refused or failed"):
        heat_map([make("learned", 1, 1024, 0.0, None)])


# --- HTML -----------------------------------------------------------------------------------------


def test_the_markup_is_well_formed_and_carries_the_filters() -> None:
    tree = ElementTree.fromstring(f"<main>{retrieval_markup(study())}</main>")
    (section,) = tree.findall("section")
    assert section.get("data-dataset") == "books" and section.get("data-trained") == "512"
    figures = section.findall(".//figure[svg]")
    assert [figure.get("data-method") for figure in figures] == ["alibi", "learned"]
    columns = figures[0].findall("svg/g[@data-length]")
    assert [column.get("data-length") for column in columns] == ["512", "1024"]
    cells = columns[0].findall("g")
    assert [cell.find("text").text for cell in cells] == ["2.000", "3.000"]
    assert cells[1].find("title").text == (
        "alibi, 512 tokens, depth 1: gain 3, loss 2, control 5, token accuracy 0.625, "
        "in the control 0.125, exact 0.5; 500 tokens back; 3 seeds"
    )
    strongest = max(float(rect.get("fill-opacity")) for rect in tree.iter("rect"))
    assert strongest == pytest.approx(0.45)
    refused = figures[1].findall("svg/g")[1].findall("g")[0]
    assert refused.find("text").text == "refused" and len(refused.findall("line")) == 2
    assert "cannot read 1024" in refused.find("title").text
    assert [row.get("data-method") for row in section.findall(".//tbody/tr")] == [
        "alibi",
        "learned",
    ]


def test_the_page_forbids_inline_styles_and_text_stays_text() -> None:
    evil = [make(EVIL, 1, 512, 0.0, 1.0, dataset=EVIL), make("x", 1, 512, 0.0, None, message=EVIL)]
    page = retrieval_markup(evil)
    assert "<script" not in page and " style=" not in page
    tree = ElementTree.fromstring(f"<main>{page}</main>")
    assert not list(tree.iter("script"))
    assert EVIL in {figure.get("data-method") for figure in tree.iter("figure")}


def test_rows_that_cannot_meet_are_said_so() -> None:
    rows = [make("a", 1, 512, d, 1.0, config_sha=sha) for d, sha in ((0.0, "one"), (1.0, "two"))]
    page = retrieval_markup(rows)
    assert "Not shown: a, seed 1: results of two configurations" in page
    all_refused = retrieval_markup([make("a", 1, 512, 0.0, None)])
    assert "refused" in all_refused


# --- the command ----------------------------------------------------------------------------------


def run(capsys, monkeypatch, *arguments: object) -> tuple[int, str, str]:
    """Exit code, output and messages of scripts/heatmap.py, in this process."""
    spec = importlib.util.spec_from_file_location("heatmap_script", ROOT / "scripts" / "heatmap.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(sys, "argv", ["heatmap.py", *map(str, arguments)])
    try:
        code = script.main()
    except SystemExit as stop:  # argparse
        code = stop.code
    return code, *capsys.readouterr()


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    other = {"task": "passkey", "source": "digits", "questions": "asked-2"}
    append_retrieval(path, [*study(), make("alibi", 1, 512, 0.5, 0.5, **other)])
    return path


def test_the_command_draws_and_prints(rows: Path, tmp_path: Path) -> None:
    line = [sys.executable, "-W", "error", "scripts/heatmap.py", rows, "--output", tmp_path / "out"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert done.stdout.count("### Gain over the control") == 2
    stems = ["gain-books-512-copy-text", "gain-books-512-passkey-digits"]
    names = [f"{stem}.{kind}" for stem in stems for kind in ("svg", "png")]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(names)
    assert [Path(line).name for line in done.stderr.splitlines()] == names


def test_the_command_chooses(rows: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    code, table, _ = run(capsys, monkeypatch, rows, "--format", "csv")
    assert code == 0 and len(re.findall("^table,", table, re.M)) == 1
    assert "passkey" in table and "copy" in table
    few = ("--tasks", "copy", "--depths", 1, "--methods", "alibi")
    _, near, _ = run(capsys, monkeypatch, rows, *few, "--output", tmp_path / "one")
    assert "| alibi | **3.000±2.484** | **2.000±2.484** |" in near and "depths 1, " in near
    before = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
    run(capsys, monkeypatch, rows, *few, "--output", tmp_path / "two")
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "two").iterdir()}
    assert run(capsys, monkeypatch, rows, "--dataset", "code") == (
        *(2, "", "error: no rows match --dataset, --tasks, --depths and --seeds\n"),
    )
    assert run(capsys, monkeypatch, rows, "--value", "loss")[0] == 2


def test_the_command_shows_chosen_seeds(rows: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    # The gains of alibi at 512 tokens: 1.5, 2.5 and 3.5 with the seeds 1, 2 and 3. Half the interval of the
    # first two is t(0.975, 1) = 12.706 times sqrt(1/2) / sqrt(2).
    for seeds, mean in (([2], "2.500"), ([1, 2], "2.000±6.353")):
        options = (rows, "--tasks", "copy", "--methods", "alibi", "--seeds", *seeds)
        code, text, _ = run(capsys, monkeypatch, *options)
        assert code == 0 and f"| alibi | **{mean}**" in text
        assert f"seeds {' '.join(map(str, seeds))}\n" in text.replace("  \n", "\n")
    assert run(capsys, monkeypatch, rows, "--seeds", 9)[0] == 2


def test_a_method_that_was_not_asked_everything(
    rows: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    code, text, _ = run(
        *(capsys, monkeypatch, rows, "--methods", "learned", "alibi", "--output", tmp_path / "out")
    )
    assert code == 0 and text.count("not asked: learned") == 1
    assert text.index("passkey (digits)") < text.index("not asked: learned")
    assert len(list((tmp_path / "out").glob("*.svg"))) == 2
    code, text, _ = run(capsys, monkeypatch, rows, "--methods", "learned")
    assert code == 0 and "passkey" not in text
    assert run(capsys, monkeypatch, rows, "--methods", "alibi", "fire") == (
        *(2, "", "error: no rows of fire\n"),
    )
