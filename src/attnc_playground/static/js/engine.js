// Runs a program of attnc: affine maps and softmax attention, with the numbers that the server sent and no others.
//
// `fold` follows the data back from the outputs. Every entry of a state is an affine form c + Σ a_i u_i of a vector u:
// first the inputs of the network, then the results of heads. Keys that do not depend on the input become plain
// arrays. `evaluate` then computes, for each point, each head's softmax once. β is part of the stored weights;
// `sharpness` multiplies all scores, so 1 is the network itself, 0 is uniform attention, and Infinity is one-hot.

const ZERO = { c: 0, v: [], a: [] };
const EVERY_QUERY = -1; // the segment of a key that every query may see

function isConstant(form) {
  return form.v.length === 0;
}

class Sum {
  constructor() {
    this.c = 0;
    this.terms = new Map();
  }
  add(factor, form) {
    if (factor === 0) return;
    this.c += factor * form.c;
    for (let i = 0; i < form.v.length; i++) {
      this.terms.set(form.v[i], (this.terms.get(form.v[i]) ?? 0) + factor * form.a[i]);
    }
  }
  form() {
    return this.terms.size || this.c ? { c: this.c, v: [...this.terms.keys()], a: [...this.terms.values()] } : ZERO;
  }
}

function affineRows(layer) {
  const [tokens, width, , widthIn] = layer.weight.shape;
  const rows = new Map();
  const { index, values } = layer.weight;
  for (let i = 0; i < values.length; i++) {
    const cell = index[4 * i] * width + index[4 * i + 1];
    let row = rows.get(cell);
    if (!row) rows.set(cell, (row = []));
    row.push(index[4 * i + 2], index[4 * i + 3], values[i]);
  }
  const constants = new Map();
  const B = layer.constant;
  for (let i = 0; i < B.values.length; i++) constants.set(B.index[2 * i] * width + B.index[2 * i + 1], B.values[i]);
  return { tokens, width, widthIn, rows, constants };
}

class Stream {
  constructor(layers, tokens, first, width) {
    this.layers = layers.map((layer) => ({ ...layer, ...(layer.kind === 'affine' ? affineRows(layer) : {}) }));
    this.tokens = [tokens]; // tokens before and after each layer
    for (const layer of this.layers) this.tokens.push(layer.kind === 'affine' ? layer.tokens : this.tokens.at(-1));
    this.first = first; // the number of its first input
    this.width = width;
    this.known = this.tokens.map(() => new Map());
  }
}

class Folding {
  constructor(program) {
    const shapes = program.input_shapes.map((shape) => [shape.slice(0, -1).reduce((a, b) => a * b, 1), shape.at(-1)]);
    const [main, second = [0, 0]] = shapes;
    this.numInputs = main[0] * main[1] + second[0] * second[1];
    this.numVariables = this.numInputs;
    this.units = [];
    this.main = new Stream(program.layers, main[0], 0, main[1]);
    this.memory = new Stream(program.memory, second[0], main[0] * main[1], second[1]);
    this.sources = new Map();
    this.queries = new Map();
  }

  // The entry (token, column) of the state after `level` layers of a stream.
  entry(stream, level, token, column) {
    if (level === 0) return { c: 0, v: [stream.first + token * stream.width + column], a: [1] };
    const layer = stream.layers[level - 1];
    const key = token * layer.width + column;
    let found = stream.known[level].get(key);
    if (found === undefined) {
      found = this.made(stream, level, layer, token, column);
      stream.known[level].set(key, found);
    }
    return found;
  }

  made(stream, level, layer, token, column) {
    const sum = new Sum();
    if (layer.kind === 'affine') {
      const cell = token * layer.width + column;
      sum.c = layer.constants.get(cell) ?? 0;
      const row = layer.rows.get(cell) ?? [];
      for (let i = 0; i < row.length; i += 3) sum.add(row[i + 2], this.entry(stream, level - 1, row[i], row[i + 1]));
    } else if (layer.kind === 'softmax') {
      const unit = this.softmax(stream, level, layer, token);
      sum.add(1, { c: 0, v: [unit.first + column], a: [1] });
    } else {
      if (layer.residual) sum.add(1, this.entry(stream, level - 1, token, column));
      layer.heads.forEach((head, number) => {
        if (!head.W_O.some((row) => row[column] !== 0)) return;
        const unit = this.attention(stream, level, layer, number, token);
        head.W_O.forEach((row, j) => sum.add(row[column], { c: 0, v: [unit.first + j], a: [1] }));
      });
    }
    return sum.form();
  }

