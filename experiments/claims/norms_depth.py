"""How signals and gradients pass through a stack: the library's layers one by one, for claims about depth.

With one token a row attention is a product of two matrices. Of a unit input it adds variance 1, a ReLU net ½ (the
library draws weights of variance 1/fan-in), and in the backward pass they multiply squared gradients by the same: so
what a stack does at the start can be said beforehand, up to terms of 1/D.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims.record import Number, Words, near
from transformer_jax import masks
from transformer_jax.config import Config, Hyper
from transformer_jax.ffn import FFN, ffn, init_ffn
from transformer_jax.layers import Layer, Stack, apply_stack, init_stack
from transformer_jax.norms import init_norm, norm

Through = Callable[[Layer, jax.Array, jax.Array], tuple[jax.Array, jax.Array, jax.Array]]

DEPTHS = (1, 2, 4, 6, 12, 24)
DEEP = DEPTHS[-1]
SEEDS = 6
ADDED = 1.5  # variance that a layer adds to a unit stream
ROWS = 32
ONE_TOKEN = Config(d_model=64, num_heads=1, d_ff=128, ffn="relu", positions="none")


@dataclasses.dataclass(frozen=True)
class Passed:
    """What stacks of L layers did to an input x, a value a seed [SEEDS].

    gain: ‖dL/dx‖/‖g‖ for the gradient g of the output, after a final norm where there is one. direct: dL/dx·g/‖g‖².
    first, last: norms of the gradients of the first and the last layer's parameters. squares [SEEDS, L + 1]: mean
    square of the stream before the first layer and after each.
    """

    gain: np.ndarray
    direct: np.ndarray
    first: np.ndarray
    last: np.ndarray
    squares: np.ndarray


def rows(count: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    """An input and a gradient of unit normals, [count, 1, D] each."""
    x, g = np.random.default_rng(0).standard_normal((2, count, 1, ONE_TOKEN.D), dtype=np.float32)
    return x, g


def seeds() -> jax.Array:
    """SEEDS keys."""
    return jax.random.split(jax.random.key(0), SEEDS)


def every(x: np.ndarray) -> jax.Array:
    """x for each seed: [SEEDS, …]."""
    return jnp.broadcast_to(x, (SEEDS, *x.shape))


@functools.cache
def layer(config: Config) -> Through:
    """A program (layer, x, dL/dy) -> (y, dL/dx, norm of the layer's own gradient), each with a leading SEEDS."""

    def forward(layer: Layer, x: jax.Array) -> jax.Array:
        stack = Stack(jax.tree.map(lambda leaf: leaf[None], layer), None)
        places = jnp.zeros((1, 1), jnp.int32)
        return apply_stack(stack, x, config, Hyper(), mask=masks.causal(), positions_BT=places)[0]

    def of_one(layer: Layer, x: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        y, back = jax.vjp(forward, layer, x)
        of_layer, of_x = back(g)
        return y, of_x, jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(of_layer)))

    return jax.jit(jax.vmap(of_one))


def stacks(config: Config) -> Stack:
    """SEEDS stacks of DEEP layers, as the library draws them; NumPy arrays, whose slices need no program each."""
    drawn = jax.vmap(lambda key: init_stack(key, config, DEEP, cross=False))(seeds())
    return jax.tree.map(np.asarray, drawn)


@functools.cache
def passes(config: Config) -> dict[int, Passed]:
    """depth -> what stacks of the library's layers do to `rows`; a shallow stack is the beginning of a deep one.

    Layer by layer, so that one small program does for all depths.
    """
    through, drawn = layer(config), stacks(config)
    layers = [jax.tree.map(lambda leaf, i=i: leaf[:, i], drawn.layers) for i in range(DEEP)]
    x, g = (every(one) for one in rows())
    xs = [x]
    for one in layers:
        xs.append(through(one, xs[-1], g)[0])
    squares = np.array([np.mean(np.square(one), axis=(1, 2, 3)) for one in xs], np.float64).T
    given, found = np.asarray(g[0], np.float64).ravel(), {}
    for depth in DEPTHS:
        slope, sizes = g, []
        if drawn.final_norm is not None:  # of scale 1 and bias 0 in every seed
            last = jax.tree.map(lambda leaf: leaf[0], drawn.final_norm)
            flat = xs[depth].reshape(-1, *x.shape[2:])
            slope = jax.vjp(lambda x, last=last: norm(last, x, config), flat)[1](g.reshape(flat.shape))[0]
            slope = slope.reshape(g.shape)
        for i in reversed(range(depth)):
            _, slope, size = through(layers[i], xs[i], slope)
            sizes.append(np.asarray(size, np.float64))
        total = np.asarray(slope, np.float64).reshape(SEEDS, -1)
        gain = np.linalg.norm(total, axis=1) / np.linalg.norm(given)
        found[depth] = Passed(gain, total @ given / (given @ given), sizes[-1], sizes[0], squares[:, : depth + 1])
    return found


