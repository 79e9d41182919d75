"""Losses: a float64 loop and optax, hand values, what does not count, divergences both ways."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from transformer_jax import losses
from transformer_jax.errors import ConfigError
from transformer_jax.losses import DISTILLATIONS, Sums, bits_per_byte, perplexity

B, T, V = 3, 5, 7

# One program each instead of one an operation.
cross_entropy = jax.jit(losses.cross_entropy)
entropy = jax.jit(losses.entropy)
kl_divergence = jax.jit(losses.kl_divergence)
distillation = jax.jit(losses.distillation, static_argnames="direction")
slope_of = jax.jit(jax.grad(lambda x, *rest, **terms: losses.cross_entropy(x, *rest, **terms).objective))
distilled = jax.jit(
    jax.value_and_grad(lambda s, *rest, **how: losses.distillation(s, *rest, **how)[0], (0, 1)),
    static_argnames="direction",
)


def data(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits, targets, and weights of which some are 0 and some are fractions."""
    rng = np.random.default_rng(seed)
    weights = rng.choice([0.0, 0.5, 1.0, 1.7], size=(B, T)).astype(np.float32)
    weights[1] = 0.0
    return rng.normal(0, 3, (B, T, V)).astype(np.float32), rng.integers(0, V, (B, T)), weights


def loop(
    logits: np.ndarray, targets: np.ndarray, weights: np.ndarray, smoothing: float = 0.0, z: float = 0.0
) -> dict[str, float]:
    """Token by token, class by class, in float64."""
    out = dict.fromkeys(("objective", "nats", "z", "correct", "count"), 0.0)
    for b, t in np.ndindex(targets.shape):
        w = float(weights[b, t])
        if w == 0:
            continue
        row = [float(v) for v in logits[b, t]]
        log_z = max(row) + math.log(sum(math.exp(v - max(row)) for v in row))
        wanted = [smoothing / len(row) + (1 - smoothing) * (v == targets[b, t]) for v in range(len(row))]
        assert sum(wanted) == pytest.approx(1, abs=1e-12)
        part = z * log_z**2
        out["objective"] += w * (sum(q * (log_z - v) for q, v in zip(wanted, row, strict=True)) + part)
        out["nats"] += w * (log_z - row[targets[b, t]])
        out["z"] += w * part
        out["correct"] += w * (row[targets[b, t]] == max(row))
        out["count"] += w
    return out


def gradient(logits: jax.Array, targets: jax.Array, weights: jax.Array, **terms: float) -> np.ndarray:
    return np.asarray(slope_of(jnp.asarray(logits), targets, weights, **terms))


@pytest.mark.parametrize("smoothing", [None, 0.0, 0.3])
@pytest.mark.parametrize("z", [None, 0.0, 0.01])
def test_against_a_loop_in_float64(smoothing: float | None, z: float | None) -> None:
    logits, targets, weights = data()
    sums = cross_entropy(logits, targets, weights, label_smoothing=smoothing, z_loss=z)
    for name, want in loop(logits, targets, weights, smoothing or 0.0, z or 0.0).items():
        assert float(getattr(sums, name)) == pytest.approx(want, rel=2e-6), name
        assert getattr(sums, name).dtype == jnp.float32


def test_against_optax_with_gradient() -> None:
    logits, targets, _ = data(1)
    ones = jnp.ones((B, T))
    want, slope = jax.jit(
        jax.value_and_grad(lambda x: optax.softmax_cross_entropy_with_integer_labels(x, jnp.asarray(targets)).sum())
    )(jnp.asarray(logits))
    sums = cross_entropy(logits, targets, ones)
    assert float(sums.nats) == pytest.approx(float(want), rel=1e-6)
    assert float(sums.loss) == pytest.approx(float(want) / (B * T), rel=1e-6)
    np.testing.assert_allclose(gradient(logits, targets, ones), slope, atol=1e-6)


