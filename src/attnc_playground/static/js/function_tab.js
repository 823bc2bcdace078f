// The tab of a function: from the text to the network, its pictures and its sliders.

import { ApiError, cancel, post, postJson, save } from './api.js';
import * as byhand from './byhand.js';
import { byId, ceiling, debounced, eachFrame, grouped, make, shown } from './dom.js';
import { evaluate, fold, lattice } from './engine.js';
import { latex, variables } from './latex.js';
import { Pictures } from './pictures.js';
import { joined } from './plot.js';
import { PRESETS } from './presets.js';
import { MEANING, signatures } from './signatures.js';
import { FIRST, state } from './state.js';
import { costCurve, showConstructions, showLedger, showNoConstructions } from './tables.js';

const TYPING = 180; // milliseconds without a key after which the function is compiled
const MOST_VARIABLES = 4; // as the server allows
const COARSE = 37; // points per axis of a plane, and 151 of a line, at which the best β is sought

let network = null; // the answer of /api/compile
let folded = null;
let hand = null; // the network that is built by hand
let points = null;
let shownNow = null; // what the pictures show
let pictures = null;
let changed = () => {};
let frames = 0;
let recent = [];
let compared = ''; // the request whose constructions are in the table

const html = document.documentElement;

/** The factor of all scores, or β by hand, that a position of the slider stands for. Its ends are the two limits. */
export function sharpnessAt(position) {
  if (position <= 0) return 0;
  if (position >= 1000) return Infinity;
  return 10 ** (-3 + (6 * position) / 1000);
}

export function start(onChange) {
  changed = onChange;
  pictures = new Pictures(byId('plots-line'), byId('plots-plane'), (at) => {
    state.at = at;
    changed();
    draw();
  });
  byId('presets').append(
    ...PRESETS.map((preset) => {
      const button = make('button', { type: 'button', 'data-testid': `preset-${preset.name}`, 'aria-pressed': 'false' }, preset.label);
      button.addEventListener('click', () => choose(preset));
      return button;
    }),
  );
  byId('expression').addEventListener('input', (event) => {
    state.f = event.target.value;
    state.norm = 'inf';
    state.construction = 'auto';
    matchBox();
    showText();
    compileSoon();
  });
  byId('eps').addEventListener('input', (event) => {
    state.eps = event.target.value.trim();
    compileSoon();
  });
  byId('construction').addEventListener('change', (event) => {
    state.construction = event.target.value;
    compile();
  });
  for (const radio of document.querySelectorAll('input[name="view"]')) {
    radio.addEventListener('change', () => setView(radio.value));
  }
  for (const name of ['beta', 'keys', 'heads', 'sentinels']) {
    byId(name).addEventListener('input', (event) => {
      state[name] = Number(event.target.value);
      if (name !== 'beta') rebuild();
      controls();
      drawSoon();
      changed();
    });
  }
  byId('arithmetic').addEventListener('change', (event) => {
    state.arithmetic = event.target.value;
    rebuild();
    drawSoon();
    changed();
  });
  byId('beta-best').addEventListener('click', () => {
    state.beta = best;
    controls();
    draw();
    changed();
  });
  for (const kind of ['network', 'onnx', 'checkpoint']) byId(`download-${kind}`).addEventListener('click', () => download(kind));
  byId('download-svg').addEventListener('click', () => save('attnc.svg', joined(pictures.shown(), `${state.f}: ${title()}`), 'image/svg+xml'));
  byId('verify-open').addEventListener('click', verify);
}

function choose(preset) {
  state.f = preset.f;
  state.box = structuredClone(preset.box);
  state.eps = preset.eps;
  state.norm = preset.norm ?? 'inf';
  state.construction = 'auto';
  state.view = preset.view ?? state.view;
  state.beta = FIRST[state.view];
  state.keys = preset.keys ?? 9;
  state.heads = 1;
  state.at = null;
  show();
  compile();
}

export function setView(view) {
  state.view = view;
  state.beta = FIRST[view];
  rebuild();
  controls();
  draw();
  changed();
}

