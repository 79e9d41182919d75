"""What a function costs, read from its jaxpr before anything is compiled or run.

Counts. A product (dot_general, ragged_dot, convolution) is 2 FLOPs per multiply-add, so
[m, k] times [k, n] is 2 m k n. Elementwise arithmetic is one per output element, a
reduction one per input element; exp, log, sin, sqrt and their like are counted apart.
Moving and converting is free. A scan's body counts `length` times; XLA's own
cost_analysis counts it once.

Bytes. Each value is one buffer, from the equation that makes it to its last use, in the
jaxpr's order; an equation holds its operands and its outputs together. Arguments, and the
constants that the function closes over, stay to the end, since the caller holds them. The
peak is the largest sum at any equation. Nothing is fused, written in place or reordered:
XLA mostly needs less, and the number says how a formula grows, not what a device allocates.
It finds dense attention's [T, S] scores as O(T^2), and a scan over chunks as O(T).

What can be refused is refused, never counted as 0: a loop of unknown length, a primitive
with an inner program that is not listed here, and one whose work cannot be seen.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from jax.interpreters.partial_eval import dce_jaxpr

from transformer_jax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Cost:
    """One call's counts and bytes.

    products: FLOPs of the products. least_products: the same, where every `cond` takes its
    cheapest branch; all other numbers take, each by itself, the dearest one.
    elementwise, transcendental: operations. peak_bytes: the most that is alive at once,
    arguments included. argument_bytes: arguments and closed-over constants. output_bytes.
    """

    products: int
    least_products: int
    elementwise: int
    transcendental: int
    peak_bytes: int
    argument_bytes: int
    output_bytes: int

    @property
    def working_bytes(self) -> int:
        """The peak without the arguments: intermediate values and outputs."""
        return self.peak_bytes - self.argument_bytes


class Slope(NamedTuple):
    """An exponent fitted in log-log, and its standard error."""

    value: float
    error: float


def measure(f: Callable[..., Any], *args: Any, while_trips: int | None = None) -> Cost:
    """Cost of f(*args); arguments are pytrees of arrays, numbers or jax.ShapeDtypeStruct. Nothing is run.

    Equations whose results nobody reads are left out, as XLA does. A gradient counts what it
    really computes: forward, backward, and what a checkpoint computes again. A `while` counts
    to its bound where its counter starts, steps and ends at literals (a loop that may also end
    earlier counts in full); while_trips is the number for every other. Inside shard_map
    both counts and bytes are the sum over the mesh axes that it maps.
    Raises ConfigError for a `while` of unknown length without while_trips, and for a primitive
    that it cannot judge.
    """
    if while_trips is not None and while_trips < 0:
        raise ConfigError(f"while_trips={while_trips}: a loop cannot run a negative number of times")
    closed = jax.make_jaxpr(f)(*args)
    arguments = _bytes(closed.jaxpr.invars) + _bytes(closed.jaxpr.constvars)
    jaxpr, _ = dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    tally = _walk(jaxpr, [False] * len(jaxpr.invars), while_trips)
    return Cost(
        tally.products,
        tally.least,
        tally.elementwise,
        tally.transcendental,
        peak_bytes=arguments + tally.peak,
        argument_bytes=arguments,
        output_bytes=_bytes(jaxpr.outvars),
    )


def slope(sizes: Sequence[float], values: Sequence[float]) -> Slope:
    """Least-squares slope of log(values) against log(sizes): 1 for linear growth, 2 for quadratic.

    The error is sqrt(residual sum of squares / (n - 2) / sum of squares of log(sizes) about
    their mean). Raises ConfigError for fewer than three points, unequal lengths, numbers
    that are not positive, or sizes that are all the same.
    """
    x, y = np.asarray(sizes, np.float64), np.asarray(values, np.float64)
    if x.shape != y.shape or x.ndim != 1 or x.size < 3:
        raise ConfigError(f"{x.size} sizes and {y.size} values: a slope needs three of each or more, as many of both")
    if not (np.all(np.isfinite(x) & np.isfinite(y)) and min(x.min(), y.min()) > 0 and x.min() < x.max()):
        raise ConfigError(f"no slope in log-log of sizes {list(sizes)} and values {list(values)}")
    x, y = np.log(x), np.log(y)
    x = x - x.mean()
    spread = float(np.sum(x * x))
    value = float(np.sum(x * y)) / spread
    residual = y - y.mean() - value * x
    return Slope(value, math.sqrt(float(np.sum(residual * residual)) / (x.size - 2) / spread))


# --- primitives, by what they cost -------------------------------------------------

# Their one inner program runs once, on the operands as they stand.
_CALLS = frozenset(
    "jit pjit call closed_call core_call eval_jaxpr remat remat2 checkpoint custom_jvp_call custom_jvp_call_jaxpr"
    " custom_vjp_call custom_vjp_call_jaxpr custom_vmap_call composite".split()
)
# Their inner program combines two scalars: it runs once an element of the operand of this number.
_COMBINERS = {"reduce": 0} | {name: 2 for name in "scatter scatter-add scatter-mul scatter-min scatter-max".split()}
_FREE = frozenset(
    "reshape broadcast_in_dim broadcast_to transpose squeeze expand_dims slice dynamic_slice dynamic_update_slice"
    " gather concatenate pad rev iota copy copy_p convert_element_type bitcast_convert_type stop_gradient split tile"
    " stack unstack optimization_barrier sharding_constraint layout_constraint device_put reshard pvary pcast"
    " axis_index platform_index all_gather all_gather_invariant all_gather_reduced all_to_all ppermute pbroadcast"
    " random_wrap random_unwrap random_clone real imag complex name create_token after_all empty empty2".split()
)
_TRANSCENDENTAL = frozenset(
    "exp exp2 expm1 log log1p logistic sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh pow sqrt rsqrt"
    " cbrt erf erfc erf_inv lgamma digamma polygamma igamma igammac igamma_grad_a zeta bessel_i0e bessel_i1e"
    " regularized_incomplete_beta cumlogsumexp".split()
)
_PER_INPUT = frozenset(
    "reduce_sum reduce_prod reduce_max reduce_min reduce_and reduce_or reduce_xor argmax argmin sort top_k"
    " reduce_scatter".split()
)
_PER_OUTPUT = frozenset("psum psum_invariant pmax pmin random_bits random_seed random_fold_in random_split".split())
# Shaped like arithmetic, but their work is more, or out of sight.
_OPAQUE = frozenset(
    "cholesky cholesky_update lu eig eigh svd schur qr triangular_solve tridiagonal_solve householder_product fft"
    " reduce_window_sum reduce_window_max reduce_window_min random_gamma pure_callback io_callback ffi_call"
    " call_exported call_hi_primitive".split()
)


class _Tally(NamedTuple):
    """Counts of a part of the program, and the most bytes of its own that are alive at once."""

    products: int = 0
    least: int = 0
    elementwise: int = 0
    transcendental: int = 0
    peak: int = 0

    def times(self, n: int) -> "_Tally":
        """The counts of n runs, one after another: the peak is that of one."""
        return _Tally._make([n * count for count in self[:4]] + [self.peak])

    def then(self, other: "_Tally") -> "_Tally":
        """Both, one after the other: counts add up, the peak is the larger one."""
        counts = [a + b for a, b in zip(self[:4], other[:4], strict=True)]
        return _Tally._make([*counts, max(self.peak, other.peak)])


def _bytes(values: Sequence[Any]) -> int:
    """Bytes of variables and literals; tokens have none, nor (their type is 0 bytes wide) tangents of integers."""
    sized = [value.aval for value in values if _shape(value) is not None]
    return sum([math.prod(aval.shape) * aval.dtype.itemsize for aval in sized])


def _shape(value: Any) -> tuple[int, ...] | None:
    """Shape of a variable or literal; None for a token."""
    return getattr(value.aval, "shape", None)


def _elements(values: Sequence[Any]) -> int:
    shapes = [_shape(value) for value in values]
    return sum([math.prod(shape) for shape in shapes if shape is not None])


def _walk(jaxpr: Jaxpr, owned: Sequence[bool], while_trips: int | None) -> _Tally:
    """Counts and own peak of a jaxpr: values made in it, and the arguments that it owns (frees after their last use).

    The other arguments are the caller's to count.
    """
    last: dict[Var, int] = {}
    for i, eqn in enumerate(jaxpr.eqns):
        last.update((v, i) for v in eqn.invars if not isinstance(v, Literal))
    last.update((v, len(jaxpr.eqns)) for v in jaxpr.outvars if not isinstance(v, Literal))
    mine = {v for v, own in zip(jaxpr.invars, owned, strict=True) if own and v in last}
    alive = _bytes(list(mine))
    total = _Tally(peak=alive)
    for i, eqn in enumerate(jaxpr.eqns):
        dying = {v for v in eqn.invars if not isinstance(v, Literal) and v in mine and last[v] == i}
        # A body takes over the operands that die here, unless it gets one of them twice.
        given = [not isinstance(v, Literal) and v in dying and eqn.invars.count(v) == 1 for v in eqn.invars]
        part, taken = _equation(eqn, given, while_trips)
        held = alive - _bytes([v for v, take in zip(eqn.invars, taken, strict=True) if take])
        kept = {v for v in eqn.outvars if v in last}
        mine = (mine - dying) | kept
        alive += _bytes(list(kept)) - _bytes(list(dying))
        total = total.then(part._replace(peak=max(held + part.peak, alive)))
    return total


def _equation(eqn: JaxprEqn, given: list[bool], while_trips: int | None) -> tuple[_Tally, list[bool]]:
    """Counts and own peak of one equation, and which of the operands it may free it has taken into that peak."""
    name, keeps = eqn.primitive.name, [False] * len(eqn.invars)
    made, bodies = _bytes(eqn.outvars), _bodies(eqn)
    if name in _CALLS and len(bodies) == 1:
        return _walk(bodies[0], given, while_trips), given
    if name == "cond":
        parts = [_walk(body, given[1:], while_trips) for body in bodies]
        highest = _Tally._make(max(numbers) for numbers in zip(*parts, strict=True))
        return highest._replace(least=min(part.least for part in parts)), [False, *given[1:]]
    if name == "scan":
        return _scan(eqn, given, while_trips)
    if name == "while":
        return _while(eqn, given, while_trips)
    if name == "shard_map":
        (body,) = bodies
        devices = math.prod(eqn.params["mesh"].shape[axis] for axis in eqn.params["newly_manual_axes"])
        part = _walk(body, [False] * len(body.invars), while_trips)
        return part.times(devices)._replace(peak=max(devices * part.peak, made)), keeps
    if name in _COMBINERS:
        part = _walk(bodies[0], [False] * len(bodies[0].invars), while_trips) if bodies else _Tally()
        return part.times(_elements([eqn.invars[_COMBINERS[name]]]))._replace(peak=made), keeps
    if bodies:
        raise ConfigError(f"primitive {name!r} has an inner program, and how often it runs is not known here")
    return _leaf(eqn)._replace(peak=made), keeps


def _bodies(eqn: JaxprEqn) -> list[Jaxpr]:
    """The inner programs among an equation's parameters, whatever their names."""

    def find(value: Any) -> list[Jaxpr]:
        if isinstance(value, ClosedJaxpr):  # in later versions of JAX the same type as Jaxpr
            return [value.jaxpr]
        if isinstance(value, Jaxpr):
            return [value]
        return [body for part in value for body in find(part)] if isinstance(value, tuple) else []

    return find(tuple(eqn.params.values()))


