"""--experiment=inspect, --restore into a new run, and which checkpoints a run keeps: by flags, as a user has them."""

import json
import resource
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

import launch
from experiments import loop, restoring, sample
from experiments.evaluate import saved_configuration
from tests.test_checkpoint import biggest, flip
from transformer_jax import checkpoint
from transformer_jax.config import Config, Hyper
from transformer_jax.errors import CheckpointError, UserError
from transformer_jax.saver import Saver

TINY = [
    "--experiment=train", "--task=copy", "--d_model=8", "--num_heads=2", "--num_layers=1", "--seq_len=13",
    "--batch_size=3", "--steps=12", "--eval_every=3", "--learning_rate=0.05",
]  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inspect") / "run"
    flags = ["--keep=1", "--keep_every=5", "--keep_best", "--checkpoint_every=5", f"--workdir={folder}"]
    assert launch.main(["launch.py", *TINY, *flags]) == 0
    return folder


def params(folder: Path, which: str = "") -> dict[str, np.ndarray]:
    config, hyper = saved_configuration(str(folder))
    state = restoring.restore_state(folder / "checkpoints", loop.abstract_state(config, hyper), which).state
    leaves = jax.tree_util.tree_leaves_with_path(state.params)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}


def test_the_last_every_fifth_and_the_best_are_kept(trained: Path) -> None:
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["loss"] for row in rows if "split" in row}
    best = min(losses, key=lambda step: losses[step])
    saves = trained / "checkpoints"
    assert checkpoint.steps(saves) == sorted({5, 10, 12, best})
    assert restoring.best_step(saves) == best
    assert checkpoint.read_meta(saves, best)["metrics"]["loss"] == losses[best]


def test_inspect_lists_what_is_inside(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["launch.py", "--experiment=inspect", f"--restore={trained}", "--restore_step=10"]) == 0
    out = capsys.readouterr().out
    made = json.loads((trained / "config.json").read_text())
    assert made["commit"] in out and f"jax {jax.__version__}" in out
    assert "learning_rate=0.05" in out and "d_model=8" in out and "num_kv_heads" not in out
    found = params(trained, "10")
    assert f"params: {sum(a.size for a in found.values()):,} numbers in {len(found)} arrays" in out
    for name, array in found.items():
        line = next(line for line in out.splitlines() if line.split()[:1] == [name])
        shape, norm, largest = line.split()[1:]
        assert shape == "×".join(map(str, array.shape))
        assert float(norm) == pytest.approx(float(np.linalg.norm(np.float64(array))), rel=1e-3)
        assert float(largest) == pytest.approx(float(np.max(np.abs(array))), rel=1e-3)


def test_inspect_takes_a_folder_of_checkpoints_too(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["launch.py", "--experiment=inspect", f"--restore={trained / 'checkpoints'}"]) == 0
    assert "12" in capsys.readouterr().out


def test_inspect_names_what_is_damaged_and_counts_what_is_not_finite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Saver(tmp_path, keep=3) as saver:
        for step in (1, 2):
            bad = np.arange(4000, dtype=np.float32)
            bad[7:9] = np.nan
            saver.save(step, {"params": {"w": bad}, "half": jax.numpy.arange(3, dtype="bfloat16")}, {})
    flip(biggest(tmp_path / "2"), 9000)
    (tmp_path / "3.orbax-checkpoint-tmp").mkdir()
    assert launch.main(["launch.py", "--experiment=inspect", f"--restore={tmp_path}"]) == 1
    out = capsys.readouterr().out
    assert [line.split()[-1] for line in out.splitlines() if line.split()[:1] in (["1"], ["2"], ["3"])] == [
        "sound", "damaged", "damaged",
    ]  # fmt: skip
    assert "step 2" in out and "half-written" in out
    assert "2 NOT FINITE" in out and "half: 3 numbers" in out and "norm 2.236" in out


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ([], "--restore=FOLDER"),
        (["--restore=/nowhere/at/all"], "/nowhere/at/all: no such folder"),
        (["--restore=tests"], "--restore=tests holds no checkpoints"),
        (["--restore=tests", "--restore_step=first"], "--restore_step=first"),
        (["--restore=tests", "--d_model=9"], "--d_model has no effect"),
    ],
)
def test_inspect_refuses_in_one_line(flags: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["launch.py", "--experiment=inspect", *flags]) == 2
    err = capsys.readouterr().err
    assert named in err and err.count("\n") == 1


# --- a new run from another's parameters ---------------------------------------


def fine_tune(trained: Path, workdir: Path, *flags: str) -> int:
    few = [x for x in TINY if "steps" not in x and "eval_every" not in x]
    return launch.main(
        ["launch.py", *few, "--steps=1", "--learning_rate=1e-9", f"--workdir={workdir}", f"--restore={trained}", *flags]
    )


