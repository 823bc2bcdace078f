// Small helpers to make and find elements. Text is always text, never markup.

export const byId = (id) => document.getElementById(id);

const SVG = 'http://www.w3.org/2000/svg';

export function make(name, attributes = {}, ...children) {
  return filled(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, name), attributes, children);
}

function filled(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(key, value === true ? '' : value);
  }
  element.append(...children);
  return element;
}

/** A number with few digits, for people. A minus is a minus sign. */
export function shown(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return '–';
  if (value === 0) return '0';
  if (!Number.isFinite(value)) return value > 0 ? '∞' : '−∞';
  const size = Math.abs(value);
  const text = size >= 1e5 || size < 1e-3 ? Number(value.toPrecision(digits)).toExponential() : String(Number(value.toPrecision(digits)));
  return text.replaceAll('-', '−').replace('e+', 'e');
}

/** A bound is rounded up, so that it stays a bound when it is printed. */
export function ceiling(value, digits = 3) {
  if (value === null || value === undefined) return '–';
  if (value <= 0 || !Number.isFinite(value)) return shown(value, digits);
  const text = value.toExponential(digits - 1);
  if (Number(text) >= value) return shown(Number(text), digits);
  const [mantissa, exponent] = text.split('e');
  return shown(Number(`${(Number(mantissa) + 10 ** (1 - digits)).toFixed(digits - 1)}e${exponent}`), digits);
}

export const grouped = (count) => String(count).replace(/\B(?=(\d{3})+(?!\d))/g, '\u2009');

// As long as work waits for a pause or for a frame, <html data-busy> states that the page is behind its controls.
let waits = 0;

function waiting(change) {
  waits += change;
  if (waits) document.documentElement.dataset.busy = '';
  else delete document.documentElement.dataset.busy;
}

/** Call a function after the last of several calls, `milliseconds` later. */
export function debounced(milliseconds, action) {
  let timer = 0;
  const cancel = () => {
    if (!timer) return;
    clearTimeout(timer);
    timer = 0;
    waiting(-1);
  };
  const later = (...given) => {
    cancel();
    waiting(1);
    timer = setTimeout(() => {
      timer = 0;
      try {
        action(...given);
      } finally {
        waiting(-1);
      }
    }, milliseconds);
  };
  later.cancel = cancel;
  return later;
}

/** Call a function at most once per frame. */
export function eachFrame(action) {
  let isAsked = false;
  return () => {
    if (isAsked) return;
    isAsked = true;
    waiting(1);
    requestAnimationFrame(() => {
      isAsked = false;
      try {
        action();
      } finally {
        waiting(-1);
      }
    });
  };
}
