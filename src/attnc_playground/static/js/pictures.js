// The pictures of a network of one or two variables, and the pointer on them.

import { ceiling, shown } from './dom.js';
import { winner } from './engine.js';
import { cellColour, colours, Plot, scale } from './plot.js';

const MOST_ROWS = 120; // rows of the map of weights; with more keys, neighbours share a row
const THICK = 16; // rows that are high enough for a light edge around the line of the winning key
const MOST_ANCHORS = 100; // anchors that are drawn; more would run together
const NO_KEYS = 'The function is affine: the network has no keys and needs no attention';
const THIN = 0.004; // the least proven bound that is drawn, as a share of the axis

export class Pictures {
  constructor(line, plane, moved) {
    this.line = line;
    this.plane = plane;
    this.moved = moved;
    this.reading = '';
    this.f = new Plot(line, { id: 'plot-function', title: 'Function and network', x: 'x', y: 'f(x)' });
    this.error = new Plot(line, { id: 'plot-error', title: 'Error', x: 'x', y: 'network − f' });
    this.map = new Plot(line, { id: 'plot-attention', title: 'Attention weights', x: 'x', y: 'key', describe: 'Each row is a key, each column an x. A row is strong in colour where its key has the most weight; the line marks the key that wins.' });
    this.target2 = new Plot(plane, { id: 'plot-target', title: 'Function', x: 'x', y: 'y', square: true });
    this.network2 = new Plot(plane, { id: 'plot-network', title: 'Network', x: 'x', y: 'y', square: true });
    this.error2 = new Plot(plane, { id: 'plot-error2', title: 'Error', x: 'x', y: 'y', square: true });
    this.partition = new Plot(plane, { id: 'plot-partition', title: 'Partition: the key that wins', x: 'x', y: 'y', square: true });
    this.keys = new Plot(plane, { id: 'plot-keys', title: 'Attention at the pointer', x: 'key', y: 'weight' });
    for (const plot of [this.f, this.error, this.map]) this.listen(plot, 1);
    for (const plot of [this.target2, this.network2, this.error2, this.partition]) this.listen(plot, 2);
  }

  shown() {
    return this.plane.hidden ? [this.f, this.error, this.map] : [this.target2, this.network2, this.error2, this.partition, this.keys];
  }

  listen(plot, d) {
    const move = (event) => {
      const place = plot.placeOf(event);
      if (place) this.moved(place.slice(0, d));
    };
    plot.frame.addEventListener('pointermove', (event) => event.pointerType === 'mouse' && move(event));
    plot.frame.addEventListener('pointerdown', move);
    plot.frame.addEventListener('keydown', (event) => {
      const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
      if (!step || !this.now || (d === 1 && step[0] === 0)) return;
      event.preventDefault();
      const { lo, hi } = this.now.network.picture;
      const size = event.shiftKey ? 0.1 : 0.01;
      const at = this.pointer().map((x, i) => Math.min(hi[i], Math.max(lo[i], x + step[i] * size * (hi[i] - lo[i]))));
      this.moved(at);
    });
  }

  // A sentence about a function of several outputs, of which the pictures show one; empty for one output.
  first() {
    const { num_outputs: count } = this.now.network.picture;
    return count > 1 ? `The pictures show the first of ${count} outputs. ` : '';
  }

  // The point that is looked at: the pointer's, or a default a third of the way.
  pointer() {
    const { lo, hi } = this.now.network.picture;
    const given = this.now.at?.length === lo.length ? this.now.at : lo.map((low, i) => low + (i ? 0.62 : 0.36) * (hi[i] - low));
    return given.map((x, i) => Math.min(hi[i], Math.max(lo[i], x)));
  }

  /** Draw, and return the largest error at the points of the picture. */
  draw(now) {
    this.now = now;
    const plane = now.network.picture.lo.length === 2;
    this.line.hidden = plane;
    this.plane.hidden = !plane;
    return plane ? this.drawPlane() : this.drawLine();
  }

