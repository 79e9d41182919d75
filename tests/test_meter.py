"""The cost meter: hand formulas of products, trip counts, live bytes, what is refused, and the real model."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import AxisType, PartitionSpec

from transformer_jax.batch import Batch
from transformer_jax.config import Config, Hyper
from transformer_jax.encoder_decoder import forward, init_transformer
from transformer_jax.errors import ConfigError
from transformer_jax.layers import Layer
from transformer_jax.meter import measure
from transformer_jax.train import gradients

SHAPE = jax.ShapeDtypeStruct


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return SHAPE(shape, jnp.float32)


def products(f: Callable[..., Any], *args: Any, **options: Any) -> int:
    return measure(f, *args, **options).products


# --- products --------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["ij,jk->ik", "bij,bjk->bik", "abc,cbd->bad", "i,j->ij", "qbsh,kbsh->sbqk", "ab,ab->"])
def test_a_product_is_two_per_multiply_add(spec: str) -> None:
    # One multiply-add for each setting of all letters, as a loop over them would do.
    letters = sorted(set(spec) - set(",->"))
    sizes = dict(zip(letters, (2, 3, 5, 7, 11, 13), strict=False))
    left, right = spec.split("->")[0].split(",")
    args = [f32(*(sizes[c] for c in part)) for part in (left, right)]
    assert products(functools.partial(jnp.einsum, spec), *args) == 2 * math.prod(sizes.values())


def test_ragged_products_and_their_gradients() -> None:
    m, k, n, g = 13, 5, 7, 3
    x, w, sizes = f32(m, k), f32(g, k, n), jnp.array([2, 0, 11])
    assert products(lax.ragged_dot, x, w, sizes) == 2 * m * k * n
    both = jax.value_and_grad(lambda x, w: jnp.sin(lax.ragged_dot(x, w, sizes)).sum(), argnums=(0, 1))
    assert products(both, x, w) == 3 * 2 * m * k * n


def test_convolutions() -> None:
    B, C, F, T, W = 2, 6, 4, 11, 3

    def conv(x: jax.Array, w: jax.Array, groups: int) -> jax.Array:
        return lax.conv_general_dilated(x, w, (2,), "VALID", feature_group_count=groups)

    outputs = (T - W) // 2 + 1
    assert products(functools.partial(conv, groups=1), f32(B, C, T), f32(F, C, W)) == 2 * B * F * outputs * C * W
    assert products(functools.partial(conv, groups=2), f32(B, C, T), f32(F, C // 2, W)) == B * F * outputs * C * W


def core(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Dense attention, [B, T, N, H]."""
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k)), v)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_attention_forward_backward_and_recomputed(dtype: Any) -> None:
    B, T, S, N, H = 2, 7, 11, 3, 5
    qkv = [SHAPE(shape, dtype) for shape in ((B, T, N, H), (B, S, N, H), (B, S, N, H))]
    one = 2 * B * N * T * S * H
    assert products(core, *qkv) == 2 * one

    def loss(f: Callable[..., jax.Array]) -> Callable[..., Any]:
        return jax.value_and_grad(lambda *a: jnp.square(f(*a)).sum(), argnums=(0, 1, 2))

    assert products(loss(core), *qkv) == 3 * 2 * one
    # A checkpoint computes the scores again, but not the output: nothing in the backward pass reads it.
    assert products(loss(jax.checkpoint(core)), *qkv) == 3 * 2 * one + one
    # The gradient alone does not need sum(out), nor, where the loss is linear, out itself.
    linear = jax.grad(lambda *a: core(*a).sum(), argnums=(0, 1, 2))
    assert products(linear, *qkv) == 3 * 2 * one - one


# --- inner programs ----------------------------------------------------------------

D = 5
ONE = 2 * D**3
X = f32(D, D)


def repeat(f: Callable[[jax.Array], jax.Array], n: int) -> Callable[[jax.Array], jax.Array]:
    return lambda x: lax.scan(lambda c, _: (f(c), None), x, length=n)[0]


def square(x: jax.Array) -> jax.Array:
    return x @ x


@jax.custom_vjp
def doubled_back(x: jax.Array) -> jax.Array:
    return x @ x


doubled_back.defvjp(lambda x: (x @ x, x), lambda x, g: (g @ x @ x @ x,))


