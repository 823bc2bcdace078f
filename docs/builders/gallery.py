"""The networks of the gallery: their code, their pictures, the page docs/gallery.md, and their files for the site.

`python docs/builders/gallery.py` writes the page. `tables.py --figures` draws the pictures, and `website.py` saves the
networks to site/gallery/NAME, with an index.json that lists them.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import attnc
from attnc.plots.style import BLUE, ERRORS, GREY, INK, ORANGE, VALUES
from attnc.wording import ceiling

PAGE = Path(__file__).resolve().parents[1] / "gallery.md"
VERIFIED = "verify/index.html#net=../gallery/{}/"
"""The address of the page that proves the bound of a network again. It is in the site, and not in docs/."""
SHOWN_RANGE = (-6.0, 6.0)
"""The part of an infinite range that a picture shows."""


@dataclass(frozen=True)
class Exhibit:
    """One network: the code that makes `net`, and a text about it."""

    name: str
    title: str
    code: str
    text: str
    page: str  # of the construction

    @functools.cached_property
    def network(self) -> attnc.Network:
        """The network that the code makes."""
        names: dict[str, Any] = {"attnc": attnc, "math": __import__("math")}
        exec(compile(self.code, f"<gallery: {self.name}>", "exec"), names)
        net: attnc.Network = names["net"]
        return net

    @property
    def picture(self) -> str:
        return f"gallery_{self.name}"


EXHIBITS = (
    Exhibit(
        "staircase",
        "A staircase",
        'net = attnc.compile(\n    "sin(x)", {"x": (-3, 3)},\n'
        '    construction="max_affine", beta=50.0, points_per_axis=7,\n)',
        "Seven keys with sharp weights. Each wins on one step, and the output is its value. The right panel shows the "
        "weights: one dark key for every x.",
        "max_affine",
    ),
    Exhibit(
        "soft-sine",
        "The same seven keys, softer",
        'net = attnc.compile("sin(x)", {"x": (-3, 3)}, eps=1e-6)',
        "Again sin by seven keys. The weights are shared, and the values are solved for. The error is 10⁶ times "
        "smaller.",
        "compose",
    ),
    Exhibit(
        "clip",
        "A clip",
        "clip = attnc.TruncatedLinear([1.0], 0.0, a=0.0, b=1.0, box=(-0.5, 1.5))\nnet = attnc.compile(clip, eps=0.01)",
        "The building block of the first paper: a linear function that is cut off at 0 and 1.",
        "truncated_linear",
    ),
    Exhibit(
        "square-root",
        "A singular point",
        'net = attnc.compile("sqrt(x)", {"x": (0, 1)}, eps=1e-6)',
        "The slope of √x is infinite at 0. The keys crowd there, each a little further from 0 than the one before.",
        "graded",
    ),
    Exhibit(
        "gelu",
        "An activation on the whole line",
        'net = attnc.compile("gelu(x)", {"x": (-math.inf, math.inf)}, eps=1e-6)',
        "The bound holds for every real number. The values of the keys carry x, so the output is not bounded.",
        "gates",
    ),
    Exhibit(
        "plane",
        "A partition of the plane",
        'net = attnc.compile(\n    "sin(x) + cos(y)", {"x": (-3, 3), "y": (-3, 3)},\n'
        '    construction="max_affine", beta=50.0, points_per_axis=7,\n)',
        "One head, 49 keys: a cell for each key. This is the picture of the second paper.",
        "max_affine",
    ),
    Exhibit(
        "sum",
        "A sum by two heads",
        'net = attnc.compile("sin(x) + cos(y)", {"x": (-3, 3), "y": (-3, 3)}, eps=1e-6)',
        "The same function by 14 keys: one head for sin, and one for cos. The ripples of the error are nearly as "
        "high as the bound everywhere.",
        "compose",
    ),
    Exhibit(
        "product",
        "A product",
        'net = attnc.compile("x*y", {"x": (-1, 1), "y": (-1, 1)}, eps=1e-8)',
        "Multiplication by one head with five keys. The query is x, and the values carry y.",
        "compose",
    ),
    Exhibit(
        "bell",
        "One head over a grid",
        'net = attnc.compile(\n    "exp(-x**2 - y**2)*sin(3*x + y)", {"x": (-2, 2), "y": (-2, 2)},\n'
        '    eps=1e-3, construction="spectral_grid",\n)',
        "A single soft head. For smooth functions the error falls exponentially with the number of keys per axis.",
        "spectral_grid",
    ),
    Exhibit(
        "pyramid",
        "Kinks, in float32",
        'net = attnc.compile("1 - max(abs(x), abs(y))", {"x": (-1, 1), "y": (-1, 1)}, eps=1e-4, dtype="float32")',
        "A pyramid. Its edges are kinks, which need steep keys and no dense grid. The bound holds in float32.",
        "compose",
    ),
    Exhibit(
        "deep",
        "Two layers",
        'net = attnc.compile("exp(sin(x)*y)", {"x": (-3, 3), "y": (-3, 3)}, eps=1e-9)',
        "The first layer computes sin(x)·y, the second its exponential. The proof goes head by head.",
        "compose",
    ),
    Exhibit(
        "jump",
        "A jump, in the mean",
        'net = attnc.compile("sign(x)*y", {"x": (-1, 1), "y": (-1, 1)}, eps=0.1, norm=2)',
        "No continuous network is close to a jump everywhere. The bound is about the square mean (L₂) of the error.",
        "affine_cells",
    ),
)


def facts(net: attnc.Network) -> dict[str, Any]:
    """Return the size and the claim of a network, as a row of index.json."""
    claim = net.certificate
    return {
        "construction": net.construction,
        "keys": net.num_anchors,
        "heads": net.program.num_heads,
        "attention_layers": net.program.num_attention_layers,
        "stored_numbers": net.num_parameters,
        "dtype": claim.dtype,
        "bound": claim.bound,
        "observed": claim.observed,
        "method": claim.method,
    }


def section(exhibit: Exhibit) -> str:
    """Return the part of the page about one network."""
    net = exhibit.network
    row = facts(net)
    counted = ("key", row["keys"]), ("head", row["heads"]), ("attention layer", row["attention_layers"])
    sizes = ", ".join(f"{number} {noun}{'s' * (number != 1)}" for noun, number in counted)
    claim = f"Bound (proven, {row['dtype']}): **{ceiling(row['bound'], 2)}**. Observed: {row['observed']:.2g}."
    return f"""## {exhibit.title}

