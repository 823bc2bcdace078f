// The failure signatures of attention, as attnc.diagnose finds them (attnc_lab/signatures.py): the same definitions,
// in the same order, from the outputs and weights that the page has computed at the points of its picture.

const DOMINATES = 0.5; // the median peak above which keys dominate
const WINS = 0.95; // the median peak above which they win
const EXCESS = 3; // an error belongs to a place if it exceeds the error elsewhere by this factor
const SILENT = 1e-3; // a head whose weight is below this is inactive
const FACTORS = Array.from({ length: 12 }, (_, k) => 2 ** (k + 1)); // factors by which scores are sharpened for a test
const ROUNDOFF = { float64: 2 ** -53, float32: 2 ** -24, plain32: 2 ** -24 };

/** Sentences that explain a signature to a reader. */
export const MEANING = {
  'diffuse attention': 'No key dominates: attention is spread over many keys, and the output is an average of their values.',
  'drift between anchors': 'Keys dominate but do not win: between two anchors the output passes smoothly from one value to the next.',
  oscillation: 'The selection is sharp, but the function varies within the cell of one key: the error swings from cell to cell.',
  'boundary artefacts': 'The error is largest near the ends of the box, where keys have neighbours on one side only.',
  'seams between heads': 'The error is largest where one head takes over from another.',
  underflow: 'The arithmetic fails: exponentials are all zero or overflow, or rounding of large scores selects the key.',
};