def test_f6_smoothing_is_over_all_classes_and_pads_do_not_matter() -> None:
    V, a, target = 5, 0.4, 2
    x = jax.random.normal(jax.random.key(0), (1, 1, V))
    # The gradient is softmax - q: so the target distribution itself can be read off.
    slope = gradient(x, jnp.array([[target]]), jnp.ones((1, 1)), label_smoothing=a)
    q = np.asarray(jax.nn.softmax(x) - slope)[0, 0]
    np.testing.assert_allclose(q, [0.08, 0.08, 0.68, 0.08, 0.08], atol=1e-6)
    assert q.sum() == pytest.approx(1, abs=1e-6)
    padded = cross_entropy(
        jnp.concatenate([x, 9 + x], 1), jnp.array([[target, 0]]), jnp.array([[1.0, 0.0]]), label_smoothing=a
    )
    alone = cross_entropy(x, jnp.array([[target]]), jnp.ones((1, 1)), label_smoothing=a)
    assert float(padded.objective) == float(alone.objective)


def test_f8_targets_are_taken_as_they_stand() -> None:
    tokens = np.random.default_rng(0).permuted(np.tile(np.arange(11), (2, 1)), axis=1)  # no token twice in a row
    inputs, targets, after = tokens[:, :-2], tokens[:, 1:-1], tokens[:, 2:]
    weights = jnp.ones(targets.shape)

    def loss(predicted: np.ndarray, weights: jax.Array = weights) -> float:
        return float(cross_entropy(30 * jax.nn.one_hot(predicted, 11), targets, weights).loss)

    assert loss(targets) < 1e-10
    assert loss(inputs) == pytest.approx(30, abs=1e-4)
    assert loss(after) == pytest.approx(30, abs=1e-4)
    row_0 = weights.at[1].set(0.0)
    changed = targets.copy()
    changed[1] = inputs[1]
    assert loss(changed, row_0) == loss(targets, row_0)
    assert loss(changed) > 10


@pytest.mark.parametrize("ignored", [-100, -1, 4, 2**31 - 1])
@pytest.mark.parametrize("terms", [{}, {"label_smoothing": 0.3, "z_loss": 0.1}])
def test_f10_what_does_not_count_is_exactly_nothing(ignored: int, terms: dict[str, float]) -> None:
    logits = np.random.default_rng(0).normal(size=(1, 3, 4)).astype(np.float32)
    weights = jnp.array([[1.0, 0.0, 1.0]])
    targets = jnp.array([[2, ignored, 1]])
    for value in (np.nan, np.inf, -np.inf, 1e38):
        bad = logits.copy()
        bad[0, 1] = value
        sums = cross_entropy(bad, targets, weights, **terms)
        alone = cross_entropy(bad[:, ::2], targets[:, ::2], weights[:, ::2], **terms)
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), sums, alone)
        slope = gradient(bad, targets, weights, **terms)
        assert np.all(slope[0, 1] == 0) and np.all(np.isfinite(slope)) and np.all(slope[0, ::2] != 0)


@pytest.mark.parametrize("target", [4, -1, -100])
def test_f10_an_id_outside_the_vocabulary_that_counts_is_nan_not_another_class(target: int) -> None:
    sums = cross_entropy(jnp.zeros((1, 1, 4)), jnp.array([[target]]), jnp.ones((1, 1)))
    assert math.isnan(sums.nats) and math.isnan(sums.objective)


@pytest.mark.parametrize("smoothing", [None, 0.4])
def test_f11_a_logit_of_minus_infinity_without_mass_is_no_harm(smoothing: float | None) -> None:
    x, target, one = jnp.array([[[-jnp.inf, 0.0]]]), jnp.array([[1]]), jnp.ones((1, 1))
    assert float(cross_entropy(x, target, one, label_smoothing=smoothing).objective) == 0
    assert np.all(gradient(x, target, one, label_smoothing=smoothing) == 0)
    # With two allowed classes the smoothing mass is shared by those two.
    x = jnp.array([[[-jnp.inf, 0.0, 1.0]]])
    want = cross_entropy(x[..., 1:], jnp.array([[0]]), one, label_smoothing=smoothing)
    sums = cross_entropy(x, target, one, label_smoothing=smoothing, z_loss=0.0)
    assert float(sums.objective) == pytest.approx(float(want.objective), rel=1e-6)
    slope = gradient(x, target, one, label_smoothing=smoothing)
    assert np.all(np.isfinite(slope)) and slope[0, 0, 0] == 0


