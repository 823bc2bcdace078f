// Python, Arb and the checker in a worker of their own: the page stays alive, and can end the worker at any time.

const PAYLOAD = new URL("./payload/", import.meta.url).href;

async function content(name) {
  const answer = await fetch(new URL(name, import.meta.url));
  if (!answer.ok) throw new Error(`${name} cannot be fetched: ${answer.status}`);
  return new Uint8Array(await answer.arrayBuffer());
}

async function start() {
  let loadPyodide;
  const tell = (step) => postMessage({ type: "starting", step });
  tell("Python, compiled to WebAssembly");
  try {
    ({ loadPyodide } = await import(PAYLOAD + "pyodide.mjs"));
  } catch {
    postMessage({ type: "missing" });
    return null;
  }
  const [python, wheel, source, driver] = await Promise.all([
    loadPyodide({ indexURL: PAYLOAD, env: { HOME: "/home", PYTHONDONTWRITEBYTECODE: "1" } }),
    ...["payload/python-flint.whl", "checker.zip", "driver.py"].map(content),
  ]);
  tell("Arb, the ball arithmetic of the checker");
  python.unpackArchive(wheel, "wheel");
  tell("attnc_checker");
  python.FS.mkdirTree("/source");
  python.unpackArchive(source, "zip", { extractDir: "/source" });
  python.FS.writeFile("/source/driver.py", driver);
  python.runPython("import sys; sys.path.insert(0, '/source')");
  const module = python.pyimport("driver");
  const versions = JSON.parse(module.versions(python.toPy(source)));
  postMessage({ type: "ready", versions: { ...versions, pyodide: python.version } });
  return { python, module };
}

const started = start().catch((error) => {
  postMessage({ type: "broken", message: String(error.message ?? error) });
  return null;
});

function lastLine(error) {
  const lines = String(error.message ?? error).trim().split("\n");
  return lines[lines.length - 1].replace(/^[\w.]*Unusable: /, "");
}

onmessage = async ({ data }) => {
  const ready = await started;
  if (!ready) return;
  const { python, module } = ready;
  try {
    const files = python.toPy(new Map(data.files.map(([name, buffer]) => [name, new Uint8Array(buffer)])));
    const folder = module.receive(data.name, files);
    files.destroy();
    if (data.tampering) postMessage({ type: "tampered", text: module.tamper(folder, data.tampering) });
    postMessage({ type: "checking" });
    module.check(folder, data.seconds, (text) => postMessage(JSON.parse(text)));
  } catch (error) {
    postMessage({ type: "broken", message: lastLine(error) });
  }
};