function median(numbers) {
  const sorted = Float64Array.from(numbers).sort();
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

function quantile(numbers, share) {
  const sorted = Float64Array.from(numbers).sort();
  const at = share * (sorted.length - 1);
  const low = Math.floor(at);
  return sorted[low] + (at - low) * ((sorted[low + 1] ?? sorted[low]) - sorted[low]);
}

const finite = (weight) => (Number.isFinite(weight) ? weight : 0);

// For each head: the winning key at each point, and the largest weight of every key that wins somewhere.
function winnersOf(map, numKeys, count) {
  const first = new Int32Array(count);
  const peak = new Float64Array(numKeys);
  const at = new Int32Array(numKeys);
  const wins = new Int32Array(numKeys);
  for (let n = 0; n < count; n++) {
    let best = 0;
    for (let k = 0; k < numKeys; k++) {
      const weight = finite(map[n * numKeys + k]);
      if (weight > finite(map[n * numKeys + best])) best = k;
      if (weight > peak[k]) {
        peak[k] = weight;
        at[k] = n;
      }
    }
    first[n] = best;
    wins[best] += 1;
  }
  const keys = [...wins.keys()].filter((k) => wins[k] > 0);
  return { first, wins, keys, peaks: keys.map((k) => peak[k]), places: keys.map((k) => at[k]) };
}

function peaksAfter(map, numKeys, count, factor) {
  const peak = new Float64Array(numKeys);
  const wins = new Uint8Array(numKeys);
  const scores = new Float64Array(numKeys);
  for (let n = 0; n < count; n++) {
    let best = 0;
    for (let k = 0; k < numKeys; k++) {
      scores[k] = factor * Math.log(Math.max(finite(map[n * numKeys + k]), 1e-300));
      if (scores[k] > scores[best]) best = k;
    }
    let total = 0;
    for (let k = 0; k < numKeys; k++) total += Math.exp(scores[k] - scores[best]);
    for (let k = 0; k < numKeys; k++) peak[k] = Math.max(peak[k], Math.exp(scores[k] - scores[best]) / total);
    wins[best] = 1;
  }
  return [...peak].filter((_, k) => wins[k]);
}

/**
 * Return the signatures that are seen: [{name, evidence, at}].
 * heads: [{map, numKeys}]; outputs, wanted: per point; points: flat; lo, hi: the box or null; eps; largestScore;
 * arithmetic; sharpened(factor): the outputs at all points with all scores multiplied by the factor.
 */
export function signatures({ heads, outputs, wanted, points, lo, hi, eps, largestScore, arithmetic = 'float64', sharpened }) {
  const count = outputs.length;
  const errors = Float64Array.from(outputs, (y, n) => (Number.isFinite(y) ? Math.abs(y - wanted[n]) : Infinity));
  let worst = 0;
  for (let n = 0; n < count; n++) if (errors[n] > errors[worst]) worst = n;

  let broken = -1;
  for (let n = 0; n < count && broken < 0; n++) {
    if (!Number.isFinite(outputs[n])) broken = n;
    for (const { map, numKeys } of heads) {
      let sum = 0;
      for (let k = 0; k < numKeys; k++) sum += map[n * numKeys + k];
      if (!(Math.abs(sum - 1) < 1e-2)) broken = n;
    }
  }
  if (broken >= 0) {
    return [{ name: 'underflow', at: broken, evidence: 'the weights do not sum to 1, or the output is not a number' }];
  }
  if (!(errors[worst] > eps)) return [];
  const u = ROUNDOFF[arithmetic];
  if (u * largestScore >= 1) {
    const evidence = `scores reach ${largestScore.toExponential(1)} and are rounded by ${(u * largestScore).toPrecision(2)}`;
    return [{ name: 'underflow', at: worst, evidence }];
  }

  const isUniform = heads.every(({ map, numKeys }) => numKeys > 1 && map.every((weight) => weight < 1.001 / numKeys));
  if (isUniform) return [{ name: 'diffuse attention', at: worst, evidence: 'all keys have the same weight everywhere' }];

  const won = heads.map(({ map, numKeys }) => winnersOf(map, numKeys, count));
  const peaks = won.flatMap((head) => head.peaks);
  const peak = median(peaks);
  const numCells = Math.max(...won.map((head) => head.keys.length));

  // Places: at an end of the box, and at a seam between heads.
  const d = points.length / count;
  const perAxis = Math.max(4, numCells ** (1 / d));
  const atEnd = new Uint8Array(count);
  if (lo) {
    for (let n = 0; n < count; n++) {
      for (let i = 0; i < d; i++) {
        const x = points[n * d + i];
        if (Math.min(x - lo[i], hi[i] - x) / (hi[i] - lo[i]) < 1 / perAxis) atEnd[n] = 1;
      }
    }
  }
  const atSeam = new Uint8Array(count);
  if (heads.length > 1) {
    const active = new Uint8Array(count);
    heads.forEach(({ map, numKeys }, h) => {
      const typical = 2.5 * median([...won[h].wins].filter((wins) => wins > 0));
      for (let n = 0; n < count; n++) {
        let activity = 0;
        for (let k = 0; k < numKeys; k++) if (!(won[h].wins[k] > typical)) activity += map[n * numKeys + k];
        if (activity > SILENT && activity < 1 - SILENT) active[n] += 1;
      }
    });
    for (let n = 0; n < count; n++) atSeam[n] = active[n] >= 2 ? 1 : 0;
  }
  const largestWhere = (test) => {
    let found = -1;
    for (let n = 0; n < count; n++) if (test(n) && (found < 0 || errors[n] > errors[found])) found = n;
    return found;
  };
  const elsewhere = largestWhere((n) => !atEnd[n] && !atSeam[n]);
  const local = [];
  for (const [name, inside] of [
    ['boundary artefacts', (n) => atEnd[n]],
    ['seams between heads', (n) => atSeam[n] && !atEnd[n]],
  ]) {
    const here = largestWhere(inside);
    if (here < 0 || elsewhere < 0) continue;
    if (errors[here] > eps && errors[here] >= EXCESS * errors[elsewhere]) {
      const evidence = `the error there is ${errors[here].toPrecision(3)}, and ${errors[elsewhere].toPrecision(3)} elsewhere`;
      local.push({ name, at: here, evidence });
    }
  }
  if (local.length && !(elsewhere >= 0 && errors[elsewhere] > eps)) return local;

  const soft = softness();
  if (soft) return [...local, soft];
  const swing = oscillation();
  if (swing) return [...local, swing];
  return local.length ? local : flat();

  // attnc.diagnose names nothing if only the keys at the ends win, by a hair. The output is then nearly constant.
  function flat() {
    const range = (values) => values.reduce((most, y) => Math.max(most, y), -Infinity) - values.reduce((least, y) => Math.min(least, y), Infinity);
    if (peak >= DOMINATES || !(range(outputs) < 0.5 * range(wanted))) return [];
    const evidence = `the network varies by ${range(outputs).toPrecision(2)} where the function varies by ${range(wanted).toPrecision(2)}`;
    return [{ name: 'diffuse attention', at: worst, evidence }];
  }

  function softness() {
    if (peak >= WINS) return null;
    const places = [...new Set(won.flatMap((head) => head.places))];
    const before = quantile(places.map((n) => errors[n]), 0.9);
    const factor = FACTORS.find((tried) => median(heads.flatMap(({ map, numKeys }) => peaksAfter(map, numKeys, count, tried))) >= WINS) ?? FACTORS.at(-1);
    const sharp = sharpened(factor);
    const after = quantile(places.map((n) => Math.abs(sharp[n] - wanted[n])), 0.9);
    if (!(after < 0.7 * before) || before <= 0.5 * eps) return null;
    const at = places.reduce((best, n) => (errors[n] > errors[best] ? n : best), places[0]);
    const name = peak >= DOMINATES ? 'drift between anchors' : 'diffuse attention';
    const evidence = `the median of the largest weights is ${peak.toFixed(2)}; ${factor} times the β would win`;
    return { name, at, evidence };
  }

  function oscillation() {
    // A cell with a single sampled point, such as a tie at an end, shows nothing.
    const telling = won.filter((head) => head.wins[head.first[worst]] > 1);
    const most = (telling.length ? telling : won).reduce((best, head) => (head.keys.length > best.keys.length ? head : best));
    let [low, high] = [Infinity, -Infinity];
    for (let n = 0; n < count; n++) {
      if (most.first[n] !== most.first[worst]) continue;
      low = Math.min(low, wanted[n]);
      high = Math.max(high, wanted[n]);
    }
    if (high - low < eps || high - low < 0.5 * errors[worst]) return null;
    const evidence = `within the cell of one key the function varies by ${(high - low).toPrecision(3)}`;
    return { name: 'oscillation', at: worst, evidence };
  }
}
