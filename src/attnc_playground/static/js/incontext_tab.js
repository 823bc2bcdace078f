// The tab of regression in context: points that can be dragged, and the fit after every layer of attention.

import { ApiError, postJson } from './api.js';
import { byId, ceiling, debounced, grouped, make, shown } from './dom.js';
import { colours, Plot } from './plot.js';
import { state } from './state.js';

const LOG_STEP = 10; // positions of the sliders of α and γ per factor of ten
const CURVE = Array.from({ length: 201 }, (_, i) => -1 + i / 100);
const FIELDS = { steps: 'ic-steps', step: 'ic-step', pairs: 'ic-heads', degree: 'ic-degree', alpha: 'ic-alpha', gamma: 'ic-gamma' };

let fit = null;
let figure = null;
let losses = null;
let changed = () => {};
let asking = false;
let again = false;
let dragged = -1;

const power = (position) => 10 ** (position / LOG_STEP);

export function start(onChange) {
  changed = onChange;
  figure = new Plot(byId('ic-plots'), { id: 'ic-fit', title: 'Points and the fit after each layer', x: 'x', y: 'y', describe: 'Faint lines are early layers. The dashed line is the exact solution.' });
  figure.frame.classList.add('tall');
  figure.frame.removeAttribute('tabindex');
  figure.svg.setAttribute('role', 'group');
  losses = new Plot(byId('ic-plots'), { id: 'ic-loss', title: 'Loss above the least possible', x: 'layer (step)', y: 'loss − least' });
  byId('ic-model').addEventListener('change', (event) => {
    state.model = event.target.value;
    show();
    ask();
  });
  for (const [name, id] of Object.entries(FIELDS)) {
    byId(id).addEventListener('input', (event) => {
      state[name] = Number(event.target.value);
      show();
      ask();
    });
  }
  byId('ic-add').addEventListener('click', () => {
    if (state.points.length >= 40) return;
    const x = ((state.points.length * 0.618) % 1) * 1.8 - 0.9;
    state.points.push([x, valueAt(fit?.exact, x) ?? 0]);
    ask();
  });
  byId('ic-remove').addEventListener('click', () => {
    if (state.points.length > 2) state.points.pop();
    ask();
  });
  figure.svg.addEventListener('pointerdown', (event) => {
    const handle = event.target.closest('.handle');
    if (!handle) return;
    dragged = Number(handle.dataset.point);
    figure.svg.setPointerCapture(event.pointerId);
    event.preventDefault();
  });
  figure.svg.addEventListener('pointermove', (event) => {
    if (dragged < 0) return;
    const place = figure.placeOf(event);
    if (place) move(dragged, place);
  });
  for (const name of ['pointerup', 'pointercancel']) figure.svg.addEventListener(name, () => (dragged = -1));
  figure.svg.addEventListener('keydown', (event) => {
    const handle = event.target.closest('.handle');
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[event.key];
    if (!handle || !step) return;
    event.preventDefault();
    const point = Number(handle.dataset.point);
    const size = event.shiftKey ? 0.1 : 0.02;
    move(point, state.points[point].map((x, i) => x + step[i] * size));
    figure.svg.querySelector(`.handle[data-point="${point}"]`)?.focus();
  });
}

function move(point, [x, y]) {
  state.points[point] = [Math.max(-1, Math.min(1, x)), Math.max(-1.2, Math.min(1.2, y))];
  draw();
  ask();
}

/** Show the state in all fields. */
export function show() {
  byId('ic-model').value = state.model;
  for (const [name, id] of Object.entries(FIELDS)) byId(id).value = state[name];
  byId('ic-steps-value').textContent = state.steps;
  byId('ic-step-value').textContent = (state.step / 100).toFixed(2);
  byId('ic-heads-value').textContent = state.pairs;
  byId('ic-degree-value').textContent = state.degree === 1 ? 'x' : `x to x${'⁰¹²³⁴⁵'[state.degree]}`;
  byId('ic-alpha-value').textContent = shown(power(state.alpha), 2);
  byId('ic-gamma-value').textContent = shown(power(state.gamma), 2);
  for (const part of document.querySelectorAll('#panel-incontext .only')) part.hidden = !part.classList.contains(state.model);
}

// One request at a time, and the last state after it: dragging shows as many fits as the server can make.
export async function ask() {
  changed();
  if (asking) {
    again = true;
    return;
  }
  asking = true;
  document.documentElement.dataset.state = 'compiling';
  try {
    do {
      again = false;
      await fitOnce();
    } while (again);
  } finally {
    asking = false;
    document.documentElement.dataset.state = 'ready';
  }
}