/** Set some of the state, as the guided text does, which speaks of the first preset. */
export function apply(set) {
  const [{ f, box, eps }] = PRESETS;
  const isOther = state.f !== f || state.eps !== eps || state.construction !== 'auto' || JSON.stringify(state.box) !== JSON.stringify(box);
  Object.assign(state, set);
  if (isOther) {
    Object.assign(state, { f, eps, box: structuredClone(box), norm: 'inf', construction: 'auto', at: null });
    show();
    compile();
    return;
  }
  rebuild();
  controls();
  draw();
  changed();
}

/** Show the state in all fields. */
export function show() {
  listConstructions([]);
  byId('expression').value = state.f;
  byId('eps').value = state.eps;
  matchBox();
  showText();
  showBox();
  controls();
}

// --- the text ---------------------------------------------------------------------------------------------------------

function showText() {
  const tex = latex(state.f);
  const place = byId('math');
  if (tex && globalThis.katex) globalThis.katex.render(`f = ${tex}`, place, { throwOnError: false, strict: false, displayMode: true, maxSize: 20 });
  else place.replaceChildren(make('span', { class: 'plain' }, state.f.trim() ? '' : 'Type a function, such as sin(x) or x*y.'));
  const preset = PRESETS.find((one) => one.f === state.f);
  byId('teach').textContent = preset?.teach ?? 'The function is compiled while you type. Write x**2 for a power, and * for every product.';
  [...byId('presets').children].forEach((button, i) => button.setAttribute('aria-pressed', String(PRESETS[i] === preset)));
}

// The variables of the box are those of the text, as soon as it can be read. Known variables keep their range.
function matchBox() {
  if (!latex(state.f)) return;
  const names = variables(state.f).slice(0, MOST_VARIABLES);
  if (!names.length) names.push('x');
  const same = names.length === Object.keys(state.box).length && names.every((name) => Object.hasOwn(state.box, name));
  if (same) return;
  const plain = Object.values(state.box).find(([lo, hi]) => !/inf/.test(lo + hi)) ?? ['-1', '1'];
  state.box = Object.fromEntries(names.map((name) => [name, Object.hasOwn(state.box, name) ? state.box[name] : [...plain]]));
  if (names.length > 1) for (const name of names) if (/inf/.test(state.box[name].join())) state.box[name] = [...plain];
  state.at = null;
  showBox();
}

function showBox() {
  byId('box').replaceChildren(
    ...Object.entries(state.box).map(([name, ends]) => {
      const field = (i, word) => {
        const input = make('input', { type: 'text', inputmode: 'text', autocomplete: 'off', spellcheck: 'false', 'data-testid': `box-${name}-${word}`, 'aria-label': `${name} from`.replace('from', i ? 'to' : 'from') });
        input.value = ends[i];
        input.addEventListener('input', () => {
          state.box[name][i] = input.value.trim();
          state.at = null;
          compileSoon();
        });
        return input;
      };
      return make('div', { class: 'range' }, make('span', {}, name), field(0, 'lo'), make('span', {}, 'to'), field(1, 'hi'));
    }),
  );
}

function number(text) {
  const plain = text.replace('−', '-').replace('∞', 'inf');
  if (/^[+-]?inf$/.test(plain)) return plain.replace('+', '');
  return plain === '' ? NaN : Number(plain);
}

/** The request for the state, or an error in the fields. */
function asked() {
  const many = variables(state.f).length;
  if (many > MOST_VARIABLES && latex(state.f)) throw new ApiError(0, { message: `the playground takes at most ${MOST_VARIABLES} variables, found ${many}.` });
  const box = Object.fromEntries(Object.entries(state.box).map(([name, ends]) => [name, ends.map(number)]));
  for (const [name, ends] of Object.entries(box)) {
    if (ends.some((end) => typeof end === 'number' && !Number.isFinite(end))) {
      throw new ApiError(0, { message: `the range of ${name} must be two numbers, such as −3 to 3 (or −inf to inf).` });
    }
  }
  const eps = number(state.eps);
  if (!(eps > 0)) throw new ApiError(0, { message: 'the largest error ε must be a number above 0, such as 1e-3.' });
  return { expression: state.f, box, eps, norm: state.norm, construction: state.construction };
}