  drawLine() {
    const { now } = this;
    const { picture, certificate } = now.network;
    const c = colours();
    const [x] = now.variables;
    const xs = now.points;
    const ys = now.outputs;
    const range = [picture.lo[0], picture.hi[0]];
    const errors = Float64Array.from(ys, (y, i) => y - picture.target[i]);
    const [low, high] = spread([...picture.target]);
    const pad = 0.12 * (high - low);
    const [at] = this.pointer();
    const looked = now.look([at]);
    const winners = now.units.map((unit, i) => winner(looked.weights[i], 0, unit.numKeys));
    const cross = { kind: 'upright', x: at, colour: c.muted, dash: '2 3', width: 1 };
    const anchors = now.units.flatMap((unit, u) => placesOf(unit, xs).filter(Boolean).map((place) => ({ ...place, unit: u })));
    const few = anchors.length <= MOST_ANCHORS ? anchors : [];

    const keyLayers = now.byHand
      ? [{ kind: 'points', xs: few.filter((key) => key.own).map((key) => key.at[0]), ys: few.filter((key) => key.own).map((key) => key.value), colour: c.key, fill: c.surface, r: 4.2, stroke: 2 }]
      : [{ kind: 'ticks', xs: few.map((key) => key.at[0]), colour: c.key, width: 2 }];
    this.f.axes.x = this.error.axes.x = this.map.axes.x = x;
    const label = now.variables.length ? `f(${x})` : 'f';
    this.f.draw({
      x: range,
      y: [low - pad, high + pad],
      labelX: x,
      labelY: label,
      layers: [{ kind: 'line', xs, ys: picture.target, colour: c.target, width: 4, opacity: 0.75 }, { kind: 'line', xs, ys, colour: c.network, width: 2 }, ...keyLayers, cross, { kind: 'points', xs: [at], ys: [looked.outputs[0]], colour: c.network, r: 4 }],
    });
    this.f.note.textContent = this.first() + (now.byHand ? 'Circles are keys: each sits at its place and holds a value. Move the pointer, or use the arrow keys.' : now.units.length ? 'Marks below: the middle of the places where each key wins. Move the pointer, or use the arrow keys.' : `${NO_KEYS}.`);
    this.f.setLegend([[c.target, 'function'], [c.network, 'network'], ...(now.units.length ? [now.byHand ? [c.key, 'keys', 'dot'] : [c.key, 'places where a key wins']] : [])]);

    const worst = errors.reduce((most, e) => (Math.abs(e) > most ? Math.abs(e) : most), 0);
    const bound = now.isOwn && certificate.norm === 'inf' ? certificate.bound : null;
    const reach = nice(Math.max(Number.isFinite(worst) ? worst : 1, bound !== null && bound < 30 * worst ? bound : 0, 1e-16) * 1.12);
    const band = now.isOwn ? certificate.band : null;
    const layers = [{ kind: 'level', y: 0, colour: c.line }];
    if (bound !== null && bound < reach * 4) {
      if (band) layers.push({ kind: 'band', ...band, colour: c.target });
      else layers.push({ kind: 'band', edges: range, bounds: [bound], colour: c.target });
      if (bound > THIN * reach) layers.push({ kind: 'level', y: bound, colour: c.target, dash: '6 4' }, { kind: 'level', y: -bound, colour: c.target, dash: '6 4' });
    }
    layers.push({ kind: 'line', xs, ys: errors, colour: c.network, width: 1.6 }, cross);
    this.error.draw({ x: range, y: [-reach, reach], labelX: x, labelY: `network − ${label}`, layers });
    this.error.setLegend(bound !== null ? [[c.network, 'error, computed in this page'], [c.target, 'proven band', 'box'], [c.target, 'proven bound', 'dashed']] : [[c.network, 'error, computed in this page']]);
    this.error.note.textContent = now.byHand ? 'Seen at the points of the picture. Nothing is proved about a network that is built by hand.' : now.isOwn ? (bound === null ? 'The bound is for a norm over the box, and not for each point.' : 'The error stays within the band at every point, rounding included: that is proven.') : 'At another β the weights are others, and the proof is not about them.';

    this.map.figure.hidden = !now.units.length;
    if (now.units.length) this.drawMap(xs, x, range, at, winners, few);
    const output = looked.outputs[0];
    const target = between(picture, [at]);
    this.reading = `${this.first()}At ${x} = ${shown(at, 4)}: network ${shown(output, 4)}, function ${shown(target, 4)}. ${this.won(looked.weights, winners)}.`;
    return worst;
  }

