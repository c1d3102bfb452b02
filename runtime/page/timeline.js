// The timelines of requests as one Gantt chart: a row for each unit and for retrieval, a colour for each layer.
//
// What is drawn is what `/requests/{id}` answers. Every bar is as long as its span; a hairline around it keeps the
// shortest visible. Colours are written into the drawing, so that the file saved of it looks as it does here.

import { digits, drawn, element, milliseconds, percent, table } from "./elements.js";
import { colours, isDark } from "./theme.js";

const ROWS = [
  ["layer", ["construct", "initialize"]],
  ["retrieval", ["retrieve"]],
  ["weight", ["apply"]],
  ["compute", ["execute"]],
];
const GUTTER = 70;
const RIGHT = 14;
const TITLE = 22;
const FLOOR_LABEL = 14;
const ROW = 20;
const LANE = 8;
const GAP = 4;
const AXIS = 22;
const BETWEEN = 18;
const REACH = 14; // how far from a bar a pointer may be and still mean it, in pixels
const FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif";

let drawings = 0;

export class Timeline {
  // requests: as `/requests/{id}` answers; those without spans are left out.
  constructor(requests) {
    this.bands = requests.filter((request) => request.spans.length).map(band);
    this.common = true;
    this.figure = element("div", { class: "figure" });
    this.tip = element("div", { class: "tip", hidden: true, "aria-hidden": "true" });
    this.root = element("div", { class: "timeline" }, this.controls(), this.figure, this.tables());
    this.width = 0;
    new ResizeObserver(([entry]) => {
      const width = Math.floor(entry.contentRect.width);
      if (width && width !== this.width) this.draw(width);
    }).observe(this.figure);
    document.addEventListener("themechange", () => this.width && this.draw(this.width));
  }

  controls() {
    const legend = element(
      "ul", { class: "key", "aria-label": "What the bars mean" },
      element("li", {}, element("i", { class: "swatch ramp" }), "a colour per layer"),
      element("li", {}, element("i", { class: "swatch hatched" }), "initialization"),
      element("li", {}, element("i", { class: "swatch held" }), "retrieval suspended"),
      element("li", {}, element("i", { class: "swatch floor" }), "floor: the sum of execution"),
    );
    if (this.bands.length < 2) return legend;
    const box = element("input", { type: "checkbox", checked: true });
    box.addEventListener("change", () => {
      this.common = box.checked;
      this.draw(this.width);
    });
    return element("div", { class: "controls" }, legend, element("label", { class: "switch" }, box, "One time axis"));
  }

  tables() {
    return element("div", { class: "tables" }, ...this.bands.map(({ request, start }) => {
      const details = element("details", {}, element("summary", {}, `Spans of ${request.strategy} as a table`));
      // Hundreds of rows that few will open.
      details.addEventListener("toggle", () => {
        if (details.open && details.children.length === 1) details.append(scrolling(spans(request, start), "Spans"));
      });
      return details;
    }));
  }

  draw(width) {
    this.width = width;
    const palette = new Palette();
    const plot = width - GUTTER - RIGHT;
    const longest = Math.max(...this.bands.map((each) => Math.max(each.end - each.start, each.floor)));
    const svg = drawn("svg", {
      xmlns: "http://www.w3.org/2000/svg", width, role: "group", "font-family": FONT, "font-size": 12,
      "aria-label": `Timeline of ${this.bands.map(({ request }) => request.strategy).join(", ")}; arrow keys move among its bars`,
    });
    drawings += 1;
    const patterns = new Patterns(`t${drawings}`, palette);
    svg.append(patterns.definitions);
    let top = 0;
    this.bands.forEach((each, index) => {
      const length = this.common ? longest : Math.max(each.end - each.start, each.floor);
      const scale = new Scale(length, plot);
      const hasAxis = !this.common || index === this.bands.length - 1;
      const drawing = new Band(each, { top, scale, palette, patterns, width, hasAxis });
      svg.append(drawing.root);
      top += drawing.height + BETWEEN;
    });
    const height = top - BETWEEN;
    svg.setAttribute("height", height);
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg = svg;
    this.tip.hidden = true;
    this.figure.replaceChildren(svg, this.tip);
    this.listen();
  }

