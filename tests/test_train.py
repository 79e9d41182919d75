"""Training: a stored step, accumulation, padding, randomness, resume, no retrace, runs side by side.

`python -m tests.test_train` makes the stored step anew. Most tests share the program RUN.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax import keys
from transformer_jax.batch import Batch
from transformer_jax.config import TERMS, Config, Hyper, with_terms
from transformer_jax.encoder_decoder import Transformer, forward
from transformer_jax.losses import Sums
from transformer_jax.optim import optimizer
from transformer_jax.train import TrainState, eval_step, evaluate, gradients, init_state, run, token_sums, train_step

FIXTURE = Path(__file__).parent / "fixtures" / "golden_step.json"
T, V = 5, 13
RATES = {"dropout_rate": 0.2, "attention_dropout_rate": 0.1, "activation_dropout_rate": 0.3}
CAPS = {"attention_softcap": 1.5, "final_softcap": 5.0}
STILL = Hyper(learning_rate=0.01, label_smoothing=0.1, z_loss=1e-3, clip_norm=0.7, **CAPS)  # no randomness
LOUD = STILL.replace(**RATES)
LENGTHS = [5, 2, 3]
# Compiling is most of this file's time.
jit = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
)


def small(hyper: Hyper | None = None, **changes: object) -> Config:
    """A model of width 7 in two layers; the terms that `hyper` uses are in its program."""
    sizes = {"vocab_size": V, "d_model": 7, "num_heads": 3, "head_dim": 2, "d_ff": 11, "num_layers": 2, "seq_len": T}
    config = Config(**{**sizes, "batch_size": 3, "steps": 11, **changes})
    return config if hyper is None else with_terms(config, [hyper])


# Every term, decay, parts of one row each, a rate that rises, stays and falls.
RUN = small(LOUD, optimizer="adamw", schedule="wsd", warmup_steps=3, decay_steps=5, accumulation=3)


def rows(B: int = 3, seed: int = 0, lengths: list[int] | None = None) -> Batch:
    """Random tokens; with `lengths`, the rest of each row is padding of weight 0."""
    tokens = jnp.asarray(np.random.default_rng(seed).integers(0, V, (B, T + 1)), jnp.int32)
    real = None if lengths is None else jnp.array(lengths, jnp.int32)
    weights = jnp.ones((B, T)) if real is None else (jnp.arange(T)[None] < real[:, None]).astype(jnp.float32)
    return Batch(tokens[:, :-1], tokens[:, 1:], weights, lengths_B=real)


def draw(key: jax.Array) -> Batch:
    """The training batch of a key."""
    tokens = jax.random.randint(key, (3, T + 1), 0, V)
    return Batch(tokens[:, :-1], tokens[:, 1:], jnp.ones((3, T)))


start = jit(init_state, static_argnums=0)
advance = jit(train_step, static_argnums=0)
grade = jit(eval_step, static_argnums=0)
slopes = jit(gradients, static_argnums=1)
summed = jit(token_sums, static_argnums=1)


@functools.partial(jit, donate_argnums=0)
@chex.assert_max_traces(n=1)
def train(state: TrainState, batch: Batch) -> tuple[TrainState, dict]:
    return train_step(RUN, state, LOUD, batch)


@jit
@chex.assert_max_traces(n=1)
def judge(params: Transformer, batch: Batch) -> Sums:
    return eval_step(RUN, params, LOUD, batch)


def fresh(config: Config = RUN) -> TrainState:
    """As init_state of the default model's sizes; compiled once for all optimisers."""
    state = start(small(), Hyper(), jax.random.key(0))
    return state.replace(opt_state=optimizer(config, Hyper()).init(state.params))


def equal(a: object, b: object) -> None:
    """Same bits in every leaf."""
    jax.tree.map(np.testing.assert_array_equal, plain(a), plain(b))


def close(a: object, b: object, atol: float) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=atol), plain(a), plain(b))


def plain(tree: object) -> object:
    """Arrays of numbers: random keys as their words."""
    return jax.tree.map(
        lambda x: np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x), tree
    )


# --- one stored step ---------------------------------------------------------------


