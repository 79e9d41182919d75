"""From files to numbers and translations by the command line alone, with each tokenizer that writes texts."""

import dataclasses
import io
import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import launch
from experiments import ensembles, evaluate
from experiments.flags import parse
from experiments.workdir import WorkdirError, open_workdir
from tests.pairs_run import phones, words, write_pairs
from transformer_jax import checkpoint
from transformer_jax.config import Config, Hyper, to_dict
from transformer_jax.data import metrics

TINY = [
    "--experiment=train", "--task=pairs", "--d_model=16", "--num_heads=2", "--num_layers=1", "--seq_len=24",
    "--batch_size=16", "--length_buckets=1", "--scan_unroll=1", "--ema_decay=0", "--dropout_rate=0", "--steps=40",
    "--eval_every=20", "--learning_rate=1e-2", "--metrics=phone_error_rate,word_error_rate",
]  # fmt: skip


def metaspace(folder: Path) -> str:
    """A tokenizer.json whose texts come back, and whose mark of the unknown has a name of its own."""
    package = pytest.importorskip("tokenizers")
    model = package.Tokenizer(package.models.BPE(unk_token="<what>"))
    model.pre_tokenizer = package.pre_tokenizers.Metaspace(prepend_scheme="never")
    model.decoder = package.decoders.Metaspace(prepend_scheme="never")
    trainer = package.trainers.BpeTrainer(vocab_size=40, special_tokens=["<what>"], show_progress=False)
    made = words(100, 0)
    model.train_from_iterator([*made, *map(phones, made)], trainer)
    model.save(str(folder / "own.json"))
    return str(folder / "own.json")


class Made(NamedTuple):
    """A run, its folder of an evaluation, and the rows of outputs.tsv."""

    run: Path
    evaluation: Path
    rows: list[list[str]]


@pytest.fixture(scope="module", params=["bytes", "bpe", "file"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder, texts = tmp_path_factory.mktemp(request.param), words(120, 0)
    given = metaspace(folder) if request.param == "file" else request.param
    pairs, dev = write_pairs(folder / "a.tsv", texts[:100]), write_pairs(folder / "b.tsv", texts[100:])
    run, place = folder / "run", folder / "evaluation"
    flags = [f"--pairs={pairs}", f"--dev={dev}", f"--tokenizer={given}", "--bpe_size=280", f"--workdir={run}"]
    assert launch.main(["launch.py", *TINY, *flags]) == 0
    if request.param == "file":
        Path(given).unlink()  # the run has what it needs
    assert launch.main(["launch.py", "--experiment=evaluate", f"--restore={run}", f"--workdir={place}"]) == 0
    rows = [line.split("\t") for line in (place / "outputs.tsv").read_text(encoding="utf-8").splitlines()[1:]]
    return Made(run, place, rows)


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def test_the_metrics_that_are_asked_for_judge_it(made: Made) -> None:
    """Edits of phones over phones, and words: by hand from outputs.tsv, as training and evaluation have them."""
    judged = [json.loads(line) for line in (made.run / "metrics.jsonl").read_text().splitlines() if "split" in line]
    best = min(judged, key=lambda row: (row["phone_error_rate"], row["loss"]))["step"]
    found = read(made.run / "results.json")
    assert found["measured_at"] == best
    assert checkpoint.read_meta(made.run / "checkpoints", best)["judged_by"] == "phone_error_rate"
    edits = sum(metrics.closest(row[3], [phones(row[1])])[1] for row in made.rows)
    rates = {
        "phone_error_rate": 100 * edits / sum(len(phones(row[1]).split()) for row in made.rows),
        "word_error_rate": 100 * sum(row[3] != phones(row[1]) for row in made.rows) / len(made.rows),
    }
    split = read(made.evaluation / "results.json")["splits"]["dev"]
    assert {name: metric["value"] for name, metric in split["metrics"].items()} == pytest.approx(rates)
    assert {name: found["report"][name] for name in rates} == pytest.approx(rates)
    assert rates["phone_error_rate"] not in (0.0, 100.0, rates["word_error_rate"]), "else this model shows nothing"
    page = (made.evaluation / "report.html").read_text(encoding="utf-8")
    assert "symbols that are mistaken" in page and "those with the most edits, in symbols" in page


def test_a_line_is_translated_as_it_was_judged(made: Made, capsys: Any, monkeypatch: Any) -> None:
    given = "".join(f"{row[1]}\n" for row in made.rows)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given.encode())))
    capsys.readouterr()
    assert launch.main(["launch.py", "--experiment=translate", f"--restore={made.run}"]) == 0
    assert capsys.readouterr().out.splitlines() == [row[3] for row in made.rows]
    kinds = {side["kind"] for side in read(made.run / "tokenizers.json").values()}
    assert kinds == {made.run.parent.name.removesuffix("0")}


