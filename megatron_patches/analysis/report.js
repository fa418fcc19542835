// Filters and hover of the report. Everything is in the page already: this hides parts of it and
// moves the points of a chart to the range of what is left. Without JavaScript all of it shows.
"use strict";

const KINDS = ["method", "variant", "dataset", "trained", "length", "protocol"];
const form = document.querySelector("form");
const boxes = [...form.querySelectorAll("input[type=checkbox]")];
const tip = document.getElementById("tip");
const shown = (node) => !node.closest("[hidden]");
const values = (node, kind) =>
  kind === "protocol" ? node.dataset[kind].split(" ") : [node.dataset[kind]];
const number = (node, name) => Number(node.dataset[name]);

// An element is hidden when one of its values is a box of the form and that box is not checked.
// What was made of several protocols names all of them, with spaces between.
function filter() {
  const off = Object.fromEntries(KINDS.map((kind) => [kind, new Set()]));
  for (const box of boxes) if (!box.checked) off[box.name].add(box.value);
  for (const node of document.querySelectorAll(KINDS.map((kind) => `[data-${kind}]`).join())) {
    const hide = KINDS.some((kind) => kind in node.dataset && values(node, kind).some(
      (value) => off[kind].has(value)));
    node.toggleAttribute("hidden", hide);
  }
  // A data set without a link left to it needs no name.
  for (const item of document.querySelectorAll("nav > ul > li"))
    if (![...item.querySelectorAll("li")].some(shown)) item.hidden = true;
  redrawAll(document);
}

// What is folded is drawn when it unfolds: a large page has a thousand charts.
const folded = (node) => node.parentElement.closest("details:not([open])");
function redrawAll(root) {
  const charts = [...root.querySelectorAll("svg.perplexity, svg.curves")];
  for (const svg of charts.filter((svg) => !folded(svg)))
    (svg.classList.contains("curves") ? redrawCurves : redraw)(svg);
}
document.addEventListener("toggle", (event) => {
  if (event.target.open) redrawAll(event.target);
}, true);

// Logarithmic heights for the points that show, then the lines, bands and ticks that follow them.
function redraw(svg) {
  const points = [...svg.querySelectorAll("circle")].filter(shown);
  if (!points.length) return;
  const low = Math.min(...points.map((point) => number(point, "low"))) / 1.03;
  const high = Math.max(...points.map((point) => number(point, "high"))) * 1.03;
  const [top, bottom] = [number(svg, "top"), number(svg, "bottom")];
  const height = (value) =>
    bottom - (Math.log(value / low) / Math.log(high / low)) * (bottom - top);
  for (const line of svg.querySelectorAll(".line")) {
    const own = [...line.querySelectorAll("circle")].filter(shown);
    const path = (nodes, name) =>
      nodes.map((node) => `${node.getAttribute("cx")},${height(number(node, name)).toFixed(1)}`);
    for (const point of own) point.setAttribute("cy", height(number(point, "value")).toFixed(1));
    line.querySelector("polyline").setAttribute("points", path(own, "value").join(" "));
    const band = [...path(own, "high"), ...path([...own].reverse(), "low")];
    line.querySelector("polygon").setAttribute("points", band.join(" "));
  }
  drawTicks(svg, ticks(low, high), height);
}

function drawTicks(svg, values, height) {
  const left = number(svg, "left");
  const marks = values.flatMap((value) => [
    shape("line", { x1: left, x2: svg.dataset.right, y1: height(value), y2: height(value),
      class: "grid" }),
    shape("text", { x: left - 6, y: height(value) + 4, class: "end" }, plain(value)),
  ]);
  svg.querySelector(".ticks").replaceChildren(...marks);
}

// The numbers of a curve, read once: they stand in its attributes as text.
const known = new WeakMap();
function numbers(trace) {
  if (!known.has(trace)) {
    const list = (name) => (trace.dataset[name] ?? "").split(" ").filter(Boolean).map(Number);
    known.set(trace, { x: list("x"), y: list("y"), px: list("px"), low: list("low"),
      high: list("high") });
  }
  return known.get(trace);
}

const traces = (svg) => [...svg.querySelectorAll(".trace")].filter(shown);
const least = (list) => list.reduce((a, b) => Math.min(a, b), Infinity);
const most = (list) => list.reduce((a, b) => Math.max(a, b), -Infinity);

// Linear heights, the twin of line_charts.py: the range of what shows and a margin.
function redrawCurves(svg) {
  const own = traces(svg);
  if (!own.length || !shown(svg)) return;
  const all = own.map(numbers).flatMap((n) => [n.y, n.low, n.high]);
  const ends = "zero" in svg.dataset ? [[0]] : [];
  let low = least([...all, ...ends].map(least));
  let high = most([...all, ...ends].map(most));
  const room = 0.03 * (high - low) || 0.1 * Math.abs(high) || 1;
  [low, high] = [low - room, high + room];
  const [top, bottom] = [number(svg, "top"), number(svg, "bottom")];
  const height = (value) => bottom - ((value - low) / (high - low)) * (bottom - top);
  for (const trace of own) {
    const { px, y, low: lower, high: upper } = numbers(trace);
    const path = (values) => {
      const pairs = values.map((value, i) => `${px[i]},${height(value).toFixed(1)}`);
      if (!("steps" in trace.dataset)) return pairs;
      return pairs.flatMap((pair, i) =>
        i + 1 < px.length ? [pair, `${px[i + 1]},${pair.split(",")[1]}`] : [pair]);
    };
    trace.querySelector("polyline").setAttribute("points", path(y).join(" "));
    const band = [...path(upper), ...path(lower).reverse()];
    trace.querySelector("polygon")?.setAttribute("points", band.join(" "));
  }
  svg.dataset.scaleLow = low;
  svg.dataset.scaleHigh = high;
  drawTicks(svg, evenTicks(low, high), height);
}