def golden_step() -> dict[str, dict[str, float]]:
    """Metrics of the third update and the mean size of each parameter after it."""
    # An epsilon far above round-off: Adam's first steps are signs of gradients, tiny ones too.
    state, hyper = fresh(), LOUD.replace(adam_epsilon=1e-3, weight_decay=0.1)
    for k in range(3):
        state, metrics = advance(RUN, state, hyper, rows(seed=k, lengths=LENGTHS))
    sizes = jax.tree_util.tree_leaves_with_path(plain(state.params))
    return {
        "metrics": {name: float(value) for name, value in metrics.items()},
        "parameters": {jax.tree_util.keystr(path): float(np.mean(np.abs(value))) for path, value in sizes},
    }


def test_golden_step() -> None:
    stored, found = json.loads(FIXTURE.read_text()), golden_step()
    for part, want in stored.items():
        assert found[part] == pytest.approx(want, rel=1e-5, abs=1e-7), (
            f"{part} of a training step changed. If that is meant, run `python -m tests.test_train`, "
            f"look at the difference of {FIXTURE.name}, and say why in the commit."
        )


# --- the loss of a batch -----------------------------------------------------------


def test_f8_targets_are_already_shifted_and_each_token_counts_once() -> None:
    config, batch = small(), rows()
    params = fresh(config).params

    @jit
    def by_token(batch: Batch) -> jax.Array:
        """Nats of each position: the slope of the sum in its weight."""
        return jax.grad(lambda w: token_sums(params, config, Hyper(), batch.replace(weights_BT=w)).nats)(
            batch.weights_BT
        )

    logits = np.asarray(jit(forward, static_argnums=1)(params, config, Hyper(), batch)[0], np.float64)
    nats = np.asarray(by_token(batch))
    for b, t in np.ndindex(3, T):
        want = np.log(np.exp(logits[b, t]).sum()) - logits[b, t, batch.targets_BT[b, t]]
        assert nats[b, t] == pytest.approx(want, rel=1e-5)
    # A target is not an input: changing it changes its own position only; a token acts from its place on.
    other = np.asarray(by_token(batch.replace(targets_BT=batch.targets_BT.at[1, 2].add(1) % V)))
    assert [tuple(x) for x in np.argwhere(other != nats)] == [(1, 2)]
    other = np.asarray(by_token(batch.replace(tokens_BT=batch.tokens_BT.at[1, 2].add(1) % V)))
    assert {tuple(x) for x in np.argwhere(other != nats)} == {(1, 2), (1, 3), (1, 4)}


def test_f1_h10_accumulated_parts_equal_one_big_batch() -> None:
    lengths = [5, 5, 1, 0, 0, 0]  # parts of two hold 10, 1 and 0 tokens
    batch = rows(6, lengths=lengths)
    whole = small(STILL, batch_size=6, optimizer="sgd")
    params = fresh(whole).params
    want, sums = slopes(params, whole, STILL, batch)
    assert float(sums.count) == 11
    # As if the rows were given one by one and added by hand.
    single = [summed(params, whole, STILL, jax.tree.map(lambda x, i=i: x[i : i + 1], batch)) for i in range(3)]
    assert float(sums.objective) == pytest.approx(sum(float(s.objective) for s in single), rel=1e-6)
    found, parts = slopes(params, whole.replace(accumulation=3), STILL, batch)
    close(found, want, 1e-6)
    np.testing.assert_allclose(jax.tree.leaves(parts), jax.tree.leaves(sums), rtol=1e-6)


CLIPPED = Hyper(learning_rate=1.0, clip_norm=0.2)
SGD = small(CLIPPED, optimizer="sgd", schedule="wsd", warmup_steps=2, decay_steps=9)