function fail(error) {
  const place = byId('error');
  const position = error.position ?? null;
  place.className = 'shown';
  place.dataset.position = position ?? '';
  const parts = [make('span', {}, error.message)];
  if (position !== null) {
    const start = Math.max(0, position - 18);
    parts.unshift(make('pre', { 'aria-hidden': 'true' }, `${state.f.slice(start, position + 12)}\n${' '.repeat(position - start)}▲`));
    parts.push(make('span', { class: 'hidden' }, ` It is at character ${position + 1}.`));
  }
  if (/norm=2/.test(error.message)) {
    const button = make('button', { type: 'button', 'data-testid': 'use-norm' }, 'Use the L₂ norm');
    button.addEventListener('click', () => {
      state.norm = 2;
      compile();
    });
    parts.push(' ', button);
  }
  place.replaceChildren(...parts);
  byId('expression').setAttribute('aria-invalid', 'true');
  say(network ? 'The pictures show the last function that could be compiled.' : 'Nothing has been compiled yet.', true);
  html.dataset.state = 'error';
}

function say(text, bad = false) {
  byId('status').textContent = text;
  byId('status').classList.toggle('bad', bad);
}

// --- compiling --------------------------------------------------------------------------------------------------------

const compileLater = debounced(TYPING, () => compile());

function compileSoon() {
  html.dataset.state = 'compiling';
  for (const kind of ['compile', 'prove', 'curve', 'plan']) cancel(kind);
  changed();
  compileLater();
}

/** Compile the state, and show it. */
export async function compile() {
  compileLater.cancel();
  for (const kind of ['prove', 'curve', 'plan']) cancel(kind);
  html.dataset.state = 'compiling';
  const started = performance.now();
  changed();
  let found;
  try {
    say('Compiling …');
    found = await postJson('compile', asked(), 'compile');
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    fail(error);
    return;
  }
  if (!found) return; // the reader typed on
  byId('error').className = '';
  byId('error').replaceChildren();
  byId('expression').removeAttribute('aria-invalid');
  network = found;
  folded = found.program && found.picture ? fold(found.program) : null;
  points = found.picture ? lattice(found.picture.lo, found.picture.hi, found.picture.count) : null;
  if (!found.picture && state.view !== 'compiled') Object.assign(state, { view: 'compiled', beta: FIRST.compiled });
  rebuild();
  checkParity();
  showLedger(found);
  controls();
  draw();
  const took = performance.now() - started;
  html.dataset.milliseconds = took.toFixed(0);
  const claim = found.certificate;
  const norm = claim.norm === 'inf' ? '' : ` in the L${claim.norm} norm`;
  say(claim.bound === null ? 'Compiled; nothing was proved.' : `Compiled and proven in ${shown(took / 1000, 2)} s: the error is at most ${ceiling(claim.bound)}${norm}.`);
  html.dataset.state = 'ready';
  compare(asked());
}

async function compare(request) {
  const { expression, box, eps, norm } = request;
  const asking = JSON.stringify({ expression, box, eps, norm });
  if (asking !== compared) showNoConstructions('The constructions are being planned …');
  compared = asking;
  const curve = costCurve(byId('cost'), request, (other) => postJson('plan', { expression, box, eps: other, norm }, 'curve').catch(() => undefined));
  try {
    const plan = await postJson('plan', { expression, box, eps, norm }, 'plan');
    if (!plan) {
      if (compared === asking) showNoConstructions('The plan was stopped.');
      return;
    }
    listConstructions(plan.rows);
    const rows = showConstructions(plan.rows, network, (name) => {
      state.construction = name;
      state.view = 'compiled';
      state.beta = FIRST.compiled;
      compile();
    });
    const proofs = rows.filter((row) => row.canProve).map((row) => async () => {
      const found = await postJson('compile', { ...request, construction: row.name }, 'prove').catch((error) => error);
      row.prove(found);
      return found !== null;
    });
    if (!(await curve())) return;
    for (const proof of proofs) if (!(await proof())) return;
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    compared = '';
    showNoConstructions(`There is no plan: ${error.message}`);
    await curve();
  }
}

function listConstructions(rows) {
  const usable = rows.filter((row) => !row.why_not).map((row) => row.name);
  const names = ['auto', ...usable];
  if (!names.includes(state.construction)) names.push(state.construction);
  byId('construction').replaceChildren(...names.map((name) => make('option', { value: name }, name === 'auto' ? 'auto: chosen by cost' : name)));
  byId('construction').value = state.construction;
}