def test_f14_z_loss() -> None:
    zeros, targets, ones = jnp.zeros((B, T, 4)), jnp.zeros((B, T), jnp.int32), jnp.ones((B, T))
    on = cross_entropy(zeros, targets, ones, z_loss=1e-4)
    assert float(on.z / on.count) == pytest.approx(1.9218e-4, abs=5e-9)
    assert float(on.objective - on.nats) == pytest.approx(B * T * 1.9218e-4, abs=1e-5)
    shifted = cross_entropy(zeros + 5, targets, ones, z_loss=1e-4)
    assert float(shifted.nats) == pytest.approx(float(on.nats), rel=1e-6)
    assert float(shifted.z / shifted.count) == pytest.approx(1e-4 * (5 + math.log(4)) ** 2, rel=1e-5)
    pads = cross_entropy(zeros.at[1:].set(50.0), targets, ones.at[1:].set(0.0), z_loss=1e-4)
    assert float(pads.z) == pytest.approx(T * 1.9218e-4, rel=1e-4)
    assert float(cross_entropy(zeros, targets, ones).z) == 0


@pytest.mark.parametrize("terms", [{}, {"label_smoothing": 0.1, "z_loss": 1e-3}])
def test_f2_a_batch_without_counted_tokens_is_zero(terms: dict[str, float]) -> None:
    logits, _, _ = data()
    none = jnp.zeros((B, T))
    sums = cross_entropy(logits, jnp.full((B, T), -100), none, **terms)
    assert all(float(x) == 0 for x in jax.tree.leaves(sums))
    assert float(sums.loss) == 0 and float(sums.accuracy) == 0
    mean = jax.grad(lambda x: cross_entropy(x, jnp.zeros((B, T), jnp.int32), none, **terms).loss)(jnp.asarray(logits))
    assert np.all(np.asarray(mean) == 0)


@pytest.mark.parametrize("terms", [{}, {"label_smoothing": 0.1, "z_loss": 1e-4}])
def test_large_logits_are_finite(terms: dict[str, float]) -> None:
    x = 1e4 * jnp.array([[[1.0, -1.0, 0.0], [-1.0, 0.5, 1.0]]])
    targets, ones = jnp.array([[0, 0]]), jnp.ones((1, 2))
    assert float(cross_entropy(x, targets, ones).nats) == pytest.approx(2e4, rel=1e-6)
    assert np.isfinite(float(cross_entropy(x, targets, ones, **terms).objective))
    assert np.all(np.isfinite(gradient(x, targets, ones, **terms)))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_logits_are_summed_in_float32(dtype: jnp.dtype) -> None:
    logits, targets, weights = data(2)
    x = jnp.asarray(logits).astype(dtype)
    sums = cross_entropy(x, targets, weights.astype(dtype), label_smoothing=0.1)
    want = loop(np.asarray(x, np.float64), targets, np.asarray(jnp.asarray(weights).astype(dtype), np.float64), 0.1)
    for name, value in want.items():
        assert getattr(sums, name).dtype == jnp.float32
        assert float(getattr(sums, name)) == pytest.approx(value, rel=2e-6), name
    # 2003 tokens of ln 257 each: a half-precision sum would be off by whole nats.
    many = cross_entropy(jnp.zeros((1, 2003, 257), dtype), jnp.zeros((1, 2003), jnp.int32), jnp.ones((1, 2003), dtype))
    assert float(many.nats) == pytest.approx(2003 * math.log(257), rel=1e-5) and float(many.count) == 2003


