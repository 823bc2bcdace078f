// What is wrong with the page as it is now, as a list of sentences. It runs within the page.
() => {
  const wrong = [];
  const visible = (node) => node.checkVisibility({ opacityProperty: true, visibilityProperty: true });
  const named = (node) => `<${node.tagName.toLowerCase()} id="${node.id}" class="${node.className}"> ${node.textContent.trim().slice(0, 40)}`;

  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 1;
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  const parsed = (colour) => {
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = colour;
    pen.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = pen.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = ([r, g, b, a], [r0, g0, b0]) => [a * r + (1 - a) * r0, a * g + (1 - a) * g0, a * b + (1 - a) * b0, 1];
  const luminance = ([r, g, b]) => {
    const [R, G, B] = [r, g, b].map((x) => (x / 255 <= 0.04045 ? x / 255 / 12.92 : ((x / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * R + 0.7152 * G + 0.0722 * B;
  };
  const behind = (node) => {
    const layers = [];
    for (let at = node; at; at = at.parentElement) layers.push(parsed(getComputedStyle(at).backgroundColor));
    const dark = matchMedia("(prefers-color-scheme: dark)").matches;
    return layers.reverse().reduce((below, layer) => over(layer, below), dark ? [18, 18, 18, 1] : [255, 255, 255, 1]);
  };
  const contrast = (node, colour) => {
    const back = behind(node);
    const [light, dark] = [luminance(over(parsed(colour), back)), luminance(back)].sort((x, y) => y - x);
    return (light + 0.05) / (dark + 0.05);
  };
  for (const node of document.querySelectorAll("body *")) {
    const hasText = [...node.childNodes].some((child) => child.nodeType === Node.TEXT_NODE && child.textContent.trim());
    if (!hasText || !visible(node) || node.closest(":disabled, [aria-hidden=true], [aria-disabled=true]")) continue;
    const style = getComputedStyle(node);
    const found = contrast(node, node instanceof SVGElement ? style.fill : style.color);
    if (found < 4.5) wrong.push(`contrast ${found.toFixed(2)}: ${named(node)}`);
  }

  const controls = "a[href], button, input, select, textarea, summary, [tabindex='0']";
  for (const node of document.querySelectorAll(controls)) {
    if (!visible(node)) continue;
    const by = (node.getAttribute("aria-labelledby") ?? "").split(" ").map((id) => document.getElementById(id)?.textContent ?? "");
    const labels = [...(node.labels ?? [])].map((label) => label.textContent);
    const own = node.matches("input, select, textarea") ? "" : node.textContent;
    const name = [node.getAttribute("aria-label"), ...by, ...labels, own, node.title].join("").trim();
    if (!name) wrong.push(`no name for screen readers: ${named(node)}`);
  }

  const ids = [...document.querySelectorAll("[id]")].map((node) => node.id);
  for (const id of new Set(ids)) if (ids.filter((other) => other === id).length > 1) wrong.push(`two elements have the id ${id}`);
  if (document.documentElement.scrollWidth > window.innerWidth) {
    const wide = [...document.querySelectorAll("body *")].filter((node) => node.getBoundingClientRect().right > window.innerWidth + 1);
    wrong.push(`the page is ${document.documentElement.scrollWidth} pixels wide: ${wide.slice(0, 3).map(named).join("; ")}`);
  }
  if (!document.documentElement.lang) wrong.push("the page states no language");
  if (document.querySelectorAll("h1").length !== 1) wrong.push("the page does not have one heading of the first level");
  return wrong;
}
