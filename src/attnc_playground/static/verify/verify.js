// The page: a network is chosen, a worker checks it, and every leaf is drawn when it is proved.

import { fromAddress, fromDrop, fromInput } from "./files.js";
import { counted, roundedUp, short } from "./numbers.js";
import { Picture } from "./pictures.js";

const GRACE = 2; // seconds that a check has to end with a verdict of its own, as on the command line
const MOST_STAGES_DRAWN = 8; // a stage takes a picture of 220 pixels; the list has them all

const element = (id) => document.getElementById(id);
const state = (name) => (document.documentElement.dataset.state = name);
const say = (text) => (element("status").textContent = text);

let worker = null;
let network = null; // { name, files }
let current = null; // the check that is going on
let timer = 0;

function made(tag, text = "", className = "") {
  const found = document.createElement(tag);
  found.textContent = text;
  if (className) found.className = className;
  return found;
}

// The checker

function start() {
  if (worker) return;
  worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
  worker.onmessage = ({ data }) => receive[data.type]?.(data);
  worker.onerror = (event) => {
    event.preventDefault();
    broken(event.message || "the worker could not be started");
  };
}

function end() {
  worker?.terminate();
  worker = null;
  clearTimeout(timer);
}

function check(tampering = "") {
  if (!network) return;
  if (current) end();
  clearTimeout(timer);
  current = { stages: [], pictures: [], verdicts: [], count: 0, done: 0 };
  for (const id of ["verdicts", "drawings", "claim", "assumed", "leaf", "tampered", "count", "picture-text", "legend"]) element(id).replaceChildren();
  for (const id of ["claims", "pictures", "assumptions"]) element(id).hidden = true;
  element("bar").removeAttribute("value");
  element("stop").disabled = false;
  element("check").disabled = true;
  state("starting");
  say(`${network.name}: the checker is starting.`);
  start();
  const seconds = Math.min(3600, Math.max(1, Number(element("seconds").value) || 120));
  current.seconds = seconds;
  worker.postMessage({ name: network.name, files: network.files, seconds, tampering });
}

function finish(name) {
  clearTimeout(timer);
  element("stop").disabled = true;
  element("check").disabled = false;
  element("tampering").hidden = false;
  if (!element("bar").hasAttribute("value")) element("bar").value = 0;
  current = null;
  state(name);
}

function undecided(reason, name) {
  end();
  verdict("undecided", "Not decided", reason);
  say(`Not decided: ${reason}`);
  finish(name);
}

function broken(message) {
  end();
  verdict("undecided", "Nothing was checked", message);
  say(`Nothing was checked: ${message}`);
  finish("broken");
}

const receive = {
  starting({ step }) {
    if (current) say(`${network.name}: starting ${step} …`);
  },
  missing() {
    end();
    const text = "Python for browsers is not installed here. Run `make verify-page`, and start the server again.";
    verdict("undecided", "The checker is missing", text);
    say(text);
    finish("missing");
  },
  ready({ versions }) {
    const { checker, lines, flint, python, pyodide } = versions;
    element("versions").textContent =
      `attnc_checker (${lines.toLocaleString("en")} lines; its source, checker.zip, has the SHA-256 ${checker}), ` +
      `python-flint ${flint} (Arb), Python ${python}, Pyodide ${pyodide}.`;
  },
  tampered({ text }) {
    element("tampered").textContent = text;
  },
  checking() {
    state("checking");
    say(`${network.name}: reading the files, and reducing the network to what its outputs need …`);
    timer = setTimeout(() => undecided(`the check did not end within ${current.seconds} s. Allow more time.`, "undecided"), 1000 * (current.seconds + GRACE));
  },
  claim(claim) {
    current.stages = claim.stages ?? [];
    current.evidence = claim.evidence;
    if (claim.bound !== undefined) showClaim(claim);
  },
  layout(layout) {
    current.count = layout.count;
    current.done = 0;
    say(`${network.name}: proving ${counted(layout.count, "leaf", "leaves")} again …`);
    showLeaves(layout);
    progress();
  },
  leaves({ proved }) {
    current.done += proved.length;
    for (const [subject, leaf, found] of proved) current.pictures[subject]?.prove(leaf, found);
    progress();
  },
  verdict(found) {
    const { proved, decided, failed, exit_code: code } = found;
    if (failed) current.pictures[failed[0]]?.fail(failed[1]);
    showVerdict(found);
    current.verdicts.push(proved ? "proved" : decided || code === 2 ? "refused" : "undecided");
  },
  end() {
    const worst = ["refused", "undecided", "proved"].find((name) => current.verdicts.includes(name));
    const [first, ...others] = [...element("verdicts").querySelectorAll("strong")].map((found) => found.textContent);
    say(`${network.name}: ${[first, ...others].join(", ").toLowerCase()}.`);
    finish(worst);
  },
  broken({ message }) {
    broken(message);
  },
};

