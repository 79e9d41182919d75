"""Long runs: what is logged, saved, resumed and restored; pull the plug at any time."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import launch
from experiments import loop, progress, restoring, workdir
from experiments.interrupt import Stopper
from experiments.workdir import WorkdirError, open_workdir
from transformer_jax import checkpoint
from transformer_jax.config import Config, Hyper
from transformer_jax.data import make_task, resolve
from transformer_jax.saver import Keep

ROOT = Path(__file__).resolve().parent.parent
TINY = [
    "--experiment=train", "--task=reverse", "--architecture=encoder_decoder", "--d_model=8", "--num_heads=2",
    "--num_layers=1", "--seq_len=13", "--batch_size=3", "--steps=40", "--dropout_rate=0.2", "--eval_every=11",
]  # fmt: skip


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loop") / "straight"
    assert launch.main(["launch.py", *TINY, f"--workdir={folder}"]) == 0
    return folder


def test_every_step_and_evaluation_is_a_row(straight: Path) -> None:
    steps = [row for row in rows(straight) if "split" not in row]
    assert [row["step"] for row in steps] == list(range(40))
    assert all(row["loss"] > 0 and row["tokens"] > 0 and row["learning_rate"] > 0 for row in steps)
    assert [row["step"] for row in rows(straight) if "split" in row] == [11, 22, 33, 40]


def test_the_workdir_says_what_it_is(straight: Path) -> None:
    held = json.loads((straight / "config.json").read_text())
    assert held["identity"]["config"]["task"] == "reverse" and held["identity"]["config"]["vocab_size"] > 0
    assert held["versions"]["jax"] and held["commit"] and "--steps=40" not in held["identity"]
    assert sorted(int(p.name) for p in (straight / "checkpoints").iterdir())[-1] == 40
    meta = checkpoint.read_meta(straight / "checkpoints")
    assert meta["step"] == 40 and meta["seed"] == 0 and meta["hyper"]["dropout_rate"] == 0.2
    assert meta["config"]["task"] == "reverse"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_pulling_the_plug_changes_no_bit(number: signal.Signals, straight: Path, tmp_path: Path) -> None:
    command = [sys.executable, "launch.py", *TINY, "--checkpoint_every=3", f"--workdir={tmp_path / 'w'}"]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    victim = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    saves, deadline = tmp_path / "w" / "checkpoints", time.monotonic() + 200
    while not (saves.is_dir() and any(p.name.isdigit() for p in saves.iterdir())):
        assert time.monotonic() < deadline and victim.poll() is None, victim.stderr.read()
        time.sleep(0.01)
    victim.send_signal(number)
    said = victim.communicate(timeout=120)[1]
    assert not (tmp_path / "w" / "results.json").exists(), said
    if number == signal.SIGTERM:
        assert victim.returncode == 128 + signal.SIGTERM and b"saved" in said
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "resumed at step" in done.stderr
    assert rows(tmp_path / "w") == rows(straight)


def test_a_damaged_newest_checkpoint_is_named_and_the_last_good_one_used(tmp_path: Path, capfd: object) -> None:
    command = ["launch.py", *TINY, "--checkpoint_every=20", f"--workdir={tmp_path / 'w'}"]
    assert launch.main(command) == 0
    before = rows(tmp_path / "w")
    (tmp_path / "w" / "results.json").unlink()
    newest = tmp_path / "w" / "checkpoints" / "40"
    for path in newest.rglob("*"):
        if path.is_file() and path.stat().st_size > 1000:
            content = bytearray(path.read_bytes())
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
    assert launch.main(command) == 0
    said = capfd.readouterr().err
    assert "40" in said and "resumed at step 20" in said
    assert rows(tmp_path / "w") == before


def test_evaluate_restores_and_agrees(straight: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads((straight / "results.json").read_text())["report"]
    assert launch.main(["launch.py", "--experiment=evaluate", f"--restore={straight}"]) == 0
    out = capsys.readouterr().out
    assert f"loss {report['loss']:.4f}" in out and "step 40" in out
    assert (
        launch.main(["launch.py", "--experiment=evaluate", f"--restore={straight}", "--attention_temperature=9"]) == 0
    )
    assert f"loss {report['loss']:.4f}" not in capsys.readouterr().out
    # A term that the training did not have.
    assert launch.main(["launch.py", "--experiment=evaluate", f"--restore={straight}", "--final_softcap=0.5"]) == 0
    assert f"loss {report['loss']:.4f}" not in capsys.readouterr().out


def test_evaluate_refuses_another_shape(straight: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["launch.py", "--experiment=evaluate", f"--restore={straight}", "--d_ff=17"]) == 2
    assert "w1_DF" in capsys.readouterr().err


def test_more_steps_go_on_where_the_schedule_allows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = [*(x for x in TINY if "steps" not in x), "--schedule=constant", "--warmup_steps=2", "--eval_every=5"]
    assert launch.main(["launch.py", *short, "--steps=10", f"--workdir={tmp_path / 'grown'}"]) == 0
    assert launch.main(["launch.py", *short, "--steps=20", f"--workdir={tmp_path / 'grown'}"]) == 0
    assert launch.main(["launch.py", *short, "--steps=20", f"--workdir={tmp_path / 'once'}"]) == 0
    assert rows(tmp_path / "grown") == rows(tmp_path / "once")
    capsys.readouterr()
    assert launch.main(["launch.py", *short, "--steps=9", f"--workdir={tmp_path / 'grown'}"]) == 2
    assert "steps is 20 there, 9 here" in capsys.readouterr().err


def test_a_warm_up_by_default_stays_what_it_was(tmp_path: Path) -> None:
    """It is a part of a short run's steps: a run with more of them goes on under the one that it began with."""
    short = [*(x for x in TINY if "steps" not in x), "--schedule=constant", f"--workdir={tmp_path / 'w'}"]
    for steps in (20, 40):
        assert launch.main(["launch.py", *short, f"--steps={steps}"]) == 0
    assert json.loads((tmp_path / "w" / "config.json").read_text())["identity"]["config"]["warmup_steps"] == 2
    assert launch.main(["launch.py", *short, "--steps=40", "--warmup_steps=4"]) == 2
    # A longer one was asked for by its flag: without it this is another run.
    longer = [*short[:-1], f"--workdir={tmp_path / 'longer'}", "--steps=20"]
    assert launch.main(["launch.py", *longer, "--warmup_steps=9"]) == 0
    assert launch.main(["launch.py", *longer]) == 2