// After a refusal the state may have changed, and is then asked for again.
async function fitOnce() {
  const { model, steps, step, pairs, degree, alpha, gamma, points } = state;
  const started = performance.now();
  try {
    const found = await postJson('incontext', { model, steps, step: step / 100, heads: pairs, degree, alpha: power(alpha), gamma: power(gamma), points }, 'incontext');
    if (!found) return;
    fit = found;
    draw();
    facts();
    byId('ic-status').className = 'status';
    finished(performance.now() - started);
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    finished.cancel();
    byId('ic-status').className = 'status bad';
    byId('ic-status').textContent = error.message;
  }
}

const finished = debounced(250, (milliseconds) => {
  byId('ic-status').textContent = `Fitted by attention in ${milliseconds.toFixed(0)} ms, ${fit.trajectory.length === 2 ? '1 step' : `${fit.trajectory.length - 1} steps`}.`;
});

/** The value of a fit with these weights. */
function valueAt(weights, x) {
  if (!weights || !fit) return null;
  if (fit.model === 'kernel') {
    return weights.reduce((sum, dual, i) => sum + (state.points[i] ? dual * Math.exp(-fit.gamma * (x - state.points[i][0]) ** 2) : 0), 0);
  }
  let sum = weights.at(-1); // the intercept is last
  for (let c = 0; c < weights.length - 1; c++) sum += weights[c] * x ** (c + 1);
  return sum;
}

export function draw() {
  if (!figure) return;
  const c = colours();
  const layers = [];
  if (fit) {
    const last = fit.trajectory.length - 1;
    const shownSteps = fit.trajectory.map((_, t) => t).filter((t) => last <= 12 || t % Math.ceil(last / 12) === 0 || t === last);
    for (const t of shownSteps) {
      const final = t === last;
      layers.push({ kind: 'line', xs: CURVE, ys: CURVE.map((x) => valueAt(fit.trajectory[t], x)), colour: c.network, width: final ? 2.6 : 1.3, opacity: final ? 1 : 0.15 + (0.5 * t) / last });
    }
    layers.push({ kind: 'line', xs: CURVE, ys: CURVE.map((x) => valueAt(fit.exact, x)), colour: c.target, dash: '6 4', width: 2 });
  }
  const points = [...state.points]; // a picture is drawn again when its size changes, and the state may have others then
  const name = (i) => ({ class: 'handle', 'data-point': i, 'data-testid': `ic-point-${i}`, tabindex: 0, role: 'button', 'aria-label': `Point ${i + 1} at x = ${points[i][0].toFixed(2)}, y = ${points[i][1].toFixed(2)}. Arrow keys move it.` });
  layers.push({ kind: 'points', xs: points.map((p) => p[0]), ys: points.map((p) => p[1]), colour: c.surface, fill: c.key, r: 8, stroke: 2, attributes: name });
  const focused = document.activeElement?.dataset?.point;
  figure.draw({ x: [-1.05, 1.05], y: [-1.25, 1.25], layers });
  if (focused !== undefined && dragged < 0) figure.svg.querySelector(`.handle[data-point="${focused}"]`)?.focus();
  figure.setLegend([[c.network, 'attention, the last layer bold'], [c.target, 'exact solution', 'dashed'], [c.key, 'the prompt: points to drag', 'dot']]);
  if (fit) {
    const above = fit.loss.map((loss) => Math.max(loss - fit.exact_loss, 1e-16));
    const most = Math.max(1e-3, ...above.filter(Number.isFinite));
    const least = Math.max(1e-16, Math.min(...above) / 3);
    losses.draw({ x: [0, fit.loss.length - 1 || 1], y: [least, most * 3], logY: true, layers: [{ kind: 'line', xs: above.map((_, t) => t), ys: above, colour: c.network }, { kind: 'points', xs: above.map((_, t) => t), ys: above, colour: c.network, r: 2.4 }] });
  }
}

function facts() {
  const bound = fit.bound === null || fit.bound > 1e6 ? '–' : ceiling(fit.bound);
  const rows = [
    ['attention layers', grouped(fit.num_layers)],
    ['heads, all layers', grouped(fit.num_heads)],
    ['keys per head', grouped(fit.num_keys)],
    ['loss', shown(fit.loss.at(-1), 4)],
    ['least possible', shown(fit.exact_loss, 4)],
    ['distance of weights', shown(fit.distance)],
    ['proven distance', bound],
  ];
  byId('ic-facts').replaceChildren(...rows.map(([label, value]) => make('div', {}, make('div', { class: 'name' }, label), make('div', { class: 'value', 'data-fact': label.replaceAll(' ', '-').replace(',', '') }, value))));
}