def test_f3_h3_h4_clipping_and_the_schedule_come_after_accumulation() -> None:
    split, batch = SGD.replace(accumulation=3), rows(lengths=[5, 1, 3])
    a, b = fresh(SGD), fresh(SGD)
    for want in (0.5, 1.0, 0.9, 0.8):  # updates are counted, not parts
        old = a
        (a, seen), (b, parts) = advance(SGD, a, CLIPPED, batch), advance(split, b, CLIPPED, batch)
        close(b.params, a.params, 5e-7)
        assert float(seen["grad_norm"]) == pytest.approx(float(parts["grad_norm"]), rel=1e-5)
        assert float(seen["grad_norm"]) > 0.2  # what is logged is the norm before clipping
        assert float(seen["learning_rate"]) == float(parts["learning_rate"]) == pytest.approx(want)
        # The rate that is logged is the rate that is applied, and to the clipped gradient.
        moved = jax.tree.leaves(jax.tree.map(lambda x, y: np.sum(np.square(np.subtract(x, y))), a.params, old.params))
        assert np.sqrt(sum(moved)) == pytest.approx(0.2 * want, rel=1e-4)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_f2_a_batch_of_padding_only_moves_nothing(kind: str) -> None:
    config, hyper = (SGD, CLIPPED) if kind == "sgd" else (RUN, LOUD.replace(weight_decay=0.0))
    state = fresh(config)
    batch = rows(lengths=[0, 0, 0])
    new, metrics = advance(config, state, hyper, batch.replace(targets_BT=jnp.full((3, T), -100)))
    equal(new.params, state.params)
    assert all(np.isfinite(x) for x in metrics.values())
    assert [float(metrics[m]) for m in ("loss", "objective", "grad_norm", "tokens", "accuracy")] == [0] * 5
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(plain(new)))
    assert float(metrics["learning_rate"]) > 0 and int(new.step) == 1


def test_padding_s_content_is_nothing() -> None:
    state, batch = fresh(), rows(lengths=LENGTHS)
    pads = batch.weights_BT == 0
    other = batch.replace(
        tokens_BT=jnp.where(pads, 7, batch.tokens_BT), targets_BT=jnp.where(pads, -100, batch.targets_BT)
    )
    equal(advance(RUN, state, LOUD, batch), advance(RUN, state, LOUD, other))
    shorter = jax.tree.map(lambda x: x[1:, :3] if x.ndim > 1 else x[1:], batch)
    total, rest, first = (grade(RUN, state.params, LOUD, b) for b in (batch, shorter, rows(1)))
    np.testing.assert_allclose(jax.tree.leaves(total), jax.tree.leaves(rest + first), rtol=1e-6)


def test_q2_evaluate_adds_sums_over_batches() -> None:
    config = small()
    params = fresh(config).params
    weights = jnp.array([[1.0] * T, [1, 1, 0, 0, 0], [0.0] * T])
    batch = rows()

    def of(i: jax.Array) -> Batch:
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, i, 1), batch.replace(weights_BT=weights))

    total = jit(lambda n: evaluate(config, params, Hyper(), of, n))
    equal(total(0), Sums.zero())
    want = grade(config, params, Hyper(), batch.replace(weights_BT=weights))
    np.testing.assert_allclose(jax.tree.leaves(total(3)), jax.tree.leaves(want), rtol=1e-6)
    assert float(total(1).count) == T and float(total(2).count) == T + 2


# --- terms and randomness ----------------------------------------------------------


DROPOUTS = ("dropout", "attention_dropout", "activation_dropout")


@pytest.mark.parametrize("term", DROPOUTS)
def test_terms_switch_the_random_bits(term: str) -> None:
    batch = rows()

    def program(config: Config, step: str) -> str:
        state = jax.eval_shape(lambda: init_state(config, Hyper(), jax.random.key(0)))
        if step == "train":
            return str(jax.make_jaxpr(functools.partial(train_step, config))(state, LOUD, batch))
        return str(jax.make_jaxpr(functools.partial(eval_step, config))(state.params, LOUD, batch))

    # The bits of attention dropout belong to places, and are hashed from them.
    draw = "threefry2x32 " if term == "attention_dropout" else "random_bits"
    assert program(small(), "train").count(draw) == 0
    assert program(small(terms=(term,)), "train").count(draw) > 0
    assert program(small(terms=(term,)), "eval").count(draw) == 0