def test_entropy_perplexity_bits_by_hand() -> None:
    p = jnp.array([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0], [1 / 3, 1 / 3, 1 / 3]])
    np.testing.assert_allclose(entropy(jnp.log(p)), [1.5 * math.log(2), 0, math.log(3)], atol=1e-6)
    assert np.all(np.isfinite(jax.grad(lambda x: entropy(x).sum())(jnp.array([1.0, 0.0, -jnp.inf]))))
    assert float(perplexity(math.log(7))) == pytest.approx(7, rel=1e-6)
    assert float(bits_per_byte(6 * math.log(2), 4)) == pytest.approx(1.5, rel=1e-6)
    # 5 tokens of ln 16 nats over a text of 10 bytes.
    assert float(bits_per_byte(5 * math.log(16), 10)) == pytest.approx(2, rel=1e-6)


def test_q2_q3_sums_add_and_only_then_divide() -> None:
    def batch(nats: float, correct: float, count: float) -> Sums:
        return Sums(*(jnp.float32(v) for v in (nats, nats, 0, correct, count)))

    total = sum((batch(10, 0, 10), batch(6, 0, 2)), Sums.zero())
    assert float(perplexity(total.loss)) == pytest.approx(3.794, abs=5e-4)
    total = batch(1, 4, 4) + batch(1, 4, 4) + batch(1, 0, 2)
    assert float(total.accuracy) == pytest.approx(0.8)


def test_accuracy_counts_by_weight() -> None:
    logits = 9 * jax.nn.one_hot(jnp.array([[1, 2, 3]]), 5)
    sums = cross_entropy(logits, jnp.array([[1, 2, 0]]), jnp.array([[1.0, 0.0, 1.0]]))
    assert float(sums.correct) == 1 and float(sums.accuracy) == 0.5


def test_e11_low_perplexity_is_not_low_entropy() -> None:
    sure, even = jnp.log(jnp.array([[[0.99, 0.01]]])), jnp.zeros((1, 1, 2))
    found = []
    for logits in (sure, even):
        ppl = perplexity(cross_entropy(logits, jnp.array([[1]]), jnp.ones((1, 1))).loss)
        found += [float(entropy(logits)[0, 0]), float(ppl)]
    assert found == pytest.approx([0.056, 100, 0.693, 2], rel=1e-3)


def test_e12_cross_entropy_is_entropy_plus_kl() -> None:
    rng = np.random.default_rng(0)
    p, q = (jnp.asarray(rng.normal(size=V), jnp.float32) for _ in range(2))

    def crossed(q: jax.Array) -> jax.Array:
        """H(p, q): each class as a target, weighted by its probability."""
        rows = jnp.broadcast_to(q, (1, V, V))
        return cross_entropy(rows, jnp.arange(V)[None], jax.nn.softmax(p)[None]).nats

    assert float(crossed(q)) == pytest.approx(float(entropy(p) + kl_divergence(p, q)[0]), rel=1e-6)
    slope = jax.jit(jax.grad(crossed))
    np.testing.assert_allclose(slope(q), jax.grad(lambda q: kl_divergence(p, q)[0])(q), atol=1e-6)
    np.testing.assert_allclose(slope(p), np.zeros(V), atol=1e-6)
    assert float(kl_divergence(p, p)[0]) == pytest.approx(0, abs=1e-7)


# --- divergences -------------------------------------------------------------------


def test_e14_kl_is_not_symmetric() -> None:
    p, q = jnp.log(jnp.array([[0.5, 0.5]])), jnp.log(jnp.array([[0.9, 0.1]]))
    want = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1), 0.9 * math.log(1.8) + 0.1 * math.log(0.2)
    assert want == pytest.approx((0.5108, 0.3681), abs=1e-4)
    assert (float(kl_divergence(p, q)[0]), float(kl_divergence(q, p)[0])) == pytest.approx(want, rel=1e-5)
    student, teacher = q, p
    assert float(distillation(student, teacher)[0]) == pytest.approx(want[0], rel=1e-5)
    assert float(distillation(student, teacher, direction="reverse")[0]) == pytest.approx(want[1], rel=1e-5)
    m = 0.5 * np.array([1.4, 0.6])
    half = [sum(a * math.log(a / b) for a, b in zip(x, m, strict=True)) for x in ((0.5, 0.5), (0.9, 0.1))]
    jsd = distillation(student, teacher, direction="jensen_shannon")[0]
    assert float(jsd) == pytest.approx(sum(half) / 2, rel=1e-5)


