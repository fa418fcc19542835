"""The report in a real browser: filters, hover, policy, requests, contrast. Needs Chromium."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from analysis_rows import fields, kernel, make, study, training

from megatron_patches.analysis.report import Extras, report
from megatron_patches.analysis.rows import Row
from megatron_patches.analysis.sections import Source
from megatron_patches.analysis.svg import plain, ticks

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next((path for name in NAMES if (path := shutil.which(name))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason=f"none of {', '.join(NAMES)} is installed"),
]
DARK = "--blink-settings=preferredColorScheme=0"
POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy"[^>]*>')


@pytest.fixture(scope="module")
def page() -> str:
    rows = [*study(), make("alibi", 1, 512, 20.0, dataset="code")]
    return report([Source("rows.jsonl", rows)], Extras(kernels=[kernel(0)]))


def dumped(address: str, folder: Path, *flags: str) -> str:
    """The document as it stands after its scripts have run."""
    assert BROWSER is not None
    command = [BROWSER, "--headless=new", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        command.append("--no-sandbox")  # Chromium refuses to start its sandbox as root
    done = subprocess.run(
        [*command, *flags, "--dump-dom", address], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def result_of(page: str, script: str, folder: Path, *flags: str) -> Any:
    """What ``script``, the body of a function, returns at the end of the page."""
    # The page's own policy would keep the script of this test out; it has a test of its own.
    free, removed = POLICY.subn("", page)
    assert removed == 1
    probe = f"""<pre id="result"></pre><script>
      const outcome = (() => {{ {script} }})();
      document.getElementById("result").textContent = JSON.stringify(outcome);
    </script></body>"""
    path = folder / "page.html"
    path.write_text(free.replace("</body>", probe), encoding="utf-8")
    found = re.search(r'<pre id="result">(.+?)</pre>', dumped(path.as_uri(), folder, *flags))
    assert found, "the script failed"
    return json.loads(html.unescape(found[1]))


HELPERS = """
  const box = (name, value) =>
    document.querySelector(`input[name="${name}"][value="${value}"]`);
  const all = (selector) => [...document.querySelectorAll(selector)];
  const drawn = (node) =>  // checkVisibility() of Chromium 150 says yes to a hidden <g>
    !node || (getComputedStyle(node).display !== "none" && drawn(node.parentElement));
  const seen = (selector) => all(selector).filter(drawn).length;
  const chart = document.querySelector("svg.perplexity");
  const state = () => ({
    learned: seen("[data-method=learned]"), alibi: seen("tr[data-method=alibi]"),
    columns: seen('th[data-length="1024"]'), sections: seen("section"),
    points: chart.querySelector(".line[data-method=alibi] polyline")
      .getAttribute("points").split(" ").length,
    height: Number(chart.querySelector(".line[data-method=alibi] circle").getAttribute("cy")),
    ticks: [...chart.querySelectorAll(".ticks text")].map((node) => Number(node.textContent)),
  });
