// What one block holds and who holds it: a tooltip that a click keeps open.

import { ApiError, ask } from "./api.js";
import { age, debounced, el, plain, plural, say } from "./dom.js";
import { FLAG_IN_TIER } from "./pool.js";

const MARGIN = 10; // CSS pixels to the cell and to the window's edge
const MAX_HOLDERS = 12;
const KINDS = {
  sequence: "request",
  credits: "credit of runner",
  pin: "pin",
  quarantine: "quarantined for",
  copy: "copy",
};

export class Tooltip {
  constructor(root, pool, goTo) {
    this.root = root;
    this.pool = pool;
    this.goTo = goTo;
    this.block = -1;
    this.onClose = () => undefined;
    this.parts = Object.fromEntries(
      ["title", "state", "text", "facts", "holders"].map((name) => [
        name,
        root.querySelector(`.tip-${name}`),
      ]),
    );
    root.querySelector(".tip-close").addEventListener("click", () => this.onClose());
    root.addEventListener("keydown", (event) => event.key === "Escape" && this.onClose());
    this.later = debounced(() => this.load(), 90);
  }

  show(block, box, pinned) {
    if (block !== this.block) {
      this.block = block;
      this.detail = null;
      this.fill();
      this.later();
    }
    this.box = box;
    this.pinned = pinned;
    this.root.classList.toggle("pinned", pinned);
    this.root.hidden = false;
    this.place();
  }

  hide() {
    this.block = -1;
    this.root.hidden = true;
    this.abort?.abort();
  }

  /** New figures came for the whole pool. */
  refresh() {
    if (this.block < 0) return;
    this.fill();
    if (this.pinned) this.later();
  }

  async load() {
    this.abort?.abort();
    if (this.block < 0) return;
    const block = this.block;
    this.abort = new AbortController();
    try {
      const detail = await ask(`/kv/blocks/${this.pool.nameOf(block)}`, { signal: this.abort.signal });
      if (block === this.block) this.detail = detail;
    } catch (error) {
      if (!(error instanceof ApiError)) return;
      if (block === this.block) this.detail = { failed: error.message };
    }
    if (block === this.block) {
      this.fill();
      this.place();
    }
  }

  fill() {
    const { title, state, text, facts, holders } = this.parts;
    const detail = this.detail ?? {};
    const idle = this.pool.state(this.block) === "free";
    say(title, `Block ${this.pool.nameOf(this.block)}`);
    say(state, this.pool.describe(this.block));
    text.hidden = idle || (this.detail !== null && !detail.text);
    text.classList.toggle("waiting", this.detail === null);
    say(text, plain(detail.text ?? ""));
    facts.replaceChildren(...(idle ? [] : this.facts(detail)));
    holders.replaceChildren(...this.holders(detail.holders ?? []));
  }

  facts(detail) {
    const cells = [["Age", this.pool.tokens[this.block] ? age(this.pool.ages[this.block]) : "–"]];
    if (detail.failed) return [el("dt", {}, "Details"), el("dd", {}, detail.failed)];
    cells.push(["Hits", detail.hits ?? "–"], ["Tokens", tokenRange(detail)]);
    if (Number.isInteger(detail.parent_block) && detail.parent_block >= 0)
      cells.push(["Follows", this.link(detail.parent_block)]);
    if (detail.children) cells.push(["Continued by", plural(detail.children, "block")]);
    if (detail.copies?.length) cells.push(["Same content", this.link(detail.copies[0])]);
    if (detail.pins?.length) cells.push(["Pins", detail.pins.join(", ")]);
    if (detail.in_tier ?? this.pool.flags[this.block] & FLAG_IN_TIER)
      cells.push(["Disk tier", "holds a copy"]);
    if (Number.isInteger(detail.eviction_rank) && detail.eviction_rank >= 0)
      cells.push([
        "Evicted",
        detail.eviction_rank === 0 ? "next" : `after ${plural(detail.eviction_rank, "other")}`,
      ]);
    if (detail.hash) cells.push(["Hash", detail.hash.slice(0, 16)]);
    return cells.flatMap(([name, value]) => [
      el("dt", {}, name),
      el("dd", {}, value instanceof Node ? value : String(value)),
    ]);
  }

  link(block) {
    const onclick = () => this.goTo(this.pool.cellOf(block));
    return el("button", { type: "button", class: "link", onclick }, `block ${block}`);
  }

  holders(holders) {
    const shown = holders
      .slice(0, MAX_HOLDERS)
      .map((holder) =>
        el(
          "li",
          {},
          `${KINDS[holder.kind] ?? holder.kind} ${holder.name}`,
          holder.choice ? ` · choice ${holder.choice}` : "",
        ),
      );
    const more = holders.length - MAX_HOLDERS;
    if (more > 0) shown.push(el("li", {}, `and ${plural(more, "other")}`));
    return shown;
  }

  /** Beside the cell, inside the window. */
  place() {
    const { x, y, side } = this.box;
    const width = this.root.offsetWidth;
    const height = this.root.offsetHeight;
    const right = x + side + MARGIN;
    const fits = right + width + MARGIN < innerWidth;
    const left = fits ? right : Math.max(MARGIN, Math.min(x - width - MARGIN, innerWidth - width - MARGIN));
    let top = Math.min(y, innerHeight - height - MARGIN);
    if (!fits && x - width - MARGIN < MARGIN)
      top = y + side + MARGIN + height < innerHeight ? y + side + MARGIN : y - height - MARGIN;
    this.root.style.transform = `translate(${Math.round(left)}px, ${Math.round(Math.max(MARGIN, top))}px)`;
  }
}

function tokenRange(detail) {
  if (!detail.token_ids?.length) return "–";
  if (!Number.isInteger(detail.first_token) || detail.first_token < 0)
    return `${detail.token_ids.length}, of a text whose beginning is gone`;
  return `${detail.first_token} to ${detail.first_token + detail.token_ids.length - 1} of its text`;
}
