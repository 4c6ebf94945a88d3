// The prefix tree: what the cache holds, by text. Branches are fetched when they are opened.

import { ApiError, ask, Poll } from "./api.js";
import {
  age,
  bytes,
  commonStart,
  count,
  debounced,
  el,
  isLowSurrogate,
  oneLine,
  plural,
  say,
} from "./dom.js";

const PAGE = 50; // nodes of one request
const MOST_OPEN = 40; // branches that are fetched again with each refresh
const MOST_NODES = 500; // of one request
const KEPT_SHARED = 8; // characters
const DEEPEST_INDENT = 14;

export class PrefixTree {
  constructor(root) {
    this.list = root.querySelector(".tree");
    this.empty = root.querySelector(".empty");
    this.note = root.querySelector(".tree-note");
    this.search = root.querySelector("input");
    this.sort = root.querySelector("select");
    this.branches = new Map(); // parent's hash ("" for the roots) → {nodes, next, total}
    this.open = new Set();
    this.focused = null;
    this.list.addEventListener("keydown", (event) => this.key(event));
    this.search.addEventListener(
      "input",
      debounced(() => this.restart(), 250),
    );
    this.sort.addEventListener("change", () => this.restart());
    this.poll = new Poll(() => this.load(), 4);
  }

  restart() {
    this.branches.clear();
    return this.poll.now();
  }

  /** What is searched for, or "". */
  get wanted() {
    return this.search.value.trim();
  }

  /** The roots and every open branch again; a search brings branches as far as they lead to a match. */
  async load() {
    const branches = new Map();
    const wanted = ["", ...(this.wanted ? [] : [...this.open].slice(0, MOST_OPEN))];
    for (const parent of wanted) {
      const limit = Math.max(PAGE, this.branches.get(parent)?.nodes.length ?? 0);
      try {
        branches.set(parent, await this.branch(parent, limit));
      } catch (error) {
        if (!(error instanceof ApiError) || error.status !== 404 || parent === "") throw error;
        this.open.delete(parent);
      }
    }
    this.branches = branches;
    this.draw();
  }

  async branch(parent, limit, cursor = "") {
    const query = new URLSearchParams({
      limit: String(Math.min(limit, MOST_NODES)),
      sort: this.sort.value,
      order: "desc",
    });
    if (this.wanted) query.set("q", this.wanted);
    else query.set("depth", "1");
    if (parent) query.set("parent", parent);
    if (cursor) query.set("cursor", cursor);
    const answer = await ask(`/kv/prefixes?${query}`);
    return { nodes: answer.nodes, next: answer.next_cursor ?? "", total: answer.total };
  }

  async more(parent) {
    const branch = this.branches.get(parent);
    const page = await this.branch(parent, PAGE, branch.next);
    branch.nodes.push(...page.nodes);
    branch.next = page.next;
    this.draw();
  }

  async toggle(node) {
    if (!node.children || this.wanted) return;
    if (this.open.has(node.hash)) {
      this.open.delete(node.hash);
    } else {
      this.open.add(node.hash);
      if (!this.branches.has(node.hash)) this.branches.set(node.hash, await this.branch(node.hash, PAGE));
    }
    this.draw();
  }

  // --- drawing ---------------------------------------------------------------------------------------------

  draw() {
    const top = this.branches.get("") ?? { nodes: [], next: "", total: 0 };
    this.empty.hidden = top.nodes.length > 0;
    say(
      this.empty,
      this.wanted
        ? `Nothing that is cached contains “${this.wanted}”.`
        : "Nothing is cached yet: send a request, and its prompt appears here.",
    );
    say(this.note, top.total ? plural(top.total, this.wanted ? "branch" : "root") : "");
    this.largest = Math.max(1, ...top.nodes.map((node) => whole(node).bytes));
    const had = this.list.contains(document.activeElement);
    const rows = [];
    this.rows(top, "", 0, rows);
    this.list.replaceChildren(...rows);
    const nodes = this.items();
    const again = nodes.find((row) => row.dataset.hash === this.focused) ?? nodes[0];
    if (again) again.tabIndex = 0;
    if (had && again) again.focus({ preventScroll: true });
  }

  rows(branch, parent, level, rows) {
    const cut = parent && !this.wanted ? sharedStart(branch.nodes.map((node) => node.text)) : 0;
    for (const node of branch.nodes) {
      if (this.wanted) level = node.depth;
      rows.push(this.row(node, level, cut));
      const below = this.open.has(node.hash) && this.branches.get(node.hash);
      if (below) this.rows(below, node.hash, level + 1, rows);
    }
    if (branch.next) {
      const label = `Show more of ${count(branch.total ?? 0)}`;
      const button = el("button", { type: "button", class: "link", onclick: () => this.more(parent) }, label);
      rows.push(indented(el("div", { class: "more" }, button), level + 1));
    }
  }