@jax.custom_jvp
def own_tangent(x: jax.Array) -> jax.Array:
    return x @ x


own_tangent.defjvp(lambda x, t: (x[0] @ x[0], t[0] @ x[0]))

PROGRAMS: dict[str, tuple[Callable[..., Any], float]] = {
    "scan": (repeat(square, 16), 16),
    "scan of nothing": (repeat(square, 0), 0),
    "nested scans": (repeat(repeat(lambda x: square(square(x)), 3), 7), 42),
    "jit in scan": (repeat(jax.jit(square), 11), 11),
    "fori_loop": (lambda x: lax.fori_loop(2, 9, lambda i, c: c @ c, x), 7),
    "map": (lambda x: lax.map(lambda row: x @ row, x), 1),
    "vmap": (lambda x: jax.vmap(lambda a: a @ x)(jnp.stack([x] * 3)), 3),
    "vmap of scan": (lambda x: jax.vmap(repeat(square, 4))(jnp.stack([x] * 3)), 12),
    "checkpoint": (jax.checkpoint(square), 1),
    "gradient": (jax.value_and_grad(lambda x: jnp.sin(x @ x).sum()), 3),
    "gradient of scan": (jax.value_and_grad(lambda x: repeat(lambda c: jnp.sin(c @ c), 7)(x).sum()), 21),
    # Forward 1, again 1, backward 2, in every step.
    "gradient of scanned checkpoint": (
        jax.value_and_grad(lambda x: repeat(jax.checkpoint(lambda c: jnp.sin(c @ c)), 7)(x).sum()),
        28,
    ),
    "custom_vjp": (doubled_back, 1),
    "gradient of custom_vjp": (jax.value_and_grad(lambda x: doubled_back(x).sum()), 4),
    "custom_jvp": (own_tangent, 1),
    "dead code": (lambda x: (x @ x @ x, x @ x)[1], 1),
    "dead in a scan": (lambda x: lax.scan(lambda c, _: (c @ c, c @ x), x, length=5)[0], 5),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_trip_counts(name: str) -> None:
    f, times = PROGRAMS[name]
    assert products(f, X) == times * ONE


def test_xla_counts_a_scan_once_and_we_do_not() -> None:
    def flops(f: Callable[..., Any]) -> float:
        found: Any = jax.jit(f).lower(jnp.zeros((D, D))).compile().cost_analysis()
        return found["flops"]

    assert flops(square) == products(square, X)
    if flops(repeat(square, 16)) > 2 * ONE:
        pytest.skip("this XLA counts the trips of a loop")
    assert products(repeat(square, 16), X) == 16 * ONE


def test_cond_takes_the_dearest_branch_of_each_number() -> None:
    def f(x: jax.Array) -> jax.Array:
        branches = (lambda a: a @ a @ a, jnp.exp, lambda a: a @ a + 1)
        return repeat(lambda c: lax.switch(c[0, 0].astype(jnp.int32), branches, c), 3)(x)

    cost = measure(f, X)
    assert (cost.products, cost.least_products, cost.transcendental) == (3 * 2 * ONE, 0, 3 * D**2)
    # Under vmap a cond is a select: every branch runs, and there is nothing to choose.
    cost = measure(jax.vmap(f), f32(7, D, D))
    assert cost.products == cost.least_products == 7 * 3 * 3 * ONE


@pytest.mark.parametrize(
    ("start", "goes_on", "step", "trips"),
    [
        (0, lambda i: i < 7, 1, 7),
        (0, lambda i: i <= 7, 1, 8),
        (1, lambda i: i < 8, 3, 3),
        (1, lambda i: i <= 7, 3, 3),
        (9, lambda i: i > 2, -2, 4),
        (9, lambda i: i >= 1, -2, 5),
        (8, lambda i: i < 8, 1, 0),
        (0, lambda i: (i < 6) & (i < 4), 1, 4),
        (0, lambda i: lax.gt(np.int32(5), i), 1, 5),
    ],
)
def test_while_loops_that_count(start: int, goes_on: Callable[[Any], Any], step: int, trips: int) -> None:
    n, i = 0, np.int32(start)
    while bool(goes_on(i)):
        n, i = n + 1, np.int32(i + step)
    assert n == trips

    def f(x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda c: goes_on(c[0]), lambda c: (c[0] + step, c[1] @ c[1]), (start, x))[1]

    assert products(f, X) == trips * ONE


def test_while_loops_that_do_not_show_their_length() -> None:
    def until(x: jax.Array, n: Any) -> jax.Array:
        return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] @ c[1]), (0, x))[1]

    def early(x: jax.Array) -> jax.Array:  # at most 6
        return lax.while_loop(lambda c: (c[0] < 6) & ~jnp.all(c[1] > 0), lambda c: (c[0] + 1, c[1] @ c[1]), (0, x))[1]

    def converges(x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda c: jnp.max(c) > 1, lambda c: c @ c / 2, x)

    def doubles(x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] * 2, c[1] @ c[1]), (1, x))[1]

    def endless(x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] - 1, c[1] @ c[1]), (1, x))[1]

    assert products(early, X) == 6 * ONE
    traced = functools.partial(products, until, X, SHAPE((), jnp.int32))
    for unreadable in (traced, *(functools.partial(products, f, X) for f in (converges, doubles, endless))):
        with pytest.raises(ConfigError, match="while_trips"):
            unreadable()
        assert unreadable(while_trips=13) == 13 * ONE
    assert products(lambda x: until(x, 7), X, while_trips=99) == 7 * ONE
    with pytest.raises(ConfigError, match="-1"):
        traced(while_trips=-1)