  // The drawing as a file of its own.
  saved() {
    const copy = this.svg.cloneNode(true);
    const background = drawn("rect", { width: "100%", height: "100%", fill: new Palette().surface });
    copy.insertBefore(background, copy.firstChild);
    for (const bar of copy.querySelectorAll("[tabindex]")) {
      bar.removeAttribute("tabindex");
      bar.prepend(drawn("title", {}, bar.getAttribute("aria-label")));
    }
    return new Blob([new XMLSerializer().serializeToString(copy)], { type: "image/svg+xml" });
  }

  // Pointing, touching and focus tell of a bar; arrow keys go from bar to bar, so that the chart is one stop of Tab.

  listen() {
    const bars = [...this.svg.querySelectorAll(".bar")];
    bars[0]?.setAttribute("tabindex", "0");
    this.svg.addEventListener("pointermove", (event) => this.tell(this.near(event)));
    this.svg.addEventListener("pointerdown", (event) => this.tell(this.near(event)));
    // A finger that is lifted has left, too, and then wants to read.
    this.svg.addEventListener("pointerleave", (event) => event.pointerType === "touch" || this.tell(null));
    this.svg.addEventListener("focusin", (event) => this.tell(event.target.closest(".bar")));
    this.svg.addEventListener("focusout", () => this.tell(null));
    this.svg.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.tell(null);
      const next = this.next(document.activeElement, event.key);
      if (!next) return;
      event.preventDefault();
      for (const bar of bars) bar.setAttribute("tabindex", bar === next ? "0" : "-1");
      next.focus();
    });
  }

  next(bar, pressed) {
    const row = bar?.closest?.(".row");
    if (!row) return null;
    const inRow = [...row.querySelectorAll(".bar")];
    const place = inRow.indexOf(bar);
    const rows = [...this.svg.querySelectorAll(".row")].filter((each) => each.querySelector(".bar"));
    const other = (step) => {
      const target = rows[rows.indexOf(row) + step];
      return target && closest([...target.querySelectorAll(".bar")], Number(bar.dataset.start));
    };
    switch (pressed) {
      case "ArrowRight": return inRow[place + 1];
      case "ArrowLeft": return inRow[place - 1];
      case "Home": return inRow[0];
      case "End": return inRow.at(-1);
      case "ArrowDown": return other(1);
      case "ArrowUp": return other(-1);
      default: return null;
    }
  }

  near({ clientX, clientY }) {
    let best = null;
    let distance = REACH;
    for (const bar of this.svg.querySelectorAll(".bar")) {
      const box = bar.getBoundingClientRect();
      const away = Math.hypot(
        Math.max(box.left - clientX, 0, clientX - box.right),
        2 * Math.max(box.top - clientY, 0, clientY - box.bottom),
      );
      // Of those that lie over one another the later drawn is the one that is seen.
      if (away < distance || (away === distance && away === 0)) [best, distance] = [bar, away];
    }
    return best;
  }

  tell(bar) {
    this.svg.querySelector(".told")?.classList.remove("told");
    this.tip.hidden = bar === null;
    if (bar === null) return;
    bar.classList.add("told");
    const { name, kind, start, end } = bar.dataset;
    this.tip.replaceChildren(
      element("strong", {}, name),
      element("span", {}, kind),
      element("span", {}, `start ${digits(Number(start))} ms`),
      element("span", {}, `duration ${digits(end - start)} ms`),
    );
    const box = bar.getBoundingClientRect();
    const figure = this.figure.getBoundingClientRect();
    const left = box.left + box.width / 2 - figure.left - this.tip.offsetWidth / 2;
    this.tip.style.left = `${Math.max(0, Math.min(left, figure.width - this.tip.offsetWidth))}px`;
    this.tip.style.top = `${box.bottom - figure.top + 6}px`;
  }
}

// What is drawn of a request. Times count from the pipeline's first start.
function band(request) {
  const start = Math.min(...request.spans.map((span) => span.start_ms));
  const end = Math.max(...request.spans.map((span) => span.end_ms));
  return { request, start, end, floor: request.figures.execute_ms };
}

function spans({ strategy, spans: all, suspensions }, origin) {
  const held = suspensions.map((each) => ({ ...each, kind: "suspended" }));
  const rows = [...all, ...held].sort((one, other) => one.start_ms - other.start_ms).map((span) => [
    span.name, span.kind, digits(span.start_ms - origin), digits(span.end_ms - span.start_ms),
  ]);
  return table(`Spans of ${strategy}, in milliseconds`, ["Layer", "Kind", "Start", "Duration"], rows);
}

