"""The report: what it shows, that it stands alone, and that text from rows stays text."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import pytest
from analysis_rows import kernel, make, study, training

from megatron_patches.analysis.charts import Line
from megatron_patches.analysis.markup import Markup, element, verbatim
from megatron_patches.analysis.published import read_published
from megatron_patches.analysis.report import Extras, Settings, report
from megatron_patches.analysis.rows import RowError, append_kernels, append_rows
from megatron_patches.analysis.sections import Source, cut, find_files
from megatron_patches.analysis.svg import ticks
from megatron_patches.analysis.training_rows import append_training

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = read_published(ROOT / "results" / "published.csv")
EVIL = "</script><script>bad()</script><img src=x onerror=bad()>\"'&\ud800"
VOID = {"meta", "link", "input"}


@dataclass
class Node:
    tag: str
    attributes: dict[str, str | None]
    text: str = ""
    children: list[Node] = field(default_factory=list)

    def all(self, *tags: str) -> list[Node]:
        found = [self] if self.tag in tags else []
        return found + [node for child in self.children for node in child.all(*tags)]

    def whole_text(self) -> str:
        return self.text + "".join(child.whole_text() for child in self.children)


class Tree(HTMLParser):
    """Builds the tree and fails on an end tag that does not close the innermost element."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.root = Node("root", {})
        self.open = [self.root]
        self.feed(page)
        self.close()
        assert self.open == [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, dict(attrs))
        assert len(node.attributes) == len(attrs), f"repeated attribute in {tag}"
        self.open[-1].children.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().tag == tag

    def handle_data(self, data: str) -> None:
        self.open[-1].text += data


def page_of(rows, kernels=(), **settings) -> tuple[str, Node]:
    chosen = Settings(published=PUBLISHED, **settings)
    page = report([Source("rows.jsonl", rows)], Extras(kernels=kernels), chosen)
    page.encode("utf-8")
    return page, Tree(page).root


def test_the_page_stands_alone() -> None:
    page, root = page_of(study(), [kernel(0)])
    for node in root.all(*{"a", "link", "img", "image", "use", "script", "style", "svg", "form"}):
        assert "src" not in node.attributes and "action" not in node.attributes
        target = node.attributes.get("href") or "#"
        assert target.startswith("#") or target == "data:,"
    (style,), (script,) = root.all("style"), root.all("script")
    assert "url(" not in style.text and "@import" not in style.text
    for word in ("fetch", "XMLHttp", "import(", "innerHTML", "eval", "WebSocket"):
        assert word not in script.text
    # The only address is the name of SVG, which nothing loads.
    assert page.count("http") == 1 + page.count("http-equiv")
    ids = [node.attributes["id"] for node in root.all("section", "div") if "id" in node.attributes]
    links = [node.attributes["href"][1:] for node in root.all("a")]
    assert set(links) <= set(ids) and len(set(ids)) == len(ids)
    assert page_of(study(), [kernel(0)])[0] == page


def test_text_of_rows_stays_text() -> None:
    row = make(EVIL, 1, 512, 20.0, dataset=EVIL, git_sha=EVIL, split=EVIL, options={EVIL: EVIL})
    refused = make("alibi", 1, 512, None, dataset=EVIL, git_sha=EVIL, split=EVIL, message=EVIL)
    rows = [row, refused]
    learned = [kernel(0, method=EVIL, dataset=EVIL, parameters={EVIL: 1.0})]
    page = report(
        [Source(EVIL, rows)],
        Extras(kernels=learned, training=[training(EVIL, 1, dataset=EVIL, machine=EVIL)]),
        Settings(reference=EVIL),
    )
    root = Tree(page.encode("utf-8").decode()).root
    assert [len(root.all(tag)) for tag in ("script", "style", "img")] == [1, 1, 0]
    assert not any(name.startswith("on") for n in _everything(root) for name in n.attributes)
    shown = EVIL.replace("\ud800", "?")
    assert shown in root.all("main")[0].whole_text()
    # One box of the filter has this value, and it is the one that the lines of the table carry.
    (box,) = [n for n in root.all("input") if n.attributes["value"] == shown][:1]
    assert box.attributes["name"] == "method"
    assert any(n.attributes.get("data-method") == shown for n in root.all("tr"))


def _everything(node: Node) -> list[Node]:
    return [node, *(found for child in node.children for found in _everything(child))]


def test_markup_escapes_what_is_not_its_own() -> None:
    made = element("p", "<b>", element("b", "&"), data_method='"<', hidden=True, title=None)
    assert made == '<p data-method="&quot;&lt;" hidden>&lt;b&gt;<b>&amp;</b></p>'
    assert isinstance(made, Markup)
    with pytest.raises(ValueError, match="end its own"):
        verbatim("script", "'</SCRIPT>'")