  // The weights of all heads: one row per key, heads below one another.
  drawMap(xs, x, range, at, winners, anchors) {
    const { units } = this.now;
    const c = colours();
    const count = xs.length;
    const total = units.reduce((sum, unit) => sum + unit.numKeys, 0);
    const share = Math.max(1, Math.ceil(total / MOST_ROWS));
    const bands = [];
    let row = 0;
    for (const unit of units) {
      const rows = Math.ceil(unit.numKeys / share);
      bands.push({ unit, start: row, rows });
      row += rows + (units.length > 1 ? Math.max(1, Math.round(total / share / 40)) : 0);
    }
    const rows = bands.at(-1).start + bands.at(-1).rows;
    const table = scale('weights');
    const ordered = bands.map(({ unit }) => order(unit, count));
    const paint = (data) => {
      data.fill(0);
      bands.forEach(({ unit, start, rows: size }, b) => {
        const rank = ordered[b];
        for (let r = 0; r < size; r++) {
          const line = rows - 1 - (start + r);
          for (let n = 0; n < count; n++) {
            let most = 0;
            for (let k = r * share; k < Math.min(unit.numKeys, (r + 1) * share); k++) most = Math.max(most, unit.map[n * unit.numKeys + rank[k]]);
            const shade = Math.round(255 * Math.min(1, most || 0));
            const pixel = 4 * (line * count + n);
            data[pixel] = table[3 * shade];
            data[pixel + 1] = table[3 * shade + 1];
            data[pixel + 2] = table[3 * shade + 2];
            data[pixel + 3] = 255;
          }
        }
      });
    };
    const layers = [];
    bands.forEach(({ unit, start }, b) => {
      const back = new Int32Array(unit.numKeys);
      ordered[b].forEach((k, i) => (back[k] = i));
      const steps = new Float64Array(count);
      for (let n = 0; n < count; n++) steps[n] = start + Math.floor(back[winner(unit.map, n, unit.numKeys)] / share) + 0.5;
      layers.push({ kind: 'line', xs, ys: steps, colour: c.key, halo: rows <= THICK ? c.surface : null, width: rows <= THICK ? 1.6 : 1.1 });
      const mine = anchors.filter((key) => key.unit === b && key.at[0] >= range[0] && key.at[0] <= range[1]);
      layers.push({ kind: 'points', xs: mine.map((key) => key.at[0]), ys: mine.map((key) => start + Math.floor(back[key.k] / share) + 0.5), colour: c.key, fill: c.surface, r: total > 40 ? 2 : 3.4 });
    });
    layers.push({ kind: 'upright', x: at, colour: c.muted, dash: '2 3', width: 1 });
    const named = bands.flatMap(({ unit, start, rows: size }, b) => {
      if (units.length > 1) return [{ at: start + size / 2, text: units.length > 9 ? `${b + 1}` : `head ${b + 1}` }];
      const step = Math.max(1, Math.ceil(size / 8));
      return Array.from({ length: Math.ceil(size / step) }, (_, i) => ({ at: i * step + 0.5, text: String(i * step * share + 1) }));
    });
    this.map.draw({
      x: range,
      y: [0, rows],
      labelX: x,
      labelY: units.length > 1 ? '' : 'key',
      ticksY: named.map((one) => one.at),
      nameY: (y) => named.find((one) => one.at === y)?.text ?? '',
      image: { columns: count, rows, paint },
      layers,
    });
    this.map.setLegend([[c.key, 'the key that wins'], [`rgb(${table[3 * 200]},${table[3 * 200 + 1]},${table[3 * 200 + 2]})`, `weight, from 0 to 1${share > 1 ? `; ${share} keys share a row` : ''}`, 'box']]);
  }