export function scrolling(content, label) {
  return element("div", { class: "scrolling", tabindex: 0, role: "region", "aria-label": label }, content);
}

class Scale {
  constructor(length, width) {
    this.length = length;
    this.width = width;
  }

  x(ms) {
    return GUTTER + (ms / this.length) * this.width;
  }

  ticks() {
    const rough = this.length / Math.max(2, Math.floor(this.width / 90));
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough);
    const count = Math.floor(this.length / step + 1e-9);
    return Array.from({ length: count + 1 }, (_, index) => Number((index * step).toPrecision(12)));
  }
}

class Band {
  constructor({ request, start, end, floor }, { top, scale, palette, patterns, width, hasAxis }) {
    Object.assign(this, { request, start, scale, palette, patterns });
    this.fills = palette.layers(request.layers.length);
    this.root = drawn("g", { class: "band", transform: `translate(0 ${top})`, "data-request": request.id, "data-strategy": request.strategy });
    const rows = ROWS.map(([name, kinds]) => this.row(name, kinds));
    const first = TITLE + FLOOR_LABEL;
    const bottom = rows.reduce((y, row) => y + row.height + GAP, first) - GAP;
    let y = first;
    for (const row of rows) {
      for (const part of [row.lane, row.root]) part.setAttribute("transform", `translate(0 ${y})`);
      y += row.height + GAP;
    }
    this.root.append(
      this.title(end - start, floor, width),
      ...rows.map((row) => row.lane),
      this.grid(first, bottom, hasAxis, width),
      ...rows.map((row) => row.root),
      this.floor(floor, first, bottom, width),
    );
    this.height = bottom + (hasAxis ? AXIS : 0);
  }

  title(length, floor, width) {
    const { request, palette } = this;
    const utilized = width < 480 ? "" : ` · ${percent(request.figures.utilization)} utilized`;
    const told = `${milliseconds(length)} · ${digits(length / floor)} × floor${utilized}`;
    return drawn(
      "text", { x: 0, y: 14, fill: palette.muted },
      drawn("tspan", { fill: palette.text, "font-weight": 650, "font-size": 13.5 }, request.strategy),
      drawn("tspan", { dx: 6 }, told),
    );
  }

  grid(top, bottom, hasAxis, width) {
    const { scale, palette } = this;
    const ticks = scale.ticks();
    return drawn("g", { class: "axis", "aria-hidden": "true" }, ...ticks.flatMap((ms, index) => {
      const x = scale.x(ms);
      const line = drawn("line", { x1: x, x2: x, y1: top, y2: bottom + (hasAxis ? 4 : 0), stroke: palette.line, "data-ms": ms, class: "tick" });
      if (!hasAxis) return [line];
      const unit = index === ticks.length - 1 ? " ms" : "";
      const place = x > width - 30 ? { x: width, "text-anchor": "end" } : { x, "text-anchor": "middle" };
      return [line, drawn("text", { ...place, y: bottom + 17, fill: palette.muted, "font-size": 11 }, `${ms.toLocaleString("en")}${unit}`)];
    }));
  }

  floor(ms, top, bottom, width) {
    const x = this.scale.x(ms);
    const atEnd = x > width - 110;
    return drawn(
      "g", { class: "floor", "data-ms": ms },
      drawn("line", { x1: x, x2: x, y1: top - 6, y2: bottom, stroke: this.palette.accent, "stroke-width": 1.6, "stroke-dasharray": "4 3" }),
      drawn("text", {
        x: x + (atEnd ? 4 : -4), y: top - 8, fill: this.palette.accent, "font-size": 11, "text-anchor": atEnd ? "end" : "start",
      }, `floor ${milliseconds(ms)}`),
    );
  }

