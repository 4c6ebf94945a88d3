// Small charts over time, drawn on canvas: lines, or areas stacked on each other.

import { css, el, perFrame } from "./dom.js";

export const SPAN = 300; // seconds that a chart shows at most
const LEAST_SPAN = 60; // and at first
const TOP = 6; // CSS pixels left free above

/** Figures over the last SPAN seconds: columns of numbers (null: nothing was measured) by time. */
export class History {
  constructor(names) {
    this.names = names;
    this.clear();
  }

  clear() {
    this.times = [];
    this.values = Object.fromEntries(this.names.map((name) => [name, []]));
  }

  add(time, values) {
    this.times.push(time);
    for (const name of this.names) this.values[name].push(values[name] ?? null);
    let old = 0;
    while (this.times[old] < time - SPAN - 5) old += 1;
    if (old > 0) {
      this.times.splice(0, old);
      for (const name of this.names) this.values[name].splice(0, old);
    }
  }

  /** Seconds that a chart shows now: it grows with what is known. */
  span(now) {
    return Math.min(SPAN, Math.max(LEAST_SPAN, now - (this.times[0] ?? now)));
  }

  /** Index of the sample nearest to a time, or -1. */
  nearest(time) {
    let best = -1;
    for (let index = 0; index < this.times.length; index += 1) {
      if (best < 0 || Math.abs(this.times[index] - time) < Math.abs(this.times[best] - time)) best = index;
    }
    return best;
  }
}

/** One chart. `series`: [{name, label, colour}] from the bottom up; `top`: the axis' end, null to fit it. */
export class Chart {
  constructor(canvas, history, { series, stacked = false, top = null, format }) {
    Object.assign(this, { canvas, history, series, stacked, top, format });
    this.context = canvas.getContext("2d");
    this.reading = canvas.parentElement.querySelector(".reading");
    this.pointer = null;
    this.now = 0;
    this.scaleTop = 1;
    this.redraw = perFrame(() => this.draw());
    new ResizeObserver(this.redraw).observe(canvas);
    canvas.addEventListener("pointermove", (event) => this.point(event.offsetX));
    canvas.addEventListener("pointerleave", () => this.point(null));
  }

  point(x) {
    this.pointer = x;
    this.redraw();
  }

  update(now) {
    this.now = now;
    this.redraw();
  }

  draw() {
    const scale = window.devicePixelRatio || 1;
    const { clientWidth: width, clientHeight: height } = this.canvas;
    if (
      this.canvas.width !== Math.round(width * scale) ||
      this.canvas.height !== Math.round(height * scale)
    ) {
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = Math.round(height * scale);
    }
    const paint = this.context;
    paint.setTransform(scale, 0, 0, scale, 0, 0);
    paint.clearRect(0, 0, width, height);
    this.width = width;
    this.height = height;
    this.span = this.history.span(this.now);
    this.scaleTop = this.top ?? niceTop(this.highest());
    this.grid();
    const floor = new Array(this.history.times.length).fill(0);
    for (const series of this.series) this.stacked ? this.area(series, floor) : this.line(series);
    this.readOut();
  }

  highest() {
    let most = 0;
    for (const { name } of this.series)
      for (const value of this.history.values[name]) most = Math.max(most, value ?? 0);
    return most;
  }

  x(time) {
    return this.width - 3 - ((this.now - time) / this.span) * (this.width - 3);
  }

  y(value) {
    return this.height - (value / this.scaleTop) * (this.height - TOP) - 0.5;
  }

  grid() {
    const paint = this.context;
    paint.strokeStyle = css("--line");
    paint.lineWidth = 1;
    paint.beginPath();
    for (const share of [0, 0.5, 1]) {
      const y = Math.round(this.y(share * this.scaleTop)) + 0.5;
      paint.moveTo(0, y);
      paint.lineTo(this.width, y);
    }
    paint.stroke();
    if (this.top === null && this.highest() > 0) {
      paint.fillStyle = css("--muted");
      paint.font = "10px system-ui, sans-serif";
      paint.fillText(this.format(this.scaleTop), 0, TOP + 10);
    }
  }

  line({ name, colour }) {
    const paint = this.context;
    const values = this.history.values[name];
    paint.strokeStyle = css(colour);
    paint.lineWidth = 1.75;
    paint.lineJoin = "round";
    paint.beginPath();
    let down = false;
    values.forEach((value, index) => {
      if (value === null) {
        down = false;
        return;
      }
      const x = this.x(this.history.times[index]);
      if (down) paint.lineTo(x, this.y(value));
      else paint.moveTo(x, this.y(value));
      down = true;
    });
    paint.stroke();
    if (down) this.dot(this.x(this.history.times.at(-1)), this.y(values.at(-1)), css(colour));
  }

  /** Where a line stands now. */
  dot(x, y, colour) {
    this.context.fillStyle = colour;
    this.context.beginPath();
    this.context.arc(x, y, 2.75, 0, 2 * Math.PI);
    this.context.fill();
  }

  area({ name, colour }, floor) {
    const paint = this.context;
    const { times, values } = this.history;
    if (times.length < 2) return;
    paint.fillStyle = css(colour);
    paint.beginPath();
    times.forEach((time, index) => paint.lineTo(this.x(time), this.y(floor[index])));
    for (let index = times.length - 1; index >= 0; index -= 1) {
      floor[index] += values[name][index] ?? 0;
      paint.lineTo(this.x(times[index]), this.y(floor[index]));
    }
    paint.fill();
  }

  /** Under the pointer: a line, and the figures of that moment; else the names of the series. */
  readOut() {
    const index =
      this.pointer === null
        ? -1
        : this.history.nearest(this.now - (1 - this.pointer / this.width) * this.span);
    const seen = this.series.filter(
      ({ name }, order) => order < 2 || this.history.values[name].some((value) => value > 0),
    );
    const items = seen.map(({ name, label, colour }) => {
      const value = index < 0 ? null : this.history.values[name][index];
      const text = index < 0 ? label : `${label} ${value === null ? "–" : this.format(value)}`;
      return [colour, text];
    });
    let when = "";
    if (index >= 0) {
      const time = this.history.times[index];
      this.context.strokeStyle = css("--muted");
      this.context.beginPath();
      this.context.moveTo(this.x(time), 0);
      this.context.lineTo(this.x(time), this.height);
      this.context.stroke();
      when = `${Math.round(this.now - time)} s ago`;
    }
    this.write(items, when);
  }

  write(items, when) {
    const text = JSON.stringify([items, when]);
    if (text === this.written) return;
    this.written = text;
    const parts = items.map(([colour, label]) =>
      el("span", {}, el("i", { class: `dot ${colour.slice(2)}` }), label),
    );
    this.reading.replaceChildren(...parts, el("span", { class: "when" }, when));
  }
}

/** 1, 2 or 5 times a power of ten that is no less than `value`. */
function niceTop(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value * 1.05) ?? 20 * power;
}
