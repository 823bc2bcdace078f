// Numbers as text. A bound is rounded up: nothing below it was proved.

export function roundedUp(x, digits = 4) {
  if (!(x > 0) || !Number.isFinite(x)) return String(x);
  const unit = 10 ** (Math.floor(Math.log10(x)) - digits + 1);
  let text = x.toPrecision(digits);
  while (Number(text) < x) text = (Number(text) + unit).toPrecision(digits);
  return x < 1e-3 ? Number(text).toExponential() : String(Number(text));
}

export function short(x) {
  return typeof x === "number" ? String(Number(x.toPrecision(6))) : x;
}

export function counted(count, one, many) {
  return `${count.toLocaleString("en")} ${count === 1 ? one : many}`;
}