def test_parts_come_from_the_other_run_and_the_rest_is_fresh(
    trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert fine_tune(trained, tmp_path / "w", "--parts=embedding,decoder/final_norm", "--restore_step=10") == 0
    said = capfd.readouterr().err
    assert "taken from step 10: params/embedding/embed_VD" in said
    assert "as it was: params/decoder/layers/attention/wq_DNH" in said
    got, source = params(tmp_path / "w"), params(trained, "10")
    for name in got:
        near = np.allclose(got[name], source[name], atol=1e-6)
        fresh_too = np.all(source[name] == source[name].reshape(-1)[0])
        assert near == name.startswith(("embedding", "decoder/final_norm")) or fresh_too, name


def test_all_parameters_are_taken_and_the_steps_begin_anew(trained: Path, tmp_path: Path) -> None:
    assert fine_tune(trained, tmp_path / "w", "--restore_step=best") == 0
    best = restoring.best_step(trained / "checkpoints")
    got, source = params(tmp_path / "w"), params(trained, str(best))
    assert all(np.allclose(got[name], source[name], atol=1e-6) for name in source)
    assert checkpoint.steps(tmp_path / "w" / "checkpoints") == [1]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--parts=embeding"], "did you mean params/embedding"),
        (["--d_model=16"], "embed_VD: shape [32, 16] wanted, [32, 8] saved"),
        (["--restore_step=11"], "no checkpoint of step 11"),
        (["--restore_step=latest"], "--restore_step=latest"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    flags: list[str], named: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fine_tune(trained, tmp_path / "w", *flags) == 2
    err = capsys.readouterr().err
    assert named in err and err.count("\n") == 1 and not (tmp_path / "w").exists()


def test_parts_without_a_source_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert launch.main(["launch.py", *TINY, f"--workdir={tmp_path / 'w'}", "--parts=embedding"]) == 2
    assert "--restore" in capsys.readouterr().err and not (tmp_path / "w").exists()


def test_the_same_command_resumes_and_another_source_is_refused(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fine_tune(trained, tmp_path / "w") == 0
    assert fine_tune(trained, tmp_path / "w") == 0
    assert fine_tune(trained, tmp_path / "w", "--restore_step=5") == 2
    assert "restore_step is '' there, '5' here" in capsys.readouterr().err


def test_a_damaged_newest_source_is_passed_over_and_named(
    trained: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained, tmp_path / "source")
    newest, before = sorted(checkpoint.steps(tmp_path / "source" / "checkpoints"))[-1:-3:-1]
    flip(biggest(tmp_path / "source" / "checkpoints" / str(newest)), 700)
    assert fine_tune(tmp_path / "source", tmp_path / "w") == 0
    said = capfd.readouterr().err
    assert f"step {newest}: " in said and f"taken from step {before}: params/" in said
    shutil.rmtree(tmp_path / "source")  # what has begun needs its source no more
    assert fine_tune(tmp_path / "source", tmp_path / "w") == 0


def test_a_diverged_run_ends_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = [x for x in TINY if "steps" not in x and "rate" not in x]
    command = ["launch.py", *few, "--steps=4", "--learning_rate=1e30", f"--workdir={tmp_path / 'w'}"]
    assert launch.main(command) == 0
    assert "loss diverged" in capsys.readouterr().out
    assert json.loads((tmp_path / "w" / "results.json").read_text())["report"]["loss"] is None
    assert checkpoint.read_meta(tmp_path / "w" / "checkpoints")["metrics"]["loss"] is None
    assert launch.main(["launch.py", "--experiment=evaluate", f"--restore={tmp_path / 'w'}"]) == 0
    assert "loss diverged" in capsys.readouterr().out


def test_the_text_of_the_step_that_is_named(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for which in ("5", "best"):
        given = []
        monkeypatch.setattr(sample, "stream", lambda found, *rest, given=given, **options: given.append(found) or [])
        command = ["--experiment=sample", f"--restore={trained}", "--prompt=a >", f"--restore_step={which}"]
        assert launch.main(["launch.py", *command]) == 0
        step = restoring.chosen_step(trained / "checkpoints", which)
        assert f"{trained}, step {step}\n" in capsys.readouterr().err
        want = params(trained, which)
        for path, leaf in jax.tree_util.tree_leaves_with_path(given[0]):
            np.testing.assert_array_equal(leaf, want[jax.tree_util.keystr(path, simple=True, separator="/")])


def test_settings_that_are_changed_bring_their_terms_and_their_band() -> None:
    config = Config(mask="window", attention_implementation="banded", band=4, terms=("clip",), seq_len=16)
    found, hyper = restoring.changed(config, Hyper(window=4), {"window": 9, "final_softcap": 5.0})
    assert (found.band, hyper.window, hyper.final_softcap) == (9, 9, 5.0)
    assert found.terms == ("clip", "final_softcap")
    assert restoring.changed(config, Hyper(window=4), {"band": 7})[0].band == 7
    with pytest.raises(UserError, match="band=7 is narrower than window=9"):
        restoring.changed(config, Hyper(window=4), {"band": 7, "window": 9})
    with pytest.raises(UserError, match="window=17 is wider than a row"):
        restoring.changed(config, Hyper(window=4), {"window": 17})


def test_no_measured_checkpoint_has_no_best(tmp_path: Path) -> None:
    with Saver(tmp_path) as saver:
        saver.save(4, {"w": np.ones(3)}, {})
    with pytest.raises(CheckpointError, match=r"best: no checkpoint .* was measured \(steps \[4\]\)"):
        restoring.best_step(tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        restoring.folders(str(tmp_path / "w"))


def test_i5_a_full_disk_ends_the_run_with_the_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["launch.py", *TINY, f"--workdir={tmp_path / 'w'}", "--d_model=64", "--checkpoint_every=3"]
    assert launch.main([*command, "--minutes=0.00001"]) == 0
    before = checkpoint.steps(tmp_path / "w" / "checkpoints")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        assert launch.main(command) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "File too large" in capsys.readouterr().err
    assert checkpoint.steps(tmp_path / "w" / "checkpoints") == before != []
    assert launch.main(command) == 0