function progress() {
  const { done, count } = current;
  element("bar").max = Math.max(1, count);
  element("bar").value = done;
  element("count").textContent = `${done.toLocaleString("en")} of ${counted(count, "leaf", "leaves")} re-proved`;
}

// What is shown

function verdict(kind, title, text, small = "") {
  const found = made("div", "", `verdict ${kind}`);
  const mark = { proved: "✓ ", refused: "✗ ", undecided: "? " }[kind];
  found.append(made("strong", mark + title), made("p", text));
  if (small) found.append(made("p", small, "small"));
  element("verdicts").append(found);
  return found;
}

function showVerdict(found) {
  const { proved, decided, bound, reproved, scope, dtype, leaves, seconds, reason, exit_code: code, certificate } = found;
  const { gradient_bound: gradient, excluded } = found;
  const which = certificate === "certificate.json" ? "" : `${certificate}: `;
  const time = `${seconds.toFixed(1)} s, in this browser`;
  if (proved) {
    const text = `${which}the error is at most ${roundedUp(bound, 6)} ${scope}, in ${dtype}.`;
    const shown = verdict("proved", "Re-proved", text, `${counted(leaves, "leaf", "leaves")}; ${roundedUp(reproved, 6)} was found here; ${time}.`);
    shown.dataset.reproved = reproved;
    if (gradient !== null) {
      const bands = excluded.map(([lo, hi]) => `[${short(lo)}, ${short(hi)}]`).join(" or ");
      shown.append(made("p", `The error of every partial derivative is at most ${roundedUp(gradient, 6)}${bands ? `, except in ${bands}` : ""}.`));
    }
  } else {
    const title = code === 2 ? "The files are bad" : decided ? "Not re-proved" : "Not decided";
    const kind = decided || code === 2 ? "refused" : "undecided";
    verdict(kind, title, which + reason, `${time}. The command line gives the same reason.`).dataset.reason = reason;
  }
  for (const text of found.assumptions) {
    const isNew = [...element("assumed").children].every((line) => line.textContent !== text);
    if (isNew) element("assumed").append(made("li", text));
  }
  if (proved) {
    const own = "the checker itself, Python, SHA-256 and Arb, and this browser's WebAssembly, which runs them";
    element("assumed").append(...([...element("assumed").children].some((line) => line.textContent === own) ? [] : [made("li", own)]));
    element("assumptions").hidden = false;
  }
}

function showClaim({ expression, box, bound, norm, dtype, certificate }) {
  const sides = box.map(([name, lo, hi]) => `${name} from ${short(lo)} to ${short(hi)}`).join(", ");
  const what = norm === "inf" ? `at most ${roundedUp(bound, 6)} at every point` : `at most ${roundedUp(bound, 6)} in the norm L_${norm}`;
  const rows = [
    ["certificate", certificate, "mono"],
    ["function", expression ?? "the rows of a table", "mono"],
    ["box", sides],
    ["error", `|function − network| is ${what}`],
    ["arithmetic", dtype],
  ];
  for (const [term, text, className] of rows) {
    const value = made("dd");
    value.append(made("span", text, className));
    element("claim").append(made("dt", term), value);
  }
  element("claims").hidden = false;
}

function showLeaves({ subjects }) {
  element("leaf").textContent = "";
  element("pictures").hidden = false;
  if (current.evidence === "stages") {
    current.pictures = showStages(subjects);
    return;
  }
  element("picture-text").textContent =
    "The box is cut into leaves. On each leaf the checker bounds the distance of the function and the network by itself. " +
    (subjects[0]?.variables.length === 1 && subjects[0].measures ? "The height of a bar is the bound that is found on it. " : "") +
    "Point at a leaf, or use the arrow keys.";
  legend(subjects[0]?.measures ?? true);
  current.pictures = subjects.map(draw);
}

function draw(subject) {
  const picture = new Picture(subject, (text) => (element("leaf").textContent = text));
  element("drawings").append(picture.canvas);
  picture.draw();
  return picture;
}

function legend(measures) {
  const keys = measures
    ? [["waiting", "not proved yet"], ["loose", "re-proved, far below the bound"], ["tight", "re-proved, close to the bound"], ["failed", "refused"]]
    : [["waiting", "not proved yet"], ["loose", "re-proved"], ["failed", "refused"]];
  for (const [className, text] of keys) {
    const key = made("span", "", "key");
    key.append(made("i", "", className), made("span", text));
    element("legend").append(key);
  }
}