![{exhibit.title}: {"; ".join(panels(net))}](figures/{exhibit.picture}.png)

{exhibit.text}

```python
{exhibit.code}
```

{sizes}, {row["stored_numbers"]} stored numbers. {claim}
Construction: [{row["construction"]}]({exhibit.page}.md).
<a href="{VERIFIED.format(exhibit.name)}">Re-prove it in the browser</a>.
"""


def page() -> str:
    """Return docs/gallery.md."""
    head = f"""# Gallery

This page has {len(EXHIBITS)} networks, each with its code, its size and its proven bound. Every one takes less than
two seconds to compile. In pictures of one variable the left panel has the function and the network, and the right panel
the weights of all keys. In pictures of two variables the left panel has the network, and the right panel its error.
The site has each as a saved network in `gallery/NAME/`, as `net.save` writes it. `attnc verify` proves its bound again,
and so does the [checker in the browser](checker.md#in-the-browser), which the links on this page open.

```python
import math
import attnc
```
"""
    return "\n".join([head, *(section(exhibit) for exhibit in EXHIBITS)])


def panels(net: attnc.Network) -> tuple[str, str]:
    """Return the contents of the two panels of a picture, for its alt text."""
    if len(net.variables) == 1:
        return "the function and the network over x", "the weights of its keys over x"
    return "the network over x and y", "its error"


def draw(exhibit: Exhibit, path: Path) -> None:
    """Draw a small picture of a network: two panels."""
    from matplotlib.figure import Figure

    net = exhibit.network
    picture = Figure(figsize=(5.6, 2.5), layout="constrained")
    left, right = picture.subplots(1, 2)
    (_draw_line if len(net.variables) == 1 else _draw_plane)(net, picture, left, right)
    for axes in (left, right):
        axes.tick_params(labelsize=8, colors=GREY)
        axes.set_xlabel("x", fontsize=9, color=INK)
    picture.savefig(path, dpi=110, facecolor="white")


def _target(net: attnc.Network) -> Any:
    if net.expression:
        box = dict(zip(net.variables, zip(net.box.lo, net.box.hi, strict=True), strict=True))
        return attnc.as_target(net.expression, box, p=float(net.certificate.norm))
    return attnc.TruncatedLinear([1.0], 0.0, 0.0, 1.0, (-0.5, 1.5))


def _draw_line(net: attnc.Network, picture: Any, left: Any, right: Any) -> None:
    lo, hi = max(net.box.lo[0], SHOWN_RANGE[0]), min(net.box.hi[0], SHOWN_RANGE[1])
    x = np.linspace(lo, hi, 601)
    outputs, cache = net.run(x[:, None], cache=True)
    left.plot(x, _target(net)(x[:, None])[:, 0], color=ORANGE, lw=2.2, ls="--")
    left.plot(x, outputs, color=BLUE, lw=1.3)
    left.set_title("dashed: function, solid: network", fontsize=9, loc="left", color=INK)
    pattern = np.concatenate([cache[name][:, 0] for name in cache if name.endswith(".pattern")], axis=1)
    pattern = pattern[:, pattern.max(axis=0) > 0]
    right.imshow(
        pattern.T, "Blues", aspect="auto", origin="lower", extent=(lo, hi, 0.5, pattern.shape[1] + 0.5), vmin=0, vmax=1
    )
    right.set_title("weights of the keys", fontsize=9, loc="left", color=INK)


def _draw_plane(net: attnc.Network, picture: Any, left: Any, right: Any) -> None:
    x, y = (np.linspace(lo, hi, 161) for lo, hi in zip(net.box.lo, net.box.hi, strict=True))
    points = np.stack(np.meshgrid(x, y), axis=-1).reshape(-1, 2)
    outputs = net(points).astype(np.float64)
    error = outputs - _target(net)(points)[:, 0]
    extent = (x[0], x[-1], y[0], y[-1])
    size = np.abs(error).max()
    for axes, values, colours, limits, title in (
        (left, outputs, VALUES, (outputs.min(), outputs.max()), "network"),
        (right, error, ERRORS, (-size, size), "error"),
    ):
        image = values.reshape(len(y), len(x))
        shown = axes.imshow(
            image, colours, origin="lower", extent=extent, vmin=limits[0], vmax=limits[1], aspect="auto"
        )
        axes.set_title(title, fontsize=9, loc="left", color=INK)
        bar = picture.colorbar(shown, ax=axes, pad=0.02)
        bar.ax.tick_params(labelsize=7, colors=GREY)
        bar.ax.yaxis.get_offset_text().set_fontsize(7)
    left.set_ylabel("y", fontsize=9, color=INK)


def save_all(folder: Path) -> None:
    """Save every network in a folder of its own, and index.json, which lists them."""
    folder.mkdir()
    rows = []
    for exhibit in EXHIBITS:
        exhibit.network.save(folder / exhibit.name)
        rows.append({"name": exhibit.name, "title": exhibit.title, "code": exhibit.code} | facts(exhibit.network))
    (folder / "index.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
