// Running and waiting requests: progress, tables; the one that is looked at lights up its blocks in the map.

import { ApiError, ask, Poll } from "./api.js";
import { age, count, debounced, el, plural, say, shortId } from "./dom.js";

const MOST_ROWS = 200; // the numbers above say how many there are
const MOST_PAGES = 4; // of requests
const MOST_BLOCKS = 400; // of a table
const ORDER = {
  running: 0,
  preempting: 1,
  cancelling: 1,
  waiting_for_prefix: 2,
  waiting_for_tier: 2,
  waiting: 3,
};
const NAMES = { waiting_for_prefix: "waits for a prefix", waiting_for_tier: "waits for the disk tier" };

export class Requests {
  constructor(root, { mark, blockSize }) {
    this.list = root.querySelector(".requests");
    this.empty = root.querySelector(".empty");
    this.mark = mark;
    this.blockSize = blockSize;
    this.rows = new Map();
    this.looked = ""; // hovered or focused
    this.open = ""; // its table is shown
    this.detail = null;
    this.look = debounced(() => this.loadDetail(), 60);
    this.poll = new Poll(() => this.load(), 1);
  }

  async load() {
    const live = await liveRequests();
    live.sort((a, b) => (ORDER[a.state] ?? 3) - (ORDER[b.state] ?? 3) || b.age - a.age);
    this.empty.hidden = live.length > 0;
    const ids = new Set(live.slice(0, MOST_ROWS).map((request) => request.request_id));
    for (const [id, row] of this.rows) {
      if (!ids.has(id)) {
        row.root.remove();
        this.rows.delete(id);
        if (id === this.open) this.open = "";
        if (id === this.looked) this.leave();
      }
    }
    live.slice(0, MOST_ROWS).forEach((request, index) => this.place(request, index));
    if (this.open || this.looked) await this.loadDetail();
  }

  /** One row per request, kept while it lives: focus and hover survive a refresh. */
  place(request, index) {
    let row = this.rows.get(request.request_id);
    if (!row) {
      row = new Row(request, this);
      this.rows.set(request.request_id, row);
    }
    row.fill(request, this.blockSize());
    if (this.list.children[index] !== row.root)
      this.list.insertBefore(row.root, this.list.children[index] ?? null);
  }

  enter(id) {
    this.looked = id;
    this.look();
  }

  leave() {
    this.looked = "";
    if (!this.open) {
      this.detail = null;
      this.mark(null);
    } else this.look();
  }

  toggle(id) {
    const before = this.rows.get(this.open);
    this.open = this.open === id ? "" : id;
    before?.table(null);
    if (!this.open && !this.looked) this.mark(null);
    this.look();
  }

  async loadDetail() {
    const id = this.looked || this.open;
    if (!id) return;
    try {
      const detail = await ask(`/kv/requests/${encodeURIComponent(id)}`);
      if (id !== (this.looked || this.open)) return;
      this.detail = detail.request;
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      return; // it ended meanwhile
    }
    this.mark(blocksOf(this.detail));
    if (id === this.open) this.rows.get(id)?.table(this.detail);
  }
}

/** All that have not ended, as far as a few pages go: each page tells where the next one begins. */
async function liveRequests() {
  const found = [];
  let cursor = "";
  for (let page = 0; page < MOST_PAGES && cursor !== null; page += 1) {
    const answer = await ask(`/kv/requests?state=live${cursor ? `&cursor=${cursor}` : ""}`);
    found.push(...answer.requests);
    cursor = answer.next_cursor;
  }
  return found;
}

const nameOf = (block) => (block < 0 ? "new" : String(block)); // a tenant's without content has no number
const blockId = (reference) => (Array.isArray(reference) ? reference[0] : reference.block);

function blocksOf(request) {
  const blocks = new Set();
  for (const sequence of request.sequences ?? [])
    for (const reference of sequence.block_table ?? []) blocks.add(blockId(reference));
  return blocks;
}

