"""Training on pairs, from files to a model that translates: judged, ended early, and resumed to the bit."""

import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import launch
from tests.pairs_run import phones, words, write_pairs
from transformer_jax import checkpoint

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


def test_other_tokenizers_are_refused_where_their_ids_would_be_taken(trained: Path, tmp_path: Path, capfd: Any) -> None:
    path = tmp_path / "other.tsv"
    path.write_text("".join(f"{word}x\t{phones(word)}\n" for word in words(30, 1)), encoding="utf-8")
    command = [
        "launch.py",
        *TINY,
        f"--pairs={path}",
        "--steps=1",
        f"--restore={trained}",
        f"--workdir={tmp_path / 'w'}",
    ]
    assert launch.main(command) == 2
    assert "other tokenizers" in capfd.readouterr().err and not (tmp_path / "w").exists()
    assert launch.main([*command, "--parts=encoder,decoder"]) == 0
