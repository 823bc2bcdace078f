// The tables and the curve below the pictures: constructions, their cost against ε, and the ledger of the bound.

import { ApiError } from './api.js';
import { byId, ceiling, grouped, make, shown } from './dom.js';
import { colours, Plot } from './plot.js';

const PROVED_AT_ONCE = 4000; // the most keys of a construction that is built and proven without being asked for
const CURVE = [1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8];
const DASHES = [null, '7 4', '2 3', '9 3 2 3', '4 2', '1 2'];

/** Put a sentence in place of the constructions. */
export function showNoConstructions(text) {
  byId('constructions').tBodies[0].replaceChildren(make('tr', {}, make('td', { colspan: 8 }, text)));
}

// The keys that a construction would need, from the reason why it is not offered.
function about(reason) {
  const keys = Number(/needs about ([0-9.e+,]+)/.exec(reason)?.[1].replaceAll(',', ''));
  return keys < 1e5 ? grouped(keys) : shown(keys, 2);
}

/** Show the plan. Returns the rows whose bound can be proven: {name, canProve, prove(answer)}. */
export function showConstructions(rows, network, choose) {
  const body = byId('constructions').tBodies[0];
  const found = [];
  body.replaceChildren(
    ...rows
      .filter((row) => !row.why_not || /needs about/.test(row.why_not))
      .map((row) => {
        const usable = !row.why_not;
        const chosen = row.name === network.construction;
        const bound = make('td', { class: 'number' }, chosen ? ceiling(network.certificate.bound) : usable ? '…' : '–');
        const keys = usable ? grouped(row.anchors) : about(row.why_not);
        const button = make('button', { type: 'button', 'aria-label': `Show ${row.name}` }, chosen ? 'shown' : 'show');
        button.disabled = !usable || chosen;
        button.addEventListener('click', () => choose(row.name));
        const canProve = usable && !chosen && row.anchors <= PROVED_AT_ONCE;
        if (usable && !chosen && !canProve) bound.textContent = 'press show';
        found.push({
          name: row.name,
          canProve,
          prove(answer) {
            if (answer instanceof ApiError) bound.textContent = 'not met';
            else if (answer) bound.textContent = ceiling(answer.certificate.bound);
          },
        });
        const cells = [
          make('td', {}, row.name),
          make('td', {}, row.paper ? 'the papers' : 'beyond'),
          make('td', { class: 'number' }, keys),
          make('td', { class: 'number' }, usable ? String(row.layers) : '–'),
          make('td', { class: 'number' }, usable ? grouped(row.parameters) : '–'),
          make('td', { class: 'number' }, usable ? shown(row.error) : 'too many keys'),
          bound,
          make('td', {}, button),
        ];
        return make('tr', { 'data-name': row.name, class: `${chosen ? 'chosen' : ''} ${usable ? '' : 'out'}` }, ...cells);
      }),
  );
  return found;
}

let plot = null;

/**
 * Prepare the curve for a function. Returns a function that asks for one plan after another, draws each as it arrives, and
 * returns whether it came to the end.
 */
export function costCurve(place, request, plan) {
  plot ??= new Plot(place, { id: 'cost-curve', title: 'Keys against the error allowed', x: 'largest error ε', y: 'keys' });
  delete plot.figure.dataset.complete;
  const known = new Map();
  const add = (eps, rows) => {
    for (const row of rows) {
      if (row.why_not || !row.anchors) continue;
      if (!known.has(row.name)) known.set(row.name, { paper: row.paper, points: [] });
      known.get(row.name).points.push([eps, row.anchors]);
    }
    draw(known, request.eps);
  };
  draw(known, request.eps);
  plot.note.textContent = 'The curve is being planned …';
  return async () => {
    for (const [number, eps] of CURVE.entries()) {
      plot.note.textContent = `The curve is being planned: ${number} of ${CURVE.length} values of ε.`;
      const found = await plan(eps);
      if (found === null) {
        plot.note.textContent = `The curve is planned for ${number} of ${CURVE.length} values of ε.`;
        return false;
      }
      if (found) add(eps, found.rows);
    }
    plot.note.textContent = known.size ? `ε falls in steps of ten. ${rises(known) ? 'The papers need 1/ε keys; attnc needs a few more for each digit.' : ''}` : 'No construction meets any of these errors.';
    plot.figure.dataset.complete = 'true';
    return true;
  };
}

// Whether a construction of the papers is among them whose keys grow with 1/ε. For a jump in the mean they need not.
function rises(known) {
  return [...known.values()].some(({ paper, points }) => paper && points.length > 2 && points.at(-1)[1] > 30 * points[0][1]);
}

function draw(known, eps) {
  const c = colours();
  const most = Math.max(100, ...[...known.values()].flatMap((line) => line.points.map(([, keys]) => keys)));
  const layers = [{ kind: 'upright', x: Math.min(0.1, Math.max(1e-8, eps)), colour: c.muted, dash: '2 3', width: 1 }];
  const legend = [];
  const drawn = { true: [], false: [] };
  for (const [name, line] of known) {
    const signature = JSON.stringify(line.points);
    const same = drawn[line.paper].find((other) => other.signature === signature);
    if (same) same.names.push(name);
    else drawn[line.paper].push({ names: [name], signature, points: line.points });
  }
  for (const paper of [true, false]) {
    const colour = paper ? c.target : c.network;
    drawn[paper].forEach(({ names, points }, i) => {
      const dash = DASHES[i % DASHES.length];
      layers.push({ kind: 'line', xs: points.map((p) => p[0]), ys: points.map((p) => p[1]), colour, dash, width: 2 });
      layers.push({ kind: 'points', xs: points.map((p) => p[0]), ys: points.map((p) => p[1]), colour, r: 2.6 });
      legend.push([colour, names.join(', '), dash ? 'dashed' : null]);
    });
  }
  plot.draw({ x: [0.14, 0.7e-8], y: [1, most * 1.6], logX: true, logY: true, layers });
  plot.setLegend(legend);
}

/** Draw the curve again, in the colours of the theme. */
export function redrawCurve() {
  if (plot?.spec) plot.draw(plot.spec);
}

/** Show the parts of the bound. */
export function showLedger({ certificate, construction }) {
  const { bound, observed, terms, stages, assumptions, method, dtype, norm } = certificate;
  const where = norm === 'inf' ? 'at every point of the box' : `in the L${norm} norm over the box`;
  byId('ledger-lead').textContent =
    bound === null
      ? `Nothing was proved about this network of ${construction}.`
      : `|network − f| ≤ ${ceiling(bound)} ${where}, in ${dtype} with its rounding (${method}). The largest error seen at samples is ${shown(observed)}: samples prove nothing.`;
  const rows = terms.map((term) => [term.name, ceiling(term.value), term.reason]);
  for (const stage of stages) rows.push([`${stage.layer}: ${stage.name}`, ceiling(stage.bound), stage.computes]);
  byId('ledger').tBodies[0].replaceChildren(...rows.map(([name, value, reason]) => make('tr', {}, make('td', {}, name), make('td', { class: 'number' }, value), make('td', {}, reason))));
  byId('assumptions').replaceChildren(...assumptions.map((text) => make('li', {}, text)));
}
