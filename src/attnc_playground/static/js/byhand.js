// Networks that are built in the page: one head whose keys are evenly spaced, as in the construction `max_affine`, or
// several heads with sentinels, as in `truncated_linear_heads`.
//
// In units of the spacing, key k is at L_k and has the score β(2 L_k·y − |L_k|²), so its weight is ∝ exp(−β|y − L_k|²).
// Its value is the target at its place. With several heads, each head has the keys of its own block, and `sentinels`
// more on each side at the places of its neighbours' keys, of value 0. So a head returns 0 where another head's block
// is, and the sum of the heads is the network. The outer sentinels of the first and last head carry the end values.

import { softmax } from './engine.js';

/** Return the heads: for each its keys' places (in spacings), their values, and which of them are sentinels. */
export function build({ lo, hi, keys, heads = 1, sentinels = 1, values }) {
  const d = lo.length;
  const scale = lo.map((low, i) => keys / (hi[i] - low));
  const place = (k) => k - (keys - 1) / 2;
  const base = { lo, hi, scale, keys, d };
  if (d === 2) {
    const L = new Float64Array(2 * keys * keys);
    for (let r = 0; r < keys; r++) for (let c = 0; c < keys; c++) L.set([place(c), place(r)], 2 * (r * keys + c));
    return { ...base, heads: [{ L, v: Float64Array.from(values), own: new Array(keys * keys).fill(true) }] };
  }
  const count = Math.min(heads, keys);
  const built = [];
  for (let h = 0; h < count; h++) {
    const [start, stop] = [Math.round((h * keys) / count), Math.round(((h + 1) * keys) / count)];
    const around = count === 1 ? 0 : sentinels;
    const numbers = [];
    for (let k = start - around; k < stop + around; k++) numbers.push(k);
    const [before, after] = [h === 0 ? values[0] : 0, h === count - 1 ? values[keys - 1] : 0];
    const valueOf = (k) => (k >= start && k < stop ? values[k] : k < 0 ? before : k >= keys ? after : 0);
    built.push({
      L: Float64Array.from(numbers, place),
      v: Float64Array.from(numbers, valueOf),
      own: numbers.map((k) => k >= start && k < stop),
      numbers,
    });
  }
  return { ...base, heads: built };
}

/** The place of a key in the units of the picture. */
export function anchor(network, place, axis = 0) {
  return (network.lo[axis] + network.hi[axis]) / 2 + place / network.scale[axis];
}

// Softmax in the arithmetic of choice. In float32, every product, sum and exponential is rounded to float32. 'plain32'
// also leaves out the subtraction of the largest score, as a careless implementation would.
function weigh(scores, count, arithmetic) {
  if (arithmetic === 'float64') return softmax(scores, count);
  const f = Math.fround;
  let most = 0;
  if (arithmetic === 'float32') {
    most = -Infinity;
    for (let k = 0; k < count; k++) most = Math.max(most, scores[k]);
  }
  let total = 0;
  for (let k = 0; k < count; k++) {
    scores[k] = f(Math.exp(f(scores[k] - most)));
    total = f(total + scores[k]);
  }
  for (let k = 0; k < count; k++) scores[k] = f(scores[k] / total);
  return undefined;
}

/** Evaluate at flat points. β may be 0 (uniform) or Infinity (one-hot). Returns what `engine.evaluate` returns. */
export function run(network, points, beta, { weights = false, arithmetic = 'float64' } = {}) {
  const { d, lo, hi, scale } = network;
  const count = points.length / d;
  const outputs = new Float64Array(count);
  const f = arithmetic === 'float64' ? (x) => x : Math.fround;
  const hard = beta === Infinity;
  const b = f(hard ? 1 : beta);
  const maps = weights ? network.heads.map((head) => new Float32Array(count * head.v.length)) : null;
  let largestScore = 0;
  network.heads.forEach((head, number) => {
    const { L, v } = head;
    const size = v.length;
    const scores = new Float64Array(size);
    const squares = new Float64Array(size);
    for (let k = 0; k < size; k++) for (let i = 0; i < d; i++) squares[k] += L[k * d + i] ** 2;
    for (let n = 0; n < count; n++) {
      const y0 = (points[n * d] - (lo[0] + hi[0]) / 2) * scale[0];
      const y1 = d === 2 ? (points[n * d + 1] - (lo[1] + hi[1]) / 2) * scale[1] : 0;
      for (let k = 0; k < size; k++) {
        const product = d === 2 ? L[2 * k] * y0 + L[2 * k + 1] * y1 : L[k] * y0;
        scores[k] = f(b * f(f(2 * product) - squares[k]));
        const score = Math.abs(scores[k]);
        if (score > largestScore) largestScore = score;
      }
      if (hard) softmax(scores, size, Infinity);
      else weigh(scores, size, arithmetic);
      let sum = 0;
      for (let k = 0; k < size; k++) sum = f(sum + f(scores[k] * v[k]));
      outputs[n] += sum;
      if (maps) maps[number].set(scores, n * size);
    }
  });
  return { outputs, weights: maps, largestScore };
}
