// Requests: the last ones, live, and one of them with its timeline and its files.

import { ask, get, Refused } from "./api.js";
import { byId, bytes, clock, digits, element, milliseconds, percent, show, table } from "./elements.js";
import { scrolling, Timeline } from "./timeline.js";

const KEPT = 256;
const HEADROOM = 1.25;

let listed = []; // the latest first
let meanwhile = []; // those told of while the list is on its way, which may be older than they are
let paused = false;
let scale = 1; // milliseconds that fill a bar

export function start() {
  const pause = byId("pause");
  pause.addEventListener("click", () => {
    paused = !paused;
    pause.setAttribute("aria-pressed", String(paused));
    pause.textContent = paused ? "Go on" : "Pause";
    if (!paused) render();
  });
}

// All that there are, since the stream tells only of those that end from now on.
export async function load() {
  meanwhile = [];
  try {
    listed = (await get("requests")).requests;
    for (const request of meanwhile) if (!listed.some(({ id }) => id === request.id)) listed.unshift(request);
    show(byId("requests-problem"), null);
    if (!paused) render();
  } catch (error) {
    show(byId("requests-problem"), error.message);
  }
}

export function arrived(request) {
  meanwhile = [...meanwhile, request].slice(-KEPT);
  listed = [request, ...listed.filter(({ id }) => id !== request.id)].slice(0, KEPT);
  if (paused) return;
  if (scaleOf(listed) !== scale) {
    render();
    return;
  }
  const rows = byId("rows");
  [...rows.children].filter((each) => each.dataset.id === request.id).forEach((each) => each.remove());
  rows.prepend(row(request, !byId("requests").hidden)); // else it would flash when the section is shown
  while (rows.children.length > KEPT) rows.lastChild.remove();
  byId("none-yet").hidden = true;
}

function render() {
  scale = scaleOf(listed);
  byId("rows").replaceChildren(...listed.map((request) => row(request, false)));
  byId("none-yet").hidden = listed.length > 0;
}

// One that took far longer than nearly all others would leave nothing of their bars: its own runs over the edge.
function scaleOf(requests) {
  const totals = requests.map((request) => request.total_ms ?? 0).sort((one, other) => one - other);
  const most = totals[Math.floor(0.95 * (totals.length - 1))] ?? 1;
  const power = 10 ** Math.floor(Math.log10(Math.max(most * HEADROOM, 1)));
  return [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= most * HEADROOM) ?? 10 * power;
}

function row(request, isNew) {
  const { id, at, status, model, strategy, total_ms: total } = request;
  const cell = (name, ...content) => element("span", { role: "cell", class: name }, ...content);
  const link = element("a", { href: `#requests/${encodeURIComponent(id)}`, title: id }, clock(at));
  const made = element(
    "div", { role: "row", class: isNew ? "request new" : "request", "data-id": id },
    cell("time", link),
    cell("status", element("b", { class: `code ${kindOf(status)}` }, String(status ?? "–"))),
    cell("model", model ?? "–"),
    cell("strategy", strategy ?? "–"),
    cell("times", bar(request)),
    cell("number total", milliseconds(total)),
  );
  made.addEventListener("click", () => link.click());
  link.addEventListener("click", (event) => event.stopPropagation());
  return made;
}

function kindOf(status) {
  return status === null || status >= 500 ? "bad" : status >= 400 ? "odd" : "good";
}

function bar({ receive_ms: receive, queue_ms: queue, pipeline_ms: pipeline, total_ms: total }) {
  const rest = Math.max(0, (total ?? 0) - (receive ?? 0) - (queue ?? 0) - (pipeline ?? 0));
  const parts = { receive, queue, pipeline, rest };
  const told = Object.entries(parts).filter(([, ms]) => ms !== null).map(([name, ms]) => `${name} ${milliseconds(ms)}`);
  const made = element("span", { class: "bars", role: "img", "aria-label": told.join(", "), title: told.join("\n") });
  for (const [name, ms] of Object.entries(parts)) {
    const part = element("i", { class: `part ${name}` });
    part.style.width = `${(100 * (ms ?? 0)) / scale}%`;
    made.append(part);
  }
  made.classList.toggle("over", (total ?? 0) > scale);
  return made;
}