// The page runs the network by itself. Its outputs are compared with those of attnc's engine, and the result is shown.
function checkParity() {
  const place = byId('parity');
  if (!folded) {
    place.textContent = network.program ? '' : 'This network is too large to be run in the page.';
    return;
  }
  const { points: at, outputs } = network.picture.checked;
  const mine = evaluate(folded, Float64Array.from(at.flat())).outputs;
  const off = outputs.reduce((most, y, i) => Math.max(most, Math.abs(y - mine[i])), 0);
  place.dataset.difference = off;
  place.textContent = `This page runs the network's own numbers (${grouped(network.num_parameters)}); at ${outputs.length} points it differs from attnc's engine by at most ${shown(off, 2)}.`;
}

// --- the pictures -----------------------------------------------------------------------------------------------------

let best = null;

function rebuild() {
  hand = null;
  if (network?.picture && Number.isFinite(network.picture.lo[0])) {
    const { lo, hi, ladder } = network.picture;
    const keys = lo.length === 2 ? Math.min(16, state.keys) : state.keys;
    hand = byhand.build({ lo, hi, keys, heads: state.heads, sentinels: state.sentinels, values: ladder[keys] });
  }
  best = null;
  byId('beta-mark').hidden = true;
  byId('beta-best').disabled = true;
  findBest();
}

// The β with the smallest error at the points of the picture.
const findBest = debounced(120, () => {
  if (!network?.picture || (isByHand() ? !hand : !folded)) return;
  const { lo, hi, count, target } = network.picture;
  const d = lo.length;
  const side = d === 2 ? COARSE : 151;
  const step = (count - 1) / (side - 1);
  const at = lattice(lo, hi, side);
  const wanted = Array.from({ length: side ** d }, (_, i) => target[d === 1 ? i * step : Math.floor(i / side) * step * count + (i % side) * step]);
  const keys = isByHand() ? hand.heads.reduce((sum, head) => sum + head.v.length, 0) : network.num_anchors;
  if (keys * wanted.length > 4e5) return;
  const error = (position) => {
    const { outputs } = computed(at, sharpnessAt(position), false);
    let most = 0;
    for (let i = 0; i < wanted.length; i++) most = Math.max(most, Math.abs(outputs[i] - wanted[i]));
    return Number.isNaN(most) ? Infinity : most;
  };
  let [found, least] = [0, Infinity];
  const seek = (from, to, by) => {
    for (let position = Math.max(0, from); position <= Math.min(1000, to); position += by) {
      const here = error(position);
      if (here < least) [found, least] = [position, here];
    }
  };
  seek(0, 1000, 20);
  seek(found - 16, found + 16, 4);
  best = found;
  const mark = byId('beta-mark');
  mark.hidden = false;
  byId('beta-best').disabled = false;
  mark.style.left = `calc(8px + (100% - 16px) * ${found / 1000})`;
  byId('beta-best').title = `the smallest error seen is ${shown(least)}`;
  byId('beta-best').dataset.position = found;
});

const isByHand = () => state.view === 'byhand' && hand !== null;

function computed(at, sharpness, weights) {
  if (isByHand()) return byhand.run(hand, at, sharpness, { weights, arithmetic: state.arithmetic });
  return evaluate(folded, at, { sharpness, weights });
}

/** Compute the network at the points of the picture, and draw. */
export function draw() {
  if (!network) return;
  if (!network.picture || (!isByHand() && !folded)) {
    facts();
    byId('plots-line').hidden = byId('plots-plane').hidden = true;
    byId('signatures').replaceChildren();
    byId('readout').textContent = network.picture ? 'The network is too large to be run in the page. Choose a larger ε, or build one by hand.' : 'Pictures are for one or two variables. The table below and the downloads are for this network, too.';
    return;
  }
  const started = performance.now();
  const sharpness = sharpnessAt(state.beta);
  const found = computed(points, sharpness, true);
  const units = isByHand()
    ? hand.heads.map((head, number) => ({ label: hand.heads.length > 1 ? `head ${number + 1}` : '', numKeys: head.v.length, map: found.weights[number], places: placesOf(head), values: head.v, own: head.own }))
    : folded.units.map((unit, number) => ({ label: folded.units.length > 1 ? `${unit.layer}, head ${unit.head + 1}` : '', numKeys: unit.numKeys, map: found.weights[number] }));
  shownNow = {
    network,
    byHand: isByHand(),
    isOwn: !isByHand() && sharpness === 1,
    points,
    outputs: found.outputs,
    largestScore: found.largestScore,
    units,
    at: state.at,
    look: (at) => computed(Float64Array.from(at), sharpness, true),
    variables: network.variables,
  };
  const error = pictures.draw(shownNow);
  facts(error);
  byId('readout').textContent = pictures.reading;
  const took = performance.now() - started;
  frames += 1;
  recent.push(performance.now());
  recent = recent.filter((at) => at > performance.now() - 1000);
  const rate = byId('fps');
  rate.dataset.frames = frames;
  rate.dataset.milliseconds = took.toFixed(2);
  rate.textContent = `Computed and drawn in ${took < 1 ? '< 1' : took.toFixed(0)} ms.`;
  name();
}

