// Light, dark, or as the system has it; what is drawn without CSS asks here for colours, and is told of a change.

import { byId } from "./elements.js";

const STORED = "cicada-theme";
const THEMES = ["auto", "light", "dark"];
const system = matchMedia("(prefers-color-scheme: dark)");
const root = document.documentElement;
let theme = localStorage.getItem(STORED) ?? "auto";

export function isDark() {
  return theme === "auto" ? system.matches : theme === "dark";
}

// {text: "rgb(...)"} of `--text`: the values that hold now.
export function colours(...names) {
  const probe = document.createElement("span");
  probe.hidden = true;
  document.body.append(probe);
  const found = Object.fromEntries(names.map((name) => {
    probe.style.color = `var(--${name})`;
    return [name, getComputedStyle(probe).color];
  }));
  probe.remove();
  return found;
}

export function start() {
  const button = byId("theme");
  const apply = () => {
    root.style.colorScheme = theme === "auto" ? "light dark" : theme;
    button.querySelector("span").textContent = theme;
    document.dispatchEvent(new Event("themechange"));
  };
  button.addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    localStorage.setItem(STORED, theme);
    apply();
  });
  system.addEventListener("change", apply);
  apply();
}
