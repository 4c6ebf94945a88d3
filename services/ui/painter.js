// Colours of the map, and the drawing of its cells. A frame costs what its pixels cost, however many blocks
// there are.

import * as pool from "./pool.js";
import { css } from "./dom.js";

const VARIABLES = {
  [pool.FREE]: "--free",
  [pool.RESERVED]: "--reserved",
  [pool.SEALED]: "--sealed",
  [pool.SHARED]: "--shared",
  [pool.CACHED]: "--cached",
  [pool.PINNED]: "--pinned",
  [pool.QUARANTINED]: "--quarantined",
  [pool.OTHER]: "--other",
};
const RAMP = 16;

export function parseColour(text) {
  const hex = text.replace("#", "");
  return [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

const mix = (a, b, share) => a.map((value, index) => Math.round(value * (1 - share) + b[index] * share));
const packed = ([red, green, blue]) => ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;

/** Colour tables: index of a cell → pixel. A cell's index is 16 × its kind (or a ramp) + its step of age. */
export class Palette {
  constructor() {
    this.card = parseColour(css("--card"));
    this.text = css("--text");
    this.accent = css("--accent");
    this.background = packed(this.card);
    const kinds = Object.entries(VARIABLES).map(([kind, name]) => [Number(kind), parseColour(css(name))]);
    this.colours = new Map(kinds);
    this.modes = { state: this.stateTable(), age: this.rampTable(), sharing: this.rampTable() };
  }

  stateTable() {
    const table = [];
    for (const [kind, colour] of this.colours) {
      const fade = kind === pool.CACHED ? 0.52 : kind === pool.FREE ? 0 : 0.18;
      for (let step = 0; step < RAMP; step += 1) {
        table[kind * RAMP + step] = mix(colour, this.card, (fade * step) / (RAMP - 1));
      }
    }
    return this.finish(table);
  }

  /** From the first to the last step of a single scale, light to dark and of rising chroma. */
  rampTable() {
    const stops = ["--ramp-0", "--ramp-1", "--ramp-2", "--ramp-3"].map((name) => parseColour(css(name)));
    const table = [];
    for (let step = 0; step < RAMP; step += 1) {
      const at = (step / (RAMP - 1)) * (stops.length - 1);
      const low = Math.min(Math.floor(at), stops.length - 2);
      table.push(mix(stops[low], stops[low + 1], at - low));
    }
    table[pool.FREE * RAMP + RAMP] = this.colours.get(pool.FREE);
    return this.finish(table);
  }

  finish(table) {
    const full = new Uint32Array(table.length);
    const dim = new Uint32Array(table.length);
    table.forEach((colour, index) => {
      full[index] = packed(colour);
      dim[index] = packed(mix(colour, this.card, 0.82));
    });
    return { full, dim };
  }

  flashed(table, share) {
    const white = parseColour(css("--flash"));
    return table.map((pixel) => {
      const colour = [pixel & 255, (pixel >> 8) & 255, (pixel >> 16) & 255];
      return packed(mix(colour, white, share));
    });
  }
}

/** A cell's index into the table of a mode. */
export function cellIndex(blocks, block, mode) {
  const kind = blocks.kinds[block];
  if (mode === "state") return kind * RAMP + blocks.steps[block];
  if (kind === pool.FREE || kind === pool.OTHER) return RAMP;
  if (mode === "age") return RAMP - 1 - blocks.steps[block];
  const refs = blocks.refs[block];
  return refs === 0 ? 0 : Math.min(RAMP - 1, 3 + Math.round(Math.log2(refs) * 3));
}

/** Cells of a grid into a canvas: `grid` has pitch, gap, columns, top (scrolled), all in device pixels. */
export class Painter {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d", { alpha: false });
  }

  resize(width, height) {
    if (this.canvas.width === width && this.canvas.height === height && this.image) return;
    this.canvas.width = width;
    this.canvas.height = height;
    this.image = this.context.createImageData(width, height);
    this.pixels = new Uint32Array(this.image.data.buffer);
  }

  /** `chosen(block)`: whether it keeps its full colour (null: all do). `flash`: 0 to 1, of changed blocks. */
  draw(blocks, grid, palette, { mode, chosen, flash }) {
    const { full, dim } = palette.modes[mode];
    const lit = flash > 0 ? palette.flashed(full, flash) : full;
    this.pixels.fill(palette.background);
    const firstRow = Math.floor(grid.top / grid.pitch);
    const lastRow = Math.min(grid.rows - 1, Math.floor((grid.top + this.canvas.height) / grid.pitch));
    const line = this.line;
    const side = grid.pitch - grid.gap;
    for (let row = firstRow; row <= lastRow; row += 1) {
      const first = row * grid.columns;
      const end = Math.min(blocks.size, first + grid.columns);
      line.fill(palette.background);
      for (let block = first; block < end; block += 1) {
        const table = chosen && !chosen(block) ? dim : blocks.changed[block] ? lit : full;
        const from = (block - first) * grid.pitch;
        line.fill(table[cellIndex(blocks, block, mode)], from, from + side);
      }
      this.repeat(row * grid.pitch - grid.top, side);
    }
    this.context.putImageData(this.image, 0, 0);
    if (grid.pitch >= grid.marksFrom) this.marks(blocks, grid, palette, { mode, chosen, firstRow, lastRow });
  }

  get line() {
    if (this.lineBuffer?.length !== this.canvas.width) this.lineBuffer = new Uint32Array(this.canvas.width);
    return this.lineBuffer;
  }

  /** The line, `height` times from pixel row `top` on (which may lie above the canvas). */
  repeat(top, height) {
    const width = this.canvas.width;
    const end = Math.min(this.canvas.height, top + height);
    for (let y = Math.max(0, top); y < end; y += 1) this.pixels.set(this.lineBuffer, y * width);
  }

  marks(blocks, grid, palette, { mode, chosen, firstRow, lastRow }) {
    const end = Math.min(blocks.size, (lastRow + 1) * grid.columns);
    for (let block = firstRow * grid.columns; block < end; block += 1) {
      const kind = blocks.kinds[block];
      if (kind === pool.FREE || kind === pool.OTHER || (chosen && !chosen(block))) {
        if (grid.pitch >= grid.labelsFrom) this.label(block, grid, palette);
        continue;
      }
      this.mark(blocks, block, grid, palette, mode);
      if (grid.pitch >= grid.labelsFrom) this.label(block, grid, palette, true);
    }
  }

  mark(blocks, block, grid, palette, mode) {
    const [x, y] = cellCorner(block, grid);
    const side = grid.pitch - grid.gap;
    const paint = this.context;
    const flags = blocks.flags[block];
    if (flags & pool.FLAG_PARTIAL && blocks.tokens[block] > 0) {
      const empty = Math.round(side * (1 - blocks.tokens[block] / blocks.blockSize));
      paint.fillStyle = `rgb(${palette.card.join(" ")} / 62%)`;
      paint.fillRect(x, y, side, empty);
    }
    const kind = blocks.kinds[block];
    if (mode === "state") {
      if (kind === pool.RESERVED || kind === pool.QUARANTINED) this.stroke(x, y, side, palette, true);
      if (kind === pool.QUARANTINED) this.stroke(x, y, side, palette, false);
      if (kind === pool.PINNED) this.hole(x, y, side, palette);
    }
    if (flags & pool.FLAG_IN_TIER) {
      paint.fillStyle = `rgb(${parseColour(palette.text).join(" ")} / 60%)`;
      const bar = Math.max(1, Math.round(side * 0.1));
      const inset = Math.round(side * 0.22);
      paint.fillRect(x + inset, y + side - 2 * bar, side - 2 * inset, bar);
    }
    if (blocks.refs[block] > 1) {
      const dot = Math.max(2, Math.round(side * 0.3));
      paint.fillStyle = `rgb(${palette.card.join(" ")})`;
      paint.fillRect(x + side - dot, y, dot, dot);
    }
  }

  /** A stroke from corner to corner: one for what is being written, two for what is quarantined. */
  stroke(x, y, side, palette, rising) {
    this.context.strokeStyle = `rgb(${palette.card.join(" ")} / 75%)`;
    this.context.lineWidth = Math.max(1, Math.round(side / 9));
    this.context.beginPath();
    this.context.moveTo(x, rising ? y + side : y);
    this.context.lineTo(x + side, rising ? y : y + side);
    this.context.stroke();
  }

  /** A hole: pinned. */
  hole(x, y, side, palette) {
    this.context.fillStyle = `rgb(${palette.card.join(" ")} / 85%)`;
    this.context.beginPath();
    this.context.arc(x + side / 2, y + side / 2, side * 0.17, 0, 2 * Math.PI);
    this.context.fill();
  }

  label(block, grid, palette, filled = false) {
    const [x, y] = cellCorner(block, grid);
    this.context.fillStyle = filled ? css("--on-cell") : css("--muted");
    this.context.font = `600 ${Math.round(11 * grid.scale)}px system-ui, sans-serif`;
    this.context.textBaseline = "top";
    this.context.fillText(String(block), x + 5 * grid.scale, y + 5 * grid.scale);
  }

  /** Frames around one cell: the focus, or the one whose tooltip is pinned. */
  frame(block, grid, colour, width) {
    if (block < 0) return;
    const [x, y] = cellCorner(block, grid);
    const side = grid.pitch - grid.gap;
    this.context.strokeStyle = colour;
    this.context.lineWidth = width;
    this.context.strokeRect(x - width / 2, y - width / 2, side + width, side + width);
  }
}

export function cellCorner(block, grid) {
  const row = Math.floor(block / grid.columns);
  return [(block - row * grid.columns) * grid.pitch, row * grid.pitch - grid.top];
}