def test_another_evaluation_may_ask_for_others(made: Made, tmp_path: Path, capsys: Any) -> None:
    command = ["launch.py", "--experiment=evaluate", f"--restore={made.run}"]
    assert launch.main([*command, "--metrics=chrf, character_error_rate", f"--workdir={tmp_path / 'w'}"]) == 0
    split = read(tmp_path / "w" / "results.json")["splits"]["dev"]
    assert list(split["metrics"]) == ["chrf", "character_error_rate"]
    assert "in characters" in (tmp_path / "w" / "report.html").read_text(encoding="utf-8")
    assert (tmp_path / "w" / "outputs.tsv").read_bytes() == (made.evaluation / "outputs.tsv").read_bytes()
    capsys.readouterr()
    assert launch.main([*command, "--metrics=word_eror_rate", f"--workdir={tmp_path / 'v'}"]) == 2
    err = capsys.readouterr().err
    assert "unknown metric 'word_eror_rate': did you mean word_error_rate" in err and err.count("\n") == 1
    assert launch.main([*command, "--metrics=chrf,chrf", f"--workdir={tmp_path / 'v'}"]) == 2
    assert "names one twice" in capsys.readouterr().err
    assert launch.main(["launch.py", "--experiment=translate", f"--restore={made.run}", "--metrics=chrf"]) == 2
    assert "--metrics has no effect in --experiment=translate" in capsys.readouterr().err
    assert not (tmp_path / "v").exists()


def test_an_unknown_metric_is_refused_before_a_file_is_made(made: Made, tmp_path: Path, capsys: Any) -> None:
    flags = [f"--pairs={made.run.parent / 'a.tsv'}", "--tokenizer=bytes", f"--workdir={tmp_path / 'w'}"]
    assert launch.main(["launch.py", *TINY, *flags, "--metrics=blue"]) == 2
    assert "unknown metric 'blue': did you mean bleu" in capsys.readouterr().err and not (tmp_path / "w").exists()
    other = ["launch.py", "--experiment=train", "--task=reverse", f"--workdir={tmp_path / 'w'}", "--metrics=bleu"]
    assert launch.main(other) == 2
    assert "--metrics is read with --task=pairs or cmudict" in capsys.readouterr().err


def test_models_that_are_judged_by_different_metrics_write_together(made: Made, tmp_path: Path) -> None:
    """One has others in its config.json; another, of an earlier version, has no such field and loads too."""
    held = read(made.run / "config.json")
    others = {"other": {"metrics": "bleu"}, "earlier": {}}
    for name, more in others.items():
        changed = json.loads(json.dumps(held))
        del changed["identity"]["config"]["metrics"]
        changed["identity"]["config"] |= more
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(changed))
        for shared in ("tokenizers.json", "checkpoints"):
            (tmp_path / name / shared).symlink_to(made.run / shared)
    restore = ",".join(map(str, [made.run, *(tmp_path / name for name in others)]))
    settings, _ = parse(["launch.py", "--experiment=evaluate", f"--restore={restore}"], {"evaluate": evaluate.FLAGS})
    loaded = ensembles.load(settings)
    assert len(loaded.translator.models) == 3
    assert loaded.translator.config.metrics == "phone_error_rate,word_error_rate"
    alone = ensembles.load(dataclasses.replace(settings, restore=str(tmp_path / "earlier")))
    assert alone.translator.config.metrics == ""


def test_a_workdir_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    """Its config.json lacks the field, which had what is the default now."""

    def opened(config: Config) -> bool:
        fields = {name: value for name, value in to_dict(config).items() if name != "steps"}
        wanted = {"experiment": "x", "config": fields, "arms": {"on": {"config": fields, "hyper": to_dict(Hyper())}}}
        return open_workdir(str(tmp_path / "w"), wanted, {}).resumed

    assert not opened(Config())
    held = read(tmp_path / "w" / "config.json")
    for part in (held["identity"], held["identity"]["arms"]["on"]):
        del part["config"]["metrics"]
    (tmp_path / "w" / "config.json").write_text(json.dumps(held))
    with pytest.raises(WorkdirError, match="config.metrics is '' there, 'bleu' here"):
        opened(Config(metrics="bleu"))
    assert opened(Config())