def test_tables_ours_beside_published() -> None:
    _, root = page_of(study(), beside={"books": "github"})
    titles = [node.text for node in root.all("figcaption")]
    assert titles == [
        "Perplexity against length, books",
        "Perplexity by evaluation length, books",
        "Published: KERPLE, Table 3, perplexity, github",
        "Perplexity relative to that at the training length, books",
        "Differences from kerple_log, books",
    ]
    text = root.all("main")[0].whole_text()
    assert "alibi, KERPLE Table 3" in text and "refused: cannot read 1024" in text
    _, plain = page_of(study())
    assert not any("Published" in node.text for node in plain.all("figcaption"))
    # Without rows of the reference there is nothing to compare with, and the rest stays.
    _, other = page_of(study(), reference="rotary")
    assert not any("Differences" in node.text for node in other.all("figcaption"))


def test_a_longer_training_takes_its_own_published_table() -> None:
    rows = [
        make("kerple_log", 1, n, 9.0, dataset="github", train_length=1024) for n in (1024, 2048)
    ]
    _, root = page_of(rows)
    titles = [node.text for node in root.all("figcaption")]
    assert "Published: KERPLE, Table 9, perplexity, github" in titles
    assert not any("Table 3" in title for title in titles)


def test_points_and_cells_carry_what_filters_compare() -> None:
    _, root = page_of(study(), [kernel(0)])
    names = {n.attributes["name"] for n in root.all("input")}
    assert names == {"method", "dataset", "trained", "length", "protocol"}
    lines = [n for n in root.all("g") if n.attributes.get("class", "").startswith("line ")]
    points = {
        (line.attributes["data-method"], point.attributes["data-length"]): point
        for line in lines
        for point in line.all("circle")
    }
    assert len(points) == 3 + 3 + 1  # one method could be scored at one length only
    point = points["alibi", "1024"]
    assert float(point.attributes["data-value"]) == pytest.approx(22.6)
    assert point.all("title")[0].text == "alibi, 1024 tokens: 22.6 ± 0.100 (3 seeds)"
    tables = root.all("table")
    for column, table in (("512", tables[0]), ("1024", tables[1])):
        cells = [n for n in table.all("th", "td") if n.attributes.get("data-length") == column]
        assert len(cells) == len(table.all("tr"))
    tagged = [n.attributes.get("data-method") for n in tables[1].all("tr")][1:]
    assert tagged == ["alibi", "kerple_log", "learned"]
    pairs = [n for n in root.all("tr") if n.attributes.get("data-length")]
    assert {n.attributes["data-method"] for n in pairs} == {"alibi", "learned"}


