// The text of an expression as LaTeX, while it is typed. It follows attnc's grammar and its rules of precedence.
// It is for display: attnc itself reads the text on the server, and says where it is wrong. Returns null for text that
// cannot be read.

const TOKEN = /\s*(?:([0-9]+\.?[0-9]*(?:[eE][+-]?[0-9]+)?|\.[0-9]+(?:[eE][+-]?[0-9]+)?)|([A-Za-z_][A-Za-z0-9_]*)|(\*\*|[-+*/(),]))/y;
const NAMED = new Set(['sin', 'cos', 'tan', 'sinh', 'cosh', 'tanh', 'exp', 'log', 'min', 'max', 'arcsin', 'arccos', 'arctan']);
const GREEK = new Set(['alpha', 'beta', 'gamma', 'delta', 'theta', 'lambda', 'mu', 'sigma', 'phi', 'omega', 'pi']);
const FUNCTIONS = { asin: 'arcsin', acos: 'arccos', atan: 'arctan' };
const SUM = 1;
const PRODUCT = 2;
const SIGN = 3;
const POWER = 4;
const ATOM = 5;

function tokens(text) {
  const found = [];
  TOKEN.lastIndex = 0;
  while (TOKEN.lastIndex < text.trimEnd().length) {
    const match = TOKEN.exec(text);
    if (!match) return null;
    const [, number, name, operator] = match;
    found.push(number ? { kind: 'number', text: number } : name ? { kind: 'name', text: name } : { kind: operator, text: operator });
  }
  return found;
}

class Parser {
  constructor(list) {
    this.list = list;
    this.at = 0;
    this.depth = 0;
  }
  get next() {
    return this.list[this.at]?.kind;
  }
  take(kind) {
    if (this.next !== kind) throw new SyntaxError(kind);
    return this.list[this.at++].text;
  }
  all() {
    const parts = [this.sum().tex];
    while (this.next === ',') {
      this.take(',');
      parts.push(this.sum().tex);
    }
    if (this.at < this.list.length) throw new SyntaxError('more');
    return parts.join(',\\; ');
  }
  sum() {
    let left = this.product();
    while (this.next === '+' || this.next === '-') {
      const sign = this.list[this.at++].text;
      const right = this.product();
      left = { tex: `${left.tex} ${sign} ${wrapped(right, sign === '-' ? PRODUCT : SUM)}`, level: SUM };
    }
    return left;
  }
  product() {
    let left = this.signed();
    while (this.next === '*' || this.next === '/') {
      const operator = this.list[this.at++].text;
      const right = this.signed();
      if (operator === '/') left = { tex: `\\frac{${left.tex}}{${right.tex}}`, level: ATOM };
      else {
        const [a, b] = [wrapped(left, PRODUCT), wrapped(right, POWER)];
        const dot = /^[0-9]/.test(b) || (/[0-9]$/.test(a) && /^\\frac/.test(b)) ? '\\cdot ' : '\\,';
        left = { tex: `${a}${dot}${b}`, level: PRODUCT };
      }
    }
    return left;
  }
  signed() {
    if (this.next !== '-' && this.next !== '+') return this.power();
    const sign = this.list[this.at++].text;
    this.enter();
    const operand = this.signed();
    this.depth--;
    return sign === '-' ? { tex: `-${wrapped(operand, PRODUCT)}`, level: SIGN } : operand;
  }
  power() {
    const base = this.atom();
    if (this.next !== '**') return base;
    this.take('**');
    this.enter();
    const exponent = this.signed();
    this.depth--;
    return { tex: `{${wrapped(base, ATOM)}}^{${exponent.tex}}`, level: POWER };
  }
  enter() {
    if (++this.depth > 60) throw new SyntaxError('depth');
  }
  atom() {
    if (this.next === '(') {
      this.take('(');
      this.enter();
      const inner = this.sum();
      this.depth--;
      this.take(')');
      return { ...inner, grouped: true };
    }
    if (this.next === 'number') return { tex: numberTex(this.take('number')), level: ATOM };
    const name = this.take('name');
    if (this.next !== '(') return { tex: nameTex(name), level: ATOM };
    this.take('(');
    this.enter();
    const given = [this.sum().tex];
    while (this.next === ',') {
      this.take(',');
      given.push(this.sum().tex);
    }
    this.depth--;
    this.take(')');
    return { tex: callTex(name, given), level: ATOM };
  }
}

function wrapped(node, least) {
  return node.level >= least ? node.tex : `\\left(${node.tex}\\right)`;
}

function numberTex(text) {
  const [mantissa, exponent] = text.toLowerCase().split('e');
  return exponent === undefined ? mantissa : `${mantissa}\\cdot 10^{${Number(exponent)}}`;
}

function nameTex(name) {
  const [, stem, digits] = /^(.*?)_?([0-9]*)$/.exec(name);
  const shown = GREEK.has(stem) ? `\\${stem}` : stem.length === 1 ? stem : `\\mathrm{${stem.replaceAll('_', '\\_')}}`;
  return digits ? `${shown}_{${digits}}` : shown;
}

function callTex(name, given) {
  if (name === 'sqrt') return `\\sqrt{${given[0]}}`;
  if (name === 'abs') return `\\left|${given[0]}\\right|`;
  if (name === 'floor') return `\\left\\lfloor ${given[0]}\\right\\rfloor`;
  if (name === 'ceil') return `\\left\\lceil ${given[0]}\\right\\rceil`;
  if (name === 'exp' && given.length === 1) return `e^{${given[0]}}`;
  const shown = FUNCTIONS[name] ?? name;
  const head = NAMED.has(shown) ? `\\${shown}` : `\\operatorname{${shown.replaceAll('_', '\\_')}}`;
  return `${head}\\left(${given.join(',\\, ')}\\right)`;
}

/** Return the LaTeX of an expression, or null. */
export function latex(text) {
  const list = tokens(text);
  if (!list || !list.length) return null;
  try {
    return new Parser(list).all();
  } catch (error) {
    if (error instanceof SyntaxError) return null;
    throw error;
  }
}

/** Return the names in an expression that are variables: not functions, not pi, not e. In order of appearance. */
export function variables(text) {
  const list = tokens(text) ?? [];
  const names = list.filter(({ kind, text: name }, i) => kind === 'name' && list[i + 1]?.kind !== '(' && name !== 'pi' && name !== 'e');
  return [...new Set(names.map(({ text: name }) => name))];
}
