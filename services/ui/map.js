// The map of the pool: layout, hover, focus, highlights. What a cell looks like is painter.js's.

import { ask, Poll } from "./api.js";
import { calm, css, perFrame, plural } from "./dom.js";
import { Painter, Palette } from "./painter.js";
import { KINDS, Pool } from "./pool.js";
import { Tooltip } from "./tooltip.js";

const PAGE = 8192; // blocks of one request
const LARGEST = 88; // CSS pixels of a cell
const SMALLEST = 2;
const MARKS_FROM = 9;
const LABELS_FROM = 40;
const FLASH_MS = 900;
const ZOOM_STEPS = [1, 1.5, 2, 3, 5, 8, 12];

export class BlockMap {
  constructor(root, { onCounts }) {
    this.pool = new Pool();
    this.scroller = root.querySelector(".map-scroll");
    this.spacer = root.querySelector(".map-space");
    this.canvas = root.querySelector("canvas");
    this.status = root.querySelector(".map-status");
    this.painter = new Painter(this.canvas);
    this.palette = new Palette();
    this.tooltip = new Tooltip(root.querySelector(".tooltip"), this.pool, (block) => this.pin(block));
    this.mode = "state";
    this.zoom = 0;
    this.hovered = -1;
    this.focused = -1;
    this.pinned = -1;
    this.marked = null; // Set of blocks, or a function: those that keep their colour
    this.flashFrom = -1e9;
    this.onCounts = onCounts;
    this.redraw = perFrame((now) => this.draw(now));
    this.poll = new Poll(() => this.load(), 1);
    this.listen();
    this.layout();
  }

  listen() {
    new ResizeObserver(() => this.layout()).observe(this.scroller);
    this.scroller.addEventListener("scroll", this.redraw, { passive: true });
    this.canvas.addEventListener(
      "pointermove",
      (event) => event.pointerType === "mouse" && this.hover(this.at(event)),
    );
    this.canvas.addEventListener("pointerleave", () => this.hover(-1));
    this.canvas.addEventListener("click", (event) => {
      this.focused = -1;
      this.pin(this.at(event));
    });
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("focus", () => {
      if (this.canvas.matches(":focus-visible") && this.pool.size) this.focus(Math.max(0, this.focused));
    });
    this.canvas.addEventListener("blur", () => this.unfocus());
    this.tooltip.onClose = () => this.pin(-1);
  }

  // --- data ------------------------------------------------------------------------------------------------

  /** Every page once; large pools are asked for less often. */
  async load() {
    let first = 0;
    let changed = false;
    while (first !== null) {
      const page = await ask(`/kv/map?first=${first}&limit=${PAGE}`);
      const size = this.pool.size;
      first = this.pool.take(page);
      changed ||= this.pool.changed.subarray(page.first, page.first + page.states.length).includes(1);
      if (size !== this.pool.size) this.layout();
      this.redraw();
    }
    if (changed && !calm()) this.flashFrom = performance.now();
    this.poll.seconds = Math.max(1, this.pool.size / 25_000);
    this.canvas.dataset.blocks = this.pool.size;
    this.onCounts(this.pool);
    this.tooltip.refresh();
    this.redraw();
  }

  // --- layout ----------------------------------------------------------------------------------------------

  layout() {
    const scale = window.devicePixelRatio || 1;
    const width = Math.floor(this.scroller.clientWidth * scale);
    const height = Math.floor(this.scroller.clientHeight * scale);
    if (!width || !height) return;
    const fit = fittingPitch(this.pool.size, width, height, scale);
    const pitch = Math.min(Math.round(fit * ZOOM_STEPS[this.zoom]), Math.round(LARGEST * scale));
    const gap = pitch < 4 ? 0 : pitch < 10 * scale ? Math.ceil(scale / 2) : Math.round(2 * scale);
    const columns = Math.max(1, Math.floor((width + gap) / pitch));
    const rows = Math.ceil(this.pool.size / columns);
    this.grid = { pitch, gap, columns, rows, scale, top: 0 };
    this.grid.marksFrom = MARKS_FROM * scale;
    this.grid.labelsFrom = LABELS_FROM * scale;
    const below = Math.ceil((rows * pitch) / scale) - this.scroller.clientHeight;
    this.spacer.style.height = `${Math.max(0, below)}px`;
    this.canvas.style.width = `${width / scale}px`;
    this.canvas.style.height = `${height / scale}px`;
    this.painter.resize(width, height);
    this.canvas.dataset.columns = columns;
    this.canvas.dataset.pitch = pitch / scale;
    this.redraw();
  }

  zoomBy(steps) {
    const most = ZOOM_STEPS.length - 1;
    this.zoom = steps === 0 ? 0 : Math.min(most, Math.max(0, this.zoom + steps));
    this.layout();
    if (this.focused >= 0) this.reveal(this.focused);
    return {
      least: this.zoom === 0,
      most: this.zoom === most || this.grid.pitch >= LARGEST * this.grid.scale,
    };
  }

