// The service's events. EventSource cannot send a key, so they are read from a fetch (WHATWG HTML, section 9.2.6).

import { ask } from "./api.js";

const PAUSES_MS = [500, 1000, 2000, 5000, 10000];

// Follows the events while the tab is seen: a hidden one holds no connection, of which a browser has six for a host.
export class Stream {
  constructor({ opened, event, state }) {
    this.told = { opened, event, state };
    this.lastId = null;
    this.failures = 0;
    this.abort = null;
    this.timer = null;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.stop() : this.start()));
  }

  start() {
    clearTimeout(this.timer);
    if (this.abort === null && !document.hidden) this.run();
  }

  stop() {
    clearTimeout(this.timer);
    this.abort?.abort();
  }

  async run() {
    this.abort = new AbortController();
    const { signal } = this.abort;
    let problem = null;
    try {
      const headers = this.lastId === null ? {} : { "Last-Event-ID": this.lastId };
      const answer = await ask("events", { headers, signal, cache: "no-store" });
      this.failures = 0;
      this.told.state("live");
      this.told.opened();
      await this.read(answer.body.pipeThrough(new TextDecoderStream()).getReader());
    } catch (error) {
      problem = error;
    }
    this.abort = null;
    if (document.hidden) return;
    if (problem?.status === 401) {
      this.told.state("key needed");
      return;
    }
    this.told.state("reconnecting");
    this.timer = setTimeout(() => this.start(), PAUSES_MS[Math.min(this.failures, PAUSES_MS.length - 1)]);
    this.failures += 1;
  }

  async read(reader) {
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      blocks.forEach((block) => this.take(block));
    }
  }

  take(block) {
    const fields = {};
    for (const line of block.split("\n")) {
      const colon = line.indexOf(":");
      if (colon > 0) fields[line.slice(0, colon)] = line.slice(colon + 1).replace(/^ /, "");
    }
    if (fields.id !== undefined) this.lastId = fields.id;
    if (fields.data !== undefined) this.told.event(fields.event ?? "message", JSON.parse(fields.data));
  }
}