  drawPlane() {
    const { now } = this;
    const { picture, certificate } = now.network;
    const c = colours();
    const [x, y] = now.variables;
    const { count, lo, hi } = picture;
    const ranges = { x: [lo[0], hi[0]], y: [lo[1], hi[1]], labelX: x, labelY: y };
    const [low, high] = spread([...picture.target]);
    const errors = Float64Array.from(now.outputs, (z, i) => z - picture.target[i]);
    const worst = errors.reduce((most, e) => Math.max(most, Math.abs(e)), 0);
    const at = this.pointer();
    const looked = now.look(at);
    const image = (values, from, to, name) => {
      const table = scale(name);
      return { columns: count, rows: count, paint: (data) => paintPlane(data, count, (i) => 3 * Math.max(0, Math.min(255, Math.round((255 * (values[i] - from)) / (to - from || 1)))), table) };
    };
    const here = [
      { kind: 'points', xs: [at[0]], ys: [at[1]], colour: c.surface, fill: 'none', r: 7.5, stroke: 3.5 },
      { kind: 'points', xs: [at[0]], ys: [at[1]], colour: c.text, fill: 'none', r: 7.5, stroke: 1.5 },
    ];
    const cells = this.cells(count);
    const anchors = now.units.flatMap((unit, u) => placesOf(unit, now.points, 2).filter(Boolean).map((place) => ({ ...place, unit: u, weight: looked.weights[u][place.k] })));
    const seen = now.units.length === 1 && anchors.length <= 300 ? anchors : []; // a key of several heads has no place
    const keyCircles = [
      { kind: 'points', xs: seen.map((key) => key.at[0]), ys: seen.map((key) => key.at[1]), colour: c.text, fill: c.text, r: 1.6, stroke: 0 },
      { kind: 'points', xs: seen.map((key) => key.at[0]), ys: seen.map((key) => key.at[1]), r: seen.map((key) => 16 * Math.sqrt(key.weight)), colour: c.text, fill: 'none', stroke: 1.6 },
    ];
    this.target2.draw({ ...ranges, image: image(picture.target, low, high, 'values'), layers: here });
    this.target2.note.textContent = `${this.first()}From ${shown(low)} (dark) to ${shown(high)} (bright)`;
    this.network2.draw({ ...ranges, image: image(now.outputs, low, high, 'values'), layers: [...keyCircles, ...here] });
    this.network2.note.textContent = seen.length ? 'The same colours. Circles: attention at the pointer.' : 'The same colours.';
    const reach = nice(Math.max(worst, 1e-16));
    this.error2.draw({ ...ranges, image: image(errors, -reach, reach, 'errors'), layers: here });
    const bound = now.isOwn && certificate.norm === 'inf' && certificate.bound !== null ? `; proven: at most ${ceiling(certificate.bound)}` : '';
    this.error2.note.textContent = `Colours from −${shown(reach)} (blue) to ${shown(reach)} (orange)${bound}`;
    this.partition.draw({ ...ranges, image: { columns: count, rows: count, paint: (data) => paintCells(data, count, cells.ids) }, layers: [...keyCircles, ...here] });
    const each = now.units.length > 1 ? ' of each head' : '';
    this.partition.note.textContent = cells.number === 1 ? `1 cell: one key${each} wins everywhere` : `${cells.number} cells; a colour is one key${each}`;

    const winners = now.units.map((unit, u) => winner(looked.weights[u], 0, unit.numKeys));
    this.drawKeys(looked.weights, winners);
    const target = between(picture, at);
    this.reading = `${this.first()}At ${x} = ${shown(at[0], 3)}, ${y} = ${shown(at[1], 3)}: network ${shown(looked.outputs[0], 3)}, function ${shown(target, 3)}. ${this.won(looked.weights, winners)}.`;
    return worst;
  }

  // The weight of every key at the pointer: heads beside one another, and in each the key that wins.
  drawKeys(maps, winners) {
    const { units } = this.now;
    const c = colours();
    const weights = maps.flatMap((map) => Array.from(map));
    this.keys.figure.hidden = !weights.length;
    if (!weights.length) return;
    const most = Math.max(...weights);
    const starts = units.map((_, u) => units.slice(0, u).reduce((sum, unit) => sum + unit.numKeys, 0));
    const ticksX = units.flatMap(({ numKeys }, u) => {
      if (units.length > 9) return u % 5 ? [] : [{ at: starts[u] + numKeys / 2, text: `head ${u + 1}` }];
      const step = nice(numKeys / (units.length > 1 ? 3 : 8));
      return Array.from({ length: numKeys }, (_, k) => k).filter((k) => k % Math.ceil(step) === 0).map((k) => ({ at: starts[u] + k + 0.5, text: String(k + 1) }));
    });
    this.keys.draw({
      x: [0, weights.length],
      y: [0, most > 0.55 ? 1 : nice(most * 1.1)],
      ticksX,
      labelX: units.length > 1 ? 'key, one head after the other' : 'key',
      labelY: 'weight',
      layers: [
        { kind: 'bars', ys: weights, colour: c.network, best: winners.map((k, u) => starts[u] + k), bestColour: c.key },
        ...starts.slice(1).map((x) => ({ kind: 'upright', x, colour: c.muted, dash: '2 3', width: 1 })),
      ],
    });
    this.keys.setLegend([[c.network, 'weight of each key', 'bar'], [c.key, `the key that wins${units.length > 1 ? ' in its head' : ''}`, 'bar'], ...(units.length > 1 ? [[c.muted, 'between two heads', 'dashed']] : [])]);
  }

  // Words on the keys that win at the pointer.
  won(maps, winners) {
    const { units } = this.now;
    const words = units.slice(0, 4).map((unit, u) => {
      const text = outcome(maps[u], winners[u]);
      return unit.label ? `${unit.label}: ${text}` : `${text[0].toUpperCase()}${text.slice(1)}`;
    });
    if (units.length > 4) words.push(`${units.length - 4} more heads`);
    return words.join('; ') || NO_KEYS;
  }

