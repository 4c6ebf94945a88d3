// The pool as the page knows it: one entry per block in typed arrays, filled page by page from /kv/map.

export const FREE = 0;
export const RESERVED = 1;
export const SEALED = 2;
export const SHARED = 3; // sealed, with more than one holder
export const CACHED = 4;
export const PINNED = 5;
export const QUARANTINED = 6;
export const OTHER = 7;

/** What the map and its legend call them, in the legend's order. */
export const KINDS = [
  {
    kind: RESERVED,
    name: "being written",
    hint: "Reserved: a running request or a runner's credit is filling it",
  },
  { kind: SEALED, name: "in use", hint: "Sealed and held by one running request" },
  { kind: SHARED, name: "shared", hint: "Sealed and held by more than one: the same memory serves several" },
  { kind: PINNED, name: "pinned", hint: "Kept by a pin" },
  {
    kind: CACHED,
    name: "cached",
    hint: "Held by nobody, and found again by the next request with this prefix",
  },
  { kind: FREE, name: "free", hint: "Holds nothing" },
  { kind: QUARANTINED, name: "quarantined", hint: "Its last owner may still be writing to it" },
  { kind: OTHER, name: "other tenants", hint: "Belongs to others; this key may not look into it" },
];

export const STATE_NAMES = {
  F: "free",
  R: "reserved",
  S: "sealed",
  C: "cached",
  Q: "quarantined",
  X: "another tenant's",
};

export const FLAG_PINNED = 1;
export const FLAG_IN_TIER = 2;
export const FLAG_PARTIAL = 4;

export const AGE_STEPS = 16;
const LOG_LONGEST = Math.log(1 + 3600); // an hour and older is one step

const BASE = { F: FREE, R: RESERVED, S: SEALED, C: CACHED, Q: QUARANTINED, X: OTHER };

export function ageStep(seconds) {
  return Math.min(AGE_STEPS - 1, Math.floor((Math.log(1 + Math.max(0, seconds)) / LOG_LONGEST) * AGE_STEPS));
}

export class Pool {
  constructor() {
    this.resize(0);
    this.blockSize = 16;
    this.blockBytes = 0;
  }

  resize(size) {
    this.size = size;
    this.kinds = new Uint8Array(size);
    this.letters = new Uint8Array(size).fill(70);
    this.refs = new Uint8Array(size);
    this.flags = new Uint8Array(size);
    this.tokens = new Uint16Array(size);
    this.ages = new Float32Array(size);
    this.steps = new Uint8Array(size);
    this.changed = new Uint8Array(size); // 1: its kind differs from that of the page before
    this.counts = new Uint32Array(KINDS.length);
    this.counts[FREE] = size;
    this.whole = false; // every page came at least once
    this.names = null; // of a tenant's blocks, which have numbers of their own
    this.cells = new Map(); // number → where it is drawn
  }

  /** A block's number; that of its cell, but for a tenant. */
  nameOf(cell) {
    return this.names?.[cell] ?? cell;
  }

  /** Where a block is drawn, or -1. */
  cellOf(name) {
    return this.names ? (this.cells.get(name) ?? -1) : name;
  }

  /** Take one page; returns the first block of the next one, or null at the end. */
  take(page) {
    if (page.num_blocks !== this.size) this.resize(page.num_blocks);
    this.blockSize = page.block_size;
    this.blockBytes = page.block_bytes ?? 0;
    for (let index = 0; index < page.states.length; index += 1) this.set(page, index);
    if (page.blocks) this.takeNames(page);
    const end = page.first + page.states.length;
    const next = page.next === undefined || page.next === null ? null : page.next;
    if (next === null || end >= this.size || page.states.length === 0) {
      this.whole = true;
      return null;
    }
    return next;
  }

  cellsOf(names) {
    return new Set([...names].map((name) => this.cellOf(name)));
  }

  takeNames({ first, blocks }) {
    this.names ??= new Float64Array(this.size);
    if (first === 0) this.cells.clear();
    blocks.forEach((name, index) => {
      this.names[first + index] = name;
      this.cells.set(name, first + index);
    });
  }

  set(page, index) {
    const block = page.first + index;
    if (block >= this.size) return;
    const letter = page.states[index];
    this.letters[block] = letter.charCodeAt(0);
    this.refs[block] = Math.min(255, page.ref_counts[index]);
    this.flags[block] = page.flags[index];
    this.tokens[block] = page.num_tokens[index];
    this.ages[block] = page.ages[index];
    this.steps[block] = ageStep(page.ages[index]);
    const before = this.kinds[block];
    const kind = kindOf(letter, page.ref_counts[index], page.flags[index]);
    this.changed[block] = this.whole && kind !== before ? 1 : 0;
    if (kind !== before) {
      this.counts[before] -= 1;
      this.counts[kind] += 1;
      this.kinds[block] = kind;
    }
  }

  state(block) {
    return STATE_NAMES[String.fromCharCode(this.letters[block])] ?? "unknown";
  }

  /** One line about a block, for the tooltip and for screen readers. */
  describe(block) {
    const parts = [this.state(block)];
    if (this.tokens[block]) parts.push(`${this.tokens[block]} of ${this.blockSize} tokens`);
    if (this.refs[block] > 1) parts.push(`${this.refs[block]} holders`);
    if (this.flags[block] & FLAG_PINNED) parts.push("pinned");
    if (this.flags[block] & FLAG_IN_TIER) parts.push("also in the disk tier");
    return parts.join(" · ");
  }
}

function kindOf(letter, refs, flags) {
  const base = BASE[letter] ?? FREE;
  if (base === OTHER) return OTHER;
  if (flags & FLAG_PINNED) return PINNED;
  return base === SEALED && refs > 1 ? SHARED : base;
}
