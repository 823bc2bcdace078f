"""A program: a list of layers from inputs to outputs, with an optional second stream that attention may read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from attnc.errors import InputError
from attnc.ir.layers import Affine, Attention, Layer
from attnc.ir.repeats import Part, unrolled
from attnc.numerics.arrays import Float
from attnc.numerics.quiet import quiet


@dataclass(frozen=True, eq=False, repr=False)
class Program:
    """Affine maps and softmax attention, applied in order.

    Calling it runs the reference: every layer as written, in plain numpy, without folding (see `ir.reference`).

    Parameters
    ----------
    layers : tuple of Affine, Attention, Softmax or Repeat
        The layers of the main stream. A `Repeat` has the layers of one turn and the number of turns. The last state,
        row by row, is reshaped to `output_shape`.
    input_shapes : tuple of one or two shapes
        An input of shape (batch, d) enters as one token of width d, one of shape (batch, n, d) as n tokens.
    output_shape : tuple of int
        The shape of the output of one point.
    memory : tuple of layers, optional
        The layers that make the memory from the second input. Layers with `cross` read it. Without a second input,
        the first of these layers is an affine map that takes no tokens.

    Attributes
    ----------
    dtype : numpy.dtype
        float64 or float32, the dtype of all weights.
    unrolled_layers, unrolled_memory, all_layers : tuple of Affine, Attention or Softmax
        The layers of the main stream, of the memory, and of both, with all turns of repeats written out.
    num_parameters : int
        Stored non-zeros. Those of a repeat are stored once.
    num_anchors : int
        The number of keys per query, summed over heads and layers.
    num_heads, num_attention_layers : int
        Counts over both streams, repeats counted.

    Examples
    --------
    >>> import attnc
    >>> net = attnc.compile("sin(x)", {"x": (0, 1)}, 1e-3)
    >>> [type(layer).__name__ for layer in net.program.layers]
    ['Affine', 'Attention', 'Affine']
    >>> abs(net.program([[0.5]])[0] - 0.4794255) < 1e-3
    np.True_
    """

    layers: tuple[Part, ...]
    input_shapes: tuple[tuple[int, ...], ...]
    output_shape: tuple[int, ...]
    memory: tuple[Part, ...] = ()

    def __call__(self, *inputs: Float[np.ndarray, "batch ..."]) -> Float[np.ndarray, "batch ..."]:
        """Run the reference on a batch."""
        from attnc.ir.reference import evaluate

        return evaluate(self, inputs)

    def __repr__(self) -> str:
        names = ", ".join(f"{type(layer).__name__} {layer.name}" for layer in self.all_layers[:8])
        more = f", … {len(self.all_layers) - 8:,} more" if len(self.all_layers) > 8 else ""
        return f"<Program: {names}{more}; {self.num_anchors:,} anchors, {self.num_parameters:,} parameters>"

    def __str__(self) -> str:
        """Return one line for each layer."""
        from attnc.ir.text import describe

        return describe(self)

    @cached_property
    def unrolled_layers(self) -> tuple[Layer, ...]:
        """The layers of the main stream, with all turns of repeats written out.

        Examples
        --------
        >>> import attnc
        >>> model = attnc.incontext.Ridge(method="plain").fit([[0.0, 0.0], [1.0, 2.0], [2.0, 1.0]], [1.0, 3.0, 5.0])
        >>> program = model.program_.program
        >>> [type(part).__name__ for part in program.layers], len(program.unrolled_layers) == 2 + 2 * model.n_iter_
        (['Affine', 'Repeat', 'Affine'], True)
        """
        return unrolled(self.layers)

    @cached_property
    def unrolled_memory(self) -> tuple[Layer, ...]:
        """The layers of the memory, with all turns of repeats written out.

        Examples
        --------
        >>> import attnc
        >>> program = attnc.compile("x**2", {"x": (0, 1)}, 0.1).program
        >>> program.unrolled_memory == program.memory
        True
        """
        return unrolled(self.memory)

    @property
    def all_layers(self) -> tuple[Layer, ...]:
        """The layers of the memory, and then those of the main stream, with all turns of repeats written out.

        Examples
        --------
        >>> import attnc
        >>> program = attnc.compile("x**2", {"x": (0, 1)}, 0.1).program
        >>> program.all_layers == program.memory + program.layers
        True
        """
        return self.unrolled_memory + self.unrolled_layers

    @property
    def starts(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(tokens, width) of the first states of the main stream and of the memory. The memory may have no tokens.

        Examples
        --------
        >>> import attnc
        >>> program = attnc.compile("x*y", {"x": (0, 1), "y": (0, 1)}, 0.1).program
        >>> program.starts  # one token with two numbers, and no memory
        ((1, 2), (0, 0))
        """
        main, *second = map(token_shape, self.input_shapes)
        return main, second[0] if second else (0, 0)

    @property
    def dtype(self) -> np.dtype[np.floating]:
        """The type of all stored numbers.

        Examples
        --------
        >>> import attnc
        >>> attnc.compile("x**2", {"x": (0, 1)}, 0.1, dtype="float32").program.dtype.name
        'float32'
        """
        for layer in self.all_layers:
            if isinstance(layer, Affine):
                return layer.weight.values.dtype
            if layer.heads:
                return layer.heads[0].W_Q.dtype
        return np.dtype(np.float64)

    @property
    def num_parameters(self) -> int:
        """The number of stored non-zeros. Those of a repeat are stored once.

        Examples
        --------
        >>> import attnc
        >>> program = attnc.compile("x**2", {"x": (0, 1)}, 0.1).program
        >>> program.num_parameters == sum(layer.num_parameters for layer in program.all_layers)
        True
        """
        return sum(part.num_parameters for part in self.memory + self.layers)

    @property
    def num_heads(self) -> int:
        """The number of attention heads.

        Examples
        --------
        >>> import attnc
        >>> attnc.compile("sin(x) + cos(y)", {"x": (-1, 1), "y": (-1, 1)}, 0.1).program.num_heads
        2
        """
        return sum(len(layer.heads) for layer in self.all_layers)

    @property
    def num_attention_layers(self) -> int:
        """The number of attention layers, repeats counted.

        Examples
        --------
        >>> import attnc
        >>> attnc.compile("exp(sin(x)*y)", {"x": (-1, 1), "y": (-1, 1)}, eps=1e-3).program.num_attention_layers
        2
        """
        return sum(isinstance(layer, Attention) for layer in self.all_layers)

    @property
    def num_anchors(self) -> int:
        """The number of keys that a query meets, summed over heads and layers.

        Examples
        --------
        >>> import attnc
        >>> attnc.compile("sin(x)", {"x": (-3, 3)}, eps=1e-6).program.num_anchors
        7
        """
        from attnc.ir.shapes import key_counts

        return sum(key_counts(self))

    def astype(self, dtype: str) -> Program:
        """Return the program with every weight rounded to a dtype.

        Parameters
        ----------
        dtype : str
            "float64" or "float32".

        Returns
        -------
        Program
            A new program. A certificate of this one does not hold for it.

        Examples
        --------
        >>> import attnc
        >>> net = attnc.compile("sin(x)", {"x": (-3, 3)}, eps=1e-3)
        >>> net.program.astype("float32").dtype.name
        'float32'
        """
        with quiet():  # a weight that overflows is not finite, and `ir.spec` refuses it
            return replace(
                self,
                layers=tuple(part.astype(dtype) for part in self.layers),
                memory=tuple(part.astype(dtype) for part in self.memory),
            )

    def as_tokens(self, inputs: tuple[np.ndarray, ...]) -> list[np.ndarray]:
        """Return the inputs in the program's dtype, each as (batch, tokens, width), checked for shape.

        Parameters
        ----------
        inputs : tuple of arrays
            One array for each input, (batch, …).

        Returns
        -------
        list of arrays of shape (batch, tokens, width)
            The inputs in the program's dtype.

        Raises
        ------
        InputError
            If an input is not an array of numbers, or has another shape.

        Examples
        --------
        >>> import attnc
        >>> net = attnc.compile("sin(x)", {"x": (-3, 3)}, eps=1e-3)
        >>> [state.shape for state in net.program.as_tokens(([[0.5], [1.0]],))]
        [(2, 1, 1)]
        """
        try:
            arrays = [np.asarray(given, self.dtype) for given in inputs]
        except (TypeError, ValueError) as error:
            raise InputError(f"the program takes arrays of numbers: {error}") from None
        require_shapes("program", self.input_shapes, arrays)
        return [a.reshape(len(a), *token_shape(shape)) for a, shape in zip(arrays, self.input_shapes, strict=True)]

    def from_tokens(self, state: Float[np.ndarray, "batch tokens width"]) -> Float[np.ndarray, "batch ..."]:
        """Return the last state of tokens in the shape of the output.

        Parameters
        ----------
        state : array of shape (batch, tokens, width)
            The state after the last layer.

        Returns
        -------
        array of shape (batch, …)
            The outputs.

        Examples
        --------
        >>> import attnc, numpy as np
        >>> program = attnc.compile("x**2", {"x": (0, 1)}, 0.1).program
        >>> program.from_tokens(np.zeros((5, 1, 1))).shape
        (5,)
        """
        return state.reshape(len(state), *self.output_shape)