def test_a_number_whose_term_is_off_does_nothing_and_each_term_does_something() -> None:
    state, batch = fresh(), rows()
    off = summed(state.params, small(), LOUD, batch, state.key)
    equal(off, summed(state.params, small(), Hyper(), batch, state.key))
    for term in TERMS:
        on = summed(state.params, small(terms=(term,)), LOUD, batch, state.key)
        assert (float(on.objective) != float(off.objective)) == (term not in ("clip", "ema")), term
        assert (float(on.nats) != float(off.nats)) == ("dropout" in term or "softcap" in term), term


def test_a_traced_rate_of_0_equals_no_dropout() -> None:
    state, batch = fresh(), rows()
    a, b = (summed(state.params, small(terms=t), Hyper(), batch, state.key) for t in ((), tuple(TERMS)[:3]))
    np.testing.assert_allclose(jax.tree.leaves(a), jax.tree.leaves(b), rtol=1e-6)


def test_e2_dropout_differs_by_step_and_not_by_run() -> None:
    state, batch = fresh(), rows(lengths=LENGTHS)
    losses = [float(advance(RUN, state.replace(step=jnp.int32(k)), LOUD, batch)[1]["loss"]) for k in (0, 1, 2, 1)]
    assert len(set(losses)) == 3 and losses[1] == losses[3]
    other = state.replace(key=jax.random.key(1))
    assert float(advance(RUN, other, LOUD, batch)[1]["loss"]) not in losses
    first = grade(RUN, state.params, LOUD, batch)
    equal(grade(RUN, state.params, LOUD, batch), first)
    np.testing.assert_allclose(first.nats, grade(small(STILL), state.params, LOUD, batch).nats, rtol=1e-6)


def test_accumulated_parts_draw_masks_of_their_own() -> None:
    state, row = fresh(), rows(1, lengths=[5])
    _, metrics = advance(RUN, state, LOUD, jax.tree.map(lambda x: jnp.concatenate([x] * 3), row))
    key = jax.random.fold_in(keys.named(state.key, "dropout"), 0)
    parts = [float(summed(state.params, RUN, LOUD, row, jax.random.fold_in(key, i)).loss) for i in range(3)]
    assert len(set(parts)) == 3
    assert float(metrics["loss"]) == pytest.approx(sum(parts) / 3, rel=1e-6)


FIVE_STEPS = """
import jax
from tests.test_train import LOUD, draw, jit, small
from transformer_jax.train import run
go = jit(lambda key: run(small(LOUD), LOUD, key, draw, steps=5)[1]["loss"])
print([go(jax.random.key(seed)).tobytes().hex() for seed in (0, 1)])
"""


def test_e6_processes_agree_whatever_the_hash_seed() -> None:
    command = {"cwd": Path(__file__).parents[1], "stdout": subprocess.PIPE, "text": True}
    processes = [
        subprocess.Popen([sys.executable, "-c", FIVE_STEPS], env={**os.environ, "PYTHONHASHSEED": seed}, **command)
        for seed in ("1", "2")
    ]
    said = [p.communicate(timeout=300)[0] for p in processes]
    assert [p.returncode for p in processes] == [0, 0]
    assert said[0] == said[1]
    one, other = json.loads(said[0].replace("'", '"'))
    assert len(one) == len(other) == 40
    assert one[:8] != other[:8]


# --- state, compilation, runs ------------------------------------------------------


def test_h2_a_state_kept_midway_goes_on_bit_for_bit() -> None:
    def go(state: TrainState, steps: int) -> tuple[TrainState, list[dict]]:
        seen = []
        for _ in range(steps):
            state, metrics = advance(RUN, state, LOUD, rows(seed=int(state.step), lengths=LENGTHS))
            seen.append(plain(metrics))
        return state, seen

    whole, seen = go(fresh(), 11)
    half, before = go(fresh(), 7)
    kept = plain(half)  # numbers on the host, as a checkpoint has them
    half = jax.tree.map(jnp.asarray, kept).replace(key=jax.random.wrap_key_data(kept.key))
    rest, after = go(half, 4)
    equal(rest, whole)
    equal(before + after, seen)
    rates = np.array([m["learning_rate"] for m in seen]) / 0.01
    np.testing.assert_allclose(rates, [1 / 3, 2 / 3, 1, 1, 1, 1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6], rtol=1e-5)
    assert int(whole.step) == 11