  softmax(stream, level, layer, token) {
    const name = `${level}/${token}`;
    let unit = this.queries.get(name);
    if (!unit) {
      const scores = [];
      for (let j = 0; j < layer.width; j++) scores.push(this.entry(stream, level - 1, token, j));
      unit = this.unit({ kind: 'softmax', layer: layer.name, head: 0, scores, numKeys: layer.width, width: layer.width });
      this.queries.set(name, unit);
    }
    return unit;
  }

  attention(stream, level, layer, number, token) {
    const name = `${stream === this.main ? 'main' : 'memory'}/${level}/${number}/${token}`;
    let unit = this.queries.get(name);
    if (!unit) {
      const head = layer.heads[number];
      const query = this.projected(stream, level - 1, token, head.W_Q);
      const seen = this.seen(stream, level, layer, number, token);
      unit = this.unit({ kind: 'attention', layer: layer.name, head: number, query, ...seen, width: seen.valueWidth });
      this.queries.set(name, unit);
    }
    return unit;
  }

  unit(facts) {
    const unit = { ...facts, first: this.numVariables };
    this.numVariables += unit.width;
    this.units.push(unit);
    return unit;
  }

  projected(stream, level, token, W) {
    return W[0].map((_, j) => {
      const sum = new Sum();
      W.forEach((row, w) => row[j] !== 0 && sum.add(row[j], this.entry(stream, level, token, w)));
      return sum.form();
    });
  }

  // The keys and values that a query sees: arrays of numbers, or of forms where they depend on the input.
  seen(stream, level, layer, number, token) {
    const head = layer.heads[number];
    const [source, at] = layer.cross ? [this.memory, this.memory.layers.length] : [stream, level - 1];
    const segments = head.mask && [head.mask[0][token], head.mask[1]];
    const name = `${stream === this.main}/${level}/${number}/${segments ? segments[0] : ''}`;
    let found = this.sources.get(name);
    if (!found) {
      const keys = [];
      const values = [];
      for (let t = 0; t < source.tokens[at]; t++) {
        if (segments && segments[1][t] !== EVERY_QUERY && segments[1][t] !== segments[0]) continue;
        keys.push(this.projected(source, at, t, head.W_K));
        values.push(this.projected(source, at, t, head.W_V));
      }
      const plain = [...keys, ...values].every((forms) => forms.every(isConstant));
      const flat = (rows) => (plain ? Float64Array.from(rows.flat(), (form) => form.c) : rows.flat());
      const shape = { numKeys: keys.length, keyWidth: head.W_K[0].length, valueWidth: head.W_V[0].length };
      found = { plain, keys: flat(keys), values: flat(values), ...shape };
      this.sources.set(name, found);
    }
    return found;
  }
}

/** Fold a program, as `/api/compile` returns it, for its first output or for some of them. */
export function fold(program, outputs = [0]) {
  const folding = new Folding(program);
  const level = folding.main.layers.length;
  const { width } = folding.main.layers[level - 1];
  const forms = outputs.map((i) => folding.entry(folding.main, level, Math.floor(i / width), i % width));
  return { numInputs: folding.numInputs, numVariables: folding.numVariables, units: folding.units, outputs: forms };
}

function valueOf(form, u) {
  let sum = form.c;
  for (let i = 0; i < form.v.length; i++) sum += form.a[i] * u[form.v[i]];
  return sum;
}

