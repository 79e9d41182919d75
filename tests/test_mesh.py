"""Training runs on a mesh, from the command line: the same rows, resumed bit for bit, described before they run."""

import functools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import launch
from experiments import feeds, loop
from experiments import mesh as question
from experiments.evaluating import judge
from experiments.program import run_key
from experiments.translating import Translator
from tests.pairs_run import BASE, words, write_pairs
from tests.quick import jit
from transformer_jax import sharding
from transformer_jax.config import Config, Hyper
from transformer_jax.data import make_task, resolve
from transformer_jax.train import eval_step, init_state

TINY = [
    "--task=copy", "--d_model=8", "--num_heads=2", "--num_layers=1", "--seq_len=8", "--batch_size=4",
    "--vocab_size=13", "--dropout_rate=0.2", "--scan_unroll=1",
]  # fmt: skip
TRAIN = ["--experiment=train", *TINY, "--steps=20", "--eval_every=1", "--checkpoint_every=10"]
MESH = "--mesh=data:2,fsdp:2"


@pytest.fixture(scope="module", autouse=True)
def quickly() -> Iterator[None]:
    """The programs of these runs are compiled in half the time; bits are compared of one program only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "jit", jit)
        yield


def start(*args: str) -> int:
    return launch.main(["launch.py", *args])


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Counted:
    """A function, and how often it was called."""

    def __init__(self, f: Any) -> None:
        self.f, self.calls = f, 0
        functools.update_wrapper(self, f)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self.f(*args, **kwargs)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, int]:
    """A run on a mesh: its folder, and how often training and evaluation were traced."""
    folder = tmp_path_factory.mktemp("mesh") / "straight"
    with pytest.MonkeyPatch.context() as patch:
        steps, evaluation = Counted(feeds.take_steps), Counted(loop.evaluate)
        patch.setattr(feeds, "take_steps", steps)
        patch.setattr(loop, "evaluate", evaluation)
        assert start(*TRAIN, MESH, f"--workdir={folder}") == 0
    return folder, steps.calls, evaluation.calls


def test_k2_k4_twenty_steps_and_evaluations_in_turns_are_one_trace_each(straight: tuple[Path, int, int]) -> None:
    """Each evaluation reads the parameters between two steps that are given them away."""
    folder, steps, evaluations = straight
    assert steps == 1 and evaluations == 2  # selection; report at the end
    assert len([row for row in rows(folder) if "split" in row]) == 20


def cut(folder: Path, to: Path) -> Path:
    """The folder as a kill after the checkpoint of step 10 would leave it."""
    shutil.copytree(folder, to)
    shutil.rmtree(to / "checkpoints" / "20")
    (to / "results.json").unlink()
    return to


def test_a_killed_run_goes_on_bit_for_bit_on_its_mesh(
    straight: tuple[Path, int, int], tmp_path: Path, capfd: Any
) -> None:
    folder = cut(straight[0], tmp_path / "w")
    assert start(*TRAIN, MESH, f"--workdir={folder}") == 0
    assert "resumed at step 10" in capfd.readouterr().err
    assert rows(folder) == rows(straight[0])


def test_it_goes_on_on_one_device_with_the_same_numbers(straight: tuple[Path, int, int], tmp_path: Path) -> None:
    folder = cut(straight[0], tmp_path / "w")
    assert json.loads((folder / "config.json").read_text())["free"]["mesh"] == "data:2,fsdp:2"
    assert start(*TRAIN, f"--workdir={folder}") == 0
    assert json.loads((folder / "config.json").read_text())["free"]["mesh"] == ""
    for found, want in zip(rows(folder), rows(straight[0]), strict=True):
        assert found.pop("split", "") == want.pop("split", "")
        assert found == pytest.approx(want, rel=1e-5, abs=1e-5)


def test_evaluate_on_a_mesh(straight: tuple[Path, int, int], capsys: pytest.CaptureFixture[str]) -> None:
    assert start("--experiment=evaluate", f"--restore={straight[0]}", "--mesh=model:2") == 0
    loss = json.loads((straight[0] / "results.json").read_text())["report"]["loss"]
    assert f"loss {loss:.4f}" in capsys.readouterr().out


def test_j2_the_last_batch_may_be_short(tmp_path: Path) -> None:
    """19 rows in batches of 8 on 4 devices: three batches, and 19 rows are counted."""
    T = 5
    text = tmp_path / "text.txt"
    text.write_text("abcdefg hi" * (19 * T + 1) * 2)
    config = resolve(Config(d_model=4, num_heads=1, num_layers=1, seq_len=T, batch_size=8, text=str(text)))
    task, mesh = make_task(config), sharding.make_mesh({"data": 4})
    assert task.eval_batches["selection"] == 3
    begun = loop._start(config, Hyper(), 0, tmp_path / "none", mesh, None)
    state, notes = begun.state, begun.notes
    assert not notes
    sums = loop.measure(config, task, "selection", mesh)(state.params, Hyper(), task.data)
    assert float(sums.count) == 19 * T
    params = jax.tree.map(np.asarray, state.params)
    want = loop.measure(config, task, "selection")(params, Hyper(), task.data)
    assert float(sums.nats) == pytest.approx(float(want.nats), rel=1e-5)


def test_q1_q2_pairs_are_measured_alike_on_any_devices(tmp_path: Path) -> None:
    """10 pairs of unlike lengths in batches of 4: tokens are summed over batches and devices and divided once."""
    made = words(40, 0)
    files = {"pairs": write_pairs(tmp_path / "a.tsv", made[:30]), "dev": write_pairs(tmp_path / "b.tsv", made[30:])}
    config = resolve(BASE.replace(**{name: str(path) for name, path in files.items()}, batch_size=4))
    task = make_task(config)
    assert task.text is not None and task.eval_batches["selection"] == 3
    pairs, names = task.text.pairs["selection"], task.text.tokenizers
    state = jit(lambda: init_state(config, Hyper(), run_key(0)))()
    tokens = sum(len(names.target.encode(several[0])) + 1 for _, several in pairs)
    one = config.replace(batch_size=1)
    alone, grade = make_task(one), jit(lambda batch: eval_step(one, state.params, Hyper(), batch))
    by_row = [grade(alone.eval_batch(alone.data, "selection", row)) for row in range(10)]
    nats, right = sum(float(s.nats) for s in by_row), sum(float(s.correct) for s in by_row)
    means = [
        float(sum(s.nats for s in part) / sum(s.count for s in part)) for part in (by_row[:4], by_row[4:8], by_row[8:])
    ]
    assert abs(np.mean(means) - nats / tokens) > 1e-3, "a mean of batch means would do"
    translator = Translator((), config, Hyper(), names, rows=16)
    want = judge(translator, pairs)(state.params)
    for axes in ({}, {"data": 2}, {"data": 4}, {"fsdp": 2, "model": 2}):
        mesh = sharding.make_mesh(axes) if axes else None
        params = state.params if mesh is None else jax.device_put(state.params, sharding.shardings(state.params, mesh))
        placed = loop.place_task(task, mesh)
        sums = loop.measure(config, placed, "selection", mesh)(params, loop.device_hyper(Hyper(), mesh), placed.data)
        assert float(sums.count) == tokens and float(sums.correct) == right
        assert float(sums.nats) == pytest.approx(nats, rel=1e-6)
        assert loop.describe(sums, task)["loss"] == pytest.approx(nats / tokens, rel=1e-6)
    assert judge(translator, pairs)(params) == pytest.approx(want)  # what is written with the last one's parameters


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([*TRAIN, "--mesh=data:3,seq:3"], "--mesh=data:3,seq:3 is 9 devices, there are 8 of kind cpu"),
        ([*TRAIN, "--mesh=modle:2"], "unknown mesh axis 'modle': did you mean model"),
        ([*TRAIN, "--mesh=seq:2", "--normaliser=entmax15"], "(seq:2) cannot do normaliser entmax15"),
        (["--experiment=mesh"], "--mesh names the axes"),
        (["--experiment=dk_scaling", MESH], "unknown mesh axis"),
        (["--experiment=dk_scaling", "--mesh=sweep:9"], "--mesh=sweep:9 is 9 devices, there are 8"),
    ],
)
def test_a_mistake_is_one_line_and_writes_nothing(
    args: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(*args, f"--workdir={tmp_path / 'w'}") == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1
    assert not (tmp_path / "w").exists()


def test_the_mesh_is_described_before_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--experiment=mesh", *TINY, "--mesh=fsdp:2,model:4", f"--workdir={tmp_path / 'w'}"]
    assert start(*args) == 0
    out = capsys.readouterr().out
    found = json.loads((tmp_path / "w" / "mesh.json").read_text())
    by_path = {row["path"]: row for row in found["parameters"]}
    w1 = by_path["decoder/layers/ffn/w1_DF"]
    assert w1["spec"] == [[], ["fsdp"], ["model"]] and w1["bytes"] == 8 * 32 * 4 // 8
    # 13 ids and 2 heads on 4 devices: named, and whole there.
    assert by_path["embedding/embed_VD"]["bytes"] == 13 * 8 * 4 // 2
    assert any("embed_VD: V=13 is no multiple of model:4" in line for line in found["dropped"])
    assert found["bytes"]["optimizer"] == 2 * found["bytes"]["parameters"] + 2 * 4  # moments; two counts
    assert found["totals"]["all-gather"][0] > 0 and found["totals"]["all-reduce"][1] > 0
    for said in ("fsdp 2, model 4", "wq_DNH", "D fsdp", "N=2 is no multiple of model:4", "collectives of a step"):
        assert said in out
    assert max(map(len, out.splitlines())) <= 80


def test_the_place_of_a_collective_is_said_in_words() -> None:
    assert question.where("jit(step)/jvp()/while/body/closed_call/ffn/dot_general") == "forward, ffn"
    assert question.where("jit(step)/transpose(jvp(loss))/gather") == "backward, loss"
    assert question.where("jit(step)/reduce_sum") == "norms, clipping, update"
