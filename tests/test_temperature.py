"""The temperature question: its judges by hand, dH/dT, samples at T = 0, the sweep from its command to its files."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import launch
from experiments import flags, temperature, tempering, trained
from experiments.tempering import BINS, distinct, entropy, entropy_slopes, log_probabilities, reliability, repetition
from tests.quick import QUICK, jit
from transformer_jax.config import Config, Hyper
from transformer_jax.data import make_task
from transformer_jax.data.markov import chain_of, mean_floor, stationary, transition_table
from transformer_jax.encoder_decoder import init_transformer

ROOT = Path(__file__).resolve().parent.parent


# --- distributions -------------------------------------------------------------------


def test_tempered_probabilities_by_hand() -> None:
    z = np.log([[1.0, 4.0], [9.0, 1.0]])
    np.testing.assert_allclose(np.exp(log_probabilities(z, 1)), [[0.2, 0.8], [0.9, 0.1]])
    np.testing.assert_allclose(np.exp(log_probabilities(z, 2)), [[1 / 3, 2 / 3], [3 / 4, 1 / 4]])
    np.testing.assert_allclose(np.exp(log_probabilities(z, 0.5)), [[1 / 17, 16 / 17], [81 / 82, 1 / 82]])
    np.testing.assert_allclose(np.exp(log_probabilities(1e6 * z, 1e-3)), [[0, 1], [1, 0]])
    # T = 0: of equal ones the first.
    np.testing.assert_array_equal(np.exp(log_probabilities(np.array([1.0, 3.0, 3.0]), 0)), [0, 1, 0])
    assert entropy(log_probabilities(np.zeros(7), 5)) == pytest.approx(math.log(7))
    assert entropy(log_probabilities(z, 0)).tolist() == [0, 0]


def test_slope_of_the_entropy_of_two_logits() -> None:
    """z = (0, a): Var = a² p (1 - p), p = 1 / (1 + exp(-a/T)), so dH/dT = a² p (1 - p) / T³."""
    a, Ts = 1.7, np.array([0.3, 1.0, 2.5])
    found = entropy_slopes(np.array([[0.0, a]]), Ts)
    p = 1 / (1 + np.exp(-a / Ts))
    np.testing.assert_allclose(found.formula, a**2 * p * (1 - p) / Ts**3, rtol=1e-12)
    np.testing.assert_allclose(found.autodiff, found.formula, rtol=1e-10)


def test_slopes_agree_three_ways_and_are_means_over_positions() -> None:
    z = np.random.default_rng(0).normal(0, 3, (11, 7)).astype(np.float32)
    Ts, h = np.geomspace(0.1, 4, 13), 1e-4
    found = entropy_slopes(z, Ts)
    assert found.largest_difference < 1e-8 < found.formula.max()
    naive = []
    for T in Ts:
        ends = []
        for t in (T + h, T - h):
            total = 0.0
            for row in z.astype(np.float64):
                powers = [math.exp((x - row.max()) / t) for x in row]
                total -= sum(q / sum(powers) * math.log(q / sum(powers)) for q in powers if q > 0)
            ends.append(total / len(z))
        naive.append((ends[0] - ends[1]) / (2 * h))
    np.testing.assert_allclose(found.formula, naive, atol=2e-5)
    assert (found.formula >= 0).all()


def test_the_largest_difference_is_between_any_two() -> None:
    one, two = np.zeros(2), np.array([0.0, 1.0])
    assert tempering.Slopes(one, one, -two, 2 * two).largest_difference == 3


# --- text ----------------------------------------------------------------------------


def test_distinct_and_repetition_by_hand() -> None:
    rows = np.array([[1, 2, 1, 2, 1, 2, 1], [3, 3, 3, 3, 3, 3, 3]])
    assert distinct(rows, 1) == pytest.approx((2 / 7 + 1 / 7) / 2)
    assert distinct(rows, 2) == pytest.approx((2 / 6 + 1 / 6) / 2)
    assert distinct(rows, 3) == pytest.approx((2 / 5 + 1 / 5) / 2)
    # 1212, 2121, 1212, 2121: two stood before; of 3333 three did.
    assert repetition(rows) == pytest.approx((2 / 4 + 3 / 4) / 2)
    assert repetition(np.arange(7)[None]) == 0 and distinct(np.arange(7)[None], 3) == 1


def test_likelihood_is_a_loop_over_the_chain() -> None:
    table = transition_table(3, 2)
    ids = np.random.default_rng(1).integers(0, 3, (5, 13))
    nats = [-math.log(table[row[t - 2], row[t - 1], row[t]]) for row in ids for t in range(2, 13)]
    found = tempering.under_chain(table, ids)
    assert found.nats == pytest.approx(sum(nats) / len(nats), rel=1e-12) and found.impossible == 0
    # The whole row: its first id is given, its second is predicted from one alone.
    pair = stationary(table)
    nats += [-math.log(pair[row[0], row[1]] / pair[row[0]].sum()) for row in ids]
    assert tempering.chain_loss(table, ids) == pytest.approx(sum(nats) / (5 * 12), rel=1e-12)


def test_what_the_chain_cannot_write_is_counted_apart() -> None:
    table = np.array([[0.25, 0.75], [0.0, 1.0]])
    # 0 -> 1 (p = 0.75), 1 -> 1 (1), 1 -> 0 never, 0 -> 0 (0.25); then id 5, no state, and what follows it.
    found = tempering.under_chain(table, np.array([[0, 1, 1, 0, 0, 5, 0]]))
    assert found.nats == pytest.approx((-math.log(0.75) - 0 - math.log(0.25)) / 3)
    assert found.impossible == pytest.approx(3 / 6)
    none = tempering.under_chain(table, np.array([[1, 0, 5]]))
    assert math.isnan(none.nats) and none.impossible == 1


def test_the_chains_own_loss_is_the_floor_in_expectation() -> None:
    config = Config(task="markov", vocab_size=5, seq_len=16, batch_size=64)
    rows, floor = temperature.held_out(config), make_task(config).floor
    assert rows.shape == (1024, 17) and floor is not None
    assert temperature.floor_of(config) == floor == mean_floor(chain_of(config), 16)
    assert tempering.chain_loss(chain_of(config), rows) == pytest.approx(floor, abs=0.03)


# --- calibration ---------------------------------------------------------------------


def test_calibration_by_hand() -> None:
    p = np.array([[0.8, 0.2], [0.3, 0.7], [0.75, 0.25], [0.5, 0.5]])
    found = reliability(np.log(p), np.array([0, 0, 0, 0]), bins=2)
    # (0, 0.5]: the last, right by being first of equals. (0.5, 1]: 0.8 right, 0.7 wrong, 0.75 right.
    assert found.count.tolist() == [1, 3]
    assert found.correct.tolist() == [1, 2]
    np.testing.assert_allclose(found.confidence, [0.5, 2.25])
    assert found.error == pytest.approx(1 / 4 * 0.5 + 3 / 4 * abs(2 / 3 - 0.75))


def test_bins_add_by_their_tokens() -> None:
    rng = np.random.default_rng(2)
    logp, targets = log_probabilities(rng.normal(0, 2, (3, 37, 5)), 1), rng.integers(0, 5, (3, 37))
    whole = reliability(logp, targets)
    parts = reliability(logp[:1], targets[:1]) + reliability(logp[1:], targets[1:])
    assert whole.count.sum() == 111 and parts.error == pytest.approx(whole.error, rel=1e-12)
    assert len(whole.count) == BINS
    # Always sure: the error is what is wrong.
    sure = reliability(log_probabilities(logp, 0), targets)
    assert sure.error == pytest.approx(np.mean(logp.argmax(-1) != targets)) and sure.count[-1] == 111


# --- samples -------------------------------------------------------------------------


@pytest.mark.usefixtures("quick_decoding")
def test_samples_at_0_are_greedy_and_their_measures_those_of_the_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(temperature, "_logits", jit(temperature.uncut_logits, static_argnums=1))
    config = Config(task="markov", vocab_size=5, d_model=8, num_heads=1, num_layers=1, seq_len=11)
    params = init_transformer(jax.random.key(0), config)
    model = trained.Model(config, Hyper(attention_temperature=0.7), params, 0)
    prompts = np.array([[0, 1], [4, 2], [0, 1]])
    samples = temperature.write(model, prompts, jax.random.key(1))
    n = len(temperature.OF_SAMPLES)
    assert samples.shape == (n, 3, 11)
    np.testing.assert_array_equal(samples[:, :, :2], np.tile(prompts, (n, 1, 1)))
    greedy = np.zeros((3, 11), int)
    greedy[:, :2] = prompts
    for t in range(1, 10):  # what stands after t is not seen
        z = temperature.logits_of(model, np.tile(greedy, (n, 1)))[:3]
        greedy[:, t + 1] = z[:, t].argmax(-1)
    np.testing.assert_array_equal(samples[0], greedy)
    assert (samples[4, 0] != samples[4, 2]).any()  # rows of one prompt draw apart
    assert (samples[-1, 1] != greedy[1]).any()
    # The mean entropy at T, from all of a loop's probabilities.
    rows, i = temperature.judge(model, samples), 3
    z = temperature.logits_of(model, samples.reshape(-1, 11)).reshape(n, 3, 11, 5)[i].astype(np.float64)
    total = 0.0
    for r in range(3):
        for t in range(2, 11):
            powers = np.exp(z[r, t - 1] / temperature.OF_SAMPLES[i])
            total -= sum(x * math.log(x) for x in powers / powers.sum())
    assert rows[i]["entropy"] == pytest.approx(total / 27, rel=1e-6)
    assert rows[0]["entropy"] == 0
    assert rows[i]["distinct_2"] == distinct(samples[i, :, 2:], 2)
    assert rows[i]["generator_nats"] == tempering.under_chain(chain_of(config), samples[i]).nats


# --- the question --------------------------------------------------------------------


def ask(*line: str) -> Any:
    settings, _ = flags.parse(["x", "--experiment=temperature", *line], {"temperature": temperature.FLAGS})
    return temperature.question(settings)


def test_each_temperature_is_compared_with_1_of_its_settings() -> None:
    default = ask()
    assert default.comparisons == (("T=0.25", "T=1"), ("T=0.5", "T=1"), ("T=2", "T=1"), ("T=4", "T=1"))
    assert len({arm.config for arm in default.arms}) == 1  # one program
    assert len(default.learning_rates) >= 3
    crossed = ask("--sweep=attention_temperature=1,3;num_layers=1,2")
    assert crossed.comparisons == (
        ("T=3, num_layers=1", "T=1, num_layers=1"),
        ("T=3, num_layers=2", "T=1, num_layers=2"),
    )
    assert [arm.hyper.attention_temperature for arm in crossed.arms] == [1, 3, 1, 3]
    many = ask("--sweep=num_layers=1,2")
    assert len(many.comparisons) == 6 and not default.notes
    assert "not compared, as a family is at most 6: T=2, num_layers=2 against T=1, num_layers=2" in many.notes[0]


MISTAKES = {
    "--attention_temperature=2": "--attention_temperature is what this experiment sweeps: use --sweep=attention_",
    "--sweep=attention_temperature=2,4": "--sweep=attention_temperature needs 1",
    "--sweep=attention_temperature=1,0": "attention_temperature=0 is out of range",
    "--sample_temperature=0.5": "--sample_temperature has no effect",
    "--task=copy": "task=copy: samples are judged by the chain",
    "--seq_len=5": "seq_len=5: 2 symbols of a prompt and one 4-gram need 6",
    "--mask=prefix": "mask=prefix: samples begin with 2 symbols",
    "--mask=none": "mask=none lets a position see later ones",
    "--sweep=mask=causal,none": "mask=none lets a position see later ones",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert launch.main(["launch.py", "--experiment=temperature", "--steps=1", "--seeds=1", line]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and MISTAKES[line] in said.err and not said.out
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("temperature") / "run"
    sizes = ["d_model=16", "num_heads=2", "num_layers=2", "scan_unroll=1", "seq_len=16", "batch_size=16"]
    sweep = "sweep=attention_temperature=0.5,1;learning_rate=1e-2"
    line = [*sizes, "vocab_size=4", "steps=300", "experiment=temperature", "seeds=2", f"workdir={folder}", sweep]
    quick = "".join(f" --{name}={str(value).lower()}" for name, value in QUICK.items())
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + quick}
    command = [sys.executable, "launch.py", *(f"--{part}" for part in line)]
    subprocess.run(command, cwd=ROOT, env=env, check=True, stdout=subprocess.DEVNULL)
    assert all((folder / f"{name}.png").stat().st_size > 1000 for name in ("sampling", "calibration"))
    return json.loads((folder / "results.json").read_text()) | {"page": (folder / "report.html").read_text()}


def test_the_command_writes_its_answer(answered: dict[str, Any]) -> None:
    assert (answered["primary_metric"], answered["programs_compiled"]) == ("report_excess_loss", 1)
    config = Config(**{name: answered["config"][name] for name in ("task", "vocab_size", "seq_len")})
    floor = make_task(config).floor
    assert floor is not None and answered["floor"]["nats"] == floor
    for arm in answered["arms"]:
        losses, above = (arm["metrics"][f"report_{name}loss"]["per_seed"] for name in ("", "excess_"))
        np.testing.assert_allclose(np.subtract(losses, above), floor, atol=1e-5)
        assert len(arm["observed"]["attention_entropy"][-1]) == 2  # layers
    slopes = answered["entropy_derivative"]
    assert slopes["max_abs_difference"] < 1e-8 < max(slopes["formula"])
    found = answered["calibration"]
    for row in found["temperatures"]:
        assert sum(b["count"] for b in row["bins"]) == 2 * found["tokens"]  # of both seeds
        assert all(b["low"] < b["confidence"] <= b["high"] + 1e-12 for b in row["bins"])
    assert all(title in answered["page"] for title in ("The floor", "Calibration at each temperature", "dH/dT"))


def test_temperature_trades_likelihood_for_diversity(answered: dict[str, Any]) -> None:
    rate, rows = answered["floor"]["entropy_rate"], answered["sampling"]["temperatures"]
    at = {row["temperature"]: {name: x["mean"] for name, x in row.items() if name != "temperature"} for row in rows}
    entropies, nats = ([at[T][name] for T in temperature.OF_SAMPLES] for name in ("entropy", "generator_nats"))
    assert entropies[0] == 0 and (np.diff(entropies) > 0).all()
    assert at[0.0]["generator_nats"] < rate - 0.1
    assert at[1.0]["generator_nats"] == pytest.approx(rate, abs=0.08)
    assert at[1.0]["entropy"] == pytest.approx(rate, abs=0.08)
    assert at[2.0]["generator_nats"] > rate + 0.1 and np.argmax(nats) == len(nats) - 1
    for name in ("distinct_1", "distinct_2", "distinct_3"):
        assert at[0.0][name] < min(at[T][name] for T in temperature.OF_SAMPLES[1:]), name
    assert at[0.0]["repetition_4"] > at[1.0]["repetition_4"] > at[2.0]["repetition_4"]
    assert all(row["impossible"] == 0 for row in at.values())
    errors = [row["ece"]["mean"] for row in answered["calibration"]["temperatures"]]
    assert temperature.OF_SAMPLES[int(np.argmin(errors))] == 1.0
