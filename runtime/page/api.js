// The service's public API: its errors are its sentences, its key is asked for when it asks for one.

import { byId } from "./elements.js";

const STORED = "cicada-api-key";
let key = sessionStorage.getItem(STORED);
let asking = null;
let declined = false;

export class Refused extends Error {
  constructor(sentence, status) {
    super(sentence);
    this.status = status;
  }
}

// The answer of a request; anything but success is thrown as Refused. Paths are relative: a prefix may stand before.
export async function ask(path, { headers = {}, ...options } = {}) {
  for (;;) {
    const used = key;
    const answer = await sent(path, options, headers);
    if (answer.ok) return answer;
    const sentence = await sentenceOf(answer);
    if (answer.status !== 401 || !(await another(used, sentence))) throw new Refused(sentence, answer.status);
  }
}

export async function get(path) {
  return (await ask(path)).json();
}

// So that the next request without a key asks for one again.
export function reconsider() {
  declined = false;
}

async function sent(path, options, headers) {
  const all = key === null ? headers : { ...headers, "X-API-Key": key };
  try {
    return await fetch(path, { ...options, headers: all });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused("the service does not answer", 0);
  }
}

async function sentenceOf(answer) {
  try {
    return String((await answer.json()).error);
  } catch {
    return `the service answered with status ${answer.status}`;
  }
}

// Whether there is another key than the one that was refused.
async function another(used, sentence) {
  if (key !== used) return true;
  if (declined) return false;
  asking ??= dialogue(sentence).finally(() => { asking = null; });
  return asking;
}

function dialogue(sentence) {
  const dialog = byId("key");
  const value = byId("key-value");
  byId("key-problem").textContent = sentence;
  value.value = "";
  dialog.showModal();
  value.focus();
  return new Promise((resolve) => {
    const ended = new AbortController();
    const finish = (given) => {
      ended.abort();
      dialog.close();
      if (given) {
        key = given;
        sessionStorage.setItem(STORED, given);
      }
      declined = !given;
      resolve(Boolean(given));
    };
    const listening = { signal: ended.signal };
    dialog.querySelector("form").addEventListener("submit", (event) => {
      event.preventDefault();
      finish(value.value.trim());
    }, listening);
    byId("key-cancel").addEventListener("click", () => finish(""), listening);
    dialog.addEventListener("cancel", (event) => {
      event.preventDefault();
      finish("");
    }, listening);
  });
}
