// Try: a photo under one or several strategies, its labels, and the timelines on one axis.

import { ask, get, reconsider, Refused } from "./api.js";
import { byId, bytes, digits, element, milliseconds, percent, show, table } from "./elements.js";
import { scrolling, Timeline } from "./timeline.js";

const TOP = 5;
const SAMPLE = "page/sample.jpg";
const CHECKED_AT_FIRST = ["traditional", "pisel", "cicada"];

let chosen = null; // a File; null is the sample
let strategies = [];
let preview = null;

export function start() {
  byId("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    reconsider();
    run();
  });
  const photo = byId("photo");
  photo.addEventListener("change", () => photo.files[0] && choose(photo.files[0]));
  if (photo.files[0]) choose(photo.files[0]); // before this ran, or kept over a reload
  byId("sample").addEventListener("click", () => choose(null));
  acceptDrops(byId("drop"));
}

// What there is to choose from, anew whenever the section is shown; what was chosen stays.
export async function shown() {
  try {
    const [found, known] = await Promise.all([get("models"), get("strategies")]);
    offerModels(found);
    if (strategies.length === 0) offerStrategies(known);
    show(byId("try-problem"), found.models.length ? null : "no model is prepared; `cicada prepare` does that");
  } catch (error) {
    show(byId("try-problem"), error.message);
  }
}

function offerModels({ models, default: preferred }) {
  const select = byId("model");
  const before = select.value || preferred || models[0]?.name;
  select.replaceChildren(...models.map(({ name, architecture, bytes: size }) => element(
    "option", { value: name, selected: name === before },
    `${name} (${name === architecture ? "" : `${architecture}, `}${bytes(size)})`,
  )));
  byId("run").disabled = models.length === 0;
}

function offerStrategies({ strategies: known, default: preferred }) {
  strategies = known;
  byId("strategies").replaceChildren(...known.map((strategy) => {
    const { name } = strategy;
    const box = element("input", { type: "checkbox", name: "strategy", value: name, checked: name === preferred || CHECKED_AT_FIRST.includes(name) });
    return element("label", { class: "choice" }, box, element("strong", {}, name), element("span", {}, described(strategy)));
  }));
}

function described({ pipelined, initialize, decoupled }) {
  const parts = [
    pipelined ? "units overlap" : "one step after the other",
    initialize ? "layers are initialized" : "no initialization",
    decoupled ? "weights retrieved from the start on" : "weights retrieved in line",
  ];
  return parts.join(", ");
}

function choose(photo) {
  chosen = photo;
  if (preview !== null) URL.revokeObjectURL(preview);
  preview = photo && URL.createObjectURL(photo);
  byId("preview").src = preview ?? SAMPLE;
  byId("photo-name").textContent = photo ? `${photo.name}, ${bytes(photo.size)}` : "the sample";
  byId("sample").hidden = photo === null;
  if (photo === null) byId("photo").value = "";
}

function acceptDrops(area) {
  for (const type of ["dragenter", "dragover"]) {
    area.addEventListener(type, (event) => {
      event.preventDefault();
      area.classList.add("over");
    });
  }
  for (const type of ["dragleave", "drop"]) area.addEventListener(type, () => area.classList.remove("over"));
  area.addEventListener("drop", (event) => {
    event.preventDefault();
    if (event.dataTransfer.files[0]) choose(event.dataTransfer.files[0]);
  });
}

async function run() {
  const wanted = [...byId("strategies").querySelectorAll(":checked")].map((box) => box.value);
  const problem = wanted.length ? null : "no strategy is chosen, expected at least one";
  show(byId("try-problem"), problem);
  if (problem) return;
  const model = byId("model").value;
  const button = byId("run");
  const progress = byId("progress");
  button.disabled = true;
  progress.textContent = "running";
  try {
    const photo = chosen ?? await (await ask(SAMPLE)).blob();
    const runs = [];
    for (const strategy of wanted) {
      progress.textContent = `running ${strategy}`;
      runs.push(await one(model, strategy, photo));
      render(runs);
    }
    progress.textContent = "done";
  } catch (error) {
    progress.textContent = "";
    show(byId("try-problem"), error.message);
    if (!(error instanceof Refused)) throw error; // a fault of the page
  } finally {
    button.disabled = false;
  }
}

async function one(model, strategy, photo) {
  try {
    const answer = await ask(`predictions/${encodeURIComponent(model)}?top=${TOP}`, {
      method: "POST", body: photo, headers: { "Cicada-Strategy": strategy, "Content-Type": photo.type || "application/octet-stream" },
    });
    const labels = await answer.json();
    const request = await get(`requests/${encodeURIComponent(answer.headers.get("X-Request-ID"))}`);
    return { strategy, labels, request };
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    return { strategy, error: error.message };
  }
}

function render(runs) {
  const done = runs.filter((run) => run.request);
  const failed = runs.filter((run) => run.error);
  byId("results").replaceChildren(
    ...failed.map(({ strategy, error }) => element("p", { class: "problem", role: "alert" }, element("strong", {}, strategy), ` ${error}`)),
    ...(done.length ? [answers(done), timelines(done.map((run) => run.request))] : []),
  );
}

// Strategies differ in when, not in what: the labels stand there once, unless they do differ.
function answers(runs) {
  const distinct = new Map();
  for (const run of runs) {
    const key = JSON.stringify(run.labels);
    distinct.set(key, [...(distinct.get(key) ?? []), run]);
  }
  const groups = [...distinct.values()].map((group) => element(
    "div", {},
    distinct.size > 1 ? element("h3", {}, group.map((run) => run.strategy).join(", ")) : null,
    labelled(group[0].labels),
  ));
  const alike = runs.length > 1 && distinct.size === 1
    ? element("p", { class: "hint" }, `The same under ${runs.length === 2 ? "both" : `all ${runs.length}`} strategies, to the last digit.`)
    : null;
  return element("section", { class: "card", "aria-labelledby": "labels-title" }, element("h2", { id: "labels-title" }, "Labels"), ...groups, alike);
}

function labelled(labels) {
  return element("ol", { class: "labels" }, ...labels.map(({ label, probability }) => {
    const meter = element("span", { class: "meter", "aria-hidden": "true" }, element("i"));
    meter.firstChild.style.width = `${100 * (probability ?? 0)}%`;
    const told = probability === null ? "not a number" : percent(probability);
    return element("li", {}, element("span", { class: "label" }, label), meter, element("span", { class: "number" }, told));
  }));
}

function timelines(requests) {
  return element(
    "section", { class: "card", "aria-labelledby": "timeline-title" },
    element("h2", { id: "timeline-title" }, requests.length > 1 ? "Timelines" : "Timeline"),
    new Timeline(requests).root,
    scrolling(compared(requests), "Comparison of the strategies"),
  );
}

function compared(requests) {
  const rows = requests.map((request) => {
    const { figures } = request;
    const link = element("a", { href: `#requests/${encodeURIComponent(request.id)}` }, request.strategy);
    return [
      link, milliseconds(figures.pipeline_ms), digits(figures.pipeline_ms / figures.execute_ms),
      milliseconds(request.total_ms), milliseconds(figures.initialize_ms), milliseconds(figures.retrieve_ms),
      percent(figures.utilization), bytes(figures.placeholder_bytes),
    ];
  });
  const titles = ["Strategy", "Pipeline", "× floor", "Total", "Initialization", "Retrieval", "Utilization", "Placeholders"];
  return table("The same in numbers", titles, rows);
}
