// Filters and hover of the report. Everything is in the page already: this hides parts of it and
// moves the points of a chart to the range of what is left. Without JavaScript all of it shows.
"use strict";

const KINDS = ["method", "dataset", "length", "protocol"];
const form = document.querySelector("form");
const boxes = [...form.querySelectorAll("input[type=checkbox]")];
const tip = document.getElementById("tip");
const shown = (node) => !node.closest("[hidden]");

// An element is hidden when one of its values is a box of the form and that box is not checked.
function filter() {
  const off = Object.fromEntries(KINDS.map((kind) => [kind, new Set()]));
  for (const box of boxes) if (!box.checked) off[box.name].add(box.value);
  for (const node of document.querySelectorAll(KINDS.map((kind) => `[data-${kind}]`).join())) {
    const hide = KINDS.some((kind) => kind in node.dataset && off[kind].has(node.dataset[kind]));
    node.toggleAttribute("hidden", hide);
  }
  document.querySelectorAll("svg.perplexity").forEach(redraw);
}

// Logarithmic heights for the points that show, then the lines, bands and ticks that follow them.
function redraw(svg) {
  const points = [...svg.querySelectorAll("circle")].filter(shown);
  if (!points.length) return;
  const number = (node, name) => Number(node.dataset[name]);
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
  const left = number(svg, "left");
  const marks = ticks(low, high).flatMap((value) => [
    shape("line", { x1: left, x2: svg.dataset.right, y1: height(value), y2: height(value),
      class: "grid" }),
    shape("text", { x: left - 6, y: height(value) + 4, class: "end" }, String(value)),
  ]);
  svg.querySelector(".ticks").replaceChildren(...marks);
}

// The twin of ticks() in charts.py.
function ticks(low, high) {
  if (high / low <= 6) {
    const rough = (high - low) / 5;
    const unit = 10 ** Math.floor(Math.log10(rough));
    const step = unit * ([1, 2, 5].find((factor) => unit * factor >= rough) ?? 10);
    const found = [];
    for (let count = Math.ceil(low / step); count * step <= high; count++)
      found.push(Number((count * step).toPrecision(12)));
    return found;
  }
  const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const every = Math.ceil((last - first) / 8);
  const found = [];
  for (let power = first; power < last; power += every)
    for (const factor of every === 1 ? [1, 3] : [1]) found.push(factor * 10 ** power);
  return found.filter((value) => low <= value && value <= high);
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

function showTip(event) {
  const node = event.target.closest("[data-tip]");
  tip.hidden = !node;
  if (!node) return;
  tip.textContent = node.dataset.tip;
  const place = node.getBoundingClientRect();
  const x = event.clientX ?? place.right;
  const y = event.clientY ?? place.top;
  tip.style.left = `${Math.max(4, Math.min(x + 12, innerWidth - tip.offsetWidth - 4))}px`;
  tip.style.top = `${Math.max(4, y - tip.offsetHeight - 10)}px`;
}
document.addEventListener("pointerover", showTip);
document.addEventListener("focusin", showTip);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") tip.hidden = true;
});

form.addEventListener("change", filter);
form.addEventListener("submit", (event) => event.preventDefault());
for (const button of form.querySelectorAll("button"))
  button.addEventListener("click", () => {
    for (const box of boxes)
      if (box.name === button.name) box.checked = button.value === "all";
    filter();
  });
// Paper cannot be unfolded.
addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details")) details.open = true;
});
form.hidden = false;
filter(); // a reloaded page may come with boxes unchecked