@pytest.mark.parametrize(("temperature", "want"), [(1, 0.46212), (2, 0.48984), (4, 0.49741)])
def test_f12_distillation_by_hand(temperature: int, want: float) -> None:
    student, teacher = jnp.array([[1.0, 0.0]]), jnp.array([[0.0, 1.0]])
    found, count = distillation(student, teacher, temperature=temperature)
    assert float(found) == pytest.approx(want, abs=6e-6) and float(count) == 1
    if temperature == 2:
        assert float(found) / 4 == pytest.approx(0.12246, abs=6e-6)


@pytest.mark.parametrize("direction", DISTILLATIONS)
def test_f12_the_teacher_has_no_gradient(direction: str) -> None:
    rng = np.random.default_rng(0)
    student, teacher = (jnp.asarray(rng.normal(size=(T, V)), jnp.float32) for _ in range(2))
    _, slopes = distilled(student, teacher, temperature=2.0, direction=direction)
    assert np.any(np.asarray(slopes[0]) != 0) and np.all(np.asarray(slopes[1]) == 0)
    _, at_teacher = distilled(teacher, teacher, temperature=2.0, direction=direction)
    np.testing.assert_allclose(at_teacher[0], np.zeros((T, V)), atol=1e-6)


@pytest.mark.parametrize("direction", DISTILLATIONS)
def test_f13_summed_over_classes_mean_over_counted_tokens(direction: str) -> None:
    p, q = jnp.log(jnp.array([[0.3, 0.7]])), jnp.log(jnp.array([[0.6, 0.4]]))

    def wide(x: jax.Array) -> jax.Array:
        return np.pad(x, ((0, 0), (0, 198)), constant_values=-np.inf)

    narrow = float(distillation(q, p, direction=direction)[0])
    assert float(distillation(wide(q), wide(p), direction=direction)[0]) == pytest.approx(narrow, rel=1e-6)
    slope = np.asarray(distilled(wide(q), wide(p), direction=direction)[1][0])
    assert np.all(np.isfinite(slope)) and np.all(slope[:, 2:] == 0) and np.all(slope[:, :2] != 0)

    # A position of weight 0 is nothing, whatever stands there.
    def padded(x: jax.Array, value: float) -> jax.Array:
        return np.concatenate([x, np.full((1, 2), value, np.float32)])

    weights = jnp.array([1.0, 0.0])
    for value in (7.0, jnp.nan, -jnp.inf):
        total, (slope, _) = distilled(padded(q, value), padded(p, value), weights, direction=direction)
        assert float(total) == pytest.approx(narrow, rel=1e-6)
        assert np.all(np.isfinite(slope)) and np.all(np.asarray(slope[1]) == 0)
        assert float(distillation(padded(q, value), padded(p, value), weights, direction=direction)[1]) == 1
    half = distillation(padded(q, 0.0), padded(p, 0.0), jnp.array([0.5, 0.0]), direction=direction)
    assert [float(x) for x in half] == pytest.approx([narrow / 2, 0.5], rel=1e-6)


def test_jensen_shannon_is_symmetric_and_at_most_ln_2() -> None:
    rng = np.random.default_rng(0)
    p, q = (jnp.asarray(rng.normal(0, 4, (T, V)), jnp.float32) for _ in range(2))

    def jsd(p: jax.Array, q: jax.Array) -> float:
        return float(distillation(p, q, direction="jensen_shannon")[0])

    assert jsd(p, q) == pytest.approx(jsd(q, p), rel=1e-5)
    assert 0.1 < jsd(p, q) / T < math.log(2)
    apart = jnp.array([[0.0, -jnp.inf]]), jnp.array([[-jnp.inf, 0.0]])
    assert jsd(*apart) == pytest.approx(math.log(2), rel=1e-6)
    assert float(kl_divergence(*apart)[0]) == math.inf


def test_unknown_direction_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'revers'.*reverse"):
        distillation(jnp.zeros((1, 2)), jnp.zeros((1, 2)), direction="revers")
