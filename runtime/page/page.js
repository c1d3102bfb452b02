// The page: its four sections, one of which the address names, and what reaches all of them.

import * as models from "./models.js";
import * as now from "./now.js";
import * as requests from "./requests.js";
import * as theme from "./theme.js";
import * as trial from "./try.js";
import { reconsider } from "./api.js";
import { byId, element } from "./elements.js";
import { Stream } from "./stream.js";

const SECTIONS = ["try", "requests", "now", "models"];
const NOTICE_MS = 15_000;
let current = null;

function route() {
  const [name, ...rest] = location.hash.slice(1).split("/");
  if (name === "main") return;
  const section = SECTIONS.includes(name) ? name : "try";
  const part = rest.length ? rest.join("/") : null;
  const isFirst = current === null;
  if (section !== current) enter(section);
  if (section === "requests") requests.open(part);
  if (!isFirst && part === null) {
    scrollTo(0, 0);
    byId(`${section}-title`).focus({ preventScroll: true });
  }
}

function enter(section) {
  current = section;
  for (const name of SECTIONS) byId(name).hidden = name !== section;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${section}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const title = byId(`${section}-title`).textContent;
  document.title = `${title} – Cicada`;
  if (section === "now") now.enter();
  else now.leave();
  if (section === "try") trial.shown();
  if (section === "models") models.shown();
}

function told(name, data) {
  if (name === "request") requests.arrived(data);
  if (name !== "handler") return;
  now.refresh();
  if (data.state === "ended") notice(`A handler ${data.sentence}; another takes its place.`);
}

function notice(sentence) {
  const shown = element("p", { class: "notice" }, sentence);
  byId("notices").append(shown);
  setTimeout(() => shown.remove(), NOTICE_MS);
}

function connection(state) {
  const pill = byId("connection");
  pill.textContent = state;
  pill.className = `pill ${state === "live" ? "good" : "odd"}`;
}

theme.start();
trial.start();
requests.start();
const stream = new Stream({ opened: requests.load, event: told, state: connection });
addEventListener("hashchange", () => {
  reconsider();
  stream.start();
  route();
});
route();
stream.start();
