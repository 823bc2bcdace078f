// Typesets the formulas of a page: Zensical writes `$…$` and `$$…$$` as elements of the class "arithmatex".
const DELIMITERS = 2; // characters of \( and \), or of \[ and \]

document.addEventListener("DOMContentLoaded", () => {
  for (const element of document.querySelectorAll(".arithmatex")) {
    const source = element.textContent.trim();
    katex.render(source.slice(DELIMITERS, -DELIMITERS), element, {
      displayMode: source.startsWith("\\["),
      throwOnError: false,
    });
  }
});