/** Turn scores into softmax weights in place, by log-sum-exp. `sharpness` 0 and Infinity are the two limits. */
export function softmax(scores, count, sharpness = 1) {
  let most = -Infinity;
  for (let k = 0; k < count; k++) if (scores[k] > most) most = scores[k];
  if (sharpness === Infinity) {
    let winners = 0;
    for (let k = 0; k < count; k++) winners += scores[k] === most ? 1 : 0;
    for (let k = 0; k < count; k++) scores[k] = scores[k] === most ? 1 / winners : 0;
    return;
  }
  let total = 0;
  for (let k = 0; k < count; k++) {
    scores[k] = Math.exp(sharpness * (scores[k] - most));
    total += scores[k];
  }
  for (let k = 0; k < count; k++) scores[k] /= total;
}

/**
 * Evaluate a folded program at points (a flat array, one row of numInputs per point).
 * With `weights`, also return for each unit the softmax weights at each point, as Float32Array (points × keys).
 */
export function evaluate(folded, points, { sharpness = 1, weights = false } = {}) {
  const count = points.length / folded.numInputs;
  const outputs = new Float64Array(count * folded.outputs.length);
  const maps = weights ? folded.units.map((unit) => new Float32Array(count * unit.numKeys)) : null;
  const u = new Float64Array(folded.numVariables);
  const scores = new Float64Array(Math.max(1, ...folded.units.map((unit) => unit.numKeys)));
  const query = new Float64Array(Math.max(1, ...folded.units.map((unit) => unit.keyWidth ?? 1)));
  let largestScore = 0;
  for (let n = 0; n < count; n++) {
    for (let i = 0; i < folded.numInputs; i++) u[i] = points[n * folded.numInputs + i];
    folded.units.forEach((unit, number) => {
      if (unit.kind === 'softmax') {
        for (let k = 0; k < unit.numKeys; k++) scores[k] = valueOf(unit.scores[k], u);
      } else {
        const { keyWidth, keys, plain } = unit;
        for (let j = 0; j < keyWidth; j++) query[j] = valueOf(unit.query[j], u);
        for (let k = 0, at = 0; k < unit.numKeys; k++) {
          let score = 0;
          for (let j = 0; j < keyWidth; j++, at++) score += query[j] * (plain ? keys[at] : valueOf(keys[at], u));
          scores[k] = score;
        }
      }
      for (let k = 0; k < unit.numKeys; k++) largestScore = Math.max(largestScore, Math.abs(scores[k]));
      softmax(scores, unit.numKeys, sharpness);
      if (unit.kind === 'softmax') {
        for (let k = 0; k < unit.numKeys; k++) u[unit.first + k] = scores[k];
      } else {
        const { valueWidth, values, plain } = unit;
        for (let j = 0; j < valueWidth; j++) {
          let sum = 0;
          for (let k = 0; k < unit.numKeys; k++) {
            const at = k * valueWidth + j;
            sum += scores[k] * (plain ? values[at] : valueOf(values[at], u));
          }
          u[unit.first + j] = sum;
        }
      }
      if (maps) maps[number].set(scores.subarray(0, unit.numKeys), n * unit.numKeys);
    });
    folded.outputs.forEach((form, i) => (outputs[n * folded.outputs.length + i] = valueOf(form, u)));
  }
  const finite = Number.isFinite(sharpness) ? sharpness : 1;
  return { outputs, weights: maps, largestScore: largestScore * finite };
}

/** Return the flat points of a line or of a plane: `count` along each axis, both ends included. */
export function lattice(lo, hi, count) {
  // The server took the function at these points, rounded as numpy.linspace does. The error of an affine map shows any difference.
  const axis = (i) => {
    const step = (hi[i] - lo[i]) / (count - 1);
    return Array.from({ length: count }, (_, k) => (k === count - 1 ? hi[i] : k * step + lo[i]));
  };
  if (lo.length === 1) return Float64Array.from(axis(0));
  const [xs, ys] = [axis(0), axis(1)];
  const points = new Float64Array(2 * count * count);
  for (let r = 0; r < count; r++) for (let c = 0; c < count; c++) points.set([xs[c], ys[r]], 2 * (r * count + c));
  return points;
}

/** The number of the largest weight in a row of a map. */
export function winner(map, row, numKeys) {
  let best = 0;
  for (let k = 1; k < numKeys; k++) if (map[row * numKeys + k] > map[row * numKeys + best]) best = k;
  return best;
}
