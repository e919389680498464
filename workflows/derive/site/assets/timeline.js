// The time line of an exhibit: a row a resource, a bar a task. Wheel and buttons zoom, dragging moves, and a bar that is
// pointed at or has the focus is described below the picture.
"use strict";

const SVG = "http://www.w3.org/2000/svg";
const COLOURS = ["#56b4e9", "#e69f00", "#009e73", "#cc79a7", "#f0e442", "#d55e00", "#7f9fd0", "#999999"];
const ROW = 30, AXIS = 30, TEXT = 7.2; // pixels; TEXT: width of a sign

function shape(tag, given, ...parts) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(given)) made.setAttribute(name, value);
  made.append(...parts);
  return made;
}

const secondsText = (value) => `${Number(value.toPrecision(4))} s`;

// A step of 1, 2 or 5 times a power of ten: about `count` of them fit into `span`.
function tickStep(span, count) {
  const power = 10 ** Math.floor(Math.log10(span / count));
  return power * [1, 2, 5, 10].find((times) => times * power >= span / count);
}

function startTimeline(box, lanes) {
  const drawing = box.querySelector("svg"), said = box.querySelector("output"), choice = box.querySelector("select");
  let events = [], rows = [], colours = new Map(), whole = 1, from = 0, span = 1, focused = -1;

  const place = () => {
    const width = Math.max(drawing.clientWidth, 200);
    const left = Math.min(width * .38, TEXT * Math.max(...rows.map((name) => name.length)) + 10);
    return { width, left, inner: width - left - 12 };
  };

  const draw = () => {
    const { width, left, inner } = place();
    const x = (seconds) => left + (seconds - from) / span * inner;
    const bottom = rows.length * ROW;
    drawing.setAttribute("height", bottom + AXIS);
    drawing.setAttribute("viewBox", `0 0 ${width} ${bottom + AXIS}`);
    const axis = shape("g", { class: "axis" }), bars = shape("g", { "clip-path": "url(#timeline-inner)" });
    const step = tickStep(span, Math.max(2, inner / 90)), digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    for (let tick = Math.ceil(from / step - 1e-9) * step; tick <= from + span * (1 + 1e-9); tick += step) {
      axis.append(shape("line", { x1: x(tick), x2: x(tick), y1: 0, y2: bottom }));
      axis.append(shape("text", { x: x(tick), y: bottom + 18, "text-anchor": "middle" }, `${tick.toFixed(digits)} s`));
    }
    rows.forEach((name, row) => {
      const fits = Math.floor((left - 8) / TEXT), text = name.length > fits ? `${name.slice(0, fits - 1)}…` : name;
      axis.append(shape("text", { x: left - 6, y: row * ROW + 19, "text-anchor": "end" }, shape("title", {}, name), text));
    });
    events.forEach((each, number) => {
      const begin = Math.max(x(each.begin), left - 5), end = Math.min(x(each.begin + each.seconds), width + 5);
      if (end < left || begin > width) return;
      const size = Math.max(end - begin, 1), top = rows.indexOf(each.resource) * ROW;
      const bar = shape("g", { class: "task", tabindex: number === Math.max(focused, 0) ? 0 : -1, role: "img", "data-task": number,
        "aria-label": describe(each) });
      bar.append(shape("rect", { x: begin, y: top + 4, width: size, height: ROW - 8, fill: colours.get(each.name) }));
      if (size > TEXT * each.name.length + 4)
        bar.append(shape("text", { x: begin + size / 2, y: top + 19, "text-anchor": "middle" }, each.name));
      bars.append(bar);
    });
    const clip = shape("clipPath", { id: "timeline-inner" }, shape("rect", { x: left, y: 0, width: inner + 12, height: bottom }));
    drawing.replaceChildren(clip, axis, bars);
  };

  const describe = (each) =>
    `${each.name} on ${each.resource}: begins at ${secondsText(each.begin)}, takes ${secondsText(each.seconds)}`;
  const tell = (event) => {
    const bar = event.target.closest?.(".task");
    if (bar) said.value = describe(events[Number(bar.dataset.task)]);
  };
  const move = (begin, size) => {
    span = Math.min(whole, Math.max(size, whole / 1e4));
    from = Math.min(Math.max(0, begin), whole - span);
    draw();
  };
  const zoom = (factor, at = from + span / 2) => {
    const size = Math.min(whole, Math.max(span * factor, whole / 1e4));
    move(at - (at - from) * size / span, size);
  };
  const focus = (number) => {
    focused = Math.min(Math.max(number, 0), events.length - 1);
    const each = events[focused];
    if (each.begin < from || each.begin > from + span) move(each.begin - span / 4, span);
    else draw();
    drawing.querySelector(`[data-task="${focused}"]`)?.focus();
  };
  const choose = () => {
    events = lanes[Number(choice.value)].events.toSorted((one, other) => one.begin - other.begin);
    rows = [...new Set(lanes[Number(choice.value)].events.map((each) => each.resource))];
    colours = new Map([...new Set(events.map((each) => each.name))].map((name, at) => [name, COLOURS[at % COLOURS.length]]));
    whole = Math.max(...events.map((each) => each.begin + each.seconds)) || 1;
    focused = -1;
    said.value = "Point at a task, or go to one with the tab and arrow keys.";
    move(0, whole);
  };

  lanes.forEach((each, number) => choice.append(new Option(`${each.lane}: ${each.source}`, number)));
  choice.parentElement.hidden = lanes.length < 2;
  choice.addEventListener("change", choose);
  box.querySelector("[name=in]").addEventListener("click", () => zoom(.5));
  box.querySelector("[name=out]").addEventListener("click", () => zoom(2));
  box.querySelector("[name=all]").addEventListener("click", () => move(0, whole));
  drawing.addEventListener("pointerover", tell);
  drawing.addEventListener("focusin", tell);
  drawing.addEventListener("wheel", (event) => {
    event.preventDefault();
    const { left, inner } = place();
    zoom(event.deltaY < 0 ? .8 : 1.25, from + (event.clientX - drawing.getBoundingClientRect().left - left) / inner * span);
  }, { passive: false });
  let held = null;
  drawing.addEventListener("pointerdown", (event) => { held = { x: event.clientX, from }; });
  addEventListener("pointermove", (event) => {
    if (held) move(held.from - (event.clientX - held.x) / place().inner * span, span);
  });
  for (const end of ["pointerup", "pointercancel"]) addEventListener(end, () => { held = null; });
  drawing.addEventListener("keydown", (event) => {
    const bar = event.target.closest(".task"), by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!bar || !by) return;
    event.preventDefault();
    focus(Number(bar.dataset.task) + by);
  });
  addEventListener("resize", draw);
  box.hidden = false;
  choose();
}

startTimeline(document.getElementById("timeline"), JSON.parse(document.getElementById("timeline-data").textContent));