def test_kernels_name_heads_and_reach() -> None:
    steep = kernel(1, bias=[-1e300 * d for d in range(64)])
    flat = kernel(2, method="weights", bias=None, weight=[1e9] * 64)
    _, root = page_of(study(), [kernel(0), steep, flat])
    tips = [n.text for n in root.all("title")]
    assert "head 0: bias_a 0.500, bias_p 1.00; effective length 13 tokens" in tips
    assert any(tip.startswith("head 2: bias_a") and "length" not in tip for tip in tips)
    (chart,) = [n for n in root.all("svg") if "kerple_log, step" in n.attributes["aria-label"]]
    heights = [
        float(pair.split(",")[1])
        for line in chart.all("polyline")
        for pair in line.attributes["points"].split()
    ]
    assert min(heights) >= 14 and max(heights) <= 206


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (43.0, 85.0, [50.0, 60.0, 70.0, 80.0]),
        (43.0, 900.0, [100.0, 300.0]),
        (0.51, 2.0, [1.0, 1.5, 2.0]),
        (1.0, 1e40, [10.0**power for power in range(0, 40, 5)]),
    ],
)
def test_ticks(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_lines_of_a_chart_look_different() -> None:
    styles = [Line("label", "method", index, ()).style for index in range(96)]
    assert len(set(styles)) == 96
    # In grey print the dashes are what is left.
    dashes = [style.split()[1] for style in styles]
    assert all(len(set(dashes[first : first + 12])) == 12 for first in range(0, 96, 12))
    css = (ROOT / "megatron_patches/analysis/report.css").read_text()
    found = re.findall(r"^\.(d\d+) \{ --dash: ([^;]+); --far: ([^;]+); \}$", css, re.MULTILINE)
    assert {name for name, *_ in found} == set(dashes)
    assert len({pattern for _, *two in found for pattern in two}) == 24
    assert all(f".{style.split()[0]} {{ --own:" in css for style in styles)


def test_sections_keep_apart_what_may_not_meet() -> None:
    position = [make("alibi", 1, 512, 20.0, protocol="position", position_losses=[2.995732273554])]
    other = [make("alibi", 1, 512, 21.0, config_sha="other")]
    sections = cut([Source("a", [*study(), *position]), Source("b", study()), Source("c", other)])
    found = [(s.rows[0].protocol, s.files, len(s.rows), s.problem) for s in sections]
    # "c" has another configuration of the same cell, so no two files meet in the first question.
    assert found == [
        *(("nonoverlap", [name], count, None) for name, count in (("a", 27), ("b", 27), ("c", 1))),
        ("position", ["a"], 1, None),
    ]
    (joined,) = cut([Source("a", study()), Source("b", study()[:3])])
    assert (joined.files, len(joined.rows)) == (["a", "b"], 27)
    (bad,) = cut([Source("a", [*study(), *other])])
    assert "two configurations" in bad.problem
    _, root = page_of([*study(), *other])
    assert "Not shown as a table: alibi, seed 1" in root.whole_text()
    assert len(root.all("table")) == 1  # the runs
    with pytest.raises(RowError, match="no rows"):
        report([])


def test_runs_say_where_numbers_come_from() -> None:
    _, root = page_of(study())
    (runs,) = [n for n in root.all("div") if n.attributes.get("class") == "wide runs"]
    lines = [[cell.text for cell in line.all("th", "td")] for line in runs.all("tr")]
    assert len(lines) == 1 + 9
    learned = next(line for line in lines if line[0] == "learned")
    assert learned[1:5] == ["1", "learned1", "abc123", "data-1"]
    assert learned[-2:] == ["1 ok, 1024 refused, 2048 refused", "4.5"]


def run(*arguments: object, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(ROOT / "scripts" / "report.py")]
    return subprocess.run(
        [*command, *map(str, arguments)], cwd=folder, capture_output=True, text=True, timeout=120
    )


def test_files_are_told_by_their_first_line(tmp_path: Path) -> None:
    append_rows(tmp_path / "deep" / "rows.jsonl", study())
    append_kernels(tmp_path / "kernels.jsonl", [kernel(0)])
    (tmp_path / "bench.jsonl").write_text('{"benchmark": "attention"}\n')
    (tmp_path / "empty.jsonl").write_text("")
    append_training(tmp_path / "training.jsonl", [training("alibi", 1)])
    found = {
        kind: [path.name for path in paths] for kind, paths in vars(find_files(tmp_path)).items()
    }
    assert found == {
        "rows": ["rows.jsonl"],
        "kernels": ["kernels.jsonl"],
        "training": ["training.jsonl"],
        "retrieval": [],
        "failed": [],
    }


def test_command(tmp_path: Path) -> None:
    rows, kernels = tmp_path / "rows.jsonl", tmp_path / "kernels.jsonl"
    append_rows(rows, [*study(), make("alibi", 1, 512, 20.0, dataset="code")])
    append_kernels(kernels, [kernel(0), kernel(0, dataset="elsewhere")])
    append_kernels(kernels, [kernel(0, dataset="elsewhere", method="learned")])
    done = run(
        "rows.jsonl", "--kernels", kernels, "--methods", "alibi", "kerple_log", folder=tmp_path
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "report.html\n", "")
    page = (tmp_path / "report.html").read_text()
    assert str(tmp_path) not in page and "learned1" not in page
    # Kernels of a data set without rows are there; only what the filters leave out is not.
    assert "elsewhere, learned kernels" in page and "learned, step 100" not in page
    assert {n.attributes["id"] for n in Tree(page).root.all("section")} == {"s1", "s2", "s3", "s4"}
    one = run(rows, "--dataset", "code", "--output", tmp_path / "new" / "code.html")
    assert one.returncode == 0
    text = (tmp_path / "new" / "code.html").read_text()
    assert "rows.jsonl" in text and str(tmp_path) not in text and "books" not in text
    assert run(rows, "--dataset", "none").stderr == "error: no rows match dataset=none\n"
    assert "error: no rows of rotari" in run(rows, "--methods", "alibi", "rotari").stderr
    assert run(rows, "--beside", "x").returncode == 2
    assert "Example: python scripts/report.py results/" in run("--help").stdout
    log = tmp_path / "training.jsonl"
    append_training(log, [training("alibi", 1), training("alibi", 1, dataset="elsewhere")])
    whole = run("rows.jsonl", "--training", log, "--output", "whole.html", folder=tmp_path)
    assert (whole.returncode, whole.stderr) == (0, "")
    text = (tmp_path / "whole.html").read_text()
    assert "books, training on 512 tokens" in text and "elsewhere, training on 512" in text
    alone = run("--training", log, "--output", "alone.html", folder=tmp_path)
    assert alone.returncode == 2 and "name files of ROWS as well" in alone.stderr


def test_all_results_make_a_page(tmp_path: Path) -> None:
    done = run("--output", tmp_path / "report.html")
    assert (done.returncode, done.stderr) == (0, "")
    text = Tree((tmp_path / "report.html").read_text()).root.whole_text()
    for path in sorted(ROOT.glob("results/*/rows.jsonl")):
        assert path.relative_to(ROOT).as_posix() in text