def _scan(eqn: JaxprEqn, given: list[bool], while_trips: int | None) -> tuple[_Tally, list[bool]]:
    """Body times length. Stacked outputs are there in full, the body's values once; it owns its carry and slices."""
    (body,) = _bodies(eqn)

    def stacked(outer: Sequence[Any], inner: Sequence[Any]) -> list[bool]:
        return [len(_shape(o) or ()) > len(_shape(i) or ()) for o, i in zip(outer, inner, strict=True)]

    # What is stacked has one axis more outside: the parameters that say so differ between versions of JAX.
    ys = stacked(eqn.outvars, body.outvars)
    xs = stacked(eqn.invars, body.invars)
    consts = len(xs) - sum(xs) - (len(ys) - sum(ys))
    owned = [i >= consts for i in range(len(xs))]
    part = _walk(body, owned, while_trips)
    room = _bytes([v for v, y in zip(eqn.outvars, ys, strict=True) if y])
    taken = [give and own and not x for give, own, x in zip(given, owned, xs, strict=True)]
    return part.times(eqn.params["length"])._replace(peak=room + part.peak), taken


def _while(eqn: JaxprEqn, given: list[bool], while_trips: int | None) -> tuple[_Tally, list[bool]]:
    """Body times trips, condition once more; the loop owns its carry."""
    carry = len(eqn.outvars)
    if (trips := _trips(eqn)) is None and (trips := while_trips) is None:
        raise ConfigError("a while loop whose length the program does not show: give while_trips")

    def walk(jaxpr: Jaxpr, own: bool) -> _Tally:
        consts = len(jaxpr.invars) - carry
        return _walk(jaxpr, [False] * consts + [own] * carry, while_trips)

    test, body = (getattr(eqn.params[key], "jaxpr", eqn.params[key]) for key in ("cond_jaxpr", "body_jaxpr"))
    asked = walk(test, False).times(trips + 1)
    asked = asked._replace(peak=asked.peak + _bytes(eqn.outvars))
    taken = [give and i >= len(given) - carry for i, give in enumerate(given)]
    return walk(body, True).times(trips).then(asked), taken


