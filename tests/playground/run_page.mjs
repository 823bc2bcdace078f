// Runs the page's own modules on a network, for the tests: node run_page.mjs < request.json > answer.json
import { readFileSync } from 'node:fs';

const { static: folder, jobs } = JSON.parse(readFileSync(0, 'utf8'));
const load = (name) => import(`${folder}/js/${name}.js`);
const [engine, byhand, { signatures }, { latex, variables }, state] = await Promise.all(
  ['engine', 'byhand', 'signatures', 'latex', 'state'].map(load),
);
const flat = (points) => Float64Array.from(points.flat());
const real = (number) => (number === 'inf' ? Infinity : number);

const work = {
  evaluate({ program, points, sharpness }) {
    const folded = engine.fold(program);
    const found = engine.evaluate(folded, flat(points), { sharpness: real(sharpness), weights: true });
    return { outputs: [...found.outputs], weights: found.weights.map((map) => [...map]), keys: folded.units.map((unit) => unit.numKeys) };
  },
  byhand({ settings, beta, points, arithmetic }) {
    const found = byhand.run(byhand.build(settings), flat(points), real(beta), { weights: true, arithmetic });
    return { outputs: [...found.outputs].map((y) => (Number.isFinite(y) ? y : null)) };
  },
  signatures({ settings, beta, points, wanted, eps, arithmetic }) {
    const network = byhand.build(settings);
    const run = (b) => byhand.run(network, flat(points), b, { weights: true, arithmetic });
    const { outputs, weights, largestScore } = run(beta);
    const heads = network.heads.map((head, i) => ({ map: weights[i], numKeys: head.v.length }));
    const { lo, hi } = settings;
    return signatures({ heads, outputs, wanted, points: flat(points), lo, hi, eps, largestScore, arithmetic, sharpened: (factor) => run(beta * factor).outputs }).map((one) => one.name);
  },
  latex({ text }) {
    return { tex: latex(text), variables: variables(text) };
  },
  roundtrip({ text }) {
    return state.encode(state.decode(text));
  },
};
process.stdout.write(JSON.stringify(jobs.map(({ kind, ...given }) => work[kind](given))));