// The twin of ticks() in svg.py.
function ticks(low, high) {
  if (high / low <= 6) return evenTicks(low, high);
  const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const every = Math.ceil((last - first) / 8);
  const found = [];
  for (let power = first; power < last; power += every)
    for (const factor of every === 1 ? [1, 3] : [1]) found.push(factor * 10 ** power);
  return found.filter((value) => low <= value && value <= high);
}

// The twin of plain() in svg.py.
function plain(value) {
  if (Math.abs(value) < 1e5) return String(value);
  return Number(value.toPrecision(4)).toExponential().replace("+", "");
}

function evenTicks(low, high) {
  const rough = (high - low) / 5;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = unit * ([1, 2, 5].find((factor) => unit * factor >= rough) ?? 10);
  const found = [];
  for (let count = Math.ceil(low / step); count * step <= high; count++)
    found.push(Number((count * step).toPrecision(12)));
  return found;
}

function shape(name, attributes, text = "") {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.textContent = text;
  return node;
}

// The browser's own titles come late and not by keyboard: the page shows them itself.
for (const title of document.querySelectorAll("svg title")) {
  const node = title.parentNode;
  node.dataset.tip = title.textContent;
  node.setAttribute("aria-label", title.textContent);
  node.setAttribute("role", "img");
  title.remove();
}

function say(text, x, y) {
  tip.hidden = false;
  tip.textContent = text;
  tip.style.left = `${Math.max(4, Math.min(x + 12, innerWidth - tip.offsetWidth - 4))}px`;
  tip.style.top = `${Math.max(4, y - tip.offsetHeight - 10)}px`;
}

function showTip(event) {
  const node = event.target.closest("[data-tip]");
  tip.hidden = !node;
  if (!node) return;
  const place = node.getBoundingClientRect();
  say(node.dataset.tip, event.clientX ?? place.right, event.clientY ?? place.top);
}
document.addEventListener("pointerover", showTip);
document.addEventListener("focusin", showTip);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") tip.hidden = true;
});

// In a chart of curves: the value of the nearest curve at the nearest of its points.
function follow(event) {
  const svg = event.currentTarget;
  const dot = svg.querySelector(".dot");
  const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(
    svg.getScreenCTM().inverse());
  const [left, right] = [number(svg, "left"), number(svg, "right")];
  const [top, bottom] = [number(svg, "top"), number(svg, "bottom")];
  const [low, high] = [number(svg, "scaleLow"), number(svg, "scaleHigh")];
  const height = (value) => bottom - ((value - low) / (high - low)) * (bottom - top);
  let best = null;
  if (at.x >= left && at.x <= right && at.y >= top && at.y <= bottom)
    for (const trace of traces(svg)) {
      const { x, y, px } = numbers(trace);
      let i = 0;
      if ("steps" in trace.dataset) while (i + 1 < px.length && px[i + 1] <= at.x) i++;
      else px.forEach((value, k) => { if (Math.abs(value - at.x) < Math.abs(px[i] - at.x)) i = k; });
      const away = Math.abs(height(y[i]) - at.y);
      if (!best || away < best.away)
        best = { away, trace, x: x[i], y: y[i], px: px[i], py: height(y[i]) };
    }
  dot.setAttribute("visibility", best ? "visible" : "hidden");
  if (!best) return;
  dot.setAttribute("cx", best.px);
  dot.setAttribute("cy", best.py);
  const where = `${best.x.toLocaleString("en")} ${svg.dataset.unit}`;
  say(`${best.trace.dataset.label}, ${where}: ${best.y}`, event.clientX, event.clientY);
}
for (const svg of document.querySelectorAll("svg.curves")) {
  svg.addEventListener("pointermove", follow);
  svg.addEventListener("pointerleave", () => {
    svg.querySelector(".dot").setAttribute("visibility", "hidden");
    tip.hidden = true;
  });
}

form.addEventListener("change", filter);
form.addEventListener("submit", (event) => event.preventDefault());
for (const button of form.querySelectorAll("button"))
  button.addEventListener("click", () => {
    for (const box of boxes)
      if (box.name === button.name) box.checked = button.value === "all";
    filter();
  });

// A link leads to a section, so the section opens.
function unfold() {
  const section = location.hash && document.getElementById(location.hash.slice(1));
  const part = section && section.querySelector("details.part");
  if (part) part.open = true;
}
addEventListener("hashchange", unfold);
for (const link of document.querySelectorAll("nav a"))
  link.addEventListener("click", () => setTimeout(unfold));
// Paper cannot be unfolded.
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
});
form.hidden = false;
filter(); // a reloaded page may come with boxes unchecked
unfold();
