"""Interventions on a network: heads that are switched off, and activations that are taken from another point."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from attnc.errors import InputError, whole_number
from attnc.exact_channels import ExactChannels, ExactOutputs
from attnc.ir.patching import Patch, unknown
from attnc.ir.program import split_columns
from attnc.ir.reference import MEMORY, activation_shapes
from attnc.numerics.arrays import Float, real_array
from attnc.proofs.observed import sample_points
from attnc.targets.expressions.kinks import REACH
from attnc.wording import plural, shortened

if TYPE_CHECKING:
    from attnc.network import Network, Run

HOW = ("zero", "mean", "resample")
"""The numbers that replace the z of a head."""
SAMPLE = 256
"""Number of points of the box over which a head is averaged or resampled, if none are given. The mean of a bounded
number over as many random points is off by a 16th of its standard deviation."""
NO_EFFECT = 1e-9
"""Tables and pictures leave out sites that restore less than this share of the difference. Shares have rounding errors
of about 1e-16 times the largest intermediate number over the difference of the outputs."""


@dataclass(frozen=True, eq=False, repr=False)
class Ablated:
    """A network with heads switched off. It is called and run like the network, and has no certificate.

    Attributes
    ----------
    network : Network
        The network.
    heads : tuple of str
        The heads that are switched off, such as "attend1.head0".
    how : str
        "zero", "mean" or "resample".
    over : ndarray
        The points over which the mean is taken, or from which numbers are drawn; None for "zero".
    seed : int
        The seed of the draw for "resample".

    Examples
    --------
    >>> import attnc, numpy as np
    >>> net = attnc.compile("sin(x) + cos(y)", {"x": (-3, 3), "y": (-3, 3)}, eps=1e-6)
    >>> off = net.ablate("attend1.head0", how="zero")
    >>> off
    <Ablated: attend1.head0 by zero, of sin(x) + cos(y)>
    >>> bool(np.abs(off([[1.0, 2.0]]) - np.sin(1.0)) < 1e-6)  # head 0 is the cosine
    True
    """

    network: Network
    heads: tuple[str, ...]
    how: str
    over: Float[np.ndarray, "points d"] | None = None
    seed: int = 0

    def __repr__(self) -> str:
        what = self.network.expression or self.network.construction
        return f"<Ablated: {', '.join(self.heads)} by {self.how}, of {shortened(what, 60)}>"

    def __call__(self, *inputs: Any, outside: str = "raise") -> Float[np.ndarray, "batch ..."]:
        """Return the outputs, as a call of the network does."""
        return self.run(*inputs, outside=outside).outputs

    def run(
        self,
        *inputs: Any,
        cache: bool = False,
        patch: Mapping[str, Patch] | None = None,
        outside: str = "raise",
    ) -> Run:
        """Return the outputs and every activation, as `Network.run` does. A patch may be given as well.

        Parameters
        ----------
        *inputs : array_like
            The inputs, as for `Network.run`.
        cache : bool
            True to return every activation.
        patch : mapping, optional
            Activations to replace, beside the ablated heads: name → number, array or function.
        outside : str
            The behaviour for points outside the box, as for `Network.run`.

        Returns
        -------
        Run
            The outputs, and the cache if it was asked for.

        Examples
        --------
        >>> import attnc
        >>> import numpy as np
        >>> net = attnc.compile("sin(x) + y", {"x": (-1, 1), "y": (-1, 1)}, eps=1e-3)
        >>> without = net.ablate("attend1.head0", how="zero")
        >>> bool(without.run(np.array([[0.5, 0.25]])).outputs == 0.25)
        True
        """
        batch = len(np.asarray(inputs[0])) if inputs else 0
        patches = {f"{head}.z": self._replacement(head, batch) for head in self.heads}
        return self.network.run(*inputs, cache=cache, outside=outside, patch={**patches, **(patch or {})})

    def _replacement(self, head: str, batch: int) -> Patch:
        if self.over is None:
            return 0.0
        z = self._z[f"{head}.z"]
        if self.how == "mean":
            return z.mean(axis=0, keepdims=True)
        drawn: np.ndarray = z[np.random.default_rng(self.seed).integers(len(z), size=batch)]
        return drawn

    @cached_property
    def _z(self) -> Mapping[str, np.ndarray]:
        assert self.over is not None
        inputs = split_columns(self.over, self.network.program.input_shapes)
        cache = self.network.run(*inputs, cache=True).cache
        return {name: array for name, array in cache.items() if name.endswith(".z")}


def ablate(
    network: Network, head: str | Sequence[str], how: str, over: npt.ArrayLike | None = None, seed: int = 0
) -> Ablated:
    """Return the network with a head, or several, switched off. See `Network.ablate`."""
    if how not in HOW:
        raise InputError(f"how must be one of {', '.join(HOW)}; found {how!r}")
    heads, known = (head,) if isinstance(head, str) else tuple(head), head_names(network)
    if not heads:
        raise InputError(f"name at least one head: {', '.join(known[:8])}")
    for name in heads:
        if name not in known:
            raise InputError(f"ablate: {unknown(name, known, 'head')}")
    if how == "zero":
        if over is not None:
            raise InputError(f'how="zero" needs no points: leave out over, or use one of {", ".join(HOW[1:])}')
        return Ablated(network, heads, how)
    whole_number("seed", seed, 0)
    if over is None:
        points = sample_points(network.box if network.box.is_bounded else network.box.core(REACH), SAMPLE, seed)
    else:
        points = real_array("the points of over", over).astype(np.float64)
    if points.ndim != 2 or points.shape[1] != network.box.d or not len(points):
        raise InputError(
            f"over has shape {points.shape}: give points (n, {network.box.d}) with n ≥ 1 and one column for each of "
            f"{', '.join(network.variables)[:200]}"
        )
    return Ablated(network, heads, how, points, seed)


def head_names(network: Network) -> list[str]:
    """Return the names of all heads whose outputs are read, such as "attend1.head0"."""
    return [name.removesuffix(".z") for name, _, _, is_head in _sites(network) if is_head]


@dataclass(frozen=True, eq=False)
class TracedSite:
    """One activation that was taken from the clean points, and its effect.

    Attributes
    ----------
    name : str
        The name in the cache: a channel after a layer, or the z of a head.
    layer : str
        The layer.
    part : str
        The channel, or the head.
    is_head : bool
        Whether it is a head.
    holds : str or None
        The exact content of the channel as an expression of the variables, if the network states it.
    restored : float
        The share of the difference of the outputs that the patch restores: 0 for none, 1 for all.
    exact : float or None
        The same share by exact evaluation of the expression's parts; None if the network does not state it.
    difference : float or None
        The largest difference between the patched outputs and the exact ones.
    is_inside : bool or None
        Whether the arguments of all heads stay in the intervals on which the certificate proves them. None if it has
        no stages. Outside of them the exact answer holds for the expression, but no bound for the network.

    Examples
    --------
    >>> import attnc
    >>> net = attnc.compile("sin(x) + y", {"x": (-3, 3), "y": (-3, 3)}, eps=1e-6)
    >>> site = attnc.trace(net, [[1.0, 0.0]], [[2.0, 0.0]])["place1.signal.x"]
    >>> site.holds, round(site.restored, 6), round(site.exact, 6)
    ('x', 1.0, 1.0)
    """

    name: str
    layer: str
    part: str
    is_head: bool
    holds: str | None
    restored: float
    exact: float | None
    difference: float | None
    is_inside: bool | None


@dataclass(frozen=True, eq=False, repr=False)
class Trace:
    """Activation patching over every channel and head, with the exact answer beside it, as `attnc.trace` returns it.

    Attributes
    ----------
    sites : tuple of TracedSite
        Every channel after every layer and every head, in the order of the layers.
    clean, corrupted : ndarray
        The outputs (pairs, outputs) at the two sets of points.
    patched : ndarray
        The outputs (sites, pairs, outputs) at the corrupted points with one site taken from the clean points.
    exact : ndarray
        The exact outputs (sites, pairs, outputs), NaN where the network does not state them.
    title : str
        The function of the network.
    note : str
        The reason if no exact answers are stated, otherwise "".

    Examples
    --------
    >>> import attnc
    >>> net = attnc.compile("sin(x) + cos(y)", {"x": (-3, 3), "y": (-3, 3)}, eps=1e-6)
    >>> found = attnc.trace(net, [[1.0, 2.0]], [[2.0, 2.0]])
    >>> round(found["attend1.head1.z"].restored, 6), round(found["attend1.head0.z"].restored, 6)
    (1.0, 0.0)
    """

    sites: tuple[TracedSite, ...]
    clean: Float[np.ndarray, "pairs outputs"]
    corrupted: Float[np.ndarray, "pairs outputs"]
    patched: Float[np.ndarray, "sites pairs outputs"]
    exact: Float[np.ndarray, "sites pairs outputs"]
    title: str = ""
    note: str = ""

    def __getitem__(self, name: str) -> TracedSite:
        """Return the site with this name."""
        for site in self.sites:
            if site.name == name:
                return site
        raise InputError(f"trace: {unknown(name, [site.name for site in self.sites], 'site')}")

    def __repr__(self) -> str:
        return f"<Trace: {plural(len(self.sites), 'site')}, {plural(len(self.clean), 'pair')} of points>"

    def __str__(self) -> str:
        return self.table()

    @property
    def effective(self) -> tuple[TracedSite, ...]:
        """The sites that have an effect, measured or exact.

        Examples
        --------
        >>> import attnc
        >>> net = attnc.compile("sin(x) + cos(y)", {"x": (-1, 1), "y": (-1, 1)}, eps=0.1)
        >>> found = attnc.trace(net, [[0.5, 0.2]], [[-0.5, 0.2]])
        >>> len(found.effective) < len(found.sites)  # the head of y has no effect
        True
        """
        return tuple(site for site in self.sites if max(abs(site.restored), abs(site.exact or 0.0)) > NO_EFFECT)

    def table(self, *, every: bool = False) -> str:
        """Return the table as text: one line per site. Sites without effect are left out, unless `every` is set.

        Parameters
        ----------
        every : bool
            True to have sites without effect as well.

        Returns
        -------
        str
            Lines of equal columns.

        Examples
        --------
        >>> import attnc
        >>> import numpy as np
        >>> net = attnc.compile("tanh(x) + y", {"x": (-1, 1), "y": (-1, 1)}, eps=1e-3)
        >>> found = attnc.trace(net, np.array([[0.5, 0.2]]), np.array([[-0.5, 0.1]]))
        >>> found.table().splitlines()[0].split()
        ['site', 'holds', 'restored', 'exact', 'difference']
        """
        rows = self.sites if every else self.effective
        lines = [("site", "holds", "restored", "exact", "difference")]
        for site in rows:
            exact, difference = ("—" if value is None else value for value in (site.exact, site.difference))
            lines.append(
                (
                    site.name,
                    "" if site.holds is None else shortened(site.holds, 40),
                    f"{site.restored + 0.0:.6f}",
                    exact
                    if isinstance(exact, str)
                    else f"{exact + 0.0:.6f}{'' if site.is_inside is not False else '*'}",
                    difference if isinstance(difference, str) else f"{difference:.2g}",
                )
            )
        widths = [max(len(line[column]) for line in lines) for column in range(5)]
        sides = "<<>>>"
        text = [
            "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(line, sides, widths, strict=True)).rstrip()
            for line in lines
        ]
        left_out = len(self.sites) - len(rows)
        if left_out:
            text.append(f"{plural(left_out, 'site')} without effect left out")
        if any(site.is_inside is False for site in rows):
            text.append("* an argument leaves the interval on which the certificate proves its head")
        return "\n".join([*text, *([self.note] if self.note else [])])

    def to_dict(self) -> dict[str, Any]:
        """Return the sites and all outputs as plain lists and numbers; None in place of NaN.

        Returns
        -------
        dict
            Plain lists, texts and numbers, as `json.dumps` takes them.

        Examples
        --------
        >>> import attnc
        >>> import numpy as np
        >>> net = attnc.compile("tanh(x) + y", {"x": (-1, 1), "y": (-1, 1)}, eps=1e-3)
        >>> found = attnc.trace(net, np.array([[0.5, 0.2]]), np.array([[-0.5, 0.1]]))
        >>> len(found.to_dict()["sites"]) == len(found.sites)
        True
        """
        arrays = {name: getattr(self, name) for name in ("clean", "corrupted", "patched", "exact")}
        return {
            "title": self.title,
            "note": self.note,
            "sites": [asdict(site) for site in self.sites],
            **{name: _plain(array) for name, array in arrays.items()},
        }

    def to_json(self) -> str:
        """Return `to_dict()` as JSON.

        Returns
        -------
        str
            One JSON object.

        Examples
        --------
        >>> import attnc, json
        >>> net = attnc.compile("sin(x)", {"x": (-1, 1)}, eps=0.1)
        >>> found = attnc.trace(net, [[0.5]], [[-0.5]])
        >>> len(json.loads(found.to_json())["sites"]) == len(found.sites)
        True
        """
        return json.dumps(self.to_dict(), ensure_ascii=False)

    def plot(self, path: str | os.PathLike[str] | Path) -> None:
        """Draw a heat map of channels and heads against layers into a .svg, .pdf or .png file. It needs matplotlib.

        Parameters
        ----------
        path : path-like
            The file; its ending chooses the format.

        Examples
        --------
        >>> import attnc, pathlib, tempfile
        >>> net = attnc.compile("sin(x)", {"x": (-1, 1)}, eps=0.1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     attnc.trace(net, [[0.5]], [[-0.5]]).plot(f"{folder}/trace.svg")
        ...     [path.name for path in pathlib.Path(folder).iterdir()]
        ['trace.svg']
        """
        from attnc.plots.tracing import plot_trace

        plot_trace(self, path)


def trace(
    net: Network,
    clean: npt.ArrayLike | tuple[npt.ArrayLike, ...],
    corrupted: npt.ArrayLike | tuple[npt.ArrayLike, ...],
) -> Trace:
    """Patch every channel and head at the corrupted points with its numbers at the clean ones, one at a time.

    The share of the difference of the outputs that a patch restores is Σ (p − c)(k − c) / Σ (k − c)², over all pairs
    and outputs, with the patched outputs p, the corrupted c and the clean k.

    Parameters
    ----------
    net : Network
        The network.
    clean, corrupted : array_like
        Pairs of points, as for a call of the network; a tuple of two arrays if it takes two inputs.

    Returns
    -------
    Trace
        The effect of every site. Beside it stands the exact effect, which follows from the expression and the part of
        it that each head computes. A composition states these parts, in its certificate if that is head by head. Other
        networks state only their inputs and outputs.

    Raises
    ------
    InputError
        If the points do not fit, or the outputs do not differ.

    Examples
    --------
    >>> import attnc
    >>> net = attnc.compile("sin(x) + cos(y)", {"x": (-3, 3), "y": (-3, 3)}, eps=1e-6)
    >>> found = attnc.trace(net, [[1.0, 2.0]], [[2.0, 0.5]])
    >>> [(site.holds, abs(site.restored - site.exact) < 1e-4) for site in found.effective if site.is_head]
    [('cos(y)', True), ('sin(x)', True)]
    """
    both = [given if isinstance(given, tuple) else (given,) for given in (clean, corrupted)]
    runs = [net.run(*inputs, cache=True) for inputs in both]
    flat = [
        np.concatenate([np.asarray(a, np.float64).reshape(len(run.outputs), -1) for a in inputs], axis=1)
        for inputs, run in zip(both, runs, strict=True)
    ]
    if len(flat[0]) != len(flat[1]) or not len(flat[0]):
        raise InputError(f"clean and corrupted are pairs of points: found {len(flat[0])} and {len(flat[1])} points")
    k, c = (run.outputs.reshape(len(run.outputs), -1).astype(np.float64) for run in runs)
    if not (k != c).any():
        raise InputError("clean and corrupted have the same outputs: there is no difference to restore")
    meaning = ExactChannels(net)
    ends = [meaning.outputs(at, None, at) for at in flat]
    sites, patched, exact = list[TracedSite](), list[np.ndarray](), list[np.ndarray]()
    for name, layer, part, is_head in _sites(net):
        is_same = np.array_equal(runs[0].cache[name], runs[1].cache[name])
        p = (
            c
            if is_same
            else net.run(*both[1], patch={name: runs[0].cache[name]}).outputs.reshape(c.shape).astype(float)
        )
        channel = _only_channel(net, layer, part) if is_head else part
        found: ExactOutputs | None = None
        if is_same:
            found = ends[1]
        elif channel is not None and not layer.startswith(MEMORY):
            found = meaning.outputs(flat[1], (layer, channel), flat[0])
        answer = None
        if found is not None and ends[0] is not None and ends[1] is not None:
            answer = _share(found.outputs, ends[1].outputs, ends[0].outputs)
        sites.append(
            TracedSite(
                name,
                layer,
                part,
                is_head,
                None if channel is None else meaning.holds(channel),
                _share(p, c, k),
                None if answer is None or not math.isfinite(answer) else answer,
                None if found is None else float(np.abs(p - found.outputs).max()),
                None if found is None else found.is_inside,
            )
        )
        patched.append(p)
        exact.append(np.full(c.shape, np.nan) if found is None else found.outputs)
    note = ""
    if all(site.exact is None for site in sites):
        note = "No exact answers: the network has no expression."
    elif any(site.exact is None for site in sites if abs(site.restored) > NO_EFFECT):
        note = "—: neither the certificate nor the construction states what this site holds."
    title = net.expression or net.construction
    return Trace(tuple(sites), k, c, np.stack(patched), np.stack(exact), title, note)


def _sites(net: Network) -> list[tuple[str, str, str, bool]]:
    """Return (name, layer, part, whether it is a head) of every channel and head, in the order of the layers."""
    found, known = [], activation_shapes(net.program)
    for prefix, layers in ((MEMORY, net.program.unrolled_memory), ("", net.program.unrolled_layers)):
        for layer in layers:
            name = prefix + layer.name
            found += [(f"{name}.head{h}.z", name, f"head{h}", True) for h in range(len(layer.heads))]
            found += [(f"{name}.{channel}", name, channel, False) for channel in layer.channels]
    return [site for site in found if site[0] in known]


def _only_channel(net: Network, layer: str, head: str) -> str | None:
    """Return the channel that holds the output of a head alone, if there is one.

    With a residual, only the channels of a derivation are known to be zero before the head writes them.
    """
    found = next((each for each in net.program.unrolled_layers if each.name == layer), None)
    if found is None or (found.residual and net.known_derivation is None):
        return None
    number = int(head.removeprefix("head"))
    written = [set(np.flatnonzero(each.W_O.any(axis=0)).tolist()) for each in found.heads]
    others = set().union(*(columns for h, columns in enumerate(written) if h != number))
    if len(written[number]) != 1 or written[number] & others:
        return None
    return found.channels[written[number].pop()]


def _plain(array: np.ndarray) -> list[Any]:
    """Return nested lists with None in place of NaN."""
    stated = array.astype(object)
    stated[np.isnan(array)] = None
    found: list[Any] = stated.tolist()
    return found


def _share(p: np.ndarray, c: np.ndarray, k: np.ndarray) -> float:
    """Return the share of k − c that p − c restores. It is NaN if k and c are equal."""
    whole = float(((k - c) ** 2).sum())
    return float(((p - c) * (k - c)).sum()) / whole if whole > 0 else math.nan
