"""What `--experiment=evaluate` draws of a model of pairs, when it writes, and in which folder."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import launch
from experiments import (
    ensembles,
    evaluate,
    evaluating,
    evaluation,
    plots_pairs,
    report_pairs,
    translating,
)
from experiments.flags import parse
from tests.pairs_run import BASE, loaded, make_run, words, write_pairs
from tests.quick import jit
from transformer_jax import beam
from transformer_jax.data import END
from transformer_jax.errors import ConfigError

LONG = "abcabcabcabc"  # longer than a row


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run that has hardly begun: dev holds aaa and LONG, test bbb, both ccc."""
    folder, made = tmp_path_factory.mktemp("show"), words(40, 3)
    files = {"pairs": made, "dev": ["aaa", LONG, "ccc"], "test": ["bbb", "ccc", "ccc"]}
    config = BASE.replace(**{name: str(write_pairs(folder / f"{name}.tsv", part)) for name, part in files.items()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(beam, "_search", jit(beam.search, static_argnames=("beam", "n_best")))
        yield make_run(folder / "run", config, saves=(2,))


def evaluated(run: Path, folder: Path, *flags: str) -> int:
    return launch.main(["launch.py", "--experiment=evaluate", f"--restore={run}", f"--workdir={folder}", *flags])


def drawn(page: str, split: str) -> list[str]:
    """The sources whose heads the page draws of a split."""
    parts = re.split(r"<h2>", page)
    part = next((part for part in parts if part.startswith(f"{split}: where the heads look")), "")
    return re.findall(r"<h3>(.*?) →", part)


# --- --show ---------------------------------------------------------------------------


def test_sources_are_named_as_they_stand() -> None:
    there = ["a", "b", "a|b", " c ", "d", "|", "x y"]
    assert evaluating.named("", there) == []
    assert evaluating.named("a", there) == ["a"]
    assert evaluating.named(" d | x y", there) == ["d", "x y"]
    # The longest piece first: what holds a bar, or has a space at an end, is named as it stands.
    assert evaluating.named("a|b", there) == ["a|b"]
    assert evaluating.named("b|a", there) == ["b", "a"]
    assert evaluating.named("d|a|b| c |b", there) == ["d", "a|b", " c ", "b"]
    assert evaluating.named("|", there) == ["|"]
    assert evaluating.named("d|d", there) == ["d"]


def test_what_is_no_source_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"--show='oisaeu': no such source is to be evaluated; .*: 'oiseau'"):
        evaluating.named("chat|oisaeu", ["chien", "chat", "oiseau", "oie"])


def test_each_split_draws_the_sources_that_it_has(run: Path, tmp_path: Path) -> None:
    assert evaluated(run, tmp_path / "w", "--show=ccc|bbb|aaa") == 0
    page = (tmp_path / "w" / "report.html").read_text(encoding="utf-8")
    assert drawn(page, "dev") == ["ccc", "aaa"] and drawn(page, "test") == ["ccc", "bbb"]


def test_a_source_that_is_nowhere_is_refused_before_anything_is_done(
    run: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluating, "translate", lambda *a, **o: pytest.fail("a model was asked"))
    assert evaluated(run, tmp_path / "w", "--show=aab") == 2
    err = capsys.readouterr().err
    assert "--show='aab': no such source" in err and "'aaa'" in err and err.count("\n") == 1
    assert not (tmp_path / "w").exists()


def test_a_shown_source_that_is_too_long_is_said(run: Path, tmp_path: Path, capsys: Any) -> None:
    assert evaluated(run, tmp_path / "w", f"--show={LONG}|aaa") == 0
    page = (tmp_path / "w" / "report.html").read_text(encoding="utf-8")
    assert drawn(page, "dev") == ["aaa"]
    assert f"--show='{LONG}', 12 tokens: nothing was written for it" in capsys.readouterr().out


def test_a_picture_that_is_too_large_is_said_and_not_drawn(
    run: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots_pairs, "LONGEST_SIDE", 2 * 13 * plots_pairs.CELL * plots_pairs.plots.DPI - 1)
    assert evaluated(run, tmp_path / "w", "--show=aaa") == 0
    assert drawn((tmp_path / "w" / "report.html").read_text(encoding="utf-8"), "dev") == []
    assert "--show='aaa', 3 tokens: too many for a picture of its attention" in capsys.readouterr().out
    assert evaluated(run, tmp_path / "v") == 0  # without being asked, only what can be drawn
    assert drawn((tmp_path / "v" / "report.html").read_text(encoding="utf-8"), "test") == []


@pytest.mark.parametrize(("layers", "heads"), [(3, 4), (1, 64), (64, 1)])
def test_the_largest_picture_is_one_that_can_be_drawn(
    layers: int, heads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its names and margins; twice as many tokens are refused."""

    def measured(path: Path, height: float, width: float) -> Any:
        sizes = [plots_pairs.plots.DPI * size for size in (height, width)]
        assert max(sizes) < 1 << 16 and sizes[0] * sizes[1] < 1.3 * plots_pairs.MOST_PIXELS
        raise StopIteration

    monkeypatch.setattr(plots_pairs.plots, "drawing", measured)
    tokens = max(t for t in range(2, 300) if plots_pairs.can_draw(layers, heads, t))
    assert tokens > 20 and not plots_pairs.can_draw(layers, heads, 2 * tokens)
    names = ["a" * plots_pairs.LONGEST] * tokens
    with pytest.raises(StopIteration):
        plots_pairs.attention(tmp_path / "a.png", np.zeros((layers, heads, tokens, tokens)), names, names)


def test_outputs_and_numbers_are_written_before_pictures(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Any:
        raise MemoryError("a picture")

    for place, name in ((report_pairs, "write"), (evaluation, "heads_of")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, fails)
            with pytest.raises(MemoryError, match="a picture"):
                evaluated(run, tmp_path / name)
        assert (tmp_path / name / "outputs.tsv").read_text(encoding="utf-8").count("\n") == 7
        assert json.loads((tmp_path / name / "results.json").read_text())["splits"]["test"]["items"] == 3


# --- folders and splits -----------------------------------------------------------------


def folder_of(run: Path | str, *flags: str) -> str:
    line = ["launch.py", "--experiment=evaluate", f"--restore={run}", *flags]
    settings, _ = parse(line, {"evaluate": evaluate.FLAGS})
    given = {name: settings.overrides[name] for name in ("pairs", "dev", "test") if name in settings.overrides}
    return evaluation.folder_name(settings, ensembles.load(settings), given)


def test_no_two_evaluations_share_a_folder(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.restoring.restore_weights", _no_weights)
    asked = [
        [run], [run, "--pairs=a/x.tsv"], [run, "--pairs=b/x.tsv"], [run, "--dev=a/x.tsv"], [run, "--test=a/x.tsv"],
        [run, "--pairs=a/x.tsv", "--beam=3"], [run, "--pairs=a/x.en,a/x.de"], [run, "--pairs=a/x.en,b/x.de"],
        [f"{run},{run}"], [f"{run},{run},{run}"], [run, "--attention_temperature=0.5"],
        [run, "--attention_temperature=0.6"], [run, "--dk_exponent=0.6"], [run, "--metrics=exact_match"],
        [run, "--beam=2", "--length_penalty=0.1234567"], [run, "--beam=2", "--length_penalty=0.1234568"],
        [run, "--restore_step=2"], [run, "--restore_step=newest"],
    ]  # fmt: skip
    other = tmp_path / "other"
    other.symlink_to(run)
    asked += [[f"{run},{other}"]]
    names = [folder_of(*flags) for flags in asked]
    assert len(set(names)) == len(names)
    assert names == [folder_of(*flags) for flags in asked]
    # What is as usual says nothing, and neither does what changes no number.
    assert folder_of(run, "--attention_temperature=1.0", "--batch_size=3", "--strict", "--show=aaa") == "evaluation"
    assert folder_of(run, f"--pairs={Path.cwd()}/a/x.tsv") == folder_of(run, "--pairs=a/x.tsv")


def _no_weights(*_: Any) -> Any:
    from transformer_jax import checkpoint

    return checkpoint.Restored(None, {}, 2, [])


@pytest.mark.parametrize("name", ["dev", "test"])
def test_a_file_of_pairs_does_not_take_the_name_of_another_split(name: str, run: Path, tmp_path: Path) -> None:
    pairs = write_pairs(tmp_path / name, ["aa", "bb"])
    flags = f"--pairs={pairs}", f"--{name}={write_pairs(tmp_path / 'x.tsv', ['c'])}"
    assert evaluated(run, tmp_path / "w", *flags) == 0
    splits = json.loads((tmp_path / "w" / "results.json").read_text())["splits"]
    assert {key: split["items"] for key, split in splits.items()} == {"pairs": 2, name: 1}


def test_outputs_without_an_end_are_counted(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a model that has hardly begun writes runs into the longest row."""
    file = tmp_path / "other.tsv"
    file.write_text("abc\ta b\nab\tb\n", encoding="utf-8")
    assert evaluated(run, tmp_path / "w", f"--pairs={file}") == 0
    said = capsys.readouterr().out
    outputs = translating.translate(loaded(f"--restore={run}").translator, ["abc", "ab"]).outputs
    unended = sum(END not in best.ids for best, *_ in outputs)
    assert unended and f"other.tsv: {unended} of 2 outputs were cut off without an end" in said


def test_the_loss_of_an_ensemble_is_of_pairs_that_fit_every_model(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = Path(shutil.copytree(run, tmp_path / "short"))
    held = json.loads((short / "config.json").read_text())
    held["identity"]["config"]["seq_len"] = 5
    (short / "config.json").write_text(json.dumps(held))
    file = tmp_path / "other.tsv"
    file.write_text("abc\ta b\nabcabcabc\tb\n", encoding="utf-8")
    both = ["launch.py", "--experiment=evaluate", f"--restore={run},{short}", f"--pairs={file}"]
    assert launch.main([*both, f"--workdir={tmp_path / 'w'}"]) == 0
    assert "1 of 2 pairs do not fit seq_len=5 and are in no batch" in capsys.readouterr().out


# --- what is asked of a trained model ---------------------------------------------------


def test_letters_in_any_form_are_right_where_outputs_are_composed() -> None:
    """A target of nfd is written composed: a reference in decomposed form is the same text."""
    translator: Any = SimpleNamespace(tokenizers=SimpleNamespace(target=SimpleNamespace(kind="nfd")))
    decomposed = "e\u0301te\u0301"
    assert evaluating._sides(translator, [("x", [decomposed])]) == (["x"], [["été"]])
    translator.tokenizers.target.kind = "chars"
    assert evaluating._sides(translator, [("x", [decomposed])]) == (["x"], [[decomposed]])


@pytest.mark.parametrize("flag", ["--learning_rate=77", "--length_buckets=9", "--dropout_rate=0.9", "--bpe_size=300"])
def test_what_only_training_reads_is_refused(run: Path, flag: str, tmp_path: Path, capsys: Any) -> None:
    assert evaluated(run, tmp_path / "w", flag) != 0
    assert f"{flag.partition('=')[0]} has no effect on a trained model: leave it out" in capsys.readouterr().err
    assert not (tmp_path / "w").exists()