  // The cells of the partition: points at which the same key of each head wins.
  cells(count) {
    const { units } = this.now;
    const ids = new Int32Array(count * count);
    const known = new Map();
    for (let n = 0; n < ids.length; n++) {
      let id = 0;
      if (units.length === 1) id = winner(units[0].map, n, units[0].numKeys);
      else {
        const name = units.map((unit) => winner(unit.map, n, unit.numKeys)).join();
        if (!known.has(name)) known.set(name, known.size);
        id = known.get(name);
      }
      ids[n] = id;
    }
    return { ids, number: new Set(ids).size };
  }
}

function spread(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (high - low < 1e-12 * Math.max(1, Math.abs(high))) return [low - 1, high + 1];
  return [low, high];
}

// The next of 1, 1.5, 2, 3, 5, 7 times a power of ten: an axis that does not tremble while a slider moves.
function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return ([1, 1.5, 2, 3, 5, 7, 10].find((step) => step * power >= value * (1 - 1e-9)) ?? 10) * power;
}

// The function at a point, between the points of the picture.
function between(picture, at) {
  const { lo, hi, count, target } = picture;
  const share = at.map((x, i) => Math.max(0, Math.min(count - 1, ((x - lo[i]) / (hi[i] - lo[i])) * (count - 1))));
  const low = share.map((s) => Math.min(count - 2, Math.floor(s)));
  const [tx, ty = 0] = share.map((s, i) => s - low[i]);
  const row = (start) => (1 - tx) * target[start + low[0]] + tx * target[start + low[0] + 1];
  if (at.length === 1) return row(0);
  return (1 - ty) * row(low[1] * count) + ty * row((low[1] + 1) * count);
}

// One head at the pointer. A weight that is not a number, or 0, wins nothing, and equal weights have no winner.
function outcome(weights, best) {
  const most = weights[best];
  if (!(most > 0)) return 'no key wins: the weights are 0, or no numbers';
  if (weights.length > 1 && weights.every((weight) => weight === most)) return `all keys have the same weight, ${shown(most, 2)}`;
  return `key ${best + 1} wins with weight ${shown(most, 2)}`;
}

// The places of keys: given, or the middle of the points at which each wins.
function placesOf(unit, points, d = 1) {
  if (unit.places) return unit.places.map((at, k) => ({ at, k, value: unit.values[k], own: unit.own[k] }));
  const sums = new Float64Array(unit.numKeys * d);
  const wins = new Int32Array(unit.numKeys);
  const count = points.length / d;
  for (let n = 0; n < count; n++) {
    const k = winner(unit.map, n, unit.numKeys);
    wins[k] += 1;
    for (let i = 0; i < d; i++) sums[k * d + i] += points[n * d + i];
  }
  return Array.from(wins, (number, k) => (number ? { at: Array.from({ length: d }, (_, i) => sums[k * d + i] / number), k, own: true } : null));
}

// Keys from left to right, by the place of their largest weight.
function order(unit, count) {
  if (unit.places) return Array.from({ length: unit.numKeys }, (_, k) => k);
  const centre = new Float64Array(unit.numKeys);
  for (let k = 0; k < unit.numKeys; k++) {
    let [mass, moment] = [0, 0];
    for (let n = 0; n < count; n += 3) {
      const weight = unit.map[n * unit.numKeys + k];
      mass += weight;
      moment += weight * n;
    }
    centre[k] = mass > 0 ? moment / mass : 0;
  }
  return Array.from(centre.keys()).sort((a, b) => centre[a] - centre[b] || a - b);
}

function paintPlane(data, count, shade, table) {
  for (let r = 0; r < count; r++) {
    for (let col = 0; col < count; col++) {
      const from = shade(r * count + col);
      const pixel = 4 * ((count - 1 - r) * count + col);
      data[pixel] = table[from];
      data[pixel + 1] = table[from + 1];
      data[pixel + 2] = table[from + 2];
      data[pixel + 3] = 255;
    }
  }
}

function paintCells(data, count, ids) {
  const known = new Map();
  for (let r = 0; r < count; r++) {
    for (let col = 0; col < count; col++) {
      const id = ids[r * count + col];
      if (!known.has(id)) known.set(id, cellColour(id));
      const pixel = 4 * ((count - 1 - r) * count + col);
      data.set(known.get(id), pixel);
      data[pixel + 3] = 255;
    }
  }
}
