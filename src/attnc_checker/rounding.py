"""Bounds on the floating-point error in the average of a head, for any order of summation.

u is the unit roundoff and γ_n = nu/(1 − nu). An engine is assumed to have IEEE 754 arithmetic rounded to nearest, and
weights within 32 ulp for exact scores (float32: 4 ulp). Results below e^−700
(float32: e^−80) may be anything from 0 to that number.
"""

from __future__ import annotations

from flint import arb

from attnc_checker.files import Refused
from attnc_checker.forms import SMALLEST, Head
from attnc_checker.vectors import INFINITE, Vector, most, total

FORMATS = {"float64": (53, 700, 32), "float32": (24, 80, 4)}
"""dtype → (m, n, K): u = 2^−m, weights below e^−n may be lost, and others are within K ulp."""


class Arithmetic:
    """float64, float32, or `real`: without rounding, u = 0."""

    def __init__(self, name: str) -> None:
        self.name, self.u, self.lost, self.kept, self.ulps = name, arb(0), arb(0), arb(0), 0
        if name in FORMATS:
            bits, negligible, self.ulps = FORMATS[name]
            self.kept = arb(negligible)
            self.u, self.lost = arb(2) ** -bits, arb(-negligible).exp() + SMALLEST[name]

    def cast_error(self, size: arb) -> arb:
        """Return the error of casting an input, a float64 number of at most this size."""
        return self.u * (size + SMALLEST[self.name]) if self.name == "float32" else arb(0)

    def unit(self, n: int) -> arb:
        """Return u/(1 − nu) = γ_n/n."""
        if not n * self.u <= arb(1) / 8:
            raise Refused(f"{n:,} roundings in a row are more than the theorems about {self.name} cover")
        return self.u / (1 - n * self.u)

    def gamma(self, n: int) -> arb:
        return n * self.unit(n)

    def weights(self, errors: Vector, behind: Vector) -> Vector:
        """Return y_k: a computed weight is e^{±y_k} times the true one, up to a factor that all keys share.

        Its score is off by errors_k. Its difference from the largest computed score is off by u times that difference,
        which is at most behind_k + errors_k + max errors. K ulp are a factor within 1 ± 2Ku.
        """
        common = most(errors) + 2 * self.ulps / (1 - 2 * self.ulps * self.u)
        return errors + (behind + errors + common) * self.u

    def summation(
        self, head: Head, o: int, weights: Vector, sizes: Vector, average: arb = INFINITE, sized: arb = INFINITE
    ) -> arb:
        """Bound the error that sums, products, the division and n more roundings add to Σ p̂_k v_k.

        Here p̂_k ≤ weights_k, |v_k| ≤ sizes_k, |Σ p̂_k v_k| ≤ average and Σ p̂_k sizes_k ≤ sized.

        A rounded a + b errs by u|a + b| at most, and by min(|a|, |b|), as a and b are floating-point numbers. Call keys
        with weights above u/8 near. In any tree of additions at most near − 1 nodes have near terms on both sides;
        the others err by (1 + 2γ_keys) times the far terms in all. So for keys·u ≤ 1/8 a sum of terms t_k is off by at
        most γ_near Σ|t_k| + 2 Σ_far |t_k|. The sum of weights is thus off by a factor 1 ± (γ_near + 2 Σ_far p̂_k), which
        multiplies the average, even if terms cancelled in it. If a term passes through at most `depth` additions, and
        weights are divided by their sum once or twice, depth + 1 replaces the number of near keys, and none is far. The
        smaller bound is returned. The largest weight is 1. Each weight that is lost or underflows moves the average by
        2·lost·max|v|. The sizes include the underflow of products.
        """
        if self.u == 0:
            return arb(0)
        keys, n, depth = head.num_keys, head.values[o].n, head.depth
        if not keys * self.u <= arb(1) / 8:
            raise Refused(f"a head with {keys:,} keys is more than the theorem about sums in {self.name} covers")
        pairs = [(w, w * size, w < self.u / 8) for w, size in zip(weights, sizes, strict=True)]
        near, largest = sum(not is_far for _, _, is_far in pairs), most(sizes)
        mass, far = total(w for w, _, is_far in pairs if is_far), total(x for _, x, is_far in pairs if is_far)
        all_ = total(x for _, x, is_far in pairs if not is_far).min(largest) + far  # computed weights add up to one
        size = all_.min(sized)
        found = self.sums(near, n, mass, far, size, average.min(size))
        if depth < keys:
            found = found.min(self.sums(depth + 1, n, arb(0), arb(0), size, average.min(size)))
        return found + 4 * (keys + head.silent) * self.lost * largest

    def at_most(self, head: Head, o: int, size: arb) -> arb:
        """Bound the same error for any weights, with |v_k| ≤ size."""
        none, keys = arb(0), head.num_keys
        lost = 4 * (keys + head.silent) * self.lost * size
        return self.sums(keys, head.values[o].n, none, none, size, size) + lost

    def sums(self, near: int, n: int, mass: arb, far: arb, size: arb, average: arb) -> arb:
        """Bound the same error for weights that are not lost, with any choice of the near keys.

        The far keys have together a weight of at most `mass` < 1/4, and Σ_far p̂_k |v_k| ≤ far.
        """
        factor = self.gamma(near) + 2 * mass
        error = self.gamma(near + 3 + n) * size + (2 * far + factor * average) * (1 + self.gamma(n))
        return error / (1 - factor)