def test_k2_one_trace_over_twenty_steps_and_stable_types() -> None:
    def types(tree: object) -> list:
        return [(x.shape, x.dtype, getattr(x, "weak_type", False)) for x in jax.tree.leaves(tree)]

    first = types(state := fresh())
    assert not any(weak for _, _, weak in first)
    for k in range(20):
        batch = rows(seed=k, lengths=LENGTHS)
        state, metrics = train(state, batch)
        judge(state.params, batch)
        assert types(state) == first
    assert train._cache_size() == 1 and judge._cache_size() == 1
    assert {(x.shape, x.dtype, x.weak_type) for x in metrics.values()} == {((), jnp.dtype("float32"), False)}


def test_k4_a_donated_state_leaves_the_caller_s_key_and_earlier_evaluations() -> None:
    key, batch = jax.random.key(0), rows(lengths=LENGTHS)
    for make in (init_state, start):
        old = make(small(), LOUD, key)
        old = old.replace(opt_state=optimizer(RUN, LOUD).init(old.params))
        before = judge(old.params, batch)
        state, _ = train(old, batch)
        state, _ = train(state, batch)
        assert old.params.embedding.embed_VD.is_deleted() and not key.is_deleted()
        np.testing.assert_allclose(before.nats, judge(start(small(), LOUD, key).params, batch).nats, rtol=1e-6)
        assert float(judge(state.params, batch).nats) != float(before.nats)


def test_runs_side_by_side_equal_runs_alone() -> None:
    hypers = [LOUD, LOUD.replace(learning_rate=0.03, dropout_rate=0.0, clip_norm=0.0), STILL.replace(learning_rate=0.0)]
    config = with_terms(small(schedule="cosine"), hypers)
    seeds = jax.vmap(jax.random.key)(jnp.array([0, 1, 1]))
    go = jit(lambda hyper, key: run(config, hyper, key, draw, steps=5))
    states, metrics = jit(jax.vmap(lambda hyper, key: run(config, hyper, key, draw, steps=5)))(
        jax.tree.map(lambda *x: jnp.array(x), *hypers), seeds
    )
    assert metrics["loss"].shape == (3, 5)
    for i, hyper in enumerate(hypers):
        state, alone = go(hyper, seeds[i])
        close(jax.tree.map(lambda x, i=i: x[i], metrics), alone, 1e-5)
        close(jax.tree.map(lambda x, i=i: x[i], states.params), state.params, 1e-5)
    assert len({float(x) for x in metrics["loss"][2]}) == 5  # at rate 0: each step has a batch of its own
    np.testing.assert_allclose(metrics["learning_rate"][1] / metrics["learning_rate"][0], 3, rtol=1e-5)


def test_a_tiny_model_learns_one_batch_by_heart() -> None:
    hyper = Hyper(learning_rate=0.03, clip_norm=1.0)
    config = small(hyper, d_model=11, num_layers=1)
    batch = rows()
    batch = batch.replace(tokens_BT=batch.tokens_BT.at[:, 0].set(jnp.arange(3)))
    _, metrics = jit(lambda key: run(config, hyper, key, lambda _: batch, steps=101))(jax.random.key(0))
    assert float(metrics["loss"][0]) > 2 and float(metrics["loss"][-1]) < 0.02
    assert float(metrics["accuracy"][-1]) == 1 and float(metrics["tokens"][-1]) == 15


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_compute_has_finite_float32_gradients(dtype: str) -> None:
    config = small(LOUD, compute_dtype=dtype, score_dtype=dtype)
    state, batch = fresh(config), rows(lengths=[5, 0, 3])
    grads, sums = slopes(state.params, config, LOUD, batch, state.key)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("float32")}
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(grads)) and np.isfinite(sums.loss)
    assert all(np.any(np.asarray(g) != 0) for g in jax.tree.leaves(grads))
    full = grade(RUN, state.params, LOUD, batch)
    assert float(grade(config, state.params, LOUD, batch).loss) == pytest.approx(float(full.loss), rel=0.03)


if __name__ == "__main__":
    FIXTURE.write_text(json.dumps(golden_step(), indent=1) + "\n")