  /** The block under a pointer, or -1. */
  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const { pitch, columns, scale } = this.grid;
    const column = Math.floor(((event.clientX - box.left) * scale) / pitch);
    const row = Math.floor(((event.clientY - box.top) * scale + this.grid.top) / pitch);
    const block = row * columns + column;
    return column >= 0 && column < columns && row >= 0 && block < this.pool.size ? block : -1;
  }

  /** A block's cell, in CSS pixels of the window. */
  boxOf(block) {
    const box = this.canvas.getBoundingClientRect();
    const { pitch, gap, columns, scale, top } = this.grid;
    const row = Math.floor(block / columns);
    const side = (pitch - gap) / scale;
    const x = box.left + ((block - row * columns) * pitch) / scale;
    const y = box.top + (row * pitch - top) / scale;
    return { x, y, side };
  }

  reveal(block) {
    const { pitch, columns, scale } = this.grid;
    const y = (Math.floor(block / columns) * pitch) / scale;
    const seen = this.scroller.clientHeight - pitch / scale;
    if (y < this.scroller.scrollTop) this.scroller.scrollTop = y;
    else if (y > this.scroller.scrollTop + seen) this.scroller.scrollTop = y - seen;
  }

  // --- what is looked at -----------------------------------------------------------------------------------

  hover(block) {
    if (block === this.hovered) return;
    this.hovered = block;
    this.canvas.classList.toggle("over-cell", block >= 0);
    if (this.pinned < 0) this.show(block);
    this.redraw();
  }

  /** Keep the tooltip of a block; -1, or the same block again, lets it go. */
  pin(block) {
    this.pinned = block === this.pinned ? -1 : block;
    if (this.pinned >= 0) this.reveal(this.pinned);
    this.show(this.pinned >= 0 ? this.pinned : this.hovered);
    this.redraw();
  }

  show(block) {
    if (block < 0) this.tooltip.hide();
    else this.tooltip.show(block, this.boxOf(block), block === this.pinned);
  }

  focus(block) {
    this.focused = Math.min(this.pool.size - 1, Math.max(0, block));
    this.reveal(this.focused);
    this.status.textContent = `Block ${this.focused}: ${this.pool.describe(this.focused)}`;
    if (this.pinned < 0) this.show(this.focused);
    this.redraw();
  }

  unfocus() {
    this.focused = -1;
    if (this.pinned < 0) this.show(this.hovered);
    this.redraw();
  }

  key(event) {
    const { columns } = this.grid;
    const page = columns * 10;
    const moves = {
      ArrowLeft: -1,
      ArrowRight: 1,
      ArrowUp: -columns,
      ArrowDown: columns,
      PageUp: -page,
      PageDown: page,
    };
    const at = Math.max(0, this.focused);
    if (event.key in moves) {
      const to = at + moves[event.key];
      if (to >= 0 && to < this.pool.size) this.focus(to);
    } else if (event.key === "Home") this.focus(0);
    else if (event.key === "End") this.focus(this.pool.size - 1);
    else if (event.key === "Enter" || event.key === " ") this.pin(at);
    else if (event.key === "Escape") this.pin(-1);
    else return;
    event.preventDefault();
  }

  /** Let only these blocks keep their colour: a Set, a function of a block, or null for all. */
  mark(blocks) {
    this.marked = blocks;
    this.redraw();
  }

  setMode(mode) {
    this.mode = mode;
    this.redraw();
  }

  recolour() {
    this.palette = new Palette();
    this.redraw();
  }

  // --- drawing ---------------------------------------------------------------------------------------------

  draw(now) {
    if (!this.grid) return;
    const started = performance.now();
    this.grid.top = Math.round(this.scroller.scrollTop * this.grid.scale);
    const flash = Math.max(0, 1 - (now - this.flashFrom) / FLASH_MS);
    const chosen = this.marked instanceof Set ? (block) => this.marked.has(block) : this.marked;
    this.painter.draw(this.pool, this.grid, this.palette, { mode: this.mode, chosen, flash: flash * 0.85 });
    const line = Math.max(1, Math.round(this.grid.scale * 2));
    this.painter.frame(this.hovered, this.grid, css("--text"), Math.max(1, line / 2));
    this.painter.frame(this.focused, this.grid, this.palette.accent, line);
    this.painter.frame(this.pinned, this.grid, this.palette.accent, line);
    this.canvas.dataset.frameMs = (performance.now() - started).toFixed(2);
    if (flash > 0) this.redraw();
  }

  /** What the canvas is, for those who do not see it. */
  label(counts) {
    const parts = KINDS.filter(({ kind }) => counts[kind]).map(({ kind, name }) => `${counts[kind]} ${name}`);
    const keys = "Arrow keys move, Enter keeps the details open.";
    return `Map of ${plural(this.pool.size, "block")}: ${parts.join(", ")}. ${keys}`;
  }
}

/** The largest pitch in device pixels with which all blocks fit, at least SMALLEST (then the map scrolls). */
function fittingPitch(size, width, height, scale) {
  const least = Math.max(SMALLEST, Math.round(1.5 * scale));
  let pitch = Math.round(LARGEST * scale);
  while (pitch > least && Math.floor(width / pitch) * Math.floor(height / pitch) < size) pitch -= 1;
  return pitch;
}
