// Files that were dropped, chosen or fetched, as pairs of a path and its bytes.

const MOST_FILES = 1000;
const MOST_BYTES = 2 ** 29; // as the checker's driver: weights have at most half of this

export class Unusable extends Error {}

async function read(listed) {
  if (!listed.length) throw new Unusable("there are no files in it");
  const bytes = listed.reduce((sum, [, file]) => sum + file.size, 0);
  if (listed.length > MOST_FILES || bytes > MOST_BYTES) {
    throw new Unusable(`it has ${listed.length} files and ${bytes} bytes: a saved network has a few files and at most ${MOST_BYTES} bytes`);
  }
  return Promise.all(listed.map(async ([path, file]) => [path, await file.arrayBuffer()]));
}

export async function fromInput(list) {
  const files = [...list].map((file) => [file.webkitRelativePath || file.name, file]);
  return { name: nameOf(files), files: await read(files) };
}

export async function fromDrop(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean); // before any await
  const found = [];
  await Promise.all(entries.map((entry) => walk(entry, "", found)));
  return { name: nameOf(found), files: await read(found) };
}

async function walk(entry, above, found) {
  const path = above + entry.name;
  if (found.length > MOST_FILES) return;
  if (entry.isFile) {
    found.push([path, await new Promise((resolve, reject) => entry.file(resolve, reject))]);
    return;
  }
  const reader = entry.createReader();
  for (;;) {
    const batch = await new Promise((resolve, reject) => reader.readEntries(resolve, reject));
    if (!batch.length) return;
    await Promise.all(batch.map((inner) => walk(inner, `${path}/`, found)));
  }
}

function nameOf(files) {
  const [path = "network"] = files[0] ?? [];
  const [first, ...rest] = path.split("/");
  return rest.length || files.length === 1 ? first.replace(/\.zip$/i, "") : "network";
}

// A zip file, or a folder whose address ends with a slash. Only this site's own addresses are fetched.
export async function fromAddress(text) {
  const url = new URL(text, location.href);
  if (url.origin !== location.origin) throw new Unusable(`${url.origin} is another site: only networks of this site are opened by their address`);
  const name = url.pathname.split("/").filter(Boolean).pop() ?? "network";
  if (!url.pathname.endsWith("/")) return { name: name.replace(/\.zip$/i, ""), files: [[`${name}.zip`, await bytesOf(url)]] };
  const config = await bytesOf(new URL("config.json", url));
  const names = ["model.safetensors", ...certificatesOf(config)];
  const others = await Promise.all(names.map(async (file) => [file, await bytesOf(new URL(file, url))]));
  return { name, files: [["config.json", config], ...others] };
}

function certificatesOf(config) {
  try {
    const listed = JSON.parse(new TextDecoder().decode(config)).certificates;
    if (Array.isArray(listed)) return listed.filter((name) => /^certificate(\.\w+)?\.json$/.test(name));
  } catch {
    // The checker says why the file cannot be read.
  }
  return ["certificate.json"];
}

async function bytesOf(url) {
  const answer = await fetch(url);
  if (!answer.ok) throw new Unusable(`${url.pathname} cannot be fetched: ${answer.status}`);
  return answer.arrayBuffer();
}
