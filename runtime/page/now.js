// Now: handlers, queue, memory, and the last minutes as charts.

import { get } from "./api.js";
import { byId, bytes, clock, digits, duration, element, milliseconds, show } from "./elements.js";
import { colours } from "./theme.js";

const STATUS_MS = 2000;
const HISTORY_MS = 5000;
const HEIGHT = 150;
const SHORTEST_S = 60;

const CHARTS = [
  {
    title: "Requests per second",
    series: [["answered", "accent"], ["refused", "warning"], ["failed", "bad"]],
    value: (step, name, { step_s: seconds }) => step[name] / seconds,
    shown: digits,
  },
  {
    title: "Latency: total of those answered",
    series: [["p50", "accent"], ["p95", "warning"], ["p99", "bad"]],
    value: (step, name) => step[`${name}_ms`],
    shown: milliseconds,
  },
  {
    title: "Requests waiting and at work",
    series: [["waiting", "warning"], ["working", "accent"]],
    value: (step, name) => step[name],
    shown: String,
    steps: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000],
  },
  {
    title: "Memory",
    series: [["used", "accent"], ["limit", "bad"]],
    value: (step, name, _, limit) => (name === "used" ? step.memory_bytes : limit),
    shown: bytes,
  },
];

let shown = false;
let limit = null;
let last = null; // the history that is drawn
let asked = null;
let again = false;
const timers = [];
const drawn = new Map();

export function enter() {
  shown = true;
  refresh();
  history();
  timers.push(setInterval(() => document.hidden || refresh(), STATUS_MS));
  timers.push(setInterval(() => document.hidden || history(), HISTORY_MS));
}

export function leave() {
  shown = false;
  timers.splice(0).forEach(clearInterval);
}

// At once when something has happened; one question at a time, and one more if something happened meanwhile.
export async function refresh() {
  if (!shown) return;
  again = true;
  if (asked) return;
  asked = true;
  while (again) {
    again = false;
    await answered("status", render);
  }
  asked = null;
}

async function history() {
  await answered("status/history", (found) => {
    last = found;
    draw();
  });
}

async function answered(path, then) {
  try {
    then(await get(path));
    show(byId("now-problem"), null);
  } catch (error) {
    show(byId("now-problem"), error.message);
  }
}

function render(status) {
  const [minute] = status.recent;
  const { memory, queue } = status;
  if (limit !== memory.limit_bytes) {
    limit = memory.limit_bytes;
    if (last) draw();
  }
  const used = memory.used_bytes === null || !limit ? null : memory.used_bytes / limit;
  const working = status.handlers.filter(({ state }) => state === "working").length;
  const alive = status.handlers.filter(({ state }) => state === "working" || state === "idle").length;
  byId("tiles").replaceChildren(
    tile("Service", status.ready ? "ready" : "not ready", status.why_not_ready ?? `up for ${duration(status.up_s)}, version ${status.version}`, status.ready ? "good" : "bad"),
    tile("Handlers", `${alive} of ${status.handlers.length}`, `${working} at work`, alive === status.handlers.length ? null : "bad"),
    tile("Queue", String(queue.waiting), `of ${queue.limit} that may wait`, queue.waiting ? "odd" : null),
    tile("Memory", bytes(memory.used_bytes), `of ${bytes(limit)}; granted to requests: ${bytes(memory.reserved_bytes)}`, null, used),
    tile("Last minute", `${digits(minute.per_second)} / s`, outcome(minute)),
    tile("Latency, last minute", milliseconds(minute.p50_ms), `p50; p95 ${milliseconds(minute.p95_ms)}, p99 ${milliseconds(minute.p99_ms)}`),
  );
  byId("handlers").replaceChildren(...status.handlers.map(handler));
  byId("ended").replaceChildren(...(status.ended.length ? status.ended.map(end) : [element("li", { class: "empty" }, "none since the service runs")]));
}

function outcome({ answered: good, refused, failed }) {
  return `${good} answered, ${refused} refused, ${failed} failed`;
}

function tile(title, value, more, kind = null, ratio = null) {
  const meter = ratio === null ? null : element("span", { class: "meter", "aria-hidden": "true" }, element("i"));
  if (meter) meter.firstChild.style.width = `${100 * Math.min(1, ratio)}%`;
  return element(
    "div", { class: "tile card" },
    element("h2", {}, title),
    element("p", { class: `value ${kind ?? ""}` }, value),
    meter,
    element("p", { class: "hint" }, more),
  );
}

