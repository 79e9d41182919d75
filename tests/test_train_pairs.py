"""Training on pairs, from files to a model that translates: judged, ended early, and resumed to the bit."""

import io
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import launch
from experiments import loop, matrix, plans, restoring, train
from experiments.flags import Settings
from tests.pairs_run import phones, words, write_pairs
from transformer_jax import checkpoint
from transformer_jax.data import make_task

ROOT = Path(__file__).resolve().parent.parent
TINY = [
    "--experiment=train", "--task=pairs", "--d_model=8", "--num_heads=2", "--num_layers=1", "--seq_len=12",
    "--batch_size=8", "--length_buckets=2", "--scan_unroll=1", "--ema_decay=0.9",
]  # fmt: skip


def rows(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder, made = tmp_path_factory.mktemp("pairs"), words(60, 0)
    return [f"--pairs={write_pairs(folder / 'a.tsv', made[:50])}", f"--dev={write_pairs(folder / 'b.tsv', made[50:])}"]


def test_i14_killed_twice_on_a_mesh_it_ends_with_the_same_bits(files: list[str], tmp_path: Path) -> None:
    """Seven batches an epoch: both kills are past the first one. Dropout is on, and the average is kept."""
    command = [sys.executable, "launch.py", *TINY, *files, "--steps=90", "--eval_every=45", "--mesh=data:2"]
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}

    def start(folder: str) -> subprocess.Popen[bytes]:
        more = ["--checkpoint_every=3", f"--workdir={tmp_path / folder}"]
        return subprocess.Popen([*command, *more], cwd=ROOT, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    straight = start("straight")
    said = straight.communicate(timeout=300)[1]
    assert straight.returncode == 0, said
    saves, past = tmp_path / "killed" / "checkpoints", 9
    for _ in range(2):
        victim, deadline = start("killed"), time.monotonic() + 200
        while not (saves.is_dir() and max(checkpoint.steps(saves), default=0) > past):
            assert victim.poll() is None and time.monotonic() < deadline, victim.stderr.read()
            time.sleep(0.005)
        victim.kill()
        victim.communicate()
        past = max(checkpoint.steps(saves))
    assert past < 90, "it had ended: nothing was killed"
    last = start("killed")
    said = last.communicate(timeout=300)[1].decode()
    assert last.returncode == 0 and "resumed at step" in said, said
    assert rows(tmp_path / "killed") == rows(tmp_path / "straight")
    (meta, arrays), (other, others) = (
        checkpoint.contents(tmp_path / n / "checkpoints", 90) for n in ("killed", "straight")
    )
    assert meta["cursor"] == other["cursor"] and list(arrays) == list(others)
    assert any("ema" in path for path in arrays)
    assert all(np.array_equal(arrays[path], others[path]) for path in arrays)


@pytest.fixture(scope="module")
def trained(files: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert launch.main(["launch.py", *TINY, *files, "--steps=12", "--eval_every=3", f"--workdir={folder}"]) == 0
    return folder


def test_a_run_is_judged_by_what_it_writes_and_its_best_is_used(trained: Path, capsys: Any) -> None:
    judged = [row for row in rows(trained) if "split" in row]
    assert [row["step"] for row in judged] == [3, 6, 9, 12]
    assert all({"word_error_rate", "phone_error_rate", "exact_match", "loss"} <= set(row) for row in judged)
    best = min(judged, key=lambda row: (row["word_error_rate"], row["loss"]))["step"]
    found = json.loads((trained / "results.json").read_text())
    assert found["measured_at"] == best and found["reached"] == 12
    assert best in checkpoint.steps(trained / "checkpoints")
    meta = checkpoint.read_meta(trained / "checkpoints", best)
    assert meta["judged_by"] == "word_error_rate" and len(meta["tokenizers"]) == 64
    assert (
        launch.main(["launch.py", "--experiment=evaluate", f"--restore={trained}", f"--workdir={trained / 'e'}"]) == 0
    )
    scores = json.loads((trained / "e" / "results.json").read_text())["splits"]["dev"]
    assert scores["metrics"]["word_error_rate"]["value"] == pytest.approx(found["report"]["word_error_rate"])
    assert scores["loss"] == pytest.approx(found["report"]["loss"], abs=1e-5)


def test_what_is_judged_is_the_average(files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and metrics of dev are of the EMA, the weights that the run is used with."""
    judged: list[Any] = []

    def score(params: Any) -> dict[str, float | None]:
        judged.append(jax.tree.map(np.array, params))
        return {"word_error_rate": 90.0 - len(judged)}

    monkeypatch.setattr(plans, "score_of", lambda *_: score)
    folder = tmp_path / "w"
    run = [*TINY, *files, "--steps=6", "--eval_every=6", "--warmup_steps=1", "--learning_rate=0.1"]
    assert launch.main(["launch.py", *run, f"--workdir={folder}"]) == 0
    config, hyper = restoring.saved_configuration(str(folder))
    state = checkpoint.restore(folder / "checkpoints", 6, loop.abstract_state(config, hyper)).state
    jax.tree.map(np.testing.assert_array_equal, judged[0], state.ema)
    task = make_task(config, restoring.saved_tokenizers(str(folder)))
    measure, numbers = loop.measure(config, task, "selection"), loop.device_hyper(hyper)
    (row,) = (row for row in rows(folder) if "split" in row)
    mean, last = (loop.describe(measure(x, numbers, task.data), task)["loss"] for x in (state.ema, state.params))
    assert row["loss"] == pytest.approx(mean, abs=1e-6) and abs(mean - last) > 1e-3


def test_patience_goes_on_after_an_interruption(
    files: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is the best so far is the run's, not the process's: a worse value after a resume is no improvement."""
    values = iter([10.0, 20.0, 15.0, 12.0])
    monkeypatch.setattr(plans, "score_of", lambda *_: lambda params: {"word_error_rate": next(values, 50.0)})
    run = ["launch.py", *TINY, *files, "--eval_every=1", "--patience=3", f"--workdir={tmp_path / 'w'}"]
    for steps in (2, 3, 4):
        assert launch.main([*run, f"--steps={steps}"]) == 0
        meta = checkpoint.read_meta(tmp_path / "w" / "checkpoints", steps)
        assert meta["best"][0] == 10 and meta["stale"] == steps - 1
    found = json.loads((tmp_path / "w" / "results.json").read_text())
    assert found["measured_at"] == 1


def test_files_may_move(files: list[str], trained: Path, tmp_path: Path, capsys: Any) -> None:
    """A run is of what its files hold: it goes on under other paths to the same, and not with other contents."""
    moved = [f"{flag.split('=')[0]}={shutil.copy(flag.split('=')[1], tmp_path)}" for flag in files]
    folder = shutil.copytree(trained, tmp_path / "w")
    run = ["launch.py", *TINY, "--eval_every=3", f"--workdir={folder}"]
    assert launch.main([*run, *moved, "--steps=14"]) == 0
    assert json.loads((folder / "results.json").read_text())["reached"] == 14
    with open(moved[1].split("=")[1], "a") as file:
        file.write("xx\tx x\n")
    capsys.readouterr()
    assert launch.main([*run, *moved, "--steps=16"]) == 2
    assert "data is " in capsys.readouterr().err


def test_dev_held_out_is_not_dev_of_the_whole_file(files: list[str], tmp_path: Path, capsys: Any) -> None:
    """The bytes read are the same, and the data are not."""
    run = ["launch.py", *TINY, files[0], f"--workdir={tmp_path / 'w'}", "--warmup_steps=1"]
    assert launch.main([*run, "--steps=2"]) == 0
    capsys.readouterr()
    assert launch.main([*run, files[0].replace("--pairs", "--dev"), "--steps=4"]) == 2
    assert "config.dev is '' there, " in capsys.readouterr().err


def test_training_ends_when_nothing_gets_better(files: list[str], tmp_path: Path, capfd: Any) -> None:
    command = ["launch.py", *TINY, *files, "--steps=30", "--eval_every=3", "--patience=2", "--learning_rate=0"]
    assert launch.main([*command, f"--workdir={tmp_path / 'w'}"]) == 0
    assert "stopped at step 9: 2 evaluations without a better word_error_rate" in capfd.readouterr().err
    found = json.loads((tmp_path / "w" / "results.json").read_text())
    assert (found["reached"], found["measured_at"]) == (9, 3)
    (tmp_path / "w" / "results.json").unlink()
    before = rows(tmp_path / "w")
    assert launch.main([*command, f"--workdir={tmp_path / 'w'}"]) == 0  # it ends where it had ended
    assert json.loads((tmp_path / "w" / "results.json").read_text()) == found and rows(tmp_path / "w") == before


def test_a_translation_is_that_of_the_best_checkpoint(trained: Path, capsys: Any, monkeypatch: Any) -> None:
    best = json.loads((trained / "results.json").read_text())["measured_at"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"abc\n\nda\n")))
    assert launch.main(["launch.py", "--experiment=translate", f"--restore={trained}"]) == 0
    out = capsys.readouterr()
    assert out.out.count("\n") == 3 and out.out.split("\n")[1] == "" and f"step {best}" in out.err


def test_a_strict_run_refuses_what_another_counts(tmp_path: Path, capfd: Any) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("".join(f"{word}\t{phones(word)}\n" for word in words(30, 1)) + "lonely\n", encoding="utf-8")
    command = ["launch.py", *TINY, f"--pairs={path}", "--steps=1"]
    assert launch.main([*command, "--strict", f"--workdir={tmp_path / 's'}"]) == 2
    assert "31" in capfd.readouterr().err and not (tmp_path / "s").exists()
    assert launch.main([*command, f"--workdir={tmp_path / 'w'}"]) == 0
    assert "skipped 1" in capfd.readouterr().err


def test_a_new_run_starts_from_the_weights_that_the_other_is_used_with(
    trained: Path, files: list[str], tmp_path: Path, capfd: Any
) -> None:
    """Its averaged parameters at its best step: with a rate of 0 the new run writes what `translate` would."""
    best = json.loads((trained / "results.json").read_text())
    command = ["launch.py", *TINY, *files, "--steps=1", "--learning_rate=0", f"--restore={trained}"]
    assert launch.main([*command, f"--workdir={tmp_path / 'w'}"]) == 0
    assert f"step {best['measured_at']}" in capfd.readouterr().err
    found = json.loads((tmp_path / "w" / "results.json").read_text())["report"]
    assert found["loss"] == pytest.approx(best["report"]["loss"], abs=1e-5)


@pytest.fixture
def other(tmp_path: Path) -> str:
    """Pairs with a letter that the trained model has never seen."""
    path = tmp_path / "other.tsv"
    path.write_text("".join(f"{word}x\t{phones(word)}\n" for word in words(30, 1)), encoding="utf-8")
    return f"--pairs={path}"


def test_a_trained_model_goes_on_with_other_pairs_in_its_own_ids(
    trained: Path, files: list[str], other: str, tmp_path: Path, capfd: Any
) -> None:
    """With a rate of 0 its loss on its own dev data is what it was: each id still means the same symbol."""
    source, folder = tmp_path / "source", tmp_path / "w"
    shutil.copytree(trained, source)
    command = [
        "launch.py", *TINY, other, files[1], "--learning_rate=0", "--warmup_steps=1", f"--restore={source}",
        f"--workdir={folder}",
    ]  # fmt: skip
    assert launch.main([*command, "--steps=1"]) == 0
    said = capfd.readouterr().err
    assert "chars of the source" in said and "those of the trained model" in said
    assert "30 symbols of the source are not in its chars vocabulary" in said
    assert json.loads((folder / "tokenizers.json").read_text()) == json.loads((trained / "tokenizers.json").read_text())
    held, found = (json.loads((path / "results.json").read_text()) for path in (trained, folder))
    assert found["report"]["loss"] == pytest.approx(held["report"]["loss"], abs=1e-5)
    shutil.rmtree(source)  # what has begun needs it no more
    assert launch.main([*command, "--steps=2"]) == 0
    assert "resumed at step 1" in capfd.readouterr().err
    assert launch.main([*command, "--steps=2", "--overwrite"]) == 2
    assert "no such folder" in capfd.readouterr().err


def test_other_tokenizers_are_refused_where_their_ids_would_be_taken(
    trained: Path, other: str, tmp_path: Path, capfd: Any
) -> None:
    command = ["launch.py", *TINY, other, "--steps=1", f"--restore={trained}", f"--workdir={tmp_path / 'w'}"]
    assert launch.main([*command, "--tokenizer=chars", "--target_tokenizer=symbols"]) == 2
    assert "other tokenizers" in capfd.readouterr().err and not (tmp_path / "w").exists()
    assert launch.main([*command, "--parts=encoder,decoder"]) == 0
    said = capfd.readouterr().err
    assert "chosen by the data" in said and "not in its chars vocabulary" not in said


def test_a_text_in_tokens_is_gone_on_with_in_those_tokens(trained: Path, tmp_path: Path, capfd: Any) -> None:
    """Of a text model its own BPE; and a model of pairs says nothing of how a text is read."""
    first, second = tmp_path / "first.txt", tmp_path / "second.txt"
    first.write_text("the cat sat on the mat and the dog lay on the rug\n" * 40, encoding="utf-8")
    second.write_text("no mat, no rug: only tiles in the whole kitchen\n" * 40, encoding="utf-8")
    tiny = [
        "launch.py", "--experiment=train", "--d_model=8", "--num_heads=2", "--num_layers=1", "--seq_len=8",
        "--batch_size=2", "--steps=1", "--warmup_steps=1",
    ]  # fmt: skip
    assert launch.main([*tiny, f"--text={first}", "--tokenizer=bpe", "--bpe_size=280", f"--workdir={tmp_path}/a"]) == 0
    more = [*tiny, f"--text={second}", f"--restore={tmp_path}/a"]
    assert launch.main([*more, f"--workdir={tmp_path}/b"]) == 0
    made = [json.loads((tmp_path / name / "tokenizers.json").read_text()) for name in "ab"]
    assert made[0] == made[1]
    fields = [json.loads((tmp_path / name / "config.json").read_text())["identity"]["config"] for name in "ab"]
    for name in ("tokenizer", "bpe_size", "vocab_size"):
        assert fields[0][name] == fields[1][name], name
    # Its tokens are not those that its own text would have, though there are as many of them.
    (row,) = matrix.rows_of(f"{tmp_path}/b")
    ((measured,),) = matrix.losses([row], [matrix.Setting(matrix.AS_TRAINED, {})])
    report = json.loads((tmp_path / "b" / "results.json").read_text())["report"]["loss"]
    assert measured[0] == pytest.approx(report, abs=1e-5)
    capfd.readouterr()
    assert launch.main([*tiny, f"--text={second}", f"--restore={trained}", f"--workdir={tmp_path}/c"]) == 2
    assert "other tokenizers" in capfd.readouterr().err


def test_what_counts_as_naming_a_tokenizer(trained: Path) -> None:
    def source(begun: str = "", restore: str = str(trained), parts: str = "", **overrides: Any) -> str:
        return train.reads_as(Settings("train", overrides, frozenset(), restore=restore, parts=parts), begun)

    assert source() == source(vocab_size=0) == source(parts="embedding/embed_VD") == str(trained)
    assert source(tokenizer="chars") == source(vocab_size=30) == source(bpe_size=300) == source(restore="") == ""
    assert source(parts="encoder,decoder") == source(parts="embedding/position_PD") == ""
    assert source(begun="own", restore="gone") == "own"
    named, made = restoring.inherited(str(trained / "checkpoints"), "cmudict")
    assert made == restoring.saved_tokenizers(str(trained)) and set(named) == {*restoring.TOKENIZER_FIELDS}
    assert restoring.inherited(str(trained), "text") == ({}, None)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tokenizer=chars", "--target_tokenizer=symbols", "--parts=embedding/embed_VD"], "other tokenizers"),
        (["--architecture=decoder"], "reads both sides with one vocabulary, not chars and symbols"),
    ],
)
def test_ids_of_another_kind_are_refused(
    flags: list[str], said: str, trained: Path, other: str, tmp_path: Path, capfd: Any
) -> None:
    command = ["launch.py", *TINY, other, "--steps=1", f"--restore={trained}", f"--workdir={tmp_path / 'w'}", *flags]
    assert launch.main(command) == 2
    assert said in capfd.readouterr().err and not (tmp_path / "w").exists()


