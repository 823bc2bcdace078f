// Pictures of the box and its leaves. One variable: bars over intervals. Two: rectangles. More: one square for each leaf.

import { roundedUp, short } from "./numbers.js";

const BAR_HEIGHT = 220; // pixels of a picture of one variable
const TAIL = 28; // pixels beside the core of an infinite box
const MARGIN = { left: 8, right: 8, top: 22, bottom: 24 };
const LOOSE = [159, 214, 180];
const TIGHT = [20, 108, 58];
const SQUARE = 14; // pixels of a leaf in three variables or more
const DOT = 3; // radius in pixels of a row of a table in two variables
const LABEL = "12px system-ui, sans-serif";

function green(share) {
  const mixed = LOOSE.map((low, i) => Math.round(low + (TIGHT[i] - low) * Math.min(1, Math.max(0, share))));
  return `rgb(${mixed.join(",")})`;
}

export class Picture {
  // `describe` takes a sentence about the leaf under the pointer, or the one that the keys have reached.
  constructor(subject, describe) {
    this.subject = subject;
    this.describe = describe;
    this.found = new Float64Array(subject.leaves.length).fill(NaN);
    this.failed = -1;
    this.chosen = -1;
    this.waiting = false;
    this.canvas = document.createElement("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-describedby", "leaf");
    this.canvas.addEventListener("pointermove", (event) => this.choose(this.at(event)));
    this.canvas.addEventListener("pointerdown", (event) => this.choose(this.at(event)));
    this.canvas.addEventListener("keydown", (event) => this.step(event));
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    this.name();
  }

  get dimension() {
    return this.subject.variables.length;
  }

  name() {
    const { variables, count } = this.subject;
    const done = this.found.reduce((sum, x) => sum + !Number.isNaN(x), 0);
    const failed = this.failed < 0 ? "" : ", 1 refused";
    const over = `${variables.join(", ")}: ${done} of ${count} leaves re-proved${failed}`;
    this.canvas.setAttribute("aria-label", `The box of ${over}. Arrow keys go from leaf to leaf.`);
  }

  prove(leaf, found) {
    if (leaf < this.found.length) this.found[leaf] = found;
    this.later();
  }

  fail(leaf) {
    this.failed = leaf;
    this.choose(leaf);
    this.later();
  }