def _trips(eqn: JaxprEqn) -> int | None:
    """Times that a while runs, or at most runs, if an integer counts in literal steps to a literal; None otherwise."""
    test, body = (getattr(eqn.params[key], "jaxpr", eqn.params[key]) for key in ("cond_jaxpr", "body_jaxpr"))
    carry = len(eqn.outvars)
    tested, before, after = test.invars[-carry:], body.invars[-carry:], body.outvars
    begin = dict(zip(tested, eqn.invars[-carry:], strict=True))
    fixed = dict(zip(test.invars[: len(test.invars) - carry], eqn.invars, strict=False))
    fixed |= {t: begin[t] for t, b, a in zip(tested, before, after, strict=True) if a is b}
    steps = {t: _step(body, b, a) for t, b, a in zip(tested, before, after, strict=True)}
    makers = _makers(test)

    def read(v: Any) -> int | None:
        maker = None if isinstance(v := _source(v, makers), Literal) else makers.get(v)
        if maker is None or len(maker.invars) != 2:
            return None
        (a, b), name = (_source(v, makers) for v in maker.invars), maker.primitive.name
        if name == "and":  # whichever ends first
            return min((n for n in (read(a), read(b)) if n is not None), default=None)
        if isinstance(a, Literal) or steps.get(a) is None:  # stop > counter is counter < stop
            a, b, name = b, a, {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}.get(name, name)
        if isinstance(a, Literal) or name not in ("lt", "le", "gt", "ge"):
            return None
        start, step = _integer(begin.get(a)), steps.get(a)
        stop = _integer(b if isinstance(b, Literal) else fixed.get(b))
        if start is None or step is None or stop is None:
            return None
        way = 1 if name in ("lt", "le") else -1
        if way * step <= 0:
            return None
        distance = way * (stop - start) + (name in ("le", "ge"))
        return max(0, -(-distance // (way * step)))

    return read(test.outvars[0])


def _integer(value: Any) -> int | None:
    """The number of a literal whole scalar; None for anything else."""
    whole = (
        isinstance(value, Literal) and _shape(value) == () and np.issubdtype(np.asarray(value.val).dtype, np.integer)
    )
    return int(value.val) if whole else None


def _makers(jaxpr: Jaxpr) -> dict[Any, JaxprEqn]:
    """Which equation makes a variable."""
    return {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}


def _source(v: Any, makers: dict[Any, JaxprEqn]) -> Any:
    """What a variable was before conversions of its type."""
    while not isinstance(v, Literal) and v in makers and makers[v].primitive.name == "convert_element_type":
        v = makers[v].invars[0]
    return v


def _step(body: Jaxpr, before: Any, after: Any) -> int | None:
    """What a loop's body adds to one carried integer, if that is a literal."""
    makers = _makers(body)
    after = _source(after, makers)
    maker = None if isinstance(after, Literal) else makers.get(after)
    if maker is None or maker.primitive.name not in ("add", "sub"):
        return None
    (a, b), adds = (_source(v, makers) for v in maker.invars), maker.primitive.name == "add"
    if a is before and (n := _integer(b)) is not None:
        return n if adds else -n
    return _integer(a) if adds and b is before else None


def _leaf(eqn: JaxprEqn) -> _Tally:
    """Counts of a primitive without an inner program."""
    name, made = eqn.primitive.name, _elements(eqn.outvars)
    if name in ("dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated"):
        n = 2 * _multiply_adds(eqn)
        return _Tally(products=n, least=n)
    if name in _FREE or not eqn.outvars:
        return _Tally()
    if name in _PER_INPUT:
        return _Tally(elementwise=_elements(eqn.invars))
    if name in _TRANSCENDENTAL:
        return _Tally(transcendental=made)
    if name in _PER_OUTPUT:
        return _Tally(elementwise=made)
    # Any other whose outputs have the shape that its operands broadcast to is arithmetic: each JAX brings new ones.
    if name in _OPAQUE or {_broadcast([_shape(v) for v in eqn.invars])} != {_shape(v) for v in eqn.outvars}:
        raise ConfigError(f"primitive {name!r}: what it costs is not known here")
    return _Tally(elementwise=made)


def _broadcast(shapes: Sequence[tuple[int, ...] | None]) -> tuple[int, ...] | str:
    """The shape that operands of one rank, scalars aside, broadcast to; a word where they do not."""
    known = [shape for shape in shapes if shape]
    sizes = [set(lengths) - {1} for lengths in zip(*known, strict=False)]
    if None in shapes or len({len(shape) for shape in known}) > 1 or any(len(size) > 1 for size in sizes):
        return "differ"
    return tuple(size.pop() if size else 1 for size in sizes)


def _multiply_adds(eqn: JaxprEqn) -> int:
    """Multiply-adds of a product. Padding, dilation's zeros and rows that no expert takes count as any other."""
    shapes: list[Any] = [_shape(v) for v in (*eqn.invars[:2], eqn.outvars[0])]
    left, right, out = shapes
    numbers: Any = eqn.params.get("dimension_numbers")
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = numbers
        return math.prod(out) * math.prod(left[d] for d in contracted)
    if eqn.primitive.name == "conv_general_dilated":
        return math.prod(out) * math.prod(n for d, n in enumerate(right) if d != numbers.rhs_spec[0])
    # Every row of the left side meets the right side of one group, whether rows are kept or summed over.
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    bound = {*contracted, *batch, *numbers.rhs_group_dimensions}
    return math.prod(left) * math.prod(n for d, n in enumerate(right) if d not in bound)