def test_a_source_is_not_moved_aside(trained: Path, other: str, tmp_path: Path, capfd: Any) -> None:
    shutil.copytree(trained, tmp_path / "w")
    command = ["launch.py", *TINY, other, "--steps=1", f"--restore={tmp_path}/w", f"--workdir={tmp_path}/w"]
    assert launch.main([*command, "--overwrite"]) == 2
    assert "would move" in capfd.readouterr().err
    assert (tmp_path / "w" / "results.json").exists() and not (tmp_path / "w.old-1").exists()


@pytest.mark.parametrize(
    "held",
    ["{}", "[]", '{"target": null}', '{"target": {"kind": "chars"}}', '{"target": {"kind": "bpe", "json": "x"}}'],
)
def test_damaged_tokenizers_are_one_line_that_names_them(held: str, trained: Path, tmp_path: Path, capfd: Any) -> None:
    shutil.copytree(trained, tmp_path / "w")
    (tmp_path / "w" / "tokenizers.json").write_text(held, encoding="utf-8")
    assert launch.main(["launch.py", "--experiment=translate", f"--restore={tmp_path}/w"]) == 2
    said = capfd.readouterr().err
    assert "tokenizers.json describes no tokenizers" in said and said.count("\n") == 1


def test_tokenizers_that_the_checkpoint_does_not_know(
    trained: Path, files: list[str], tmp_path: Path, capfd: Any
) -> None:
    shutil.copytree(trained, tmp_path / "w")
    held = json.loads((tmp_path / "w" / "tokenizers.json").read_text())
    held["source"]["symbols"][:2] = held["source"]["symbols"][1::-1]
    (tmp_path / "w" / "tokenizers.json").write_text(json.dumps(held), encoding="utf-8")
    assert launch.main(["launch.py", *TINY, *files, f"--restore={tmp_path}/w", f"--workdir={tmp_path}/v"]) == 2
    assert "other tokenizers than its tokenizers.json" in capfd.readouterr().err