@functools.cache
def nets(kind: str, normed: bool = False) -> Callable[[FFN], jax.Array]:
    """A program: feed-forward nets of a kind, stacked [DEEP, …] -> ‖dL/dx‖ through all of them, for `rows`.

    normed: each behind a LayerNorm.
    """
    config, (x, g) = ONE_TOKEN.replace(ffn=kind), rows()
    x = x / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True)) if normed else x

    def forward(x: jax.Array, net: FFN) -> tuple[jax.Array, None]:
        return ffn(net, norm(init_norm(config), x, config) if normed else x, config, Hyper()), None

    def size(chain: FFN) -> jax.Array:
        slope = jax.vjp(lambda x: jax.lax.scan(forward, x, chain)[0], jnp.asarray(x))[1](jnp.asarray(g))[0]
        return jnp.linalg.norm(slope)

    return jax.jit(size)


def chain(kind: str, gain: float = 1.0, normed: bool = False) -> np.ndarray:
    """(‖dL/dx‖/‖dL/dy‖)^(1/DEEP) through DEEP of the library's feed-forward nets, no residual and no norm: [SEEDS].

    gain: a factor on the first matrix of each. normed: with a norm before each.
    """
    config, norms = ONE_TOKEN.replace(ffn=kind), []
    for key in seeds():
        drawn = jax.vmap(lambda key: init_ffn(key, config))(jax.random.split(key, DEEP))
        norms.append(float(nets(kind, normed)(dataclasses.replace(drawn, w1_DF=gain * drawn.w1_DF))))
    return (np.array(norms) / np.linalg.norm(rows()[1])) ** (1 / DEEP)


NODES, MASS = np.polynomial.hermite_e.hermegauss(100)
MASS = MASS / MASS.sum()


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + e^−x)."""
    return 1 / (1 + np.exp(-x))


def normal_cdf(x: np.ndarray) -> np.ndarray:
    """Φ(x)."""
    return np.array([0.5 * math.erfc(-one / math.sqrt(2)) for one in x])


def density(x: np.ndarray) -> np.ndarray:
    """φ(x)."""
    return np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)


# f and its derivative.
FUNCTIONS = {
    "tanh": (np.tanh, lambda x: 1 / np.cosh(x) ** 2),
    "relu": (lambda x: np.maximum(x, 0), lambda x: x > 0),
    "gelu": (lambda x: x * normal_cdf(x), lambda x: normal_cdf(x) + x * density(x)),
    "silu": (lambda x: x * sigmoid(x), lambda x: sigmoid(x) * (1 + x * (1 - sigmoid(x)))),
}


def moments(kind: str, q: float) -> tuple[float, float]:
    """E f(√q z)² and E f'(√q z)² of a normal z."""
    f, slope = FUNCTIONS[kind]
    z = math.sqrt(q) * NODES
    return float(MASS @ f(z) ** 2), float(MASS @ slope(z) ** 2)


def expected_chain(kind: str) -> float:
    """The factor a layer of `chain` in the limit of wide nets (Schoenholz et al. 2017)."""
    q, log = 1.0, 0.0
    for _ in range(DEEP):
        q, chi = moments(kind, q)
        log += math.log(chi)
    return math.exp(log / 2 / DEEP)