class Row {
  constructor(request, owner) {
    const id = request.request_id;
    this.owner = owner;
    this.name = el("span", { class: "request-id", title: id }, shortId(id));
    this.state = el("span", { class: "pill" });
    this.where = el("span", { class: "where" });
    this.cached = el("i", { class: "part cached" });
    this.computed = el("i", { class: "part computed" });
    this.output = el("i", { class: "part output" });
    this.bar = el("span", { class: "progress", role: "img" }, this.cached, this.computed, this.output);
    this.counts = ["cached", "computed", "output"].map((name) => {
      const number = el("span");
      return { number, node: el("span", {}, el("i", { class: `part-dot ${name}` }), number) };
    });
    this.prompt = el("span");
    this.rest = el("span");
    this.figures = el(
      "span",
      { class: "request-figures" },
      this.prompt,
      ...this.counts.map(({ node }) => node),
      this.rest,
    );
    this.tables = el("div", { class: "tables" });
    this.button = el(
      "button",
      { type: "button", class: "request-head", "aria-expanded": "false", onclick: () => owner.toggle(id) },
      el("span", { class: "request-line" }, this.name, this.where, this.state),
      this.bar,
      this.figures,
    );
    this.root = el(
      "li",
      {
        class: "request",
        onmouseenter: () => owner.enter(id),
        onmouseleave: () => owner.leave(),
        onfocusin: () => owner.enter(id),
        onfocusout: () => owner.leave(),
      },
      this.button,
      this.tables,
    );
  }

  fill(request, blockSize) {
    const { state, num_prompt_tokens: prompt, max_tokens: most } = request;
    const sequences = request.sequences ?? [];
    const choices = Math.max(1, request.num_choices);
    const total = prompt + most * choices;
    const hit = Math.min(prompt, foundTokens(request.lookup, blockSize));
    const computed = Math.min(prompt, Math.max(0, ...sequences.map((sequence) => sequence.num_computed)));
    const output = sequences.reduce((sum, sequence) => sum + Math.max(0, sequence.num_tokens - prompt), 0);
    this.root.dataset.id = request.request_id;
    this.root.dataset.state = state;
    say(this.state, NAMES[state] ?? state.replaceAll("_", " "));
    this.state.className = `pill ${state}`;
    say(
      this.where,
      [request.runner, age(request.age), request.priority ? `priority ${request.priority}` : ""]
        .filter(Boolean)
        .join(" · "),
    );
    share(this.cached, Math.min(hit, prompt) / total);
    share(this.computed, Math.max(0, computed - hit) / total);
    share(this.output, output / total);
    const counts = [
      `${count(hit)} cached`,
      `${count(Math.max(0, computed - hit))} computed`,
      `${count(output)} of ${count(most * choices)} output`,
    ];
    const more = [
      choices > 1 ? plural(choices, "choice") : "",
      request.preemptions ? plural(request.preemptions, "preemption") : "",
    ];
    say(this.prompt, `prompt ${count(prompt)}:`);
    counts.forEach((text, index) => say(this.counts[index].number, text));
    say(this.rest, more.filter(Boolean).join(" · "));
    const said = `Prompt ${count(prompt)}: ${counts.join(", ")}`;
    if (this.bar.getAttribute("aria-label") !== said) this.bar.setAttribute("aria-label", said);
  }

  /** The block table of each sequence, or none (null). */
  table(detail) {
    this.button.setAttribute("aria-expanded", String(detail !== null));
    if (detail === null) {
      this.tables.replaceChildren();
      return;
    }
    const tables = (detail.sequences ?? []).map((sequence) => {
      const blocks = (sequence.block_table ?? [])
        .slice(0, MOST_BLOCKS)
        .map((reference) => el("span", { class: "chip" }, nameOf(blockId(reference))));
      const more = (sequence.block_table?.length ?? 0) - MOST_BLOCKS;
      const whose = detail.num_choices > 1 ? `Choice ${sequence.choice}: ` : "";
      const shared = sequence.shared_blocks ? `, ${count(sequence.shared_blocks)} shared` : "";
      const title = whose + plural(sequence.num_blocks, "block") + shared;
      return el(
        "div",
        { class: "table" },
        el("div", { class: "table-title" }, title),
        el("div", { class: "chips" }, ...blocks, more > 0 ? `and ${count(more)} more` : ""),
      );
    });
    this.tables.replaceChildren(lookupLine(detail.lookup), ...tables);
  }
}

/** Tokens that a request's lookup found, in the pool and the tier. */
function foundTokens(lookup, blockSize) {
  return lookup ? (lookup.hit_blocks + lookup.promoted_blocks) * blockSize + lookup.copied_tokens : 0;
}

function share(node, value) {
  node.style.setProperty("--share", String(Math.min(1, Math.max(0, value))));
}

function lookupLine(lookup) {
  if (!lookup) return "";
  const parts = [`Lookup: ${plural(lookup.hit_blocks, "block")} hit`];
  if (lookup.copied_tokens) parts.push(`${plural(lookup.copied_tokens, "token")} copied`);
  if (lookup.promoted_blocks) parts.push(`${plural(lookup.promoted_blocks, "block")} from disk`);
  if (lookup.waited_for) parts.push(`waited ${age(lookup.waited_seconds)} for ${shortId(lookup.waited_for)}`);
  return el("div", { class: "table-title" }, parts.join(", "));
}
