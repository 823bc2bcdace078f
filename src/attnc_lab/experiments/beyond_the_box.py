"""Experiment 19: inputs far from all centres; and networks of other activations as targets."""

from __future__ import annotations

import numpy as np

import attnc
from attnc_lab import drawing
from attnc_lab.experiment import About, Cell, Row, Span, Status, Table, Verdict, Verdicts, listed, sweep
from attnc_lab.measuring import errors_at, sizes_of, unproved

SIDE = 3.0
"""The functions are compiled on [−3, 3]²."""
DISTANCES = (0.0, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Distances from the box, in the largest coordinate."""
POINTS = 400
FEW = 200
"""Number of points for networks of many anchors: each of them meets every anchor for every unit."""
NETS = {
    "hard": ("sin(x)+cos(y)", "max_affine", 0.1),
    "soft": ("sin(x)+cos(y)", "spectral_grid", 1e-4),
    "composed": ("sin(x)+cos(y)", "compose", 1e-4),
    "gates": ("relu(x-y)+tanh(x+y)", "compose", 1e-4),
}
"""The name of a network → its function, its construction and the requested error."""
COLOURS = dict(zip(NETS, (drawing.INK, drawing.GREEN, drawing.BLUE, drawing.ORANGE), strict=True))
WIDTHS = (2, 4, 3, 1)
"""The widths of the networks that are targets, on [−1, 1]²."""
ACTIVATIONS = {"sigmoid": "sigmoid({})", "tanh": "tanh({})", "hard tanh": "clip({},-1,1)"}
LEVELS, SAMPLED = (1e-1, 1e-3, 1e-5, 1e-7), (1e-1, 1e-2, 1e-3, 1e-4)
"""The requested errors for gates, and for the papers' heads, whose anchors grow like 1/ε."""


def cells(profile: str) -> list[Cell]:
    return [
        *sweep(kind="far", net=NETS, distance=DISTANCES),
        *sweep(kind="network", activation=ACTIVATIONS, construction="compose", eps=LEVELS),
        *sweep(kind="network", activation="hard tanh", construction="relu_network", eps=SAMPLED),
    ]


def measure(cell: Cell, seed: int) -> list[Row]:
    if cell["kind"] == "far":
        return [_far(cell["net"], cell["distance"], seed)]
    return [_network(cell["activation"], cell["construction"], cell["eps"], seed)]


def _far(name: str, distance: float, seed: int) -> Row:
    """Measure points at a distance from the box: their error, that against f at the nearest point, and attention."""
    text, construction, eps = NETS[name]
    target = attnc.as_target(text, {"x": (-SIDE, SIDE), "y": (-SIDE, SIDE)})
    built = getattr(attnc.constructions, construction)(target, eps=eps)
    rng = np.random.default_rng([seed, 4])
    places, sides = rng.uniform(-SIDE, SIDE, (POINTS, 2)), rng.integers(0, 2, POINTS)
    signs = rng.choice([-1.0, 1.0], POINTS)
    places[np.arange(POINTS), sides] = signs * SIDE  # on the border of the box
    points = places.copy()
    points[np.arange(POINTS), sides] += signs * distance
    outputs, cache = unproved(target, built).run(points, cache=True, outside="allow")
    patterns = [cache[key] for key in cache if key.endswith(".pattern")]
    largest = np.min([pattern.max(axis=-1).mean() for pattern in patterns])
    wanted, nearest = target(points)[:, 0], target(places)[:, 0]
    outputs = np.asarray(outputs).reshape(-1)
    return {
        "error": np.abs(outputs - wanted).max(),
        "to_nearest": np.abs(outputs - nearest).max(),
        "largest_weight": largest,
        "largest_output": np.abs(outputs).max(),
        "eps": eps,
        **sizes_of(built),
    }


def layers_of(seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return random weights and biases for the widths. Four digits keep the expression short."""
    rng = np.random.default_rng([seed, 5])
    shapes = zip(WIDTHS[1:], WIDTHS[:-1], strict=True)
    return [(np.round(2 * rng.normal(size=shape) / shape[1] ** 0.5, 4), np.round(rng.normal(size=shape[0]) / 2, 4))
            for shape in shapes]  # fmt: skip


def text_of(layers: list[tuple[np.ndarray, np.ndarray]], activation: str) -> str:
    """Return a network as an expression of x and y."""
    units = ["x", "y"]
    for number, (W, b) in enumerate(layers, 1):
        sums = ["+".join([*(f"({w})*{unit}" for w, unit in zip(row, units, strict=True)), f"({c})"])
                for row, c in zip(W, b, strict=True)]  # fmt: skip
        units = sums if number == len(layers) else [ACTIVATIONS[activation].format(total) for total in sums]
    return units[0]


def as_relus(layers: list[tuple[np.ndarray, np.ndarray]]) -> attnc.ReLUNetwork:
    """Return a network of hard tanh as one of twice as many ReLUs: clip(z, −1, 1) = relu(z + 1) − relu(z − 1) − 1."""
    weights, biases = [], []
    for number, (W, b) in enumerate(layers):
        if number:
            W, b = np.concatenate([W, -W], axis=1), b - W.sum(axis=1)
        is_last = number == len(layers) - 1
        weights.append(W if is_last else np.concatenate([W, W]))
        biases.append(b if is_last else np.concatenate([b + 1, b - 1]))
    return attnc.ReLUNetwork(weights, biases, box=(-1, 1))


def _network(activation: str, construction: str, eps: float, seed: int) -> Row:
    layers = layers_of(seed)
    text, box = text_of(layers, activation), {"x": (-1, 1), "y": (-1, 1)}
    points, target = np.random.default_rng([seed, 6]).uniform(-1, 1, (4000, 2)), attnc.as_target(text, box)
    if construction == "relu_network":
        built = attnc.constructions.relu_network(as_relus(layers), eps=eps)
        few = points[:FEW]
        return {"error": errors_at(few, built.program, target).max(), **sizes_of(built)}
    net = attnc.compile(text, box, eps, construction=construction)
    found: Row = {"error": errors_at(points, net, target).max(), "anchors": net.num_anchors}
    return found if net.certificate.bound is None else found | {"bound": net.certificate.bound}


def judge(table: Table) -> Verdicts:
    far = table.where(kind="far")
    hard = far.where(net="hard")
    outside = hard.above("distance", 0.0)
    least = outside.above("distance", 0.9).column("largest_weight").min()
    yield Verdict(
        "Far from all centres selection becomes a soft average (the break condition of the paper).",
        Status.HOLDS.when(least < 0.5),
        f"from a distance of 1 on the largest weight of the hard head is at least {least:.4f} on average, since the "
        "scores of two neighbours differ by an amount that does not fall with the distance. Selection stays sharp, and "
        "the output is the value of the nearest cell: its error is the change of f since the nearest point of the box.",
        {"least_weight": least},
    )
    yield Verdict(
        "Beyond the box a hard head returns f at the nearest point of the box.",
        Status.HOLDS.when((hard.column("to_nearest") <= hard.column("bound")).all()),
        f"up to a distance of {DISTANCES[-1]:,g}, within {hard.column('to_nearest').max():.2g} of it, and the bound in "
        f"the box is {hard.column('bound').max():.2g}: on a grid the centre nearest to x is that nearest to the box's "
        "point nearest to x.",
        {"to_nearest": hard.column("to_nearest").max()},
    )
    sizes = {net: Span.of(far.where(net=net).column("largest_output")) for net in ("soft", "composed")}
    one = {net: far.where(net=net, distance=1.0)[0]["error"] for net in ("soft", "composed")}
    gates = far.where(net="gates")
    limit = gates.where(distance=0.0)[0]["error"] * 10 + NETS["gates"][2]
    yield Verdict(
        "Soft and composed heads with fitted values extrapolate badly; gates stay within their bound there.",
        Status.HOLDS.when(gates.column("error").max() <= limit and min(one.values()) > 10 * NETS["soft"][2]),
        f"at a distance of 1 the error is {listed('{1:.1e} ({0})', one)} for a requested 1e-4: nothing is claimed "
        f"outside. The outputs stay bounded, at most {listed('{1.largest:.3g} ({0})', sizes)}, the largest value of a "
        f"key. relu(x−y) + tanh(x+y) by gates errs by {gates.column('error').max():.1e} at most, at every "
        "distance up to 1,000.",
        {"gates": gates.column("error").max(), **{f"{net}_at_1": value for net, value in one.items()}},
    )
    nets = table.where(kind="network")
    composed = nets.where(construction="compose")
    exact = {name: composed.where(activation=name)[-1] for name in ACTIVATIONS}
    papers = nets.where(construction="relu_network")
    law = papers.growth("anchors")
    yield Verdict(
        "Attention subsumes other known approximators: networks of sigmoids, tanh and hard tanh.",
        Status.HOLDS.when(nets.is_within("error", "eps") and len(nets.having("bound")) == len(nets)),
        f"networks 2 → 4 → 3 → 1 with a proof of every requested error: sigmoid and tanh units are two keys each and "
        f"exact (proven {exact['sigmoid']['bound']:.1e} and {exact['tanh']['bound']:.1e}); hard tanh to "
        f"{LEVELS[-1]:g} takes {exact['hard tanh']['anchors']} keys. As a ReLU network of twice the width, by one head "
        f"per layer as in the paper, its anchors grow like ε^−{law.exponent:.2f}: {papers[-1]['anchors']:,} at "
        f"{papers[-1]['eps']:g}.",
        {"exponent": law.exponent, "hard_tanh_anchors": exact["hard tanh"]["anchors"]},
    )


def draw(table: Table, picture: drawing.Figure) -> None:
    first, second, third = drawing.panels(picture, 3, width=4.8, height=4.2)
    far = table.where(kind="far")
    first.label("error beyond the box", "distance from the box", "largest error", log="y")
    second.label("attention beyond the box", "distance from the box", "largest weight, mean")
    for (net, colour), marker in zip(COLOURS.items(), "so^D", strict=True):
        rows = far.where(net=net)
        name = f"{net}: {NETS[net][0]}"
        first.measured(rows.column("distance"), np.maximum(rows.column("error"), 1e-16), name, colour, marker)
        second.points(rows, "distance", "largest_weight", net, colour, marker)
    rows = far.where(net="hard")
    first.points(
        rows, "distance", "to_nearest", "hard, against f at the nearest point", drawing.GREY, "s", is_open=True
    )
    first.law(rows, "distance", "bound", "hard: proven, against f there", drawing.GREY)
    for panel in (first, second):
        panel.axes.set_xscale("symlog", linthresh=0.03)
        panel.axes.set_xticks([0, 0.1, 1, 10, 100, 1000], labels=["0", "0.1", "1", "10", "100", "1,000"])
    second.axes.set_ylim(0, 1.05)
    third.label("networks 2 → 4 → 3 → 1 as targets", "requested error ε", "anchors in all", log="xy")
    nets = table.where(kind="network")
    for activation, colour, marker in zip(
        ACTIVATIONS, (drawing.GREEN, drawing.ORANGE, drawing.BLUE), "o^s", strict=True
    ):
        rows = nets.where(activation=activation, construction="compose")
        is_first = activation == "sigmoid"  # tanh takes as many keys
        third.points(
            rows,
            "eps",
            "anchors",
            f"{activation}, by gates",
            colour,
            marker,
            size=9 if is_first else 5,
            is_open=is_first,
        )
    rows = nets.where(construction="relu_network")
    third.points(rows, "eps", "anchors", "hard tanh, by the papers' heads", drawing.INK, "D")
    eps = rows.column("eps")
    third.theory(eps, rows.column("anchors")[-1] * eps[-1] / eps, "theory: 1/ε")
    third.axes.invert_xaxis()


ABOUT = About(
    19,
    "Beyond the box, and other networks as targets",
    "What do hard, soft and composed networks return far from all centres? Are networks of sigmoids and of hard tanh "
    "targets as well as those of ReLU?",
    "Score differences of neighbours do not fall with the distance, so that a hard head selects the nearest cell: "
    "f at the nearest point of the box. Outputs never exceed the largest value of a key. Gates hold on all of R.",
    "2504.19901: mechanism 1, break condition (distance to the centres); 2504.15956: abstract (subsumes known "
    "approximators)",
)