def require_shapes(
    taker: str, shapes: Sequence[tuple[int, ...]], arrays: Sequence[Any], columns: Sequence[str] = ()
) -> None:
    """Raise InputError unless the arrays (or tensors) are batches of inputs of these shapes, all of one length."""
    if len(arrays) != len(shapes):
        raise InputError(f"the {taker} takes {len(shapes)} input(s), {len(arrays)} given")
    for array, shape in zip(arrays, shapes, strict=True):
        if array.ndim == 0 or tuple(array.shape[1:]) != shape:
            wanted = ", ".join(["batch", *map(str, shape)])
            names = f" (columns {', '.join(columns)})" if columns and len(shape) == 1 else ""
            raise InputError(f"points of shape {tuple(array.shape)}: the {taker} takes ({wanted}){names}")
    if any(array.shape[0] != arrays[0].shape[0] for array in arrays[1:]):
        raise InputError(f"the inputs differ in batch size: {[len(array) for array in arrays]}")


def split_columns(flat: Float[np.ndarray, "batch d"], shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
    """Split flat points into one input of each shape, in order."""
    parts = np.split(flat, np.cumsum([math.prod(shape) for shape in shapes])[:-1], axis=1)
    return [part.reshape(len(flat), *shape) for part, shape in zip(parts, shapes, strict=True)]


def token_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return (tokens, width) of an input of shape (d,) or (n, d)."""
    return (math.prod(shape[:-1]), shape[-1])
