// Models: what is prepared, and the layers of each.

import { get } from "./api.js";
import { byId, bytes, digits, element, show, table } from "./elements.js";
import { scrolling } from "./timeline.js";

export async function shown() {
  try {
    const found = await get("models");
    const cards = [...found.damaged.map(damaged), ...found.models.map((model) => card(model, found.default))];
    byId("models-list").replaceChildren(...(cards.length ? cards : [nothing()]));
    show(byId("models-problem"), null);
  } catch (error) {
    show(byId("models-problem"), error.message);
  }
}

function nothing() {
  return element("p", { class: "empty" }, "No model is prepared: ", element("code", {}, "cicada prepare resnet50 --pretrained"), " puts one into the store.");
}

function damaged({ name, fault }) {
  return element("article", { class: "card" }, element("h2", {}, name), element("p", { class: "problem" }, fault));
}

function card(model, preferred) {
  const { name, version, versions } = model;
  const facts = {
    Architecture: model.architecture,
    Version: versions.length > 1 ? `${version} (before: ${versions.slice(1).join(", ")})` : version,
    Layers: `${model.layers}, by ${model.granularity}`,
    Format: model.format,
    Size: `${bytes(model.bytes)}, ${(model.parameters / 1e6).toLocaleString("en", { maximumFractionDigits: 1 })} M parameters`,
    Classes: String(model.classes),
    Input: model.side === null ? "tensors" : `${model.side} × ${model.side}`,
    Weights: model.source,
    Execution: model.gain ? `${model.execution}; ${model.gain}` : model.execution,
  };
  const details = element("details", {}, element("summary", {}, `Layers of ${name}`));
  details.addEventListener("toggle", () => details.open && details.children.length === 1 && contents(name, details));
  return element(
    "article", { class: "card model" },
    element("h2", {}, name, name === preferred ? element("span", { class: "pill good" }, "default") : null),
    element("dl", { class: "facts" }, ...Object.entries(facts).map(
      ([fact, value]) => element("div", {}, element("dt", {}, fact), element("dd", {}, value)),
    )),
    details,
  );
}

async function contents(name, details) {
  const place = element("div", {}, "loading");
  details.append(place);
  try {
    const { contents: layers, labels } = await get(`models/${encodeURIComponent(name)}`);
    const largest = Math.max(...layers.map((layer) => layer.bytes), 1);
    const rows = layers.map((layer) => [
      `${layer.index} ${layer.name}`, share(layer.bytes / largest), bytes(layer.bytes),
      layer.parameters.toLocaleString("en"), String(layer.tensors), layer.file ?? "–",
    ]);
    const titles = ["Layer", "Share of the largest", "Size", "Parameters", "Tensors", "File"];
    place.replaceChildren(scrolling(table(`Layers of ${name}`, titles, rows, { class: "layers" }), `Layers of ${name}`), classes(labels));
  } catch (error) {
    place.remove();
    details.append(element("p", { class: "problem", role: "alert" }, error.message));
  }
}

function share(ratio) {
  const meter = element("span", { class: "meter", role: "img", "aria-label": `${digits(100 * ratio)} %` }, element("i"));
  meter.firstChild.style.width = `${100 * ratio}%`;
  return meter;
}

function classes(labels) {
  if (!labels) return element("p", { class: "hint" }, "Its classes have no names.");
  return element("details", {}, element("summary", {}, `The names of its ${labels.length} classes`), element("p", { class: "classes" }, labels.join(" · ")));
}
