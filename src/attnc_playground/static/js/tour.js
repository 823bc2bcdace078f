// The guided text: what a key is, in five steps that set the controls.

import { byId, make } from './dom.js';
import { TOUR } from './presets.js';

export function startTour(apply) {
  let at = 0;
  const show = () => {
    byId('tour-text').replaceChildren(...TOUR[at].text.map((text) => make('p', {}, text)));
    byId('tour-count').textContent = `${at + 1} of ${TOUR.length}`;
    byId('tour-back').disabled = at === 0;
    byId('tour-next').textContent = at === TOUR.length - 1 ? 'Again' : 'Next';
  };
  const go = (to) => {
    at = (to + TOUR.length) % TOUR.length;
    show();
    apply(TOUR[at].set);
  };
  byId('tour-back').addEventListener('click', () => go(at - 1));
  byId('tour-next').addEventListener('click', () => go(at + 1));
  show();
}