def test_shard_map_is_the_sum_over_its_devices() -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    rows = PartitionSpec("data")
    m, k, n = 6, 5, 8

    def layer(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sin(x @ w)

    def over(axes: set[str], spec: PartitionSpec) -> Any:
        specs: dict[str, Any] = {"in_specs": (spec, PartitionSpec()), "out_specs": spec}
        f = jax.shard_map(layer, mesh=mesh, axis_names=axes, check_vma=False, **specs)
        return measure(f, f32(m, k), f32(k, n))

    # Split rows: together the devices do what one would.
    assert over({"data"}, rows) == measure(layer, f32(m, k), f32(k, n))
    # "model" is mapped too, but nothing is split by it: four times the same.
    assert over({"data", "model"}, rows).products == 4 * 2 * m * k * n


# --- elementwise -------------------------------------------------------------------


def test_elementwise_transcendental_and_free() -> None:
    n, m = 7, 3
    x = f32(n, m)

    def counts(f: Callable[..., Any], *args: Any) -> tuple[int, int]:
        cost = measure(f, *args)
        assert cost.products == 0
        return cost.elementwise, cost.transcendental

    assert counts(lambda x: x * 2 + x, x) == (2 * n * m, 0)
    assert counts(lambda x: jnp.tanh(jnp.exp(x)), x) == (0, 2 * n * m)
    assert counts(lambda x: lax.reduce_sum_p.bind(x, axes=(0,), out_sharding=None), x) == (n * m, 0)
    assert counts(lambda x: x.T.reshape(m, n)[:, None].astype(jnp.bfloat16), x) == (0, 0)
    assert counts(lambda x: lax.cumsum(x) * jnp.where(x > 0, x, -x), x) == (5 * n * m, 0)
    assert counts(lambda x: lax.reduce(x, 0.0, lambda a, b: a + b * b, (0,)), x) == (2 * n * m, 0)
    # Two added to rows of a table: as many sums as there are updates.
    assert counts(lambda x, u, i: x.at[i].add(u, mode="drop", wrap_negative_indices=False), x, f32(2, m),
                  SHAPE((2,), jnp.int32)) == (2 * m, 0)  # fmt: skip
    assert counts(repeat(lambda c: c * jnp.sin(c), 5), x) == (5 * n * m, 5 * n * m)


# --- refusals ----------------------------------------------------------------------


def test_unknown_work_is_refused_by_name() -> None:
    looped = Primitive("looped_somehow")
    looped.def_abstract_eval(lambda x, **_: x)
    body = jax.make_jaxpr(square)(X)
    for hidden in (body, body.jaxpr, (1, (body,))):
        with pytest.raises(ConfigError, match="looped_somehow"):
            measure(lambda x, hidden=hidden: looped.bind(x, program=hidden), X)
    assert measure(lambda x: looped.bind(x, program=3), X).elementwise == D**2

    pooled = Primitive("pooled_somehow")
    pooled.def_abstract_eval(lambda x: x.update(shape=()))
    refused: dict[str, Callable[[jax.Array], Any]] = {
        "pooled_somehow": lambda x: pooled.bind(x),
        "pure_callback": lambda x: jax.pure_callback(np.sin, x, x),
        "cholesky": lambda x: lax.linalg.cholesky(x),
        "custom_linear_solve": lambda x: lax.custom_linear_solve(lambda v: x @ v, x[0], lambda _, b: b),
    }
    for name, f in refused.items():
        with pytest.raises(ConfigError, match=name):
            measure(repeat(lambda x, f=f: x + f(x).sum(), 3), X)


# --- the model ---------------------------------------------------------------------

B, T, S = 3, 7, 11
SMALL = Config(vocab_size=13, d_model=12, num_heads=3, d_ff=17, num_layers=5, seq_len=T, max_positions=31)


def batch(config: Config) -> Batch:
    def ids(n: int) -> jax.ShapeDtypeStruct:
        return SHAPE((B, n), jnp.int32)

    source: Any = ids(S) if config.architecture == "encoder_decoder" else None
    made: Any = (ids(T), ids(T), f32(B, T))
    return Batch(*made, source_BS=source)


def shapes(config: Config) -> Any:
    return jax.eval_shape(lambda k: init_transformer(k, config), jax.random.key(0))


def matrices(tree: Any) -> int:
    """Parameters of the weights in a pytree: of what has two letters or more in its name, the layers' axis aside."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return sum(x.size for path, x in leaves if len(path[-1].name.rsplit("_", 1)[1]) > 1 and path[-1].name[0] == "w")


def hand(config: Config) -> int:
    """Products of a forward pass: every weight meets every token it sees once, and the scores and their weights."""
    params, c = shapes(config), config
    total = 2 * B * T * c.D * c.V
    if params.encoder is not None:
        n = T if params.decoder is None else S
        total += 2 * B * n * matrices(params.encoder) + 4 * B * n * n * c.N * c.H * c.encoder_layers
    if params.decoder is not None:
        layers: Layer = params.decoder.layers
        cross: Any = layers.cross
        total += 2 * B * T * matrices((layers.attention, layers.ffn)) + 4 * B * T * T * c.N * c.H * c.L
        if cross is not None:
            total += 2 * B * T * (cross.wq_DNH.size + cross.wo_NHD.size)
            total += 2 * B * S * (cross.wk_DKH.size + cross.wv_DKH.size) + 4 * B * T * S * c.N * c.H * c.L
    return total


def step_products(config: Config) -> int:
    return products(lambda p, b: gradients(p, config, Hyper(), b), shapes(config), batch(config))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"ffn": "swiglu", "tie_embeddings": False, "compute_dtype": "bfloat16"},
        {"num_kv_heads": 1, "scan_unroll": 0},
        {"architecture": "encoder"},
        {"architecture": "encoder_decoder", "num_encoder_layers": 2},
    ],
    ids=str,
)
def test_the_model_costs_what_its_formula_says(changes: dict[str, Any]) -> None:
    config = SMALL.replace(**changes)
    found = measure(lambda p, b: forward(p, config, Hyper(), b)[0], shapes(config), batch(config))
    assert found.products == found.least_products == hand(config)
    assert found.output_bytes == 4 * B * T * config.V
    # A gradient costs two products for each product of the forward pass.
    assert step_products(config) == 3 * hand(config)


def test_remat_computes_a_layer_again_except_its_last_product() -> None:
    config = SMALL.replace(remat=True)
    last = 2 * B * T * config.F * config.D
    layers = hand(config) - 2 * B * T * config.D * config.V
    assert step_products(config) == 3 * hand(config) + layers - config.L * last


def test_a_longer_row_and_a_deeper_stack() -> None:
    """What one more layer costs is the same for every depth; what it keeps for the backward pass, too."""
    costs = []
    for layers in (2, 3, 4):
        config = SMALL.replace(num_layers=layers)
        costs.append(measure(lambda p, b, c=config: gradients(p, c, Hyper(), b), shapes(config), batch(config)))
    for number in ("products", "elementwise", "transcendental", "argument_bytes", "peak_bytes"):
        a, b, c = (getattr(cost, number) for cost in costs)
        assert b - a == c - b > 0, number