"""


def test_filters_hide_and_rescale(page: str, tmp_path: Path) -> None:
    script = """
      const states = [state()];
      box("method", "learned").click(); states.push(state());
      box("length", "1024").click(); states.push(state());
      box("method", "learned").click(); box("length", "1024").click(); states.push(state());
      document.querySelector('button[name=dataset][value=none]').click(); states.push(state());
      document.querySelector('button[name=dataset][value=all]').click(); states.push(state());
      box("protocol", "nonoverlap").click(); states.push(state());
      return states;
    """
    start, no_method, no_length, back, none, again, no_protocol = result_of(
        page, HELPERS + script, tmp_path
    )
    assert start["learned"] > 0 and start["sections"] == 3 and start["points"] == 3
    assert no_method["learned"] == 0 and no_method["alibi"] == start["alibi"]
    # Without the highest line the others have more room: the chart starts lower and is redrawn.
    assert no_method["height"] < start["height"]
    assert max(no_method["ticks"]) <= 25 and len(no_method["ticks"]) >= 3
    assert no_length["columns"] == 0 < start["columns"] and no_length["points"] == 2
    assert back == start == again
    assert none["sections"] == 0 and none["alibi"] == 0
    assert no_protocol["sections"] == 1


def test_links_go_with_their_sections_and_variants_with_their_boxes(tmp_path: Path) -> None:
    window = {"options": {"sliding_window_width": 512}}
    rows = [*study(), *(make("alibi", 1, n, 25.0, **window) for n in (512, 1024, 2048))]
    sliding = [
        make(m, 1, n, 20.0, protocol="sliding", stride=256, data="d", config_sha=f"{m}1")
        for m in ("alibi", "kerple_log")
        for n in (512, 1024)
    ]
    runs = [training("alibi", 1, train_length=128, global_batch=16, dataset="code")]
    page = report([Source("rows.jsonl", [*rows, *sliding])], Extras(training=runs))
    script = """
      const counts = () => [seen("nav li li"), seen("section"), seen("nav > ul > li"),
        seen("g[data-variant='alibi, window 512']"), seen("g[data-variant=alibi]")];
      const states = [counts()];
      box("trained", "128").click(); states.push(counts()); box("trained", "128").click();
      box("protocol", "sliding").click(); states.push(counts()); box("protocol", "sliding").click();
      box("variant", "alibi, window 512").click(); states.push(counts());
      return states;
    """
    start, no_training, no_sliding, no_window = result_of(page, HELPERS + script, tmp_path)
    # Rows side by side, sliding, the early part made of both, and a training of another data set.
    assert start[:3] == [4, 4, 2] and start[3] > 0
    assert no_training[:3] == [3, 3, 1]
    assert no_sliding[:3] == [2, 2, 2]  # the early part needs both protocols
    assert no_window[:3] == [4, 4, 2]
    assert no_window[3] == 0 and no_window[4] == start[4] > 0


def test_a_control_looks_like_its_method(tmp_path: Path) -> None:
    def line(method: str, **changes: object) -> Row:
        more = {"protocol": "position", "position_losses": [3.0, 1.0], "config_sha": method}
        return Row(**fields(method=method, **{**more, **changes}))

    window = {"options": {"sliding_window_width": 512}}
    rows = [line(m, **w) for m in ("alibi", "rotary") for w in ({}, window)]
    script = """
      return all("svg.curves")[0].querySelectorAll(".trace").length &&
        [...all("svg.curves")[0].querySelectorAll(".trace")].map((trace) => {
          const own = getComputedStyle(trace.querySelector("polyline"));
          return [trace.dataset.label, own.stroke, own.strokeDasharray]; });
    """
    found = result_of(report([Source("r", rows)]), HELPERS + script, tmp_path)
    looks = {label: (colour, dashes) for label, colour, dashes in found}
    assert len(set(looks.values())) == 4
    for method in ("alibi", "rotary"):
        assert looks[method][0] == looks[f"{method}, window 512"][0]
    assert looks["alibi"][0] != looks["rotary"][0]


def test_hover_and_focus_show_values(page: str, tmp_path: Path) -> None:
    script = """
      const point = chart.querySelector(".line[data-method=alibi] circle");
      const tip = document.getElementById("tip");
      const texts = [];
      const note = () => {
        const place = tip.getBoundingClientRect();
        const inside = place.left >= 0 && place.right <= innerWidth && place.top >= 0;
        texts.push(tip.checkVisibility() ? [tip.textContent, inside] : null);
      };
      note();
      point.dispatchEvent(new PointerEvent("pointerover",
        { bubbles: true, clientX: innerWidth - 1, clientY: 1 })); note();
      document.querySelector("h1").dispatchEvent(
        new PointerEvent("pointerover", { bubbles: true })); note();
      point.focus(); note();
      document.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape" })); note();
      dispatchEvent(new Event("beforeprint"));
      return [texts, all("details").every((node) => node.open), all("svg title").length];
    """
    texts, open_for_print, native = result_of(page, HELPERS + script, tmp_path)
    value = "alibi, 512 tokens: 23.9 ± 0.153 (3 seeds)"
    assert texts == [None, [value, True], None, [value, True], None]
    assert open_for_print and native == 0


def test_ticks_have_a_true_twin(page: str, tmp_path: Path) -> None:
    ranges = [(43.0, 85.0), (43.0, 900.0), (0.51, 2.0), (1.0, 1e40), (22.1, 22.3), (3.0, 18.0)]
    found = result_of(page, f"return {json.dumps(ranges)}.map((r) => ticks(...r));", tmp_path)
    for (low, high), values in zip(ranges, found, strict=True):
        assert values == pytest.approx(ticks(low, high))
    numbers = [22.5, 10_000.0, 150_000.0, 3e5, 1e29, 0.0, 1.25e7]
    found = result_of(page, f"return {json.dumps(numbers)}.map(plain);", tmp_path)
    assert found == [plain(value) for value in numbers]


def test_nothing_is_asked_for_and_no_other_script_runs(page: str, tmp_path: Path) -> None:
    asked: list[str] = []
    foreign = '<script>document.title = "taken"</script><img src="/image.png"></body>'

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(page.replace("</body>", foreign).encode("utf-8"))

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            text = dumped(f"http://127.0.0.1:{server.server_port}/report.html", tmp_path)
        finally:
            server.shutdown()
            thread.join()
    assert asked == ["/report.html"]
    assert "<title>taken" not in text
    # Its own script did run: the filters show and the titles have become tips.
    assert re.search(r"<form(?![^>]*hidden)", text) and "data-tip=" in text


@pytest.mark.parametrize(("flags", "dark"), [((), False), ((DARK,), True)])
def test_light_and_dark_are_readable(
    page: str, tmp_path: Path, flags: tuple[str, ...], dark: bool
) -> None:
    names = ["ground", "ink", "pale", "panel", "link", *(f"c{k}" for k in range(8))]
    script = f"""const style = getComputedStyle(document.documentElement);
      const found = {json.dumps(names)}.map((name) => style.getPropertyValue(`--${{name}}`).trim());
      return [found, getComputedStyle(document.body).backgroundColor];"""
    values, ground = result_of(page, script, tmp_path, *flags)
    colours = dict(zip(names, values, strict=True))
    assert (ground != "rgb(255, 255, 255)") == dark
    for name, least in (("ink", 12), ("pale", 4.5), ("link", 4.5)):
        assert contrast(colours[name], colours["ground"]) >= least, name
        assert contrast(colours[name], colours["panel"]) >= 4.5, name
    for k in range(8):
        assert contrast(colours[f"c{k}"], colours["ground"]) >= 3, f"c{k}"


def contrast(first: str, second: str) -> float:
    """The ratio of WCAG 2, 1 to 21, of two colours spelled #rgb or #rrggbb."""
    low, high = sorted((_luminance(first), _luminance(second)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    digits = colour.lstrip("#")
    digits = "".join(d * 2 for d in digits) if len(digits) == 3 else digits
    parts = [int(digits[k : k + 2], 16) / 255 for k in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
