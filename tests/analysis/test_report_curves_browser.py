"""The curves of the report in a real browser: values under the pointer, scale, folding."""

from __future__ import annotations

from pathlib import Path

import pytest
from analysis_rows import kernel, make, study, training
from test_report_browser import BROWSER, HELPERS, result_of

from megatron_patches.analysis.report import Extras, report
from megatron_patches.analysis.sections import Source
from megatron_patches.analysis.svg import even_ticks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="Chromium is not installed"),
]


@pytest.fixture(scope="module")
def page() -> str:
    far = [100.0 - step / 2 for step in range(10, 101, 10)]
    runs = [training("alibi", 1), training("rotary", 1, lm_loss=far)]
    runs.append(training("alibi", 1, train_length=128, global_batch=16))
    heads = [kernel(h, searched_to=63, effective_length=end) for h, end in ((0, 13), (1, None))]
    return report([Source("rows.jsonl", study())], Extras(heads, runs))


CURVES = """
  const training = all("svg.curves").find((svg) => svg.querySelectorAll(".trace").length === 2);
  const trace = training.querySelector(".trace[data-method=alibi]");
  const heights = () => trace.querySelector("polyline").getAttribute("points").split(" ")
    .map((pair) => Number(pair.split(",")[1]));
  const scaled = () => ({ heights: heights(), low: Number(training.dataset.scaleLow),
    high: Number(training.dataset.scaleHigh),
    ticks: [...training.querySelectorAll(".ticks text")].map((node) => Number(node.textContent)) });
  const move = (svg, x, y) => {
    const at = new DOMPoint(x, y).matrixTransform(svg.getScreenCTM());
    svg.dispatchEvent(new PointerEvent("pointermove",
      { bubbles: true, clientX: at.x, clientY: at.y }));
  };
"""


def test_curves_take_the_scale_of_what_shows(page: str, tmp_path: Path) -> None:
    script = """
      const states = [scaled()];
      box("method", "rotary").click(); states.push(scaled());
      box("method", "rotary").click(); states.push(scaled());
      box("trained", "128").click(); states.push(seen("section"));
      return states;
    """
    start, alone, back, sections = result_of(page, HELPERS + CURVES + script, tmp_path)
    assert start["high"] == pytest.approx(95.0 + 0.03 * 92) and start["low"] < 3
    # Without the far line, 3.0 to 4.8 fills the plot: the same numbers as drawn from the start.
    assert (alone["low"], alone["high"]) == pytest.approx((3 - 0.054, 4.8 + 0.054))
    assert max(alone["heights"]) - min(alone["heights"]) > 200
    assert max(start["heights"]) - min(start["heights"]) < 10
    assert alone["ticks"] == pytest.approx(even_ticks(alone["low"], alone["high"]))
    assert back["high"] == start["high"]
    assert back["heights"] == pytest.approx(start["heights"], abs=0.11)
    assert sections == 3  # rows, training on 512, kernels whose length is not known


def test_the_pointer_reads_values(page: str, tmp_path: Path) -> None:
    script = """
      const tip = document.getElementById("tip");
      const dot = training.querySelector(".dot");
      const texts = [];
      const note = (svg) => texts.push([tip.hidden ? null : tip.textContent,
        svg.querySelector(".dot").getAttribute("visibility")]);
      const px = trace.dataset.px.split(" ").map(Number);
      move(training, px[3] + 2, heights()[3] - 3); note(training);
      const near = Math.abs(Number(dot.getAttribute("cx")) - px[3]) < 0.01;
      move(training, px[3], -500); note(training);
      training.dispatchEvent(new PointerEvent("pointerleave")); note(training);
      const reach = all("svg.curves").find((svg) => svg.querySelector("[data-steps]"));
      const steps = reach.querySelector(".trace");
      const [x0, x1] = steps.dataset.px.split(" ").map(Number).slice(0, 2);
      move(reach, (x0 + x1) / 2 + 10, Number(reach.dataset.bottom) - 20); note(reach);
      trace.focus(); note(training);
      return [texts, near];
    """
    texts, near = result_of(page, HELPERS + CURVES + script, tmp_path)
    assert near
    assert texts[0] == ["alibi, 81,920 tokens: 4.2", "visible"]
    assert texts[1][1] == "hidden" and texts[2] == [None, "hidden"]
    # A staircase keeps its last value: 0 heads before 13 tokens.
    assert texts[3] == ["kerple_log, 1 tokens: 0", "visible"]
    assert texts[4][0] == "alibi: 3.0000 at 204,800 tokens (1 seed)"


def test_a_link_unfolds_its_section(tmp_path: Path) -> None:
    many = [make("alibi", 1, n, 20.0, dataset=f"set{k}") for k in range(8) for n in (512, 1024)]
    page = report([Source("rows.jsonl", many)])
    script = """
      const open = () => all("details.part").filter((node) => node.open).length;
      const counts = [open()];
      location.hash = "#s3"; unfold(); counts.push(open());
      dispatchEvent(new Event("beforeprint")); counts.push(open());
      return [counts, all("nav li li a").length, all("nav > ul > li").length,
        document.getElementById("s3").querySelector("details").open];
    """
    counts, links, sets, third = result_of(page, HELPERS + script, tmp_path)
    assert counts == [0, 1, 8] and (links, sets) == (8, 8) and third