// A staged proof: every channel that attention writes is a stage, with leaves of its own or like an earlier one.
function showStages(subjects) {
  element("picture-text").textContent =
    "Several attention layers follow each other. Every channel that attention writes is a stage: one function of one number, proved by leaves of its own. " +
    "The checker then adds up how the errors of all stages reach the outputs.";
  const table = made("table");
  const head = made("tr");
  for (const title of ["stage", "function of t", "t is", "t lies in", "claimed bound", "re-proved"]) head.append(made("th", title));
  table.append(head);
  const rows = new Map();
  for (const stage of current.stages) {
    const row = made("tr");
    const [lo, hi] = stage.interval;
    const value = stage.carrier === null ? stage.function : `(${stage.carrier}) · ${stage.function}`;
    const texts = [stage.name, value, stage.argument, `[${short(lo)}, ${short(hi)}]`, roundedUp(stage.bound)];
    texts.forEach((text, i) => {
      const cell = made("td", "", i > 2 ? "number" : "");
      cell.append(made("span", text, i > 2 ? "" : "mono"));
      row.append(cell);
    });
    row.append(made("td", stage.like ? `like ${stage.like}` : "waits"));
    row.dataset.stage = stage.name;
    table.append(row);
    rows.set(stage.name, row);
  }
  const holder = made("div", "", "scroll");
  holder.tabIndex = 0;
  holder.setAttribute("role", "region");
  holder.setAttribute("aria-label", "Stages");
  holder.append(table);
  element("drawings").append(holder);
  const own = current.stages.filter((stage) => !stage.like);
  legend(true);
  return subjects.map((subject, i) => {
    const picture = i < MOST_STAGES_DRAWN ? drawStage(subject, own[i]) : null;
    return new StageRow(rows.get(own[i]?.name), subject.count, picture);
  });
}

function drawStage(subject, stage) {
  element("drawings").append(made("h3", `Stage ${stage.name}: ${stage.function}`));
  return draw(subject);
}

class StageRow {
  constructor(row, count, picture) {
    Object.assign(this, { row, count, picture, done: 0 });
  }

  prove(leaf, found) {
    this.picture?.prove(leaf, found);
    this.done += 1;
    this.tell(this.done === this.count ? "proved" : "", `${this.done} of ${counted(this.count, "leaf", "leaves")}`);
  }

  fail(leaf) {
    this.picture?.fail(leaf);
    this.tell("failed", `refused after ${this.done} of ${counted(this.count, "leaf", "leaves")}`);
  }

  tell(className, text) {
    if (!this.row) return;
    this.row.className = className;
    this.row.lastElementChild.textContent = text;
  }
}

// Where networks come from

let choices = 0;

async function choose(source) {
  choices += 1;
  const number = choices;
  try {
    const found = await source;
    if (number !== choices) return; // another network was chosen meanwhile
    network = found;
  } catch (error) {
    if (number !== choices) return;
    element("chosen").textContent = `This cannot be opened: ${error.message}.`;
    say("Nothing was checked.");
    state("broken");
    return;
  }
  const bytes = network.files.reduce((sum, [, content]) => sum + content.byteLength, 0);
  const size = `${counted(network.files.length, "file", "files")}, ${counted(bytes, "byte", "bytes")}`;
  element("chosen").textContent = `Chosen: ${network.name} (${size}).`;
  element("check").disabled = false;
  check();
}

async function offer() {
  const answer = await fetch("networks.json");
  if (!answer.ok) return;
  const offered = await answer.json();
  for (const { title, url } of offered) {
    const option = made("option", title);
    option.value = url;
    element("gallery").append(option);
  }
  element("gallery").disabled = !offered.length;
  if (!offered.length) element("gallery").options[0].textContent = "on the site of the documentation";
}

function listen() {
  for (const id of ["files", "folder"]) {
    element(id).addEventListener("change", ({ target }) => {
      if (target.files.length) choose(fromInput(target.files)).finally(() => (target.value = ""));
    });
  }
  const drop = element("drop");
  for (const name of ["dragenter", "dragover", "dragleave", "drop"]) {
    document.addEventListener(name, (event) => {
      event.preventDefault();
      drop.classList.toggle("over", name === "dragenter" || name === "dragover");
      if (name === "drop") choose(fromDrop(event.dataTransfer));
    });
  }
  element("gallery").addEventListener("change", ({ target }) => {
    if (target.value) location.hash = `net=${encodeURIComponent(target.value)}`;
  });
  window.addEventListener("hashchange", fromHash);
  element("check").addEventListener("click", () => check());
  element("stop").addEventListener("click", () => undecided("you stopped the check.", "stopped"));
  for (const button of document.querySelectorAll("[data-tampering]")) {
    button.addEventListener("click", () => check(button.dataset.tampering));
  }
  window.addEventListener("message", ({ origin, source, data }) => {
    if (origin !== location.origin || source !== window.opener || data?.type !== "attnc-network") return;
    choose(Promise.resolve({ name: String(data.name ?? "network"), files: Object.entries(data.files) }));
  });
}

function fromHash() {
  const given = new URLSearchParams(location.hash.slice(1));
  if (given.get("net")) choose(fromAddress(given.get("net")));
  if (given.get("from") === "opener" && window.opener) window.opener.postMessage({ type: "attnc-verify-ready" }, location.origin);
}

element("needs-server").remove();
state("idle");
listen();
await offer();
fromHash();
