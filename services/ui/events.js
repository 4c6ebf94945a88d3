// The ticker: what becomes findable in the cache and what goes, as it happens.

import { connection, follow } from "./api.js";
import { count, el, oneLine, say } from "./dom.js";

const KEPT = 120; // events in the list
const REFRESH_MS = 250;

export class Events {
  constructor(root) {
    this.list = root.querySelector("ol");
    this.empty = root.querySelector(".empty");
    this.state = root.querySelector(".ticker-state");
    this.fresh = [];
    this.seen = { stored: 0, removed: 0, cleared: 0 };
    this.paused = false;
    this.abort = null;
    root.querySelector("button").addEventListener("click", (event) => this.pause(event.currentTarget));
    setInterval(() => this.draw(), REFRESH_MS);
    connection.listeners.push((state) => {
      if (state === "live" && !this.abort) this.start();
      if (state === "locked") this.stop();
    });
  }

  start() {
    this.abort = new AbortController();
    follow("/kv/events?snapshot=0", (event) => this.take(event), {
      signal: this.abort.signal,
      onState: (state) => {
        this.stream = state;
      },
    });
  }

  stop() {
    this.abort?.abort();
    this.abort = null;
  }

  pause(button) {
    this.paused = !this.paused;
    button.setAttribute("aria-pressed", String(this.paused));
    say(button, this.paused ? "Resume" : "Pause");
  }

  take({ event, data }) {
    if (!(event in this.seen)) return;
    this.seen[event] += 1;
    let value;
    try {
      value = JSON.parse(data);
    } catch {
      return;
    }
    this.fresh.push({ kind: event, value, at: new Date() });
    if (this.fresh.length > KEPT) this.fresh.shift();
  }

  draw() {
    const words = { live: "", waiting: "reconnecting… ", none: "not served here " }[this.stream ?? "waiting"];
    const { stored, removed, cleared } = this.seen;
    const wiped = cleared ? ` · ${count(cleared)} cleared` : "";
    say(this.state, `${words}${count(stored)} stored · ${count(removed)} removed${wiped}`);
    if (this.paused || this.fresh.length === 0) return;
    this.empty.hidden = true;
    const rows = this.fresh.reverse().map(row);
    this.fresh = [];
    this.list.prepend(...rows);
    while (this.list.children.length > KEPT) this.list.lastElementChild.remove();
  }
}

const SIGNS = { stored: "+", removed: "−", cleared: "×" };

function row({ kind, value, at }) {
  const time = at.toLocaleTimeString("en-GB");
  const hash = String(value.hash ?? value.block_hash ?? "").slice(0, 12);
  const facts = [];
  if (value.block >= 0) facts.push(`block ${value.block}`);
  if (value.num_tokens) facts.push(`${value.num_tokens} tokens`);
  if (value.tier && value.tier !== "pool") facts.push(value.tier);
  if (value.cause) facts.push(value.cause);
  return el(
    "li",
    { class: `event ${kind}` },
    el("time", {}, time),
    el("span", { class: "event-kind" }, `${SIGNS[kind]} ${kind}`),
    el("span", { class: "event-facts" }, facts.join(" · ")),
    el("code", {}, hash),
    el("span", { class: "event-text" }, oneLine(String(value.text ?? "").slice(0, 160))),
  );
}