  row(node, level, cut) {
    const open = this.wanted !== "" || this.open.has(node.hash);
    const all = whole(node);
    const text = el("span", { class: "prefix-text" });
    highlight(text, oneLine(cut ? `…${node.text.slice(cut)}` : node.text), this.wanted);
    const figures = [
      figure("tokens", count(all.tokens)),
      figure("size", bytes(all.bytes)),
      figure("hits", count(all.hits)),
      figure("refs", String(node.references)),
      figure("age", age(node.age)),
    ];
    const bar = el("span", { class: "size-bar" });
    bar.style.setProperty("--share", String(Math.min(1, all.bytes / this.largest)));
    const twist = el("span", { class: node.children ? "twist" : "twist none", "aria-hidden": "true" });
    const properties = {
      class: this.wanted && !node.match ? "tree-row leads-on" : "tree-row",
      role: "treeitem",
      tabindex: -1,
      "aria-level": level + 1,
      "aria-expanded": node.children ? String(open) : null,
      "data-hash": node.hash,
      title: factsOf(node),
      onclick: (event) => {
        this.focused = node.hash;
        event.currentTarget.focus();
        this.toggle(node);
      },
      onfocus: () => (this.focused = node.hash),
    };
    const row = el(
      "div",
      properties,
      twist,
      el("span", { class: "prefix" }, text, ...badgesOf(node)),
      bar,
      ...figures,
    );
    row.node = node;
    return indented(row, level);
  }

  items() {
    return [...this.list.querySelectorAll(".tree-row")];
  }

  key(event) {
    const rows = this.items();
    const at = rows.indexOf(document.activeElement);
    if (at < 0) return;
    const { node } = rows[at];
    const open = this.open.has(node.hash);
    if (event.key === "ArrowDown") rows[at + 1]?.focus();
    else if (event.key === "ArrowUp") rows[at - 1]?.focus();
    else if (event.key === "Home") rows[0].focus();
    else if (event.key === "End") rows.at(-1).focus();
    else if (event.key === "Enter" || event.key === " ") this.toggle(node);
    else if (event.key === "ArrowRight" && !open) this.toggle(node);
    else if (event.key === "ArrowRight") rows[at + 1]?.focus();
    else if (event.key === "ArrowLeft" && open) this.toggle(node);
    else if (event.key === "ArrowLeft") parentOf(rows, at)?.focus();
    else return;
    event.preventDefault();
  }
}

const whole = (node) => node.subtree ?? node;

function figure(name, text) {
  return el("span", { class: `figure ${name}`, "data-name": name }, text);
}

function factsOf(node) {
  const parts = [plural(node.blocks, "block")];
  const first = node.first_token;
  if (Number.isInteger(first)) parts.push(`tokens ${first} to ${first + node.tokens - 1}`);
  if (node.children) parts.push(plural(node.children, "branch"));
  return parts.join(", ");
}

function badgesOf(node) {
  const badges = [];
  if (node.partial)
    badges.push(el("span", { class: "badge", title: "Its last block is not full" }, "partial"));
  if (node.pinned) badges.push(el("span", { class: "badge", title: "Kept by a pin" }, "pinned"));
  if (node.in_tier) badges.push(el("span", { class: "badge", title: "In the disk tier" }, "disk"));
  return badges;
}

function indented(row, level) {
  row.style.setProperty("--level", String(Math.min(level, DEEPEST_INDENT)));
  return row;
}

function parentOf(rows, at) {
  const level = Number(rows[at].getAttribute("aria-level"));
  for (let index = at - 1; index >= 0; index -= 1) {
    if (Number(rows[index].getAttribute("aria-level")) < level) return rows[index];
  }
  return null;
}

/** How much of their beginning siblings share and need not show: a block ends anywhere in a text. */
function sharedStart(texts) {
  if (texts.length < 2) return 0;
  const shared = texts.reduce((least, text) => Math.min(least, commonStart(texts[0], text)), texts[0].length);
  if (shared < 2 * KEPT_SHARED) return 0;
  const before = texts[0].slice(0, shared - 3);
  const word = Math.max(before.lastIndexOf("<"), before.lastIndexOf(" ") + 1);
  if (word > shared - 3 * KEPT_SHARED) return word;
  return shared - KEPT_SHARED - (isLowSurrogate(texts[0], shared - KEPT_SHARED) ? 1 : 0);
}

/** `text` into `node`, with the places that match what is searched for in <mark>. */
function highlight(node, text, wanted) {
  const place = wanted ? text.toLowerCase().indexOf(wanted.toLowerCase()) : -1;
  if (place < 0) {
    node.textContent = text;
    return;
  }
  const from = Math.max(0, place - 40);
  node.append(
    from > 0 ? "…" : "",
    text.slice(from, place),
    el("mark", {}, text.slice(place, place + wanted.length)),
    text.slice(place + wanted.length),
  );
}
