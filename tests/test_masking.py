"""The masking question from its command to its files, and the matrix that is made of its models."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import launch
from experiments import flags, mask_constants, masking, matrix, report_matrix, trained
from experiments import train as training
from experiments.grid import Run
from experiments.loop import device_hyper
from experiments.workdir import open_workdir
from tests import reference
from tests.quick import QUICK, jit
from tests.test_checkpoint import biggest, flip
from tests.test_honest import HYPER, SMALL, TYPES
from transformer_jax import checkpoint, train
from transformer_jax.config import Hyper
from transformer_jax.data import make_task, resolve
from transformer_jax.errors import UserError
from transformer_jax.saver import Saver
from transformer_jax.train import init_state

ROOT = Path(__file__).resolve().parent.parent


# --- the question --------------------------------------------------------------------


def ask(*line: str) -> Any:
    settings, _ = flags.parse(["x", "--experiment=masking", *line], {"masking": masking.FLAGS})
    return masking.question(settings)


def test_each_arm_is_compared_with_the_causal_one_of_its_settings() -> None:
    default = ask()
    assert [b for _, b in default.comparisons] == ["causal"] * 6
    names = [arm.name for arm in default.arms]
    # A window of the whole row is the causal mask: a control, not a comparison.
    assert set(names) - {a for a, _ in default.comparisons} == {"causal", "window 64"}
    assert ask("--sweep=mask=causal,window").comparisons == (("window 4", "causal"), ("window 16", "causal"))
    crossed = ask("--sweep=mask=causal,window;window=2,3;num_layers=1,2")
    assert crossed.comparisons == tuple(
        (f"window {w}, num_layers={n}", f"causal, num_layers={n}") for n in (1, 2) for w in (2, 3)
    )
    assert [arm.hyper.window for arm in crossed.arms[1:3]] == [2, 3]
    prefixes = ask("--sweep=mask=causal,prefix;prefix=4,8")
    assert [(arm.name, arm.hyper.prefix) for arm in prefixes.arms[1:]] == [("prefix 4", 4), ("prefix 8", 8)]
    assert prefixes.comparisons == (("prefix 4", "causal"), ("prefix 8", "causal"))
    assert not ask("--sweep=mask=none,inverted").comparisons
    many = ask("--sweep=mask=causal,window;window=2,3;num_layers=1,2,3,4")
    assert len(many.comparisons) == 6 and not default.notes
    (note,) = many.notes
    assert note.startswith("not compared") and note.endswith(
        ": window 2, num_layers=4 against causal, num_layers=4, window 3, num_layers=4 against causal, num_layers=4"
    )
    # Windows are numbers of one program.
    assert len({arm.config for arm in default.arms}) == len(names) - 2


MISTAKES = {
    "--mask=none": "--mask is what this experiment sweeps: use --sweep=mask=",
    "--window=3": "--window is what this experiment sweeps",
    "--sweep=window=99": "window=99 is wider than a row: seq_len=64",
    "--sweep=mask=casual": "unknown mask 'casual': did you mean causal",
    "--architecture=encoder": "architecture=encoder",
    "--restore=w": "--restore has no effect",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert launch.main(["launch.py", "--experiment=masking", line]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and MISTAKES[line] in said.err and not said.out
    assert not list(tmp_path.iterdir())


ARMS = "mask=causal,none;learning_rate=3e-2"


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("masking") / "run"
    sizes = ["d_model=8", "num_heads=1", "num_layers=1", "seq_len=8", "batch_size=2", "steps=40", "vocab_size=5"]
    line = [*sizes, "experiment=masking", "task=markov", "seeds=2", f"workdir={folder}", f"sweep={ARMS}"]
    quick = "" if "xla_cpu_use_fusion_emitters" not in QUICK else " --xla_cpu_use_fusion_emitters=false"
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": os.environ["XLA_FLAGS"] + quick}
    command = [sys.executable, "launch.py", *(f"--{part}" for part in line)]
    subprocess.run(command, cwd=ROOT, env=env, check=True, stdout=subprocess.DEVNULL)
    return folder


def test_the_command_writes_its_answer(answered: Path) -> None:
    found = json.loads((answered / "results.json").read_text())
    causal, none = found["arms"]
    assert (found["primary_metric"], found["metric_label"]) == ("report_honest_loss", "honest loss")
    assert found["comparisons"][0]["a"] == "no mask" and found["comparisons"][0]["metric"] == "report_honest_loss"
    for arm in (causal, none):
        honest_loss, seen_loss = (arm["metrics"][f"report_{name}_loss"]["per_seed"] for name in ("honest", "seen"))
        gap = next(row for row in found["gaps"] if row["name"] == arm["name"])["per_seed"]
        np.testing.assert_allclose(gap, np.subtract(honest_loss, seen_loss), atol=1e-9)
        assert (np.abs(gap) < 1e-5).all() == (arm is causal) and (np.array(gap) > 0.05).all() == (arm is none)
    assert [row["pairs"] for row in found["leaks"]] == [0, 28]
    with np.load(answered / "leaks.npz") as held:
        slopes = held["no mask"]
    assert slopes.shape == (8, 8) and np.triu(slopes, 1).max() == np.float32(found["leaks"][1]["largest"])
    for name in ("honest.png", "leaks.png", "report.html"):
        assert (answered / name).stat().st_size > 1000
    page = (answered / "report.html").read_text()
    assert all(text in page for text in ("Who cheats", "28 of 28", "NaN from step 1", "hidden weight"))


def test_constants_train_alike_or_not_at_all(answered: Path) -> None:
    rows = json.loads((answered / "results.json").read_text())["constants_in_training"]["rows"]
    at = {(row["constant"], row["score_dtype"]): row for row in rows}
    for dtype in TYPES:
        for constant in mask_constants.CONSTANTS:
            row = at[constant, dtype]
            if constant == "-inf" or (constant, dtype) == ("-1e9", "float16"):
                assert row["nan_step"] == 1 and row["loss"] is None  # the loss before the first update is sound
            else:
                assert row["loss"] == pytest.approx(at["boolean", dtype]["loss"], abs=1e-5)


def test_models_come_back_as_they_were_measured(answered: Path) -> None:
    found = json.loads((answered / "results.json").read_text())
    models = trained.models(answered)
    assert len(models) == 4
    model = models[Run(1, 3e-2, 1)]
    assert model.config.mask == "none" and model.step == 40 and model.hyper.learning_rate == 3e-2
    task = make_task(model.config)
    sums = train.evaluate(
        model.config,
        jax.tree.map(jnp.asarray, model.params),
        device_hyper(model.hyper),
        lambda i: task.eval_batch(task.data, "report", i),
        task.eval_batches["report"],
    )
    assert float(sums.loss) == pytest.approx(found["arms"][1]["metrics"]["report_loss"]["per_seed"][1], abs=1e-6)


def test_models_that_are_not_those_of_the_last_step_are_refused(answered: Path, tmp_path: Path) -> None:
    group = min(answered.glob("checkpoints/group*"))
    held = checkpoint.restore_latest(group, trained._like)
    again = tmp_path / "checkpoints" / group.name
    with Saver(again) as saver:
        saver.save(20, held.state, held.meta)
    with pytest.raises(UserError, match=r"step 20 of 40$"):
        trained.models(tmp_path)
    with Saver(again) as saver:
        saver.save(40, held.state, held.meta)
    assert len(trained.models(tmp_path)) == 2
    flip(biggest(again / "40"), 500)
    with pytest.raises(UserError, match=r"step 20 of 40 \(.*step 40"):
        trained.models(tmp_path)


def test_a_folder_without_models_is_refused(tmp_path: Path) -> None:
    from experiments.workdir import WorkdirError

    with pytest.raises(WorkdirError, match="holds no checkpoints"):
        trained.models(tmp_path)


def test_gaps_leave_diverged_seeds_out() -> None:
    metrics = {"report_honest_loss": {"per_seed": [2.0, None]}, "report_seen_loss": {"per_seed": [0.5, 1.0]}}
    row = masking.gap({"name": "x", "metrics": metrics})
    assert row["per_seed"] == [1.5, None] and row["mean"] == 1.5


# --- the matrix ------------------------------------------------------------------------


def test_matrix_measures_what_the_sweep_did_and_what_it_did_not(
    answered: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = matrix.rows_of(str(answered))
    assert [row.name for row in rows] == ["causal", "no mask"] and [len(row.params) for row in rows] == [2, 2]
    columns, notes = matrix.settings_of(rows)
    assert not notes
    names = [setting.name for setting in columns]
    # Nothing is wider than a row of 8.
    assert "mask window 4" in names and "mask window 16" not in names and "rope_base 100000" in names
    asked_for = ("as trained", "attention_temperature 2", "dk_exponent 0.5", "mask causal", "mask none")
    few = [columns[names.index(name)] for name in asked_for]
    found = matrix.build(rows, few, matrix.losses(rows, few), "there")
    stored = json.loads((answered / "results.json").read_text())
    for arm, of in zip(found["arms"], stored["arms"], strict=True):
        own = np.array(of["metrics"]["report_loss"]["per_seed"])
        trained_with = {"causal": "mask causal", "no mask": "mask none"}[arm["name"]]
        for name in ("as trained", "dk_exponent 0.5", trained_with):
            np.testing.assert_allclose(arm["metrics"][name]["per_seed"], own, rtol=0, atol=1e-6)
        other = next(name for name in ("mask causal", "mask none") if name != trained_with)
        changed = arm["metrics"][other]
        np.testing.assert_allclose(changed["difference"]["per_seed"], changed["per_seed"] - own, atol=1e-6)
        assert min(np.abs(changed["difference"]["per_seed"])) > 1e-3
    # One of the numbers, by the model itself: numpy, batch by batch.
    row, task = rows[0], make_task(rows[0].config)
    warm, nats, count = dataclasses.replace(row.hyper, attention_temperature=2.0), 0.0, 0.0
    for i in range(task.eval_batches["report"]):
        data = task.eval_batch(task.data, "report", i)
        logits = reference.transformer(row.params[1], row.config, warm, data)
        picked = np.take_along_axis(logits, np.asarray(data.targets_BT)[..., None], -1)[..., 0]
        nats += float(np.sum(np.log(np.sum(np.exp(logits), -1)) - picked))
        count += picked.size
    assert found["arms"][0]["metrics"]["attention_temperature 2"]["per_seed"][1] == pytest.approx(
        nats / count, abs=1e-5
    )
    folder = tmp_path / "matrix"
    folder.mkdir()
    report_matrix.write(folder, found)
    report_matrix.show(found, folder)
    assert (folder / "matrix.png").stat().st_size > 1000
    own = report_matrix.fixed(stored["arms"][0]["metrics"]["report_loss"]["mean"], 3)
    for text in ((folder / "report.html").read_text(), capsys.readouterr().out):
        assert all(part in text for part in ("no mask", "attention temperature 2", own, "+0.000"))


def test_matrix_leaves_masks_out_that_change_the_buckets() -> None:
    def asked_of(*kinds: str, positions: str = "t5") -> tuple[list[str], list[str]]:
        rows = [matrix.Row(mask, SMALL.replace(mask=mask, positions=positions), HYPER, [], 0) for mask in kinds]
        columns, notes = matrix.settings_of(rows)
        return [column.name for column in columns if column.name.startswith("mask")], notes

    every = ["mask causal", "mask none", "mask inverted", "mask window 4", "mask prefix 4"]
    assert asked_of("causal", "none", positions="alibi") == (every, [])
    names, notes = asked_of("causal", "block_sparse")
    assert names == ["mask causal", "mask window 4"]
    assert notes[0].endswith(": mask none, mask inverted, mask prefix 4")
    assert asked_of("prefix")[0] == ["mask none", "mask inverted", "mask prefix 4"]
    assert asked_of("causal", "none")[0] == []


def test_a_matrix_is_of_the_step_that_was_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, hyper, source = resolve(SMALL.replace(task="copy", vocab_size=0)), Hyper(), tmp_path / "trained"
    open_workdir(str(source), training.identity(config, hyper, 0, make_task(config)), {"steps": config.steps})
    state = jit(lambda: init_state(config, hyper, jax.random.key(0)))()
    monkeypatch.setattr(matrix, "losses", lambda rows, columns: np.ones((len(rows), len(columns), 1)))

    def ask_again(*line: str) -> tuple[int, str, str]:
        command = ["launch.py", "--experiment=matrix", f"--restore={source}", f"--workdir={tmp_path / 'w'}", *line]
        code = launch.main(command)
        said = capsys.readouterr()
        return code, said.out, said.err

    with Saver(source / "checkpoints") as saver:
        saver.save(2, state, {"step": 2})
        saver.save(3, state, {"step": 3})
    flip(biggest(source / "checkpoints" / "3"), 500)
    code, out, _ = ask_again()
    assert code == 0 and "step 2," in out and "step 3" in out  # the note names what was passed over
    assert "step 2" in (page := (tmp_path / "w" / "report.html").read_text()) and "step 3" in page
    assert ask_again()[0] == 0
    held = json.loads((tmp_path / "w" / "config.json").read_text())["identity"]
    assert held["seeds"] == 1
    with Saver(source / "checkpoints") as saver:
        saver.save(5, state, {"step": 5})
    code, _, err = ask_again()
    assert code == 2 and "step is 2 there, 5 here" in err and err.count("\n") == 1
    code, out, _ = ask_again("--overwrite")
    assert code == 0 and "step 5," in out and "step 3" not in out


def test_matrix_says_what_it_cannot_restore(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"identity": {"experiment": "masking"}}')
    there = f"--restore={tmp_path}"
    for line, words in (
        ([], "--restore=WORKDIR"),
        (["--restore=nowhere"], "no config.json there"),
        ([there], "holds no finished sweep"),
        ([there, "--window=3"], "--window has no effect"),
    ):
        assert launch.main(["launch.py", "--experiment=matrix", f"--workdir={tmp_path / 'w'}", *line]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and words in said
    assert not (tmp_path / "w").exists()