def tanh_chain() -> np.ndarray:
    """As `chain`, of tanh, which the library does not have: float64 [SEEDS]."""
    out, (x, g) = [], rows()
    for seed in range(SEEDS):
        draw = np.random.default_rng(seed)
        y, slope, nets = x[:, 0].astype(np.float64), g[:, 0].astype(np.float64), []
        for _ in range(DEEP):
            a = draw.standard_normal((ONE_TOKEN.D, ONE_TOKEN.F)) / math.sqrt(ONE_TOKEN.D)
            b = draw.standard_normal((ONE_TOKEN.F, ONE_TOKEN.D)) / math.sqrt(ONE_TOKEN.F)
            hidden = np.tanh(y @ a)
            nets.append((a, b, 1 - hidden**2))
            y = hidden @ b
        for a, b, bent in reversed(nets):
            slope = (slope @ b.T * bent) @ a.T
        out.append(np.linalg.norm(slope) / np.linalg.norm(g))
    return np.array(out) ** (1 / DEEP)


def foreseen(name: str, label: Words, values: np.ndarray, predicted: float, spread: float) -> Number:
    """The mean over seeds, within five standard errors, and 4/D of it, of what is predicted.

    spread: the standard deviation of a seed's value over what is predicted, by theory: a measured one would forgive
    what makes it larger.
    """
    error = 5 * spread / math.sqrt(len(values)) + 4 / ONE_TOKEN.D
    return near(name, label, np.mean(values), predicted, error * abs(predicted), "float32")


# --- how much the weights that are drawn may change it ---------------------------------
#
# The squared norm of rows that pass a matrix of D columns has the relative variance 2ρ/D, a ReLU layer's 5ρ/F (Hanin
# and Nica 2020). ρ is tr M²/(tr M)² of the rows' Gram matrix M: 1 if all rows are alike, 1/rows + 1/D at random.

LINEAR, RELU = 4 / ONE_TOKEN.D, 5 / ONE_TOKEN.F + 2 / ONE_TOKEN.D  # of attention to one token, of a net
ALONE = 1 / ROWS + 1 / ONE_TOKEN.D
DIRECT = math.sqrt(ALONE / ONE_TOKEN.D)  # of dL/dx·g/‖g‖²: what matrices without a direction add to it


class Spreads(NamedTuple):
    """Relative standard deviations over drawn weights, by the names of Passed; square: the last of squares."""

    gain: float
    square: float
    last: float


def spreads(placement: str, depth: int) -> Spreads:
    """To first order.

    A branch of a times the stream's power moves |x + y|² by its own power and by 2 x·y, of relative variance 4ρ/D.
    ReLU aligns the rows of the forward pass (Cho and Saul 2009). Rows of gradients stay apart, but each matrix
    I + A leaves them fewer dimensions: tr M² grows by (2a + a²)/(1 + a)².
    """
    cosine, worn, power = 0.0, 1.0, 1.0
    back = ahead = 0.0  # relative variances of |g|² and of |x|²
    for size, own in ((1.0, LINEAR), (0.5, RELU)) * depth:
        a = size / power if placement == "pre" else size
        share = (4 * a / ONE_TOKEN.D + a**2 * own) / (1 + a) ** 2
        kept = 1 / (1 + a) ** 2 if placement == "pre" else 1.0  # what is added to |x|² is not a part of it
        ahead = kept * ahead + share * (cosine**2 + (1 - cosine**2) * ALONE)
        back += share * min(1.0, 1 / ROWS + worn / ONE_TOKEN.D)
        worn += (2 * a + a**2) / (1 + a) ** 2
        power += size
        if own is RELU:
            bent = (math.sqrt(1 - cosine**2) + cosine * (math.pi - math.acos(cosine))) / math.pi
            cosine = (cosine + a * bent) / (1 + a)
    # Norms divide by the stream's size. The last layer's gradients are products of a forward row, which has passed a
    # matrix or a ReLU layer, and of a gradient's, which has passed a layer at most.
    divided = 0.0 if placement == "none" else ahead
    last = RELU * (cosine**2 + (1 - cosine**2) * ALONE) + (LINEAR + RELU + 6 / ONE_TOKEN.D) * ALONE
    last += ahead if placement == "pre" else 0.0
    return Spreads(math.sqrt(back + divided) / 2, math.sqrt(ahead), math.sqrt(last) / 2)


def of_chain() -> float:
    """The same of `chain`: a net leaves rows of gradients fewer dimensions by 1 + D/F, its ReLU included."""
    worn = [min(1.0, 1 / ROWS + (1 + 1.5 * i) / ONE_TOKEN.D) for i in range(DEEP)]
    return math.sqrt(RELU * sum(worn)) / 2 / DEEP
