"""What may change between two calls of one sweep, and what of a question is refused before a file is made."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

import launch
from experiments import ablation, flags, observed, plots
from experiments.grid import Arm, Run
from experiments.interrupt import Stopper
from experiments.sections import Section
from experiments.sweep import Question, RunResult, at_common_marks, run_sweep
from experiments.train import came_from
from experiments.workdir import WorkdirError, open_workdir
from transformer_jax.config import Config, Hyper
from transformer_jax.data import make_task, resolve

SMALL = ("--d_model=8", "--d_ff=8", "--seq_len=8", "--batch_size=2", "--task=copy", "--num_heads=1")


def asked(folder: Path, *line: str, sweep: str = "head_dim=8;dk_exponent=0.5;learning_rate=1e-3") -> int:
    command = ["launch.py", "--experiment=dk_scaling", *SMALL, f"--workdir={folder}", f"--sweep={sweep}", *line]
    return launch.main(command)


# --- between two calls ----------------------------------------------------------------


def test_arms_in_another_order_are_another_sweep(tmp_path: Path) -> None:
    """What is saved stands in the order of the arms: taken in another one, each would have another's models."""
    of_arms = {"off": {"hyper": {"dk_exponent": 0.0}}, "on": {"hyper": {"dk_exponent": 0.5}}}
    open_workdir(str(tmp_path), {"experiment": "q", "arms": of_arms}, {})
    assert open_workdir(str(tmp_path), {"experiment": "q", "arms": of_arms}, {}).resumed
    turned = dict(reversed(of_arms.items()))
    with pytest.raises(WorkdirError, match="the arms stand there as off, on, here as on, off"):
        open_workdir(str(tmp_path), {"experiment": "q", "arms": turned}, {})


def test_means_are_of_the_marks_that_all_runs_share() -> None:
    def result(*marks: int) -> RunResult:
        return RunResult(np.zeros(6), np.zeros(6), marks, {"report_loss": np.array(marks) * 10})

    made = at_common_marks({Run(0, 1e-3, 0): result(0, 2, 4, 6), Run(0, 1e-3, 1): result(0, 3, 4, 6)})
    assert [run.marks for run in made.values()] == [(0, 4, 6)] * 2
    assert [run.measured["report_loss"].tolist() for run in made.values()] == [[0, 40, 60]] * 2
    assert at_common_marks({}) == {}


def test_seeds_and_steps_that_grow_together_have_an_answer(tmp_path: Path) -> None:
    """The seeds that come later are measured at other steps."""
    assert asked(tmp_path, "--steps=12", "--seeds=1", "--num_layers=1") == 0
    assert asked(tmp_path, "--steps=24", "--seeds=2", "--num_layers=1", "--checkpoint_every=8") == 0
    found = json.loads((tmp_path / "results.json").read_text())
    assert (found["seeds"], found["steps"]) == (2, 24)
    assert {0, 24} <= set(found["arms"][0]["observed"]["marks"])


def test_a_short_warm_up_stays_when_the_steps_of_pairs_grow(tmp_path: Path) -> None:
    line = ["x", "--experiment=ablation", "--task=pairs", "--pairs=x.tsv", f"--workdir={tmp_path}"]

    def warm_up(*more: str) -> int:
        settings, _ = flags.parse([*line, *more], {"ablation": ablation.FLAGS})
        return ablation.question(settings).arms[0].config.warmup_steps

    assert warm_up("--steps=8") == 4
    of_arms = {"as set": {"config": {"warmup_steps": 4}}}
    (tmp_path / "config.json").write_text(json.dumps({"identity": {"experiment": "ablation", "arms": of_arms}}))
    assert warm_up("--steps=16") == 4
    assert warm_up("--steps=16", "--overwrite") == 8


def test_a_tokenizers_file_may_move_and_its_kind_may_not(tmp_path: Path) -> None:
    def opened(tokenizer: str, data: str = "digest") -> bool:
        return open_workdir(str(tmp_path), {"config": {"tokenizer": tokenizer}, "data": data}, {}).resumed

    assert not opened("/a/tokenizer.json") and opened("/b/tokenizer.json")
    with pytest.raises(WorkdirError, match="config.tokenizer is '/b/tokenizer.json' there, 'bpe' here"):
        opened("bpe")
    with pytest.raises(WorkdirError, match="data is"):
        opened("/b/tokenizer.json", "another")


def test_the_source_of_a_run_is_a_folder_however_it_is_written() -> None:
    settings, _ = flags.parse(["x", "--experiment=train", "--restore=runs/a"], {"train": ("restore",)})
    assert came_from(settings)["from"]["restore"] == "runs/a"
    for same in ("runs/a/", "./runs//a", "runs/b/../a"):
        assert came_from(dataclasses.replace(settings, restore=same)) == came_from(settings)


def test_a_group_on_one_device_is_one_program(tmp_path: Path) -> None:
    """What comes out of a call goes into the next in the placement of what went in."""
    config = resolve(
        Config(d_model=8, num_heads=1, num_layers=1, d_ff=8, seq_len=8, batch_size=2, steps=4, task="copy")
    )
    question = Question("q", "?", (Arm("one", config, Hyper()),), (1e-3,), ())
    made = run_sweep(question, 1, tmp_path, blocks=[(0, 1)], chunk=2, devices=1, stop=Stopper())
    assert made.programs_compiled == 1


# --- refused before a file is made ------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "sweep", "said"),
    [
        ((), "head_dim=8;steps=6,12", "--sweep=steps=…: arms of one sweep train alike; use --steps"),
        (("--architecture=encoder",), "head_dim=8", "architecture=encoder: what attention does is measured in a decod"),
        (("--attention_implementation=linear",), "head_dim=8", "linear attention cannot do weights"),
    ],
)
def test_a_question_that_cannot_be_measured_makes_no_file(
    line: tuple[str, ...], sweep: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked(tmp_path / "w", "--steps=6", "--num_layers=1", *line, sweep=sweep) != 0
    assert said in capsys.readouterr().err
    assert not (tmp_path / "w").exists()


def test_each_arm_is_drawn_with_its_own_layers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arms = [
        {"name": name, "observed": {"marks": [0, 1], "x": [[10.0 * m + layer for layer in range(L)] for m in (0, 1)]}}
        for name, L in (("two", 2), ("one", 1), ("three", 3))
    ]
    drawn: dict[str, list[float]] = {}
    monkeypatch.setattr(plots, "lines", lambda path, marks, series, **_: drawn.update(series))
    section = observed.over_training(arms, "x", Section("t", "s", (), []))
    assert section.figure is not None
    section.figure[1](tmp_path / "x.png")
    wanted = {
        f"{name}, layer {n + 1}": [n, 10 + n] for name, L in (("two", 2), ("one", 1), ("three", 3)) for n in range(L)
    }
    assert drawn == wanted


def test_losses_are_of_one_question_where_the_tokens_are(tmp_path: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_text("one two three\n\n" * 300)

    def alike(a: dict[str, object], b: dict[str, object]) -> bool:
        made = [resolve(Config(**{"seq_len": 16, "batch_size": 4} | fields)) for fields in (a, b)]
        left, right = (ablation._tokens(config, make_task(config)) for config in made)
        return bool(left == right)

    of_text = {"task": "text", "text": str(text)}
    assert alike(of_text, of_text | {"seq_len": 8, "batch_size": 2})
    assert not alike(of_text, of_text | {"packing": True})
    made = {"task": "reverse"}
    assert alike(made, made | {"norm": "rmsnorm"})
    assert not alike(made, made | {"architecture": "encoder_decoder"})
    assert not alike(made, made | {"batch_size": 8})
