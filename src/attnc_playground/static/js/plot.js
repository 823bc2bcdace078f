// Pictures: a figure with axes in SVG, and images on a canvas below them. Every axis has a label and round ticks.

import { make, shown, svg } from './dom.js';

const MARGIN = { left: 70, right: 14, top: 10, bottom: 40 };
const FONT = 12;

let palette = null;

/** The colours of the theme, as CSS has them now. */
export function colours() {
  if (!palette) {
    const style = getComputedStyle(document.documentElement);
    const names = ['bg', 'surface', 'raised', 'text', 'muted', 'line', 'grid', 'accent', 'target', 'network', 'key', 'good', 'bad', 'warn'];
    palette = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    palette.dark = luminance(palette.surface) < 0.5;
  }
  return palette;
}

export function forgetColours() {
  palette = null;
}

function rgb(hex) {
  return [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
}

function luminance(hex) {
  const [r, g, b] = rgb(hex);
  return (0.299 * r + 0.587 * g + 0.114 * b) / 255;
}

function between(stops) {
  const table = new Uint8ClampedArray(3 * 256);
  for (let i = 0; i < 256; i++) {
    const t = (i / 255) * (stops.length - 1);
    const k = Math.min(stops.length - 2, Math.floor(t));
    for (let c = 0; c < 3; c++) table[3 * i + c] = stops[k][c] + (t - k) * (stops[k + 1][c] - stops[k][c]);
  }
  return table;
}

const SCALES = {
  values: ['#00224e', '#2a3f6d', '#575d6d', '#7d7c78', '#a59c74', '#d2c060', '#fee838'], // cividis: even for all eyes
  weights: ['#ffffff', '#dce9f5', '#b3d0ea', '#83b2da', '#5492c8', '#2f74b3', '#1a5c9c'],
  weightsDark: ['#1c2027', '#22344a', '#29496b', '#33608f', '#4079b0', '#5393cd', '#6aade6'],
  errors: ['#0b5394', '#6fa3d3', '#cfe0ee', '#f7f6f2', '#f5d7b8', '#dd8d3f', '#b4560a'],
  errorsDark: ['#7cb7f2', '#4376a8', '#2c4159', '#1c2027', '#584024', '#a86a25', '#f0a04b'],
};

const tables = {};

/** A table of 256 colours: 'values', 'weights' or 'errors'. */
export function scale(name) {
  const key = colours().dark && SCALES[`${name}Dark`] ? `${name}Dark` : name;
  tables[key] ??= between(SCALES[key].map(rgb));
  return tables[key];
}

/** The colour of a cell. Neighbouring numbers differ much in hue and lightness. */
export function cellColour(number) {
  const hue = (number * 137.508 + 205) % 360;
  const light = [0.44, 0.58, 0.7][number % 3];
  const chroma = 0.34;
  const channel = (n) => {
    const k = (n + hue / 30) % 12;
    return Math.round(255 * (light - chroma * Math.min(light, 1 - light) * 1.5 * Math.max(-1, Math.min(k - 3, 9 - k, 1))));
  };
  return [channel(0), channel(8), channel(4)];
}

/** Round ticks within [lo, hi]. */
export function ticks(lo, hi, most) {
  const span = hi - lo;
  if (!(span > 0)) return [lo];
  const rough = span / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const found = [];
  for (let k = Math.ceil(lo / step - 1e-9); k * step <= hi + 1e-9 * span; k++) found.push(Math.abs(k * step) < step * 1e-6 ? 0 : k * step);
  return found;
}

function decades(from, to, most) {
  const found = [];
  const [lo, hi] = from < to ? [from, to] : [to, from];
  const step = Math.max(1, Math.ceil((Math.log10(hi) - Math.log10(lo)) / most));
  for (let e = Math.ceil(Math.log10(lo) - 1e-9); e <= Math.log10(hi) + 1e-9; e += step) found.push(10 ** e);
  return found;
}

function swatch(colour, kind) {
  if (kind === 'dot') return svg('circle', { cx: 8, cy: 5, r: 4, fill: colour });
  if (kind === 'box' || kind === 'bar') return svg('rect', { x: 0, y: 1, width: 16, height: 8, fill: colour, opacity: kind === 'box' ? 0.35 : 1 });
  return svg('line', { x1: 0, x2: 16, y1: 5, y2: 5, stroke: colour, 'stroke-width': 2.5, 'stroke-dasharray': kind === 'dashed' ? '4 3' : null });
}

/**
 * A figure. `draw` takes the ranges of the axes and layers: {kind: 'line'|'steps'|'band'|'ticks'|'points'|'image'|…}.
 */
export class Plot {
  constructor(place, { id, title, x, y, ratio = 0.42, square = false, describe = '' }) {
    this.axes = { x, y };
    this.ratio = ratio;
    this.square = square;
    this.svg = svg('svg', { class: 'plot', role: 'img', 'aria-labelledby': `${id}-title`, 'aria-describedby': `${id}-note` });
    this.canvas = make('canvas', { class: 'under', 'aria-hidden': 'true' });
    this.title = make('span', { id: `${id}-title`, class: 'plot-title' }, title);
    this.legend = make('span', { class: 'legend' });
    this.note = make('p', { id: `${id}-note`, class: 'note' }, describe);
    this.frame = make('div', { class: square ? 'frame square' : 'frame', tabindex: '0', role: 'group', 'aria-labelledby': `${id}-title` }, this.canvas, this.svg);
    this.figure = make('figure', { id, 'data-testid': id }, make('figcaption', {}, this.title, this.legend), this.frame, this.note);
    place.append(this.figure);
    this.spec = null;
    this.size = { width: 0, height: 0 };
    new ResizeObserver(() => this.resize()).observe(this.frame);
  }

  resize() {
    const width = Math.round(this.frame.clientWidth);
    const height = Math.round(this.frame.clientHeight);
    if (!width || (width === this.size.width && height === this.size.height)) return;
    this.size = { width, height };
    this.svg.setAttribute('viewBox', `0 0 ${width} ${height}`);
    if (this.spec) this.draw(this.spec);
  }

  /** Say what the colours mean: [[colour, text, kind]]. The kind is 'dashed', 'box', 'bar' or 'dot'; without one it is a line. */
  setLegend(entries) {
    this.legend.replaceChildren(
      ...entries.map(([colour, text, kind]) => {
        return make('span', { class: 'entry' }, svg('svg', { viewBox: '0 0 16 10', width: 16, height: 10, 'aria-hidden': 'true' }, swatch(colour, kind)), text);
      }),
    );
  }

  draw(spec) {
    this.spec = spec;
    const { width, height } = this.size;
    if (!width) return;
    const left = spec.left ?? MARGIN.left;
    this.area = { left, top: MARGIN.top, width: width - left - MARGIN.right, height: height - MARGIN.top - MARGIN.bottom };
    const { area } = this;
    const to = (range, log) => (log ? (v) => (Math.log(v) - Math.log(range[0])) / (Math.log(range[1]) - Math.log(range[0])) : (v) => (v - range[0]) / (range[1] - range[0]));
    const [tx, ty] = [to(spec.x, spec.logX), to(spec.y, spec.logY)];
    this.px = (x) => area.left + area.width * tx(x);
    this.py = (y) => area.top + area.height * (1 - ty(y));
    const inside = svg('clipPath', { id: `${this.figure.id}-area` }, svg('rect', { x: area.left, y: area.top, width: area.width, height: area.height }));
    const parts = [inside, ...this.grid(spec), ...(spec.layers ?? []).flatMap((layer) => this.layer(layer)), ...this.frameLines(spec)];
    this.svg.replaceChildren(...parts.filter(Boolean));
    this.image(spec.image);
  }

  grid(spec) {
    const c = colours();
    const { area } = this;
    const xs = spec.ticksX ? spec.ticksX.map((tick) => tick.at) : spec.logX ? decades(...spec.x, Math.max(2, area.width / 70)) : ticks(...spec.x, Math.max(2, Math.floor(area.width / 80)));
    const ys = spec.ticksY ?? (spec.logY ? decades(...spec.y, Math.max(2, area.height / 34)) : ticks(...spec.y, Math.max(2, Math.floor(area.height / 44))));
    const name = spec.nameY ?? ((value) => shown(value));
    const text = (attributes, content) => svg('text', { fill: c.muted, 'font-size': FONT, ...attributes }, content);
    const found = [];
    for (const [i, x] of xs.entries()) {
      const at = this.px(x);
      if (!spec.image && !spec.ticksX) found.push(svg('line', { x1: at, x2: at, y1: area.top, y2: area.top + area.height, stroke: c.grid }));
      found.push(text({ x: at, y: area.top + area.height + 16, 'text-anchor': 'middle' }, spec.ticksX ? spec.ticksX[i].text : shown(x)));
    }
    for (const y of ys) {
      const at = this.py(y);
      if (!spec.image) found.push(svg('line', { x1: area.left, x2: area.left + area.width, y1: at, y2: at, stroke: c.grid }));
      found.push(text({ x: area.left - 7, y: at + 4, 'text-anchor': 'end' }, name(y)));
    }
    found.push(text({ x: area.left + area.width / 2, y: area.top + area.height + 34, 'text-anchor': 'middle' }, spec.labelX ?? this.axes.x));
    const middle = area.top + area.height / 2;
    found.push(text({ x: 15, y: middle, 'text-anchor': 'middle', transform: `rotate(-90 15 ${middle})` }, spec.labelY ?? this.axes.y));
    return found;
  }

  frameLines() {
    const { area } = this;
    return [svg('rect', { x: area.left, y: area.top, width: area.width, height: area.height, fill: 'none', stroke: colours().line })];
  }

  layer(layer) {
    if (!layer) return [];
    const { area } = this;
    const bottom = area.top + area.height;
    const low = Math.min(...(this.spec.y ?? [0])) ;
    const clampY = (y) => Math.max(area.top - 50, Math.min(bottom + 50, this.py(this.spec.logY ? Math.max(y, low * 1e-3) : y)));
    const path = (xs, ys) => {
      let d = '';
      let pen = 'M';
      for (let i = 0; i < xs.length; i++) {
        if (!Number.isFinite(ys[i])) {
          pen = 'M';
          continue;
        }
        d += `${pen}${this.px(xs[i]).toFixed(1)} ${clampY(ys[i]).toFixed(1)}`;
        pen = 'L';
      }
      return d;
    };
    const clip = { 'clip-path': `url(#${this.figure.id}-area)` };
    switch (layer.kind) {
      case 'line':
        return [layer.halo && svg('path', { d: path(layer.xs, layer.ys), fill: 'none', stroke: layer.halo, 'stroke-width': (layer.width ?? 2) + 3, 'stroke-linejoin': 'round', ...clip }), svg('path', { d: path(layer.xs, layer.ys), fill: 'none', stroke: layer.colour, 'stroke-width': layer.width ?? 2, 'stroke-linejoin': 'round', 'stroke-dasharray': layer.dash, opacity: layer.opacity, ...clip })];
      case 'band': {
        const { edges, bounds } = layer;
        let top = '';
        let under = '';
        bounds.forEach((bound, i) => {
          const [a, b] = [this.px(edges[i]).toFixed(1), this.px(edges[i + 1]).toFixed(1)];
          top += `${i ? 'L' : 'M'}${a} ${clampY(bound).toFixed(1)}L${b} ${clampY(bound).toFixed(1)}`;
          under = `L${b} ${clampY(-bound).toFixed(1)}L${a} ${clampY(-bound).toFixed(1)}${under}`;
        });
        return [svg('path', { d: `${top}${under}Z`, fill: layer.colour, opacity: 0.16, ...clip })];
      }
      case 'level':
        return [svg('line', { x1: area.left, x2: area.left + area.width, y1: this.py(layer.y), y2: this.py(layer.y), stroke: layer.colour, 'stroke-width': layer.width ?? 1.5, 'stroke-dasharray': layer.dash })];
      case 'upright':
        return [svg('line', { x1: this.px(layer.x), x2: this.px(layer.x), y1: area.top, y2: bottom, stroke: layer.colour, 'stroke-width': layer.width ?? 1.5, 'stroke-dasharray': layer.dash })];
      case 'ticks':
        return layer.xs.map((x) => svg('path', { d: `M${this.px(x).toFixed(1)} ${bottom - 9}v9`, stroke: layer.colour, 'stroke-width': layer.width ?? 1.5 }));
      case 'points':
        return layer.xs.map((x, i) => Number.isFinite(clampY(layer.ys[i])) && svg('circle', { cx: this.px(x).toFixed(2), cy: clampY(layer.ys[i]).toFixed(2), r: typeof layer.r === 'number' ? layer.r : (layer.r?.[i] ?? 4), fill: layer.fill ?? layer.colour, stroke: layer.colour, 'stroke-width': layer.stroke ?? 1.5, ...(layer.attributes?.(i) ?? {}) }));
      case 'bars':
        return layer.ys.map((y, i) => svg('rect', { x: this.px(i + 0.1), width: Math.max(1, this.px(i + 0.9) - this.px(i + 0.1)), y: this.py(y), height: Math.max(0, bottom - this.py(y)), fill: layer.best.includes(i) ? layer.bestColour : layer.colour }));
      case 'text':
        return [svg('text', { x: this.px(layer.x), y: this.py(layer.y), fill: layer.colour ?? colours().muted, 'font-size': layer.size ?? FONT, 'text-anchor': layer.anchor ?? 'middle', dx: layer.dx, dy: layer.dy }, layer.text)];
      default:
        throw new Error(`no layer is called ${layer.kind}`);
    }
  }

  // An image fills the whole area: {columns, rows, pixel(i) → index into table | [r, g, b], table}.
  image(image) {
    const { area, canvas } = this;
    canvas.hidden = !image;
    if (!image) return;
    const { columns, rows } = image;
    if (canvas.width !== columns || canvas.height !== rows) Object.assign(canvas, { width: columns, height: rows });
    Object.assign(canvas.style, { left: `${area.left}px`, top: `${area.top}px`, width: `${area.width}px`, height: `${area.height}px` });
    const context = canvas.getContext('2d');
    const data = context.createImageData(columns, rows);
    image.paint(data.data);
    context.putImageData(data, 0, 0);
  }

  /** The place under a pointer, in the units of the axes; null outside the axes. */
  placeOf(event) {
    if (!this.spec || !this.area) return null;
    const box = this.svg.getBoundingClientRect();
    const sx = (event.clientX - box.left - this.area.left) / this.area.width;
    const sy = 1 - (event.clientY - box.top - this.area.top) / this.area.height;
    if (sx < 0 || sx > 1 || sy < 0 || sy > 1) return null;
    const { x, y } = this.spec;
    return [x[0] + sx * (x[1] - x[0]), y[0] + sy * (y[1] - y[0])];
  }

  /** The picture as an SVG document of its own. */
  document() {
    const { width, height } = this.size;
    const c = colours();
    const copy = this.svg.cloneNode(true);
    for (const name of ['class', 'role', 'aria-labelledby', 'aria-describedby']) copy.removeAttribute(name);
    const group = svg('g', {});
    if (!this.canvas.hidden) {
      group.append(svg('image', { href: this.canvas.toDataURL('image/png'), x: this.area.left, y: this.area.top, width: this.area.width, height: this.area.height, preserveAspectRatio: 'none', 'image-rendering': 'pixelated' }));
    }
    group.append(...copy.childNodes);
    return { group, width, height, title: this.title.textContent, background: c.surface, colour: c.text };
  }
}

/** Put pictures below one another in one SVG document, with their titles. */
export function joined(plots, heading) {
  const parts = plots.filter((plot) => plot.size.width && plot.spec && plot.figure.offsetParent !== null).map((plot) => plot.document());
  const width = Math.max(...parts.map((part) => part.width));
  let at = 34;
  const root = svg('svg', { xmlns: 'http://www.w3.org/2000/svg', 'font-family': 'system-ui, Arial, sans-serif' });
  const { background, colour } = parts[0];
  const back = svg('rect', { width, height: 0, fill: background });
  root.append(back, svg('text', { x: 14, y: 22, 'font-size': 15, fill: colour }, heading));
  for (const part of parts) {
    root.append(svg('text', { x: 14, y: at + 14, 'font-size': 13, 'font-weight': 600, fill: colour }, part.title));
    part.group.setAttribute('transform', `translate(0 ${at + 20})`);
    root.append(part.group);
    at += part.height + 28;
  }
  back.setAttribute('height', at);
  root.setAttribute('viewBox', `0 0 ${width} ${at}`);
  root.setAttribute('width', width);
  root.setAttribute('height', at);
  return `<?xml version="1.0" encoding="UTF-8"?>\n${new XMLSerializer().serializeToString(root)}\n`;
}
