// The page: its tabs, its colours, and the address that holds its state.

import '../vendor/katex/katex.min.js';
import { byId, debounced } from './dom.js';
import * as functionTab from './function_tab.js';
import * as incontextTab from './incontext_tab.js';
import { forgetColours } from './plot.js';
import { decode, encode, state } from './state.js';
import { redrawCurve } from './tables.js';
import { startTour } from './tour.js';

const TABS = ['function', 'incontext'];
let written = '';

const write = debounced(250, () => {
  written = encode();
  history.replaceState(null, '', written ? `#${written}` : location.pathname);
});

function open(tab, focus = false) {
  state.tab = tab;
  for (const name of TABS) {
    const button = byId(`tab-${name}`);
    button.setAttribute('aria-selected', String(name === tab));
    button.tabIndex = name === tab ? 0 : -1;
    byId(`panel-${name}`).hidden = name !== tab;
    if (focus && name === tab) button.focus();
  }
  write();
  if (tab === 'function') functionTab.compile();
  else {
    incontextTab.show();
    incontextTab.ask();
  }
}

// --- the theme --------------------------------------------------------------------------------------------------------

const THEMES = ['auto', 'light', 'dark'];

function setTheme(theme) {
  if (theme === 'auto') delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId('theme').textContent = `Colours: ${theme}`;
  byId('theme').setAttribute('aria-label', `Colours: ${theme === 'auto' ? 'as the system' : theme}. Change them.`);
  redraw();
}

function redraw() {
  forgetColours();
  functionTab.draw();
  incontextTab.draw();
  redrawCurve();
}

function stored() {
  try {
    const theme = localStorage.getItem('attnc-theme');
    return THEMES.includes(theme) ? theme : 'auto';
  } catch {
    return 'auto'; // the browser keeps nothing
  }
}

byId('theme').addEventListener('click', () => {
  const theme = THEMES[(THEMES.indexOf(stored()) + 1) % THEMES.length];
  try {
    localStorage.setItem('attnc-theme', theme);
  } catch {
    // it holds until the page is left
  }
  setTheme(theme);
});
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', redraw);

// --- tabs and links ---------------------------------------------------------------------------------------------------

for (const name of TABS) {
  byId(`tab-${name}`).addEventListener('click', () => open(name));
  byId(`tab-${name}`).addEventListener('keydown', (event) => {
    if (event.key === 'ArrowLeft' || event.key === 'ArrowRight') open(TABS[(TABS.indexOf(name) + 1) % TABS.length], true);
  });
}

byId('permalink').addEventListener('click', async () => {
  write.cancel();
  written = encode();
  history.replaceState(null, '', written ? `#${written}` : location.pathname);
  try {
    await navigator.clipboard.writeText(location.href);
    byId('permalink').textContent = 'Copied';
  } catch {
    byId('permalink').textContent = 'In the address bar';
  }
  setTimeout(() => (byId('permalink').textContent = 'Copy link'), 2000);
});

// The address holds the state of the page, so the link to the pictures must not change it.
document.querySelector('.skip').addEventListener('click', (event) => {
  event.preventDefault();
  byId('readout').focus();
});

function load() {
  Object.assign(state, decode(location.hash.slice(1)));
  functionTab.show();
  incontextTab.show();
  open(state.tab);
}

addEventListener('hashchange', () => {
  if (location.hash.slice(1) !== written) load();
});

functionTab.start(write);
incontextTab.start(write);
startTour(functionTab.apply);
setTheme(stored());
load();
