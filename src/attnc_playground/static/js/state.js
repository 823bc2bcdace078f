// The whole state of the page, and its text form in the address.

export const DEFAULTS = {
  tab: 'function',
  f: 'sin(x)',
  box: { x: ['-3', '3'] },
  eps: '1e-3',
  norm: 'inf',
  construction: 'auto',
  view: 'byhand',
  beta: 667,
  keys: 9,
  heads: 1,
  sentinels: 1,
  arithmetic: 'float64',
  at: null,
  model: 'descent',
  steps: 8,
  step: 50,
  pairs: 4,
  degree: 1,
  alpha: -10,
  gamma: 6,
  points: [[-0.9, -0.6], [-0.55, -0.45], [-0.3, 0.05], [0, -0.1], [0.25, 0.35], [0.5, 0.3], [0.75, 0.75], [0.95, 0.6]],
};

const COUNTS = { beta: [0, 1000], keys: [2, 64], heads: [1, 8], sentinels: [0, 4], steps: [1, 60], step: [5, 100], pairs: [1, 4], degree: [1, 5], alpha: [-40, 10], gamma: [-10, 20] };
const WORDS = {
  tab: ['function', 'incontext'],
  view: ['byhand', 'compiled'],
  arithmetic: ['float64', 'float32', 'plain32'],
  model: ['descent', 'ridge', 'kernel'],
};

export const state = structuredClone(DEFAULTS);

/** The position of the temperature that a view begins with: β = 10 by hand, and its own β for a compiled network. */
export const FIRST = { byhand: 667, compiled: 500 };

/** The state as the part of an address after #. Values that are the defaults are left out. */
export function encode(from = state) {
  const query = new URLSearchParams();
  const usual = { ...DEFAULTS, beta: FIRST[from.view] };
  for (const [name, value] of Object.entries(from)) {
    const text = written(name, value);
    if (text !== null && text !== written(name, usual[name])) query.set(name, text);
  }
  return query.toString();
}

function written(name, value) {
  if (value === null || value === undefined) return null;
  if (name === 'box') return Object.entries(value).map(([variable, [lo, hi]]) => `${variable}:${lo}:${hi}`).join(';');
  if (name === 'points') return value.map((pair) => pair.map((x) => Number(x.toFixed(3))).join(',')).join(';');
  if (name === 'at') return value.map((x) => Number(x.toPrecision(5))).join(',');
  return String(value);
}

/** Read an address. What is missing or not valid is as by default. */
export function decode(text) {
  const found = structuredClone(DEFAULTS);
  const query = new URLSearchParams(text);
  for (const [name, value] of query) {
    if (Object.hasOwn(COUNTS, name)) {
      const number = Math.round(Number(value));
      if (Number.isFinite(number)) found[name] = Math.min(COUNTS[name][1], Math.max(COUNTS[name][0], number));
    } else if (Object.hasOwn(WORDS, name)) {
      if (WORDS[name].includes(value)) found[name] = value;
    } else if (name === 'box') {
      const sides = value.split(';').map((side) => side.split(':')).filter((side) => side.length === 3 && /^[A-Za-z_]\w{0,39}$/.test(side[0]));
      if (sides.length && sides.length <= 4) found.box = Object.fromEntries(sides.map(([variable, lo, hi]) => [variable, [lo.slice(0, 24), hi.slice(0, 24)]]));
    } else if (name === 'points') {
      const points = value.split(';').map((pair) => pair.split(',').map(Number));
      const within = points.filter(([x, y]) => Math.abs(x) <= 1 && Math.abs(y) <= 1.2);
      if (within.length >= 2) found.points = within.slice(0, 40).map(([x, y]) => [x, y]);
    } else if (name === 'at') {
      const at = value.split(',').map(Number);
      if (at.length <= 2 && at.every(Number.isFinite)) found.at = at;
    } else if (name === 'norm') {
      found.norm = value === 'inf' || !(Number(value) >= 1) ? 'inf' : Number(value);
    } else if (['f', 'eps', 'construction'].includes(name)) found[name] = value.slice(0, 500);
  }
  if (!query.has('beta')) found.beta = FIRST[found.view];
  return found;
}
