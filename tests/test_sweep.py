"""The ablation compiler: one program a group, each arm equal to its solo run, nothing lost on the way."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from experiments import grid, program, results
from experiments.grid import Arm, Run
from experiments.interrupt import Stopper
from experiments.sweep import Outcome, Question, RunResult, plan, run_sweep
from transformer_jax import sharding, train
from transformer_jax.config import Config, Hyper
from transformer_jax.data import make_task, resolve
from transformer_jax.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
TINY = resolve(
    Config(
        d_model=8, num_heads=1, num_layers=1, d_ff=11, seq_len=7, batch_size=3, steps=13, task="markov", vocab_size=5
    )
)


def a_question(config: Config = TINY, **changes: object) -> Question:
    arms = grid.with_shared_terms(
        [
            Arm("off", config, Hyper(dk_exponent=0.0)),
            Arm("on", config, Hyper(dk_exponent=0.5)),
            Arm("drop", config, Hyper(dropout_rate=0.3)),
        ]
    )
    return dataclasses.replace(Question("q", "?", arms, (1e-2, 1e-1), (("off", "on"),)), **changes)


def sweep(question: Question, folder: Path, seeds: int = 2, **options: object) -> Outcome:
    options = {"blocks": [(0, seeds)], "stop": Stopper()} | options
    return run_sweep(question, seeds, folder, **options)


def same(a: Outcome, b: Outcome) -> None:
    assert a.results.keys() == b.results.keys()
    for run, left in a.results.items():
        right = b.results[run]
        np.testing.assert_array_equal(left.loss, right.loss)
        np.testing.assert_array_equal(left.grad_norm, right.grad_norm)
        assert {k: v[-1].tolist() for k, v in left.measured.items()} == {
            k: v[-1].tolist() for k, v in right.measured.items()
        }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return sweep(a_question(notes=("a line for the results",)), tmp_path_factory.mktemp("whole"))


def test_a_group_is_one_program_and_its_arms_are_their_solo_runs(whole: Outcome) -> None:
    assert len(whole.results) == 12 and not whole.stopped and whole.notes == ["a line for the results"]
    assert whole.programs_compiled == 1
    assert whole.certificate.arms_checked == 1
    assert whole.certificate.max_abs_difference == 0.0
    assert whole.certificate.steps == TINY.steps


def test_arms_over_fewer_devices_are_the_same_arms(whole: Outcome, tmp_path: Path) -> None:
    """As --mesh=sweep:2 spreads them; the last bits of a sum may depend on the number of devices."""
    two = sweep(a_question(), tmp_path, devices=2)
    assert two.certificate.max_abs_difference == 0.0 and two.results.keys() == whole.results.keys()
    for run, found in two.results.items():
        np.testing.assert_allclose(found.loss, whole.results[run].loss, atol=1e-4)


@pytest.mark.parametrize("run", [Run(0, 1e-2, 1), Run(2, 1e-1, 0)])
def test_an_arm_equals_a_plain_run_of_the_library(whole: Outcome, run: Run) -> None:
    """train.run knows nothing of sweeps: no map, no mesh, no measurement between."""
    question = a_question()
    config, task = question.arms[run.arm].config, make_task(TINY)
    hyper = grid.hyper_of(question.arms, run)
    key = program.run_key(run.seed)
    _, metrics = jax.jit(lambda h, k: train.run(config, h, k, lambda key: task.train_batch(task.data, key)))(hyper, key)
    np.testing.assert_allclose(whole.results[run].loss[:10], metrics["loss"][:10], rtol=0, atol=1e-5)


def test_arms_share_weights_and_batches(whole: Outcome) -> None:
    """At the first step, before any update, arms that compute the same function have the same loss."""
    losses = {run: result.loss[0] for run, result in whole.results.items()}
    for seed in range(2):
        first = [losses[Run(1, rate, seed)] for rate in (1e-2, 1e-1)]
        assert first[0] == first[1]
        assert losses[Run(0, 1e-2, seed)] == pytest.approx(first[0], abs=0.5) and losses[Run(0, 1e-2, seed)] != first[0]
    assert losses[Run(1, 1e-2, 0)] != losses[Run(1, 1e-2, 1)]


@pytest.mark.parametrize("chunk", [1, 5])
def test_chunks_leave_no_trace(whole: Outcome, chunk: int, tmp_path: Path) -> None:
    same(whole, sweep(a_question(), tmp_path, chunk=chunk))


def test_the_number_of_devices_leaves_no_trace(whole: Outcome) -> None:
    """Eight devices above; here three, so that runs are repeated to fill them."""
    question = a_question()
    config, task = question.arms[0].config, make_task(TINY)
    group = grid.group_runs(question.arms, question.learning_rates, range(2))[0]
    made = program.build(config, task, program.nothing_observed, TINY.steps, devices=3)
    hypers = program.stack([grid.hyper_of(question.arms, run) for run in group.runs])
    keys = jax.numpy.stack([program.run_key(run.seed) for run in group.runs])
    one = made.empty(jax.tree.map(lambda x: x[0], hypers), keys[0])
    states = jax.tree.map(lambda x: np.zeros((12, *x.shape), x.dtype), one)
    states, hypers, keys = sharding.place_runs((states, hypers, keys), made.mesh)
    _, (record, _) = made.call(states, hypers, keys, np.int32(0), np.int32(TINY.steps), np.bool_(True), task.data)
    for r, run in enumerate(group.runs):
        np.testing.assert_array_equal(record["loss"][r], whole.results[run].loss)


class StopAfter(Stopper):
    """Asks to stop when it was asked `n` times."""

    def __init__(self, n: int):
        super().__init__()
        self.left = n

    @property
    def reason(self) -> str:
        self.left -= 1
        return "enough" if self.left < 0 else ""


@pytest.mark.parametrize("asked", [0, 2])
def test_a_stopped_sweep_goes_on_to_the_same_bits(whole: Outcome, asked: int, tmp_path: Path) -> None:
    first = sweep(a_question(), tmp_path, chunk=5, stop=StopAfter(asked))
    assert first.stopped and not first.results
    second = sweep(a_question(), tmp_path, chunk=5)
    assert not second.stopped
    same(whole, second)
    # A finished group is kept: nothing is compiled for it again.
    assert sweep(a_question(), tmp_path, chunk=5).programs_compiled == 0


def test_a_sweep_goes_on_on_another_number_of_devices(whole: Outcome, tmp_path: Path) -> None:
    """12 runs fill eight devices up to 16, and five up to 15; sums differ in the last bits between them."""
    assert sweep(a_question(), tmp_path, chunk=5, stop=StopAfter(2)).stopped
    second = sweep(a_question(), tmp_path, chunk=5, devices=5)
    assert not second.stopped and second.results.keys() == whole.results.keys()
    for run, one in whole.results.items():
        np.testing.assert_allclose(second.results[run].loss, one.loss, rtol=1e-5)
        assert second.results[run].final("report_loss") == pytest.approx(one.final("report_loss"), rel=1e-5)


def test_more_seeds_join_a_finished_sweep(whole: Outcome, tmp_path: Path) -> None:
    question = a_question()
    sweep(question, tmp_path, seeds=1, blocks=[(0, 1)])
    grown = sweep(question, tmp_path, seeds=2, blocks=[(0, 1), (1, 2)])
    assert grown.programs_compiled == 1
    same(whole, grown)


def test_more_steps_continue_a_finished_sweep(tmp_path: Path) -> None:
    longer = a_question(TINY.replace(steps=19))
    sweep(a_question(), tmp_path / "grown", chunk=5)
    same(sweep(longer, tmp_path / "grown", chunk=5), sweep(longer, tmp_path / "straight"))


COMMAND = [
    sys.executable, "launch.py", "--experiment=dk_scaling", "--d_model=8", "--d_ff=8", "--seq_len=8", "--batch_size=2",
    "--num_layers=1", "--steps=40", "--seeds=2", "--task=copy", "--checkpoint_every=2",
    "--sweep=head_dim=8;dk_exponent=0,0.5;learning_rate=1e-3,1e-2",
]  # fmt: skip


def launched(folder: Path) -> subprocess.Popen[bytes]:
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [*COMMAND, f"--workdir={folder}"]
    return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("process") / "straight"
    done = launched(folder)
    _, said = done.communicate(timeout=300)
    assert done.returncode == 0, said
    return folder


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_process_goes_on_to_the_same_bits(number: signal.Signals, straight: Path, tmp_path: Path) -> None:
    victim = launched(tmp_path / "killed")
    saves = tmp_path / "killed" / "checkpoints" / "group0_seeds0-1"
    deadline = time.monotonic() + 300
    while not (saves.is_dir() and any(p.name.isdigit() and int(p.name) > 2 for p in saves.iterdir())):
        assert time.monotonic() < deadline and victim.poll() is None, victim.stderr.read()
        time.sleep(0.02)
    victim.send_signal(number)
    _, said = victim.communicate(timeout=120)
    assert not (tmp_path / "killed" / "results.json").exists()
    if number == signal.SIGTERM:
        assert victim.returncode == 128 + signal.SIGTERM and b"saved" in said
    again = launched(tmp_path / "killed")
    _, said = again.communicate(timeout=300)
    assert again.returncode == 0, said
    a, b = (json.loads((folder / "results.json").read_text()) for folder in (tmp_path / "killed", straight))
    for arm_a, arm_b in zip(a["arms"], b["arms"], strict=True):
        assert arm_a["metrics"] == arm_b["metrics"] and arm_a["learning_rates"] == arm_b["learning_rates"]
    assert (tmp_path / "killed" / "metrics.jsonl").read_text() == (straight / "metrics.jsonl").read_text()


def test_divergence_is_counted_with_its_step(tmp_path: Path) -> None:
    arms = (Arm("sane", TINY, Hyper()), Arm("mad", TINY.replace(optimizer="sgd"), Hyper()))
    question = Question("q", "?", arms, (1e-2, 1e30), (("sane", "mad"),))
    outcome = sweep(question, tmp_path, seeds=3)
    found = results.build(outcome)
    json.dumps(found, allow_nan=False)
    mad = found["arms"][1]
    assert mad["best_learning_rate"] == 1e-2
    lost = [row for row in mad["diverged"] if row["learning_rate"] == 1e30]
    assert [row["seed"] for row in lost] == [0, 1, 2] and all(0 < row["step"] < TINY.steps for row in lost)
    assert mad["learning_rates"][1]["report"]["per_seed"] == [None] * 3
    assert "diverged" in found["verdict"]


def test_results_choose_on_one_split_and_report_the_other() -> None:
    def run(selection: float, report: float) -> RunResult:
        measured = {"selection_loss": selection, "report_loss": report, "report_accuracy": 0.5}
        return RunResult(np.ones(4), np.ones(4), (4,), {k: np.array([v]) for k, v in measured.items()})

    arms = (Arm("a", TINY, Hyper()), Arm("b", TINY, Hyper(dk_exponent=0.0)))
    question = Question("q", "?", arms, (0.1, 0.2, 0.3), (("a", "b"),))
    outcome = Outcome(question, seeds=2)
    for arm in range(2):
        for rate, selection, report in ((0.1, 3.0, 1.0), (0.2, 2.0, 2.5), (0.3, 4.0, 0.5)):
            for seed in range(2):
                outcome.results[Run(arm, rate, seed)] = run(selection + seed, report + seed + arm)
    found = results.build(outcome)
    a = found["arms"][0]
    assert a["best_learning_rate"] == 0.2 and a["warning"] is None
    assert a["metrics"]["report_loss"]["per_seed"] == [2.5, 3.5]
    assert found["comparisons"][0]["difference"] == -1.0


def test_plan_counts_without_running() -> None:
    made = plan(a_question(), seeds=5)
    assert made["groups"][0]["runs"] == 30 and made["groups"][0]["parameters"] > 0
    assert made["groups"][0]["seconds"] > 0 and made["groups"][0]["bytes"] > 0


def test_sweep_text_is_parsed_and_crossed() -> None:
    extra = grid.parse_sweep("num_layers=2,4; dk_exponent=0,0.5")
    assert extra == {"num_layers": (2, 4), "dk_exponent": (0.0, 0.5)}
    arms = grid.cross([Arm("a", TINY, Hyper())], extra)
    assert [arm.name for arm in arms][1] == "a, num_layers=2, dk_exponent=0.5"
    assert (arms[3].config.num_layers, arms[3].hyper.dk_exponent) == (4, 0.5)
    groups = grid.group_runs(arms, (0.1,), range(2))
    assert [len(group.runs) for group in groups] == [4, 4]
    with pytest.raises(ConfigError, match="runs: at most"):
        grid.group_runs(arms, (0.1,), range(5000))


def test_terms_are_shared_by_all_arms() -> None:
    arms = grid.with_shared_terms([Arm("a", TINY, Hyper()), Arm("b", TINY, Hyper(dropout_rate=0.1))])
    assert [arm.config.terms for arm in arms] == [("dropout",), ("dropout",)]


def test_experts_are_measured_in_a_sweep() -> None:
    """Traced only: their losses are summed over the batches of both splits."""
    config = resolve(Config(task="copy", d_model=4, num_heads=1, num_layers=1, seq_len=5, num_experts=2, batch_size=2))
    task, hyper = make_task(config), Hyper()
    state = jax.eval_shape(lambda: train.init_state(config, hyper, program.run_key(0)))
    observe = program.nothing_observed
    found = jax.eval_shape(
        lambda s: program.measure(config, task, observe, s, hyper, jax.numpy.bool_(True), 2, task.data, {}), state
    )
    assert found["report_loss"].shape == ()