const drawSoon = eachFrame(draw);

function placesOf(head) {
  if (hand.d === 2) return Array.from({ length: head.v.length }, (_, k) => [byhand.anchor(hand, head.L[2 * k], 0), byhand.anchor(hand, head.L[2 * k + 1], 1)]);
  return Array.from(head.L, (L) => [byhand.anchor(hand, L)]);
}

const name = debounced(90, () => {
  if (!shownNow || !network?.picture || network.certificate.norm !== 'inf') {
    byId('signatures').replaceChildren();
    byId('signatures').dataset.names = '';
    return;
  }
  const { lo, hi, target, count } = network.picture;
  const d = lo.length;
  // In the plane, every second point along each axis.
  const keep = d === 1 ? null : Array.from({ length: count * count }, (_, i) => i).filter((i) => Math.floor(i / count) % 2 === 0 && (i % count) % 2 === 0);
  const take = (array, width = 1) => (keep ? Float64Array.from(keep.flatMap((i) => Array.from(array.slice(i * width, (i + 1) * width)))) : array);
  const wanted = take(target);
  const range = Math.max(...wanted) - Math.min(...wanted);
  const at = take(points, d);
  const sharpness = sharpnessAt(state.beta);
  const bounded = Object.values(network.box).flat().every((end) => typeof end === 'number');
  const tolerated = isByHand() || network.eps === null ? 0.02 * range : network.eps;
  const found = signatures({
    heads: shownNow.units.map(({ map, numKeys }) => ({ map: take(map, numKeys), numKeys })),
    outputs: take(shownNow.outputs),
    wanted,
    points: at,
    lo: bounded ? lo : null,
    hi,
    eps: tolerated,
    largestScore: shownNow.largestScore,
    arithmetic: isByHand() ? state.arithmetic : 'float64',
    sharpened: (factor) => computed(at, factor * (sharpness || sharpnessAt(1)), false).outputs,
  });
  const list = byId('signatures');
  list.dataset.names = found.map((one) => one.name).join(',');
  const items = found.map((one) => make('li', { 'data-name': one.name }, make('b', {}, one.name), ` (${one.evidence}). ${MEANING[one.name]}`));
  const limit = isByHand() ? `2 % of the range of f, ${shown(0.02 * range)}` : `ε = ${shown(network.eps)}`;
  const worst = take(shownNow.outputs).reduce((most, y, i) => Math.max(most, Math.abs(y - wanted[i])), 0);
  if (!items.length && worst <= tolerated) items.push(make('li', { class: 'fine' }, make('b', {}, 'no failure'), `: the error seen is within ${limit}.`));
  else if (!items.length) items.push(make('li', {}, `The error seen, ${shown(worst)}, is above ${limit}, and none of the known failures explains it: the values do not fit this β.`));
  list.replaceChildren(...items);
});

function title() {
  if (!network) return '';
  return isByHand() ? `by hand, ${grouped(handKeys())} keys` : `${network.construction}, ${grouped(network.num_anchors)} keys`;
}

const handKeys = () => hand.heads.reduce((sum, head) => sum + head.v.length, 0);

