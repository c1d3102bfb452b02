// Elements and numbers for all sections. Text goes in as text nodes only: names and errors are others' words.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

// element("p", {class: "lead", hidden: false}, "text", child)
export function element(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function drawn(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) {
      made.setAttribute(name, value === true ? "" : String(value));
    }
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export function show(problem, sentence) {
  problem.textContent = sentence ?? "";
  problem.hidden = !sentence;
}

export function milliseconds(value) {
  return value === null || value === undefined ? "–" : `${digits(value)} ms`;
}

export function digits(value) {
  const places = Math.abs(value) < 10 ? 2 : Math.abs(value) < 100 ? 1 : 0;
  return value.toLocaleString("en", { minimumFractionDigits: places, maximumFractionDigits: places });
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1000;
    unit += 1;
  }
  return `${unit === 0 ? value : value.toLocaleString("en", { maximumFractionDigits: value < 100 ? 1 : 0 })} ${units[unit]}`;
}

export function percent(ratio) {
  return `${(100 * ratio).toLocaleString("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 })} %`;
}

export function duration(seconds) {
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d`;
}

export function clock(moment) {
  return new Date(moment).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
}

export function table(caption, titles, rows, attributes = {}) {
  return element(
    "table", attributes,
    element("caption", {}, caption),
    element("thead", {}, element("tr", {}, ...titles.map((title) => element("th", { scope: "col" }, title)))),
    element("tbody", {}, ...rows.map(([first, ...rest]) => element(
      "tr", {},
      element("th", { scope: "row" }, first),
      ...rest.map((cell) => element("td", {}, cell)),
    ))),
  );
}
