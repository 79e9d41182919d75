"""The command line as a person meets it: what it says, and that a mistake writes nothing."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

import launch
from experiments import REGISTRY

ROOT = Path(__file__).resolve().parent.parent


def says(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = launch.main(["launch.py", *args])
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_alone_it_says_what_it_can_do(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = says(capsys)
    assert code == 0
    assert all(name in out for name in REGISTRY) and "--help" in out


def test_list_is_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = says(capsys, "--list")
    assert code == 0
    assert [line.split(":")[0] for line in out.splitlines()] == list(REGISTRY)


def test_help_describes_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    from experiments.grid import CONFIG_FIELDS, HYPER_FIELDS

    code, out, _ = says(capsys, "--help")
    assert code == 0
    for name, field in (CONFIG_FIELDS | HYPER_FIELDS).items():
        line = next(line for line in out.splitlines() if line.startswith(f"  --{name}:"))
        assert field.metadata["help"] in line and "default" in line


def test_help_is_quick() -> None:
    start = time.monotonic()
    subprocess.run([sys.executable, "launch.py", "--help"], cwd=ROOT, capture_output=True, check=True)
    # 2 s is the promise; a busy test machine is given as much again.
    assert time.monotonic() - start < 4.0


MISTAKES = {
    "--experiment=train --pairs=train.tsv": "--pairs is read with --task=pairs, not with text",
    "--experiment=train --task=copy --tokenizer=bpe": "--tokenizer is read with --task=text or pairs or cmudict",
    "--experiment=claims --only=B77": "no claim B77; near: B",
    "--experiment=dk_scaling --only=B12": "--only has no effect",
    "--experment=train": "did you mean --experiment",
    "--experiment=dk_scalin": "did you mean dk_scaling",
    "--experiment=train --d_modle=3": "unknown flag --d_modle: did you mean --d_model",
    "--experiment=train --d_model=wide": "d_model",
    "--experiment=train --d_model=3.0": "d_model",
    "--experiment=train --d_model=0": "d_model=0 is out of range: at least 1",
    "--experiment=train --learning_rate=-1": "learning_rate=-1 is out of range: at least 0",
    "--experiment=train --learning_rate=nan": "learning_rate=nan is out of range",
    "--experiment=train --dropout_rate=1": "dropout_rate=1 is out of range",
    "--experiment=train --num_heads=5": "num_heads=5 does not divide d_model=128",
    "--experiment=train --num_kv_heads=3": "num_kv_heads=3 does not divide num_heads=4",
    "--experiment=train --norm=rms": "unknown norm 'rms': did you mean rmsnorm",
    "--experiment=train --ffn=swigl": "did you mean swiglu",
    "--experiment=train --preset=tny": "unknown preset 'tny': did you mean tiny",
    "--experiment=train --remat maybe": "'maybe' is not a flag",
    "--experiment=train --remat=maybe": "remat",
    "--experiment=train --remat False": "'False' is not a flag",
    "--experiment=train --plan": "--plan has no effect in --experiment=train",
    "--experiment=train --seeds=3": "--seeds has no effect in --experiment=train",
    "--experiment=train --minutes=-1": "--minutes=-1.0 is out of range",
    "--experiment=train --minutes=nan": "--minutes=nan is out of range",
    "--experiment=train --seed=9223372036854775808": "--seed=9223372036854775808 is out of range: at most",
    "--experiment=train --task=copy --steps=3000000000": "steps=3000000000 is out of range",
    "--experiment=train --terms=dropuot": "did you mean dropout",
    "--experiment=train --positions=learned --seq_len=2000": "seq_len=2000 is past the position table",
    "--experiment=train --text=none.txt": "none.txt",
    "--experiment=train --text=empty.txt": "empty",
    "--experiment=train --text=latin.txt": "UTF-8",
    "--experiment=train --text=short.txt": "short.txt",
    "--experiment=train --text=.": "--text",
    "--experiment=train --vocab_size=50": "50",
    "--experiment=train --schedule=cosine --warmup_steps=9 --steps=5": "warmup_steps=9 is past steps=5",
    "--experiment=dk_scaling --sweep=learnin_rate=1": "unknown field 'learnin_rate': did you mean learning_rate",
    "--experiment=dk_scaling --sweep=num_layers=two": "num_layers=two: not a int",
    "--experiment=dk_scaling --sweep=num_layers": "write FIELD=VALUE",
    "--experiment=dk_scaling --sweep=num_layers=0": "num_layers=0 is out of range",
    "--experiment=dk_scaling --sweep=num_layers=2,2": "repeats",
    "--experiment=dk_scaling --depth=deep": "--depth=deep: choose from quick, full",
    "--experiment=dk_scaling --seeds=-2": "--seeds=-2 is out of range",
    "--experiment=dk_scaling --dk_exponent=1": "is what this experiment sweeps",
    "--experiment=dk_scaling --text=short.txt": "short.txt",
    "--experiment=evaluate": "--restore=WORKDIR",
    "--experiment=evaluate --restore=nowhere": "nowhere",
}  # fmt: skip


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line_and_writes_nothing(
    line: str, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (elsewhere / "empty.txt").write_bytes(b"")
    (elsewhere / "latin.txt").write_bytes("café ".encode("latin-1") * 500)
    (elsewhere / "short.txt").write_text("too short")
    before = sorted(elsewhere.rglob("*"))
    code, out, err = says(capsys, *line.split())
    assert code == 2
    assert not out
    assert err.startswith("launch.py: ") and err.count("\n") == 1, err
    assert MISTAKES[line] in err
    assert sorted(elsewhere.rglob("*")) == before


def test_debug_shows_the_traceback() -> None:
    from transformer_jax.errors import UserError

    with pytest.raises(UserError, match="d_model"):
        launch.main(["launch.py", "--experiment=train", "--d_model=0", "--debug"])


def test_booleans_that_are_off_are_off() -> None:
    from experiments import flags

    for given, value in (("--remat=False", False), ("--noremat", False), ("--remat=0", False), ("--remat", True)):
        settings, _ = flags.parse(["x", "--experiment=t", given], {"t": ()})
        assert settings.overrides == {"remat": value}


def test_zero_and_false_override_a_base(elsewhere: Path) -> None:
    from experiments import flags, train

    settings, _ = flags.parse(
        ["x", "--experiment=train", "--clip_norm=0", "--noscale_embeddings", "--steps=9"], {"train": train.FLAGS}
    )
    config, hyper, _ = train.configuration(settings)
    assert hyper.clip_norm == 0 and not config.scale_embeddings and not config.has("clip")


def test_terms_follow_the_numbers() -> None:
    from experiments import flags, train

    settings, _ = flags.parse(["x", "--experiment=train", "--dropout_rate=0.1"], {"train": train.FLAGS})
    assert train.configuration(settings)[0].terms == ("dropout", "clip")


def test_plan_runs_nothing(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = says(capsys, "--experiment=dk_scaling", "--plan", "--seeds=2")
    assert code == 0
    assert "d_k=16 off" in out and "36" in out  # 6 arms, 3 rates, 2 seeds
    assert not list(elsewhere.iterdir())


def test_a_workdir_of_another_run_is_refused_by_its_values(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = ["--experiment=train", "--d_model=8", "--num_heads=1", "--num_layers=1", "--seq_len=8", "--batch_size=2",
            "--steps=2", "--task=copy", "--workdir=w"]  # fmt: skip
    assert says(capsys, *tiny)[0] == 0
    assert json.loads((elsewhere / "w/results.json").read_text())["steps"] == 2
    files = {path: path.read_bytes() for path in elsewhere.rglob("*") if path.is_file()}
    code, _, err = says(capsys, *tiny[:-2], "--task=reverse", "--workdir=w")
    assert code == 2 and "config.task is 'copy' there, 'reverse' here" in err
    code, out, _ = says(capsys, *tiny)  # finished: reprinted
    assert code == 0 and "copy" in out
    assert files == {path: path.read_bytes() for path in elsewhere.rglob("*") if path.is_file()} | {
        path: files[path] for path in files if path.name == "config.json"
    }
    assert says(capsys, *tiny, "--overwrite")[0] == 0
    assert (elsewhere / "w.old-1/results.json").exists() and (elsewhere / "w/results.json").exists()