function facts(error = null) {
  const claim = network.certificate;
  const norm = claim.norm === 'inf' ? '' : ` (L${claim.norm})`;
  const own = !isByHand() && sharpnessAt(state.beta) === 1;
  const bound = own ? ceiling(claim.bound) : isByHand() ? 'none' : 'none at this β';
  const rows = [
    ['construction', isByHand() ? 'by hand' : network.construction, ''],
    ['keys', grouped(isByHand() ? handKeys() : network.num_anchors), ''],
    ['parameters', isByHand() ? grouped(handKeys() * (network.variables.length + 2)) : grouped(network.num_parameters), ''],
    ['attention layers', isByHand() ? '1' : String(network.num_layers), ''],
    [`largest error seen`, error === null ? (own ? shown(claim.observed) : '–') : shown(error), ''],
    [`proven bound${norm}`, bound, own && claim.bound !== null ? 'good' : ''],
  ];
  byId('facts').replaceChildren(...rows.map(([label, value, kind]) => make('div', {}, make('div', { class: 'name' }, label), make('div', { class: `value ${kind}`, 'data-fact': label.replaceAll(' ', '-') }, value))));
}

function controls() {
  const sharpness = sharpnessAt(state.beta);
  const plane = Object.keys(state.box).length > 1;
  byId('panel-function').classList.toggle('compiled', state.view === 'compiled');
  byId('beta').value = state.beta;
  const value = sharpness === 0 ? 'uniform attention' : sharpness === Infinity ? 'one-hot attention' : state.view === 'byhand' ? `β = ${shown(sharpness, 2)}` : `${shown(sharpness, 2)} × own β`;
  byId('beta-value').textContent = value;
  byId('beta').setAttribute('aria-valuetext', value);
  byId('keys').max = plane ? 16 : 64;
  byId('keys').value = Math.min(state.keys, plane ? 16 : 64);
  byId('keys-name').textContent = plane ? 'keys per axis' : 'keys';
  byId('keys-value').textContent = byId('keys').value;
  byId('heads').value = state.heads;
  byId('heads-value').textContent = plane ? '1' : state.heads;
  byId('sentinels').value = state.sentinels;
  byId('sentinels-value').textContent = state.heads > 1 && !plane ? state.sentinels : '–';
  byId('heads').disabled = plane;
  byId('sentinels').disabled = plane || state.heads < 2;
  byId('arithmetic').value = state.arithmetic;
  for (const input of document.querySelectorAll('input[name="view"]')) {
    input.checked = input.value === state.view;
    input.disabled = input.value === 'byhand' && network !== null && !network.picture;
  }
  for (const name of ['keys', 'heads', 'sentinels', 'arithmetic']) if (state.view === 'compiled') byId(name).disabled = true;
  if (state.view === 'byhand') byId('keys').disabled = byId('arithmetic').disabled = false;
}

// --- downloads --------------------------------------------------------------------------------------------------------

const SUFFIX = { network: 'attnc-network.zip', onnx: 'attnc-network.onnx', checkpoint: 'attnc-checkpoint.zip' };

async function download(kind) {
  const note = byId('download-note');
  const button = byId(`download-${kind}`);
  button.disabled = true;
  note.textContent = 'Building the file …';
  try {
    const file = await post('download', { ...asked(), kind }, `download-${kind}`, async (response) => [await response.arrayBuffer(), response.headers.get('content-type')]);
    if (!file) return;
    save(SUFFIX[kind], ...file);
    note.textContent = `${SUFFIX[kind]} was saved.`;
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    note.textContent = error.message;
  } finally {
    button.disabled = false;
  }
}

// The page for verification asks for the network once it is ready. Both check that the other is of the same origin.
function verify() {
  const note = byId('download-note');
  let request;
  try {
    request = asked();
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    note.textContent = error.message;
    return;
  }
  const opened = window.open('verify/#from=opener', '_blank');
  if (!opened) {
    note.textContent = 'The browser did not open a new page. Download the network, and drop it on “Verify a network”.';
    return;
  }
  const files = postJson('download', { ...request, kind: 'files' }, 'download-files');
  files.catch((error) => (note.textContent = error.message)); // a refusal may come before the page for verification is ready
  const name = state.f;
  window.addEventListener('message', async function ready(event) {
    if (event.source !== opened || event.origin !== location.origin || event.data?.type !== 'attnc-verify-ready') return;
    window.removeEventListener('message', ready);
    try {
      const found = await files;
      if (!found) return; // asked for again
      const bytes = Object.fromEntries(Object.entries(found).map(([file, text]) => [file, Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer]));
      opened.postMessage({ type: 'attnc-network', name, files: bytes }, location.origin);
      note.textContent = 'The network was handed to the page for verification.';
    } catch (error) {
      note.textContent = error.message;
    }
  });
}