def test_the_budget_stops_cleanly(tmp_path: Path, capfd: object) -> None:
    command = ["launch.py", *TINY, f"--workdir={tmp_path / 'w'}"]
    assert launch.main([*command, "--minutes=0.0001"]) == 0
    assert "budget" in capfd.readouterr().err
    assert not (tmp_path / "w" / "results.json").exists()
    assert launch.main(command) == 0
    assert (tmp_path / "w" / "results.json").exists()


COPY = Config(task="copy", d_model=8, num_heads=2, num_layers=1, seq_len=9, batch_size=4, steps=80)
SCORES = [(10, 90.0), (20, 70.0), (30, 70.0), (40, 80.0), (50, 75.0), (60, None), (70, 60.0), (80, 65.0)]


def judged_by(metric: str, patience: int = 0) -> tuple[loop.Judge, list[int]]:
    """A judge that says what SCORES says, in order; and the calls so far."""
    calls: list[int] = []

    def score(params: Any) -> dict[str, float | None]:
        calls.append(len(calls))
        value = SCORES[len(calls) - 1][1]
        return {"rate": value, "gain": None if value is None else 100.0 - value}

    return loop.Judge(metric, score, patience), calls


@pytest.mark.parametrize("metric", ["rate", "-gain"])
@pytest.mark.parametrize(("patience", "last", "best"), [(0, 80, 70), (2, 50, 30), (3, 60, 30)])
def test_a_judge_says_which_is_best_and_when_to_end(
    metric: str, patience: int, last: int, best: int, tmp_path: Path
) -> None:
    """At 20 and 30 the metric is the same and the loss lower: better. What is not finite is no better than anything."""
    hyper, config = Hyper(learning_rate=1e-2), resolve(COPY)
    judge, calls = judged_by(metric, patience)
    with Stopper(0) as stop:
        state, finished = loop.train(
            config, hyper, 0, make_task(config), tmp_path, stop=stop, eval_every=10, judge=judge,
            keep=Keep(last=9, best=judge.metric),
        )  # fmt: skip
    assert finished and int(state.step) == last and len(calls) == last // 10
    losses = [row["loss"] for row in rows(tmp_path) if "split" in row]
    assert losses[1] > losses[2], "the tie is not what this test wants"
    assert restoring.best_step(tmp_path / "checkpoints") == best
    assert checkpoint.steps(tmp_path / "checkpoints") == sorted(
        {10, 20, 30, best, last}
    )  # each best so far, and the end


