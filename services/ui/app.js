// The page: its parts, and what joins them.

import { ApiError, ask, connection, hasKey, useKey } from "./api.js";
import { $, count, el, say, sentence } from "./dom.js";
import { Events } from "./events.js";
import { Explain } from "./explain.js";
import { BlockMap } from "./map.js";
import { KINDS } from "./pool.js";
import { Requests } from "./requests.js";
import { Stats } from "./stats.js";
import { PrefixTree } from "./tree.js";

const card = (name) => document.querySelector(`.${name}`);

const map = new BlockMap(card("map-card"), { onCounts: showCounts });
const stats = new Stats();
const requests = new Requests(card("requests-card"), {
  mark: (blocks) => map.mark(blocks ? map.pool.cellsOf(blocks) : legendFilter()),
  blockSize: () => map.pool.blockSize,
});
const tree = new PrefixTree(card("tree-card"));
new Explain(card("explain-card"), {
  goTo: (block) => {
    const cell = map.pool.cellOf(block);
    card("map-card").scrollIntoView({ block: "nearest" });
    if (cell >= 0 && map.pinned !== cell) map.pin(cell);
  },
});
new Events(card("events-card"));

// --- legend ------------------------------------------------------------------------------------------------

let shown = null; // the kind that the legend lets stand out
const entries = KINDS.map(({ kind, name, hint }) => {
  const number = el("b", {}, "0");
  const swatch = el("i", { class: `swatch kind-${kind}` });
  const button = el(
    "button",
    { type: "button", title: hint, "aria-pressed": "false", onclick: () => choose(kind) },
    swatch,
    `${name} `,
    number,
  );
  return { kind, button, number };
});
const MARKS = [
  ["partial", "partly filled", "The lower part shows how much of it is filled"],
  ["sharing", "several holders", "A corner is cut off"],
  ["tier", "also on disk", "A bar at its foot"],
];
$("legend").append(
  ...entries.map(({ button }) => button),
  el(
    "span",
    { class: "marks" },
    ...MARKS.map(([name, label, hint]) =>
      el("span", { title: hint }, el("i", { class: `swatch mark-${name}` }), label),
    ),
  ),
  el("span", { class: "ramp age", "data-from": "an hour", "data-to": "new" }, el("i")),
  el("span", { class: "ramp sharing", "data-from": "no holder", "data-to": "16 and more" }, el("i")),
);

function legendFilter() {
  return shown === null ? null : (block) => map.pool.kinds[block] === shown;
}

function choose(kind) {
  shown = shown === kind ? null : kind;
  for (const entry of entries) entry.button.setAttribute("aria-pressed", String(entry.kind === shown));
  map.mark(legendFilter());
}

function showCounts(pool) {
  $("map-empty").hidden = pool.size > 0;
  $("legend").classList.remove("waiting");
  for (const { kind, button, number } of entries) {
    say(number, count(pool.counts[kind]));
    button.classList.toggle("none", pool.counts[kind] === 0);
    button.dataset.count = pool.counts[kind];
  }
  map.canvas.setAttribute("aria-label", map.label(pool.counts));
}

// --- the map's buttons -------------------------------------------------------------------------------------

$("modes").addEventListener("click", (event) => {
  const { mode } = event.target.dataset;
  if (!mode) return;
  for (const button of $("modes").children)
    button.setAttribute("aria-pressed", String(button.dataset.mode === mode));
  card("map-card").dataset.mode = mode;
  map.setMode(mode);
});

$("zoom").addEventListener("click", (event) => {
  const { zoom } = event.target.dataset;
  if (!zoom) return;
  const { least, most } = map.zoomBy(Number(zoom));
  const [smaller, larger] = $("zoom").children;
  smaller.disabled = least;
  larger.disabled = most;
});

// --- theme -------------------------------------------------------------------------------------------------

function recolour() {
  map.recolour();
  for (const chart of stats.charts) chart.redraw();
}

$("theme").addEventListener("click", () => {
  const root = document.documentElement;
  root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark";
  try {
    localStorage.setItem("pagekeeper-theme", root.dataset.theme);
  } catch {
    // Not remembered, then.
  }
  recolour();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour); // after theme.js

// --- connection, key ---------------------------------------------------------------------------------------

const WORDS = { connecting: "connecting", live: "live", down: "no connection", locked: "key needed" };
let countdown = 0;

connection.listeners.push((state, error) => {
  $("status").dataset.state = state;
  say($("status-text"), WORDS[state]);
  document.body.dataset.connection = state;
  $("forget-key").hidden = !hasKey();
  clearInterval(countdown);
  $("banner").hidden = state !== "down";
  if (state === "down") countDown(error.message);
  if (state === "locked") askForKey(error);
  if (state === "live" && !$("model").textContent) nameModel();
});

function countDown(message) {
  const until = Date.now() + connection.pause() * 1000;
  const write = () => {
    const left = Math.max(0, Math.ceil((until - Date.now()) / 1000));
    say($("banner-text"), `${sentence(message)} ${left ? `Trying again in ${left} s.` : "Trying again…"}`);
  };
  write();
  countdown = setInterval(write, 250);
}

$("retry").addEventListener("click", () => stats.poll.now());

async function nameModel() {
  try {
    const { data } = await ask("/v1/models");
    say($("model"), data[0]?.id ?? "");
  } catch {
    say($("model"), "");
  }
}

function askForKey(error) {
  const first = error.status === 401 && !hasKey();
  say(
    $("key-reason"),
    first ? "This server shows its cache to admin's and tenant's keys." : sentence(error.message),
  );
  $("key").value = "";
  if (!$("key-dialog").open) $("key-dialog").showModal();
}

$("key-dialog").addEventListener("close", () => {
  const value = $("key").value.trim();
  $("key").value = "";
  if (/[^\x20-\x7e]/.test(value)) {
    askForKey(new ApiError(0, "A browser can send ASCII only: was something else copied with the key?"));
    return;
  }
  if (value) useKey(value);
  connection.state = "connecting";
  stats.poll.now();
});

$("forget-key").addEventListener("click", () => {
  useKey("");
  location.reload();
});

stats.poll.now();
for (const { poll } of [map, requests, tree]) poll.now();