  row(name, kinds) {
    const chosen = this.request.spans.filter((span) => kinds.includes(span.kind)).sort((one, other) => one.start_ms - other.start_ms);
    const lanes = new Lanes();
    const placed = chosen.map((span) => [span, lanes.place(span)]);
    const height = Math.max(ROW, lanes.count * LANE);
    const thick = height / Math.max(1, lanes.count);
    const held = kinds.includes("retrieve") ? this.request.suspensions : [];
    const bars = placed.flatMap(([span, lane]) => {
      const place = { y: lane * thick, height: thick - (lanes.count > 1 ? 1 : 0) };
      const own = held.filter(({ layer }) => layer === span.layer).map((each) => this.bar({ ...each, kind: "suspended" }, place));
      return [this.bar(span, place), ...own];
    });
    const root = drawn(
      "g", { class: "row", "data-row": name, role: "group", "aria-label": `${this.request.strategy}, ${name}` },
      ...bars,
    );
    const lane = drawn(
      "g", { "aria-hidden": "true" },
      drawn("rect", { x: GUTTER, width: this.scale.width, height, fill: this.palette.lane, rx: 2 }),
      drawn("text", { x: 0, y: height / 2 + 4, fill: this.palette.muted }, name),
    );
    return { root, lane, height };
  }

  bar(span, { y, height }) {
    const [start, end] = [span.start_ms - this.start, span.end_ms - this.start];
    const colour = this.fills[span.layer];
    const x = this.scale.x(start);
    const shape = { x, y, width: Math.max(0, this.scale.x(end) - x), height };
    const patterns = { initialize: this.patterns.hatch, suspended: this.patterns.held };
    const pattern = patterns[span.kind];
    const fill = span.kind === "suspended" ? this.palette.surface : colour;
    return drawn(
      "g", {
        class: "bar", role: "img", tabindex: -1,
        "aria-label": `${span.name}, ${span.kind}, start ${milliseconds(start)}, duration ${milliseconds(end - start)}`,
        "data-layer": span.layer, "data-name": span.name, "data-kind": span.kind, "data-start": start, "data-end": end,
      },
      drawn("rect", { ...shape, fill, stroke: colour, "stroke-width": 0.6 }),
      pattern ? drawn("rect", { ...shape, fill: `url(#${pattern})` }) : null,
    );
  }
}

// Retrievals run side by side: those that overlap lie in lanes of their own.
class Lanes {
  constructor() {
    this.ends = [];
  }

  place({ start_ms: start, end_ms: end }) {
    const free = this.ends.findIndex((last) => last <= start);
    const lane = free === -1 ? this.ends.length : free;
    this.ends[lane] = end;
    return lane;
  }

  get count() {
    return this.ends.length;
  }
}

class Patterns {
  constructor(prefix, palette) {
    this.hatch = `${prefix}-hatch`;
    this.held = `${prefix}-held`;
    const stripes = (id, colour, width, angle) => drawn(
      "pattern", { id, width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: `rotate(${angle})` },
      drawn("rect", { width, height: 5, fill: colour }),
    );
    this.definitions = drawn(
      "defs", {},
      stripes(this.hatch, palette.surface, 2.4, 45),
      stripes(this.held, palette.warning, 2, -45),
    );
  }
}

// The page's colours as they are at this moment, and a ramp of hues through the layers, blue first and purple last;
// neighbours differ in lightness too.
class Palette {
  constructor() {
    Object.assign(this, colours("text", "muted", "line", "lane", "surface", "accent", "warning"));
    this.dark = isDark();
  }

  layers(count) {
    return Array.from({ length: count }, (_, index) => {
      const hue = 262 - 300 * (count === 1 ? 0 : index / (count - 1));
      return hex((this.dark ? 0.7 : 0.55) + (index % 2 ? 0.09 : 0), 0.135, hue);
    });
  }
}

// OKLCH to sRGB (B. Ottosson, "A perceptual color space for image processing", 2020); SVG editors do not know oklch().
function hex(lightness, chroma, hue) {
  const [a, b] = [Math.cos, Math.sin].map((turn) => chroma * turn((hue * Math.PI) / 180));
  const [l, m, s] = [
    lightness + 0.3963377774 * a + 0.2158037573 * b,
    lightness - 0.1055613458 * a - 0.0638541728 * b,
    lightness - 0.0894841775 * a - 1.291485548 * b,
  ].map((root) => root ** 3);
  const linear = [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ];
  return `#${linear.map((value) => {
    const limited = Math.min(1, Math.max(0, value));
    const encoded = limited <= 0.0031308 ? 12.92 * limited : 1.055 * limited ** (1 / 2.4) - 0.055;
    return Math.round(255 * encoded).toString(16).padStart(2, "0");
  }).join("")}`;
}

function closest(bars, start) {
  const distance = (bar) => Math.abs(Number(bar.dataset.start) - start);
  return bars.reduce((best, bar) => (best === null || distance(bar) < distance(best) ? bar : best), null);
}
