"""Optimisers and schedules: another implementation's numbers, float64 loops, hand lists, edges."""

import functools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct

from transformer_jax.config import OPTIMIZERS, SCHEDULES, Config, Hyper
from transformer_jax.encoder_decoder import Transformer, init_transformer
from transformer_jax.errors import ConfigError
from transformer_jax.optim import clip, decays, global_norm, learning_rate, optimizer, schedule_shape

GOLDEN = Path(__file__).parents[2] / "shared" / "golden" / "torch_adamw_clip.npz"
SHAPE = (5, 3)


@struct.dataclass
class Weights:
    """Two leaves: one that decays, one that does not."""

    w: jax.Array
    b: jax.Array


def made(kind: str, **changes: object) -> Config:
    return Config(**{"vocab_size": 7, "optimizer": kind, **changes})


def descend(config: Config, hyper: Hyper, params: Weights, grads: list[Weights]) -> list[Weights]:
    """The parameters before and after each gradient."""
    moved = _descend(config, hyper, params, jax.tree.map(lambda *g: jnp.stack(g), *grads))
    return [jax.tree.map(lambda x, k=k: x[k], moved) for k in range(len(grads) + 1)]


@functools.partial(jax.jit, static_argnums=0)
def _descend(config: Config, hyper: Hyper, params: Weights, grads: Weights) -> Weights:
    tx = optimizer(config, hyper)

    def step(carry: tuple, g: Weights) -> tuple:
        params, state = carry
        updates, state = tx.update(g, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    _, path = jax.lax.scan(step, (params, tx.init(params)), grads)
    return jax.tree.map(lambda p, rest: jnp.concatenate([p[None], rest]), params, path)


def problem(steps: int = 5, seed: int = 0) -> tuple[Weights, list[Weights]]:
    rng = np.random.default_rng(seed)

    def draw() -> Weights:
        return Weights(*(jnp.asarray(rng.normal(size=SHAPE), jnp.float32) for _ in range(2)))

    return draw(), [draw() for _ in range(steps)]


# --- update rules ------------------------------------------------------------------


@pytest.mark.skipif(not GOLDEN.exists(), reason="the stored outputs of other implementations are not here")
def test_adamw_after_clipping_against_pytorch() -> None:
    golden = np.load(GOLDEN)
    config = made("adamw")
    hyper = Hyper(learning_rate=1e-2, b1=0.9, b2=0.98, adam_epsilon=1e-9, weight_decay=0.1)
    params = Weights(jnp.asarray(golden["params"][0], jnp.float32), jnp.zeros(2))
    grads = []
    for g in golden["grads"]:
        g = Weights(jnp.asarray(g, jnp.float32), jnp.zeros(2))
        grads.append(clip(g, global_norm(g), jnp.float32(1.0)))
    path = descend(config, hyper, params, grads)
    np.testing.assert_allclose([p.w for p in path], golden["params"], rtol=1e-6, atol=1e-6)
    assert np.abs(golden["params"][-1] - golden["params"][0]).max() > 0.05


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_against_a_loop_in_float64(kind: str) -> None:
    params, grads = problem()
    hyper = Hyper(learning_rate=0.03, b1=0.8, b2=0.95, adam_epsilon=1e-3, momentum=0.7, weight_decay=0.2)
    path = descend(made(kind), hyper, params, grads)
    for name in ("w", "b"):
        p = np.asarray(getattr(params, name), np.float64)
        m, v = np.zeros_like(p), np.zeros_like(p)
        for k, step in enumerate(grads, start=1):
            g = np.asarray(getattr(step, name), np.float64)
            if kind == "sgd":
                update = g
            elif kind == "momentum":
                m = 0.7 * m + g
                update = m
            else:
                m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g**2
                update = (m / (1 - 0.8**k)) / (np.sqrt(v / (1 - 0.95**k)) + 1e-3)
                if kind == "adamw" and name == "w":
                    update = update + 0.2 * p
            p = p - 0.03 * update
            np.testing.assert_allclose(getattr(path[k], name), p, rtol=1e-5, atol=1e-6, err_msg=f"{name} at {k}")


DECAYED = {
    "embed_VD", "source_VD", "position_PD", "wout_DV", "wq_DNH", "wk_DKH", "wv_DKH", "wo_NHD",
    "w1_DF", "w2_FD", "wg_DF",
}  # fmt: skip
KEPT = {"scale_D", "bias_D", "bq_NH", "bk_KH", "bv_KH", "bo_D", "b1_F", "b2_D", "bg_F", "bout_V"}


@pytest.fixture(scope="module")
def everything() -> Transformer:
    """A model with every parameter that there is; no leaf is 0."""
    config = made(
        "adamw",
        architecture="encoder_decoder",
        d_model=6,
        num_heads=3,
        d_ff=5,
        ffn="swiglu",
        positions="learned",
        max_positions=67,
        tie_embeddings=False,
        attention_bias=True,
        norm_placement="sandwich",
        source_vocab_size=11,
        output_bias=True,
    )
    shapes = jax.eval_shape(lambda: init_transformer(jax.random.key(0), config))
    return jax.tree.map(lambda x: jnp.asarray(np.full(x.shape, 0.5, x.dtype)), shapes)


def test_decay_is_by_name_stacked_biases_and_norms_are_kept(everything: Transformer) -> None:
    seen = {}
    for path, decayed in jax.tree_util.tree_leaves_with_path(decays(everything)):
        name = path[-1].name
        assert seen.setdefault(name, decayed) == decayed, jax.tree_util.keystr(path)
    assert {n for n, d in seen.items() if d} == DECAYED
    assert {n for n, d in seen.items() if not d} == KEPT


def test_without_a_gradient_only_weights_shrink(everything: Transformer) -> None:
    tx = optimizer(made("adamw"), Hyper(learning_rate=0.5, weight_decay=0.25))
    updates, _ = jax.jit(lambda p: tx.update(jax.tree.map(jnp.zeros_like, p), tx.init(p), p))(everything)
    for (path, u), p in zip(jax.tree_util.tree_leaves_with_path(updates), jax.tree.leaves(everything), strict=True):
        want = -0.125 * p if path[-1].name in DECAYED else jnp.zeros_like(p)
        np.testing.assert_allclose(u, want, rtol=1e-6, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_traced_numbers_under_vmap_equal_one_by_one(kind: str) -> None:
    params, grads = problem(3)
    config = made(kind, schedule="cosine", steps=3, warmup_steps=2)
    hypers = [
        Hyper(learning_rate=r, b1=b1, b2=0.99, weight_decay=d, momentum=b1, adam_epsilon=1e-4)
        for r, b1, d in ((0.1, 0.5, 0.0), (0.01, 0.9, 0.3), (0.0, 0.0, 0.1))
    ]
    stacked = jax.tree.map(lambda *x: jnp.array(x), *hypers)
    together = jax.vmap(lambda h: descend(config, h, params, grads)[-1])(stacked)
    for i, hyper in enumerate(hypers):
        alone = descend(config, hyper, params, grads)[-1]
        np.testing.assert_allclose(together.w[i], alone.w, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(together.b[i], alone.b, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(together.w[2], params.w)  # rate 0
    assert np.abs(np.asarray(together.w[0] - together.w[1])).max() > 1e-2


def test_d7_adam_makes_headway_under_half_precision_compute() -> None:
    config, hyper = made("adam"), Hyper(learning_rate=1e-3)
    params = Weights(jnp.ones(2), jnp.ones(2))
    tx = optimizer(config, hyper)
    state = tx.init(params)
    slope = jax.grad(lambda p: jnp.sum(p.w.astype(jnp.bfloat16) + p.b.astype(jnp.bfloat16)).astype(jnp.float32))

    @jax.jit
    def step(params: Weights, state: object) -> tuple:
        updates, state = tx.update(slope(params), state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(100):
        params, state = step(params, state)
    assert params.w.dtype == jnp.float32
    np.testing.assert_allclose(params.w, 0.9, rtol=0.01)
    assert {x.dtype for x in jax.tree.leaves(state)} == {jnp.dtype("float32"), jnp.dtype("int32")}
    # Gradients that come in half precision leave the moments in float32.
    _, state = tx.update(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), tx.init(params), params)
    assert {x.dtype for x in jax.tree.leaves(state)} == {jnp.dtype("float32"), jnp.dtype("int32")}


def test_j04_adam_does_not_see_the_gradient_s_scale() -> None:
    params, grads = problem()
    hyper = Hyper(learning_rate=0.01)

    def moved(kind: str, c: float) -> np.ndarray:
        path = descend(made(kind), hyper, params, [jax.tree.map(lambda g: c * g, g) for g in grads])
        return np.asarray(path[-1].w - path[0].w)

    base = moved("adam", 1.0)
    for c in (1e3, 1e-3):
        np.testing.assert_allclose(moved("adam", c), base, atol=1e-4 * np.abs(base).max())
    assert np.abs(moved("adam", 1e-9) - base).max() > 0.1 * np.abs(base).max()  # |g| below epsilon
    np.testing.assert_allclose(moved("sgd", 1e3), 1e3 * moved("sgd", 1.0), atol=1e-3)
    first = descend(made("adam"), hyper, params, grads[:1])[1]
    np.testing.assert_allclose(first.w - params.w, -0.01 * np.sign(grads[0].w), rtol=1e-4)


def test_j02_descent_on_a_quadratic_diverges_past_two_over_lambda() -> None:
    curvature = 5.0

    @jax.jit
    def after(rate: jax.Array) -> jax.Array:
        tx, x = optimizer(made("sgd"), Hyper(learning_rate=rate)), jnp.ones(())
        state = tx.init(x)
        for _ in range(31):
            updates, state = tx.update(curvature * x, state, x)
            x = optax.apply_updates(x, updates)
        return x

    for factor, grows in ((0.5, False), (1.0, False), (1.9, False), (2.1, True), (3.0, True)):
        reached = float(after(factor / curvature))
        assert abs(reached) == pytest.approx(abs(1 - factor) ** 31, rel=1e-3, abs=1e-6)
        assert (abs(reached) > 1) == grows


# --- clipping ----------------------------------------------------------------------


def test_clip_by_hand() -> None:
    grads = Weights(jnp.array([3.0, 0.0]), jnp.array([[4.0]]))
    norm = global_norm(grads)
    assert float(norm) == 5
    clipped = clip(grads, norm, jnp.float32(2.0))
    np.testing.assert_allclose(clipped.w, [1.2, 0.0], rtol=1e-6)
    np.testing.assert_allclose(clipped.b, [[1.6]], rtol=1e-6)
    for limit in (5.0, 7.0, 0.0):  # not above its norm; 0 is off
        jax.tree.map(np.testing.assert_array_equal, clip(grads, norm, jnp.float32(limit)), grads)


@pytest.mark.parametrize("limit", [0.0, 0.5])
def test_h7_a_zero_gradient_stays_zero(limit: float) -> None:
    zeros = Weights(jnp.zeros(3), jnp.zeros(2))
    clipped = jax.jit(clip)(zeros, global_norm(zeros), jnp.float32(limit))
    assert all(np.all(np.asarray(x) == 0) for x in jax.tree.leaves(clipped))


def test_d8_the_norm_of_half_precision_gradients_is_summed_in_float32() -> None:
    grads = {"a": jnp.full(600_011, 0.01, jnp.bfloat16), "b": jnp.full((1, 399_989), 0.01, jnp.bfloat16)}
    norm = global_norm(grads)
    assert norm.dtype == jnp.float32 and float(norm) == pytest.approx(10.0, rel=5e-3)
    clipped = clip(grads, norm, jnp.float32(1.0))
    assert {x.dtype for x in jax.tree.leaves(clipped)} == {jnp.dtype(jnp.bfloat16)}
    assert float(global_norm(clipped)) == pytest.approx(1.0, rel=5e-3)


# --- schedules ---------------------------------------------------------------------


def rates(schedule: str, steps: int, warmup: int, decay: int = 0, past: int = 0) -> np.ndarray:
    config = made("sgd", schedule=schedule, steps=steps, warmup_steps=warmup, decay_steps=decay)
    return np.asarray(jax.jit(jax.vmap(lambda k: schedule_shape(config, k)))(np.arange(steps + past, dtype=np.int32)))


@pytest.mark.parametrize(
    ("schedule", "steps", "warmup", "decay", "want"),
    [
        ("constant", 5, 3, 0, [1 / 3, 2 / 3, 1, 1, 1]),
        ("constant", 2, 5, 0, [0.2, 0.4]),
        ("constant", 2, 0, 0, [1, 1]),
        ("inverse_sqrt", 7, 4, 0, [0.25, 0.5, 0.75, 1, 0.894427, 0.816497, 0.755929]),
        ("inverse_sqrt", 4, 0, 0, [1, 0.707107, 0.57735, 0.5]),
        ("cosine", 10, 4, 0, [0.25, 0.5, 0.75, 1, 0.950484, 0.811745, 0.61126, 0.38874, 0.188255, 0.049516]),
        ("cosine", 3, 0, 0, [0.853553, 0.5, 0.146447]),
        ("cosine", 3, 3, 0, [1 / 3, 2 / 3, 1]),
        ("cosine", 1, 0, 0, [0.5]),
        ("cosine", 1, 1, 0, [1]),
        ("wsd", 8, 2, 3, [0.5, 1, 1, 1, 1, 0.75, 0.5, 0.25]),
        ("wsd", 5, 0, 0, [1, 1, 1, 1, 0.5]),
        ("wsd", 5, 2, 3, [0.5, 1, 0.75, 0.5, 0.25]),
        ("wsd", 1, 0, 0, [0.5]),
    ],
)
def test_h4_h6_shapes_by_hand(schedule: str, steps: int, warmup: int, decay: int, want: list[float]) -> None:
    np.testing.assert_allclose(rates(schedule, steps, warmup, decay), want, atol=2e-6)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("steps", [1, 2, 13])
def test_h6_edges_are_finite_positive_and_stay_so_past_the_end(schedule: str, steps: int) -> None:
    for warmup in {0, 1, steps // 2, steps}:
        try:
            shape = rates(schedule, steps, warmup, past=17)
        except ConfigError:
            assert schedule == "wsd" and warmup + max(1, steps // 5) > steps  # refused before any training
            continue
        assert np.all(np.isfinite(shape)) and np.all(shape > 0) and np.all(shape <= 1)
        if schedule in ("cosine", "wsd"):
            np.testing.assert_array_equal(shape[steps:], shape[steps - 1])


def test_h6_warm_up_past_the_end_is_refused() -> None:
    for schedule in ("inverse_sqrt", "cosine", "wsd"):
        with pytest.raises(ConfigError, match=r"warmup_steps=6 .*steps=5"):
            made("sgd", schedule=schedule, steps=5, warmup_steps=6)


@pytest.mark.parametrize("schedule", ["inverse_sqrt", "cosine", "wsd"])
@pytest.mark.parametrize(("steps", "warmup"), [(13, 1), (13, 5), (101, 29), (100_003, 4001)])
def test_h5_peak_at_the_end_of_warm_up_lowest_at_the_last_update(schedule: str, steps: int, warmup: int) -> None:
    shape = rates(schedule, steps, warmup)
    peak = warmup - 1
    assert shape[peak] == 1 and np.all(shape[:peak] < 1)
    assert np.all(np.diff(shape[: peak + 1]) > 0) and np.all(np.diff(shape[peak:]) <= 0)
    assert 0 < shape[-1] < shape[peak:-1].min()
    if steps < 1000 and schedule != "wsd":
        assert np.all(shape[peak + 1 :] < 1)
    if schedule == "wsd":  # the decay is as long as asked for, warm-up not taken off
        assert np.sum(shape[peak:] < 1) == steps // 5


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_h4_the_rate_that_is_named_is_the_rate_that_is_applied(schedule: str) -> None:
    config = made("sgd", schedule=schedule, steps=11, warmup_steps=3)
    hyper = Hyper(learning_rate=0.7)
    gradient = Weights(jnp.full(2, 2.0), jnp.full(2, -1.0))
    path = descend(config, hyper, Weights(jnp.zeros(2), jnp.zeros(2)), [gradient] * 11)
    named = jax.jit(jax.vmap(lambda k: learning_rate(config, hyper, k)))(np.arange(11, dtype=np.int32))
    applied = -np.diff([p.w[0] for p in path]) / 2
    np.testing.assert_allclose(applied, named, rtol=1e-4)
    np.testing.assert_allclose(named, 0.7 * rates(schedule, 11, 3), rtol=1e-6)


def test_a_very_late_step_is_finite() -> None:
    for schedule in SCHEDULES:
        late = float(schedule_shape(made("sgd", schedule=schedule, steps=5, warmup_steps=2), jnp.int32(2**31 - 2)))
        assert math.isfinite(late) and late > 0