function handler({ pid, state, for_s: seconds, request, done, memory_bytes: memory }) {
  const doing = request
    ? element("a", { href: `#requests/${encodeURIComponent(request)}` }, request)
    : `for ${duration(seconds)}`;
  return element(
    "li", { class: `card handler ${state}`, "data-pid": pid, "data-state": state },
    element("span", { class: "state" }, element("i", { "aria-hidden": "true" }), state),
    element("strong", {}, pid === null ? "no process" : `pid ${pid}`),
    element("span", { class: "doing" }, doing),
    element("span", { class: "hint" }, `${done} requests, ${bytes(memory)} of its own`),
  );
}

function end({ at, pid, cause, sentence }) {
  return element("li", {}, element("time", { datetime: at }, clock(at)), ` ${pid === null ? "a handler" : `pid ${pid}`} ${sentence} `, element("code", {}, cause));
}

// Charts: uPlot draws on a canvas, whose colours and words come from here.

function draw() {
  const place = byId("charts");
  if (place.children.length === 0) place.append(...CHARTS.map(frame));
  CHARTS.forEach((chart) => plot(chart, drawn.get(chart.title)));
}

function frame({ title }) {
  const canvas = element("div", { class: "plot", role: "img" });
  const told = element("p", { class: "hint" });
  const figure = element("figure", { class: "card" }, element("figcaption", {}, element("h3", {}, title), told), canvas);
  const held = { canvas, told, plot: null, width: 0 };
  drawn.set(title, held);
  new ResizeObserver(([{ contentRect }]) => {
    held.width = Math.floor(contentRect.width);
    if (held.width) held.plot?.setSize({ width: held.width, height: HEIGHT });
  }).observe(canvas);
  return figure;
}

function plot(chart, held) {
  const steps = last.steps;
  const data = [
    steps.map((step) => Date.parse(step.at) / 1000),
    ...chart.series.map(([name]) => steps.map((step) => chart.value(step, name, last, limit))),
  ];
  tellOf(chart, held, data);
  if (held.plot) held.plot.setData(data);
  else held.plot = new uPlot(options(chart, held), data, held.canvas);
}

function tellOf(chart, held, data) {
  const latest = chart.series.map(([name, colour], index) => {
    const known = data[index + 1].filter((value) => value !== null);
    return { name, colour, value: known.length ? chart.shown(known.at(-1)) : "–" };
  });
  held.told.replaceChildren(...latest.map(({ name, colour, value }) => element("span", { class: `line ${colour}` }, element("i", { "aria-hidden": "true" }), `${name} ${value}`)));
  held.canvas.setAttribute("aria-label", `${chart.title} over the last ten minutes; latest: ${latest.map(({ name, value }) => `${name} ${value}`).join(", ")}`);
}

function options(chart, held) {
  const palette = colours("muted", "line", "accent", "warning", "bad");
  const axis = { stroke: palette.muted, grid: { stroke: palette.line, width: 1 }, ticks: { stroke: palette.line, width: 1 }, font: "11px system-ui, sans-serif" };
  return {
    width: held.canvas.clientWidth || 300,
    height: HEIGHT,
    legend: { show: false },
    cursor: { show: false },
    scales: {
      x: { range: (_, first, latest) => [Math.min(first, latest - SHORTEST_S), latest] },
      y: { range: (_, __, most) => [0, (most || 1) * 1.1] },
    },
    axes: [
      { ...axis, size: 30, space: 80, values: (_, moments) => moments.map((moment) => clock(moment * 1000)) },
      { ...axis, size: 58, space: 32, incrs: chart.steps, values: (_, values) => values.map((value) => axisLabel(chart, value)) },
    ],
    series: [{}, ...chart.series.map(([name, colour]) => ({
      label: name, stroke: palette[colour], width: 1.6, points: { size: 4 }, spanGaps: false,
      dash: name === "limit" ? [4, 3] : undefined,
      fill: colour === "accent" ? palette.accent.replace("rgb(", "rgba(").replace(")", ", 0.12)") : undefined,
    }))],
  };
}

function axisLabel(chart, value) {
  return chart.shown === bytes ? bytes(value) : value.toLocaleString("en");
}

document.addEventListener("themechange", () => {
  for (const held of drawn.values()) {
    held.plot?.destroy();
    held.plot = null;
  }
  if (last) draw();
});