// One request, in the place of the list; without an id the list.
export async function open(id) {
  const place = byId("request-shown");
  byId("requests-list").hidden = id !== null;
  place.hidden = id === null;
  if (id === null) return;
  place.replaceChildren(element("p", { class: "empty" }, "loading"));
  const back = element("p", {}, element("a", { href: "#requests" }, "← All requests"));
  try {
    const request = await get(`requests/${encodeURIComponent(id)}`);
    place.replaceChildren(back, ...detail(request));
  } catch (error) {
    place.replaceChildren(back, heading(id), element("p", { class: "problem", role: "alert" }, error.message));
  }
  place.querySelector("h1").focus();
}

function heading(id) {
  return element("h1", { tabindex: -1, class: "id" }, `Request ${id}`);
}

function detail(request) {
  const { id, error, figures } = request;
  const chart = request.spans.length ? new Timeline([request]) : null;
  const nothing = element("p", { class: "empty" }, "It did not come to a pipeline, so there is no timeline.");
  return [
    heading(id),
    error ? element("p", { class: "problem" }, error) : null,
    element("section", { class: "card", "aria-labelledby": "shown-timeline" }, element("h2", { id: "shown-timeline" }, "Timeline"), chart?.root ?? nothing),
    files(id, chart),
    facts(request),
    figures ? element("section", { class: "card" }, scrolling(units(figures), "Figures of the units")) : null,
  ].filter(Boolean);
}

function facts(request) {
  const { figures } = request;
  const known = {
    Status: String(request.status ?? "–"),
    Model: request.model ?? "–",
    Version: request.version ?? "–",
    Strategy: request.strategy ?? "–",
    Arrived: new Date(request.at).toLocaleString([], { hourCycle: "h23" }),
    Receive: milliseconds(request.receive_ms),
    Queue: milliseconds(request.queue_ms),
    Pipeline: milliseconds(request.pipeline_ms),
    Total: milliseconds(request.total_ms),
    ...(figures && {
      Utilization: percent(figures.utilization),
      Placeholders: `${bytes(figures.placeholder_bytes)} for ${milliseconds(figures.placeholder_usage_ms)}`,
    }),
  };
  return element("dl", { class: "facts card" }, ...Object.entries(known).map(
    ([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value)),
  ));
}

function units({ work_ms: work, wait_ms: wait, idle_ms: idle }) {
  const rows = ["layer", "weight", "compute"].map((unit) => [unit, ...[work, wait, idle].map((each) => digits(each[unit]))]);
  return table("The units, in milliseconds", ["Unit", "Work", "Wait", "Idle"], rows);
}

function files(id, chart) {
  const path = `requests/${encodeURIComponent(id)}`;
  const problem = element("span", { role: "alert", class: "bad" });
  const offered = (title, name, content) => {
    const button = element("button", { type: "button" }, title);
    button.addEventListener("click", async () => {
      problem.textContent = "";
      try {
        save(await content(), `cicada-${id}${name}`);
      } catch (error) {
        if (!(error instanceof Refused)) throw error;
        problem.textContent = error.message;
      }
    });
    return button;
  };
  return element(
    "div", { class: "actions", role: "group", "aria-label": "Save this request" },
    offered("Trace for Perfetto", ".trace.json", async () => (await ask(`${path}/trace`)).blob()),
    chart && offered("SVG", ".svg", () => chart.saved()),
    offered("JSON", ".json", async () => (await ask(path)).blob()),
    problem,
  );
}

function save(content, name) {
  const address = URL.createObjectURL(content);
  element("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000); // once the browser has taken it
}