  later() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.draw();
      this.name();
    });
  }

  share(leaf) {
    return this.subject.measures ? this.found[leaf] / this.subject.bounds[leaf] : 0.5;
  }

  draw() {
    const width = Math.max(160, this.canvas.clientWidth);
    const columns = Math.max(1, Math.floor((width - 2 * MARGIN.left) / SQUARE));
    const rows = Math.ceil(this.subject.leaves.length / columns);
    const square = Math.min(width, 560);
    const height = this.dimension === 1 ? BAR_HEIGHT : this.dimension === 2 ? square : rows * SQUARE + 2 * MARGIN.left;
    const scale = window.devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(width * scale) || this.canvas.height !== Math.round(height * scale)) {
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = Math.round(height * scale);
      this.canvas.style.height = `${height}px`;
    }
    const pen = this.canvas.getContext("2d");
    const colours = getComputedStyle(document.documentElement);
    this.colour = (name) => colours.getPropertyValue(name).trim();
    Object.assign(this, { width, height, columns, pen });
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = LABEL;
    this.places = this.subject.leaves.map((leaf, i) => this.place(leaf, i));
    this.places.forEach((_, i) => this.paint(i));
    this.label();
    if (this.chosen >= 0) this.outline(this.places[this.chosen]);
  }

  // The rectangle of a leaf: left, top, width, height in pixels.
  place(leaf, i) {
    if (this.dimension > 2) {
      const [column, row] = [i % this.columns, Math.floor(i / this.columns)];
      return [MARGIN.left + column * SQUARE, MARGIN.left + row * SQUARE, SQUARE - 2, SQUARE - 2];
    }
    const tails = this.subject.leaves.some(({ kind }) => kind === "tail") ? TAIL : 0;
    const [left, right] = [MARGIN.left + tails, this.width - MARGIN.right - tails];
    const [top, bottom] = [MARGIN.top, this.height - MARGIN.bottom];
    if (leaf.kind === "tail") return [leaf.side < 0 ? MARGIN.left : right + 2, top, TAIL - 2, bottom - top];
    const along = ([lo, hi], x, from, to) => from + ((x - lo) / (hi - lo)) * (to - from);
    const [x0, x1] = leaf.sides.slice(0, 2).map((x) => along(this.subject.ends[0], x, left, right));
    if (this.dimension === 1) {
      return x1 > x0 ? [x0, top, x1 - x0, bottom - top] : [x0 - 1, top, 2, bottom - top];
    }
    const [y0, y1] = leaf.sides.slice(2, 4).map((y) => along(this.subject.ends[1], y, bottom, top));
    return x1 > x0 ? [x0, y1, x1 - x0, y0 - y1] : [x0 - DOT, y0 - DOT, 2 * DOT, 2 * DOT];
  }

  paint(i) {
    const [x, y, w, h] = this.places[i];
    const pen = this.pen;
    const gap = Math.min(0.5, w / 8);
    const isProved = !Number.isNaN(this.found[i]);
    pen.fillStyle = i === this.failed ? this.colour("--bad") : this.colour("--line");
    if (isProved && this.dimension > 1) pen.fillStyle = green(this.share(i));
    pen.fillRect(x + gap, y + gap, Math.max(0.5, w - 2 * gap), Math.max(0.5, h - 2 * gap));
    if (isProved && this.dimension === 1) {
      const tall = this.subject.measures ? Math.max(2, h * this.share(i)) : h;
      pen.fillStyle = this.colour("--surface");
      pen.fillRect(x + gap, y, Math.max(0.5, w - 2 * gap), h);
      pen.fillStyle = green(this.share(i));
      pen.fillRect(x + gap, y + h - tall, Math.max(0.5, w - 2 * gap), tall);
    }
  }

  outline([x, y, w, h]) {
    this.pen.strokeStyle = this.colour("--text");
    this.pen.lineWidth = 2;
    this.pen.strokeRect(x, y, w, h);
  }

  label() {
    if (this.dimension > 2) return;
    const { pen, width, height } = this;
    const [[lo, hi], vertical] = this.subject.ends;
    const [name, second] = this.subject.variables;
    pen.fillStyle = this.colour("--text");
    pen.textAlign = "left";
    pen.fillText(`${name} = ${short(lo)}`, MARGIN.left, height - 8);
    pen.textAlign = "right";
    pen.fillText(short(hi), width - MARGIN.right, height - 8);
    pen.textAlign = "left";
    if (this.dimension === 2) {
      const [low, high] = vertical.map(short);
      pen.fillText(`${second} from ${low} (bottom) to ${high} (top)`, MARGIN.left, 14);
    } else if (this.subject.measures) {
      pen.strokeStyle = this.colour("--text");
      pen.setLineDash([4, 3]);
      pen.lineWidth = 1;
      pen.beginPath();
      pen.moveTo(MARGIN.left, MARGIN.top);
      pen.lineTo(width - MARGIN.right, MARGIN.top);
      pen.stroke();
      pen.setLineDash([]);
      pen.fillText("claimed bound", MARGIN.left, 14);
    }
  }

  at(event) {
    const { left, top } = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - left, event.clientY - top];
    return this.places.findIndex(([x0, y0, w, h]) => x >= x0 && x < x0 + w && y >= y0 && y < y0 + h);
  }

  choose(leaf) {
    if (leaf < 0 || leaf >= this.found.length || leaf === this.chosen) return;
    this.chosen = leaf;
    this.later();
    this.describe(this.sentence(leaf));
  }

  step(event) {
    const moves = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -this.found.length, End: this.found.length };
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.choose(Math.min(this.found.length - 1, Math.max(0, this.chosen + moves[event.key])));
  }

  sentence(i) {
    const { leaves, variables, bounds, measures, title } = this.subject;
    const { kind, order, sides, side } = leaves[i];
    const where = !sides
      ? `everything beyond the core on the ${side < 0 ? "left" : "right"}`
      : variables.map((name, k) => range(name, sides[2 * k], sides[2 * k + 1])).join(", ");
    const isProved = !Number.isNaN(this.found[i]);
    const proved = measures
      ? `Re-proved: the error is at most ${roundedUp(this.found[i])} here, and ${roundedUp(bounds[i])} is claimed.`
      : "Re-proved: its part of the norm is found here.";
    const state = i === this.failed ? "Refused: see the reason above." : isProved ? proved : "Not proved yet.";
    const degree = kind === "taylor" ? `, order ${order}` : "";
    return `${title}Leaf ${i + 1} of ${leaves.length} (${kind}${degree}): ${where}. ${state}`;
  }
}

function range(name, lo, hi) {
  return lo === hi ? `${name} = ${short(lo)}` : `${name} ∈ [${short(lo)}, ${short(hi)}]`;
}