@pytest.mark.parametrize("metric", ["loss", "rate", "-gain"])
def test_the_bar_shows_the_last_and_the_best_evaluation(
    metric: str, tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is shown between two evaluations; a diverged one shows the best alone."""
    monkeypatch.setattr(progress, "QUIET_SECONDS", -1.0)  # where there is no terminal, each update is a line
    hyper, config = Hyper(learning_rate=1e-2), resolve(COPY)
    judge = loop.PLAIN if metric == "loss" else judged_by(metric)[0]
    with Stopper(0) as stop:
        loop.train(config, hyper, 0, make_task(config), tmp_path, stop=stop, eval_every=10, judge=judge)
    dev = [row for row in rows(tmp_path) if "split" in row]
    name = metric.removeprefix("-")
    values = [row[name] for row in dev]
    shown: dict[int, set[str]] = {}
    for line in capfd.readouterr().err.splitlines():
        if line.startswith("step "):
            shown[int(line.split()[1])] = set()
        elif line.startswith("copy  ") and shown:
            shown[max(shown)].add(line.split("  loss ")[1].split("  ", 1)[1].split(" tokens/s")[0].rsplit("  ", 1)[0])
    assert list(shown) == [row["step"] for row in dev] and not shown[80]
    for i, step in enumerate(list(shown)[:-1]):
        finite = [value for value in values[: i + 1] if value is not None]
        best = max(finite) if metric.startswith("-") else min(finite)
        last = "" if values[i] is None else f"{'dev loss' if metric == 'loss' else name} {values[i]:.4g}  "
        assert shown[step] == {f"{last}best {best:.4g}"}, step


def test_two_processes_do_not_write_to_one_workdir(straight: Path, tmp_path: Path) -> None:
    """Not even to move it aside; and a process that is killed keeps nobody out, nor a command that has ended."""
    assert (straight / workdir.LOCK).exists() and not workdir._claimed
    folder = tmp_path / "w"
    code = (
        "import sys, time; from experiments.workdir import open_workdir; "
        f"open_workdir({str(folder)!r}, {{'seed': 1}}, {{}}); print('there', flush=True); time.sleep(100)"
    )
    other = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None and other.stdout.readline() == "there\n"
        for overwrite in (False, True):
            with pytest.raises(WorkdirError, match=r"w is in use by another process"):
                open_workdir(str(folder), {"seed": 1}, {}, overwrite=overwrite)
        assert not (tmp_path / "w.old-1").exists()
    finally:
        other.kill()
        other.communicate()
    assert open_workdir(str(folder), {"seed": 1}, {}).resumed
    assert open_workdir(str(folder), {"seed": 1}, {}).resumed  # this one has it already
    assert not open_workdir(str(folder), {"seed": 2}, {}, overwrite=True).resumed
    shutil.rmtree(folder)
    assert not open_workdir(str(folder), {"seed": 3}, {}).resumed
