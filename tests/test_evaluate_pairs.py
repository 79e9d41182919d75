"""`--experiment=evaluate` on a model of pairs: its numbers, its files, its page."""

import dataclasses
import html
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import launch
from experiments import ensembles, evaluate, evaluating, evaluation, heads, loop, plots_pairs, report_pairs, translating
from experiments.evaluating import Item
from experiments.flags import parse
from experiments.samples import samples
from experiments.translating import Translator
from tests.pairs_run import BASE, loaded, make_run, phones, words, write_pairs
from tests.quick import jit
from transformer_jax import beam
from transformer_jax.batch import Batch
from transformer_jax.data import END, START, make_task, metrics
from transformer_jax.data.tokenizers import Bytes
from transformer_jax.encoder_decoder import forward
from transformer_jax.errors import ConfigError

DEV, TEST = 13, 10  # no multiples of a batch


class Done(NamedTuple):
    """A run, what was evaluated, and the files that say so."""

    run: Path
    folder: Path
    results: dict[str, Any]
    rows: list[list[str]]
    page: str
    translator: Translator


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Done]:
    folder = tmp_path_factory.mktemp("evaluate")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(beam, "_search", jit(beam.search, static_argnames=("beam", "n_best")))
        made = words(300 + DEV + TEST, 1)
        files = {"pairs": made[:300], "dev": made[300 : 300 + DEV], "test": made[300 + DEV :]}
        config = BASE.replace(**{n: str(write_pairs(folder / f"{n}.tsv", part)) for n, part in files.items()})
        run = make_run(folder / "run", config, saves=(150,))
        # Its own training file is not needed any more.
        (folder / "pairs.tsv").unlink()
        assert launch.main(["launch.py", "--experiment=evaluate", f"--restore={run}", "--beam=2"]) == 0
        place = run / "evaluation-beam-2"
        rows = [line.split("\t") for line in (place / "outputs.tsv").read_text(encoding="utf-8").splitlines()]
        results = json.loads((place / "results.json").read_text(encoding="utf-8"))
        page = (place / "report.html").read_text(encoding="utf-8")
        yield Done(run, place, results, rows, page, loaded(f"--restore={run}", "--beam=2").translator)


def test_another_search_file_or_step_has_its_own_folder(done: Done) -> None:
    def named(given: dict[str, str], *args: str) -> str:
        line = ["launch.py", "--experiment=evaluate", f"--restore={done.run}", *args]
        settings, _ = parse(line, {"evaluate": evaluate.FLAGS})
        return evaluation.folder_name(settings, ensembles.load(settings), given)

    names = [
        named({}),
        named({"pairs": "a/fr.tsv"}),
        named({"pairs": "a/fr.tsv", "test": "en.gz,fr.gz"}, "--beam=5"),
        named({}, "--beam=5", "--penalty=gnmt", "--length_penalty=0.6"),
        named({}, "--restore_step=150"),
    ]
    assert [re.sub(r"-[0-9a-f]{8}$", "-…", name) for name in names] == [
        "evaluation",
        "evaluation-fr-…",
        "evaluation-fr-en-beam-5-…",
        "evaluation-beam-5-penalty-gnmt-0.6",
        "evaluation-step-150",
    ]


def pairs_of(rows: list[list[str]], split: str) -> list[tuple[str, list[str]]]:
    return [(row[1], row[2].split(report_pairs.BETWEEN)) for row in rows if row[0] == split]


# --- numbers ------------------------------------------------------------------------


def test_q1_every_pair_is_an_output_once_and_in_order(done: Done) -> None:
    assert done.rows[0] == list(report_pairs.COLUMNS)
    splits = [row[0] for row in done.rows[1:]]
    assert splits == ["dev"] * DEV + ["test"] * TEST
    for split, count in (("dev", DEV), ("test", TEST)):
        sources = [line.split("\t")[0] for line in (done.run.parent / f"{split}.tsv").read_text().splitlines()]
        assert [source for source, _ in pairs_of(done.rows, split)] == sources
        assert done.results["splits"][split]["items"] == count


def test_q2_the_metrics_are_those_of_the_outputs(done: Done) -> None:
    for split in ("dev", "test"):
        rows = [row for row in done.rows if row[0] == split]
        wrong = sum(row[3] != phones(row[1]) for row in rows)
        found = {name: metric["value"] for name, metric in done.results["splits"][split]["metrics"].items()}
        assert found["word_error_rate"] == pytest.approx(100 * wrong / len(rows)) == 100 - found["exact_match"]
        edits = sum(metrics.closest(row[3], [phones(row[1])])[1] for row in rows)
        length = sum(len(phones(row[1]).split()) for row in rows)
        assert found["phone_error_rate"] == pytest.approx(100 * edits / length)
        assert [row[5] for row in rows] == [str(int(row[3] == phones(row[1]))) for row in rows]
        assert 0 < wrong < len(rows)  # else this model shows nothing
    made = translating.translate(done.translator, [row[1] for row in done.rows[1:]])
    assert made.best() == [row[3] for row in done.rows[1:]]
    scores = [float(row[4]) for row in done.rows[1:]]
    np.testing.assert_allclose(scores, [found[0].score for found in made.outputs], atol=2e-5)


def test_q3_perplexity_is_by_tokens(done: Done) -> None:
    config, model = done.translator.config, done.translator.models[0]
    names = done.translator.tokenizers
    nats, tokens = 0.0, 0
    pairs = pairs_of(done.rows, "dev")
    targets = [names.target.encode(several[0]) for _, several in pairs]
    sources = [names.source_ids(source) for source, _ in pairs]
    T, S = max(map(len, targets)) + 1, max(map(len, sources))
    pad = lambda rows, width: jnp.asarray([row + [0] * (width - len(row)) for row in rows])  # noqa: E731
    lengths = jnp.asarray([len(row) + 1 for row in targets])
    batch = Batch(
        pad([[START, *row] for row in targets], T), pad([[*row, END] for row in targets], T), jnp.ones((DEV, T)),
        lengths_B=lengths, source_BS=pad(sources, S), source_lengths_B=jnp.asarray([len(row) for row in sources]),
    )  # fmt: skip
    logits, _ = jit(lambda p, b: forward(p, config, done.translator.hyper, b))(model, batch)
    log_p = np.asarray(jax.nn.log_softmax(logits, axis=-1))
    for i, row in enumerate(targets):
        for t, token in enumerate([*row, END]):
            nats, tokens = nats - log_p[i, t, token], tokens + 1
    found = done.results["splits"]["dev"]
    assert found["tokens"] == tokens
    assert found["loss"] == pytest.approx(nats / tokens, abs=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-5)


def test_a_judge_gives_the_same_numbers_and_null_for_a_diverged_model(done: Done) -> None:
    pairs = pairs_of(done.rows, "test")
    score = evaluating.judge(done.translator, pairs)
    found = {name: metric["value"] for name, metric in done.results["splits"]["test"]["metrics"].items()}
    before = beam._search._cache_size()
    assert score(done.translator.models[0]) == pytest.approx(found)
    broken = jax.tree.map(lambda x: x * jnp.nan, done.translator.models[0])
    assert score(broken) == dict.fromkeys(found)
    assert beam._search._cache_size() == before
    linear = done.translator.config.replace(attention_implementation="linear")
    with pytest.raises(ConfigError, match="no cache"):
        evaluating.judge(dataclasses.replace(done.translator, config=linear), pairs)


def test_white_space_around_symbols_is_no_error(done: Done) -> None:
    pairs = pairs_of(done.rows, "test")
    wide = [(source, [f" {several[0].replace(' ', '  ')} "]) for source, several in pairs]
    found = {name: metric["value"] for name, metric in done.results["splits"]["test"]["metrics"].items()}
    assert evaluating.judge(done.translator, wide)(done.translator.models[0]) == pytest.approx(found)
    assert evaluating.evaluate_pairs(done.translator, wide).scores["exact_match"].value == found["exact_match"]


def test_any_reference_is_right(done: Done) -> None:
    pairs = [(source, ["x", *several]) for source, several in pairs_of(done.rows, "test")]
    found = evaluating.evaluate_pairs(done.translator, pairs)
    there = done.results["splits"]["test"]["metrics"]
    assert {name: score.value for name, score in found.scores.items()} == pytest.approx(
        {name: metric["value"] for name, metric in there.items()}, abs=20
    )
    assert found.scores["word_error_rate"].value == pytest.approx(there["word_error_rate"]["value"])
    assert all(item.correct == (item.output in item.references) for item in found.items)


def test_a_file_of_other_pairs(done: Done, tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "other.tsv"
    file.write_text("abc\tɑ̃ b k\nabcabcabcabc\tb\nabx\tb\n\nba\n", encoding="utf-8")
    command = ["launch.py", "--experiment=evaluate", f"--restore={done.run}", f"--pairs={file}", "--beam=2"]
    assert launch.main([*command, f"--workdir={tmp_path / 'w'}"]) == 0
    out = capsys.readouterr().out
    results = json.loads((tmp_path / "w" / "results.json").read_text(encoding="utf-8"))
    assert list(results["splits"]) == ["other.tsv"] and results["splits"]["other.tsv"]["items"] == 3
    outputs = (tmp_path / "w" / "outputs.tsv").read_text(encoding="utf-8").splitlines()
    assert next(line for line in outputs if "abcabcabcabc" in line).endswith("\t0")
    assert "1 of 3 pairs do not fit seq_len=12 and are in no batch" in out
    assert "1 symbols of the source are not in its chars vocabulary" in out
    assert "1 blank line, 1 one-sided line (first: line 5)" in out
    assert launch.main([*command, f"--workdir={tmp_path / 'w'}", "--strict"]) == 2
    assert "line 5: a one-sided line" in capsys.readouterr().err


# --- what is said -------------------------------------------------------------------


def test_the_terminal_has_the_numbers(done: Done, capsys: Any) -> None:
    report_pairs.show(done.results, done.folder)
    out = capsys.readouterr().out
    for split in done.results["splits"].values():
        for name, metric in split["metrics"].items():
            line = next(line for line in out.splitlines() if line.startswith(metrics.METRICS[name].label))
            assert f"{metric['value']:.2f}" in line
    assert "beam 2, power length penalty 1" in out and "step 150" in out and "outputs.tsv" in out


def test_the_page_is_whole_and_loads_nothing(done: Done) -> None:
    assert not re.search(r"(src|href)=.(?!data:)", done.page) and "http" not in done.page.replace("http-equiv", "")
    text = html.unescape(re.sub(r"<[^>]+>", " ", done.page))
    for split in ("dev", "test"):
        for metric in done.results["splits"][split]["metrics"].values():
            assert f"{metric['value']:.2f}" in text
    wrong = [row for row in done.rows[1:] if row[5] == "0"]
    for row in wrong:
        assert all(cell in text for cell in row[1:4])
    assert "ɑ̃" in text and "jaxlib" in text
    # Three pairs, each with encoder, decoder and cross attention.
    assert done.page.count('class="scroll heads"') == 9


def test_sentences_have_bleu_with_its_signature(done: Done, tmp_path: Path, capsys: Any) -> None:
    names = dataclasses.replace(done.translator.tokenizers, target=Bytes())
    outputs = ["a man reads a book .", "two dogs run through the grass ."]
    references = [["a man reads a book ."], ["two dogs are running through the grass ."]]
    scores = evaluating.scores_of(dataclasses.replace(done.translator, tokenizers=names), outputs, references)
    items = [item_of("x", out, several[0]) for out, several in zip(outputs, references, strict=True)]
    found = {name: {"value": s.value, "signature": s.signature} for name, s in scores.items()}
    results = dict(done.results, splits={"s": {"items": 2, "loss": None, "perplexity": None, "metrics": found}})
    report_pairs.write(tmp_path, results, {"s": evaluating.Evaluated(items, scores)}, "words", {})
    report_pairs.show(results, tmp_path)
    page, said = (tmp_path / "report.html").read_text(encoding="utf-8"), capsys.readouterr().out
    for text in (page, said):
        assert "tok:13a" in text and "tok:none" in text and f"{scores['bleu'].value:.2f}" in text
    assert report_pairs.verdict(results) == [f"s: BLEU (13a) {scores['bleu'].value:.2f} of 2 items"]
    assert "that are mistaken" not in page and "in words" in page


def test_markup_in_texts_stays_text(done: Done, tmp_path: Path) -> None:
    hostile = "<b>&\"'$\\frac$"
    item = Item(hostile, [hostile], "<i>", -1.0, (4, END), 2, hostile, 3)
    found = {hostile: evaluating.Evaluated([item], {"word_error_rate": metrics.Score(100.0)})}
    results = dict(done.results, title=hostile, notes=[hostile], splits={hostile: done.results["splits"]["dev"]})
    shown = heads.Heads("cross", np.full((1, 2, 2, 3), 1 / 3), ["<i>", "$x$"], list("a_b"))
    report_pairs.write(tmp_path, results, found, "characters", {hostile: [(item, [shown])]})
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<b>" not in page and "<i>" not in page and html.escape(hostile, quote=False)[:9] in page


def test_tabs_and_breaks_in_texts_keep_the_columns(tmp_path: Path) -> None:
    item = Item("a\tb", ["c\nd", "e"], "f\r\ng", -1.5, (4, END), 2, "e", 3)
    report_pairs.write_outputs(tmp_path / "o.tsv", {"s": evaluating.Evaluated([item], {})})
    lines = (tmp_path / "o.tsv").read_bytes().decode().split("\n")
    assert lines[1] == "s\ta b\tc d ||| e\tf g\t-1.500000\t0" and lines[2:] == [""]


def item_of(source: str, output: str, reference: str) -> Item:
    edits = metrics.closest(output, [reference])[1]
    return Item(source, [reference], output, -1.0, (4,) * (len(output.split()) + 1), len(source), reference, edits)


ITEMS = [
    item_of("ab", "a b", "a b"), item_of("abc", "a b", "a b c"), item_of("ba", "x y", "b a"),
    item_of("abcd", "a x c", "a b c"), item_of("b", "b", "b"), item_of("cc", "x", "b"),
]  # fmt: skip


def test_the_worst_have_the_most_edits() -> None:
    assert [item.source for item in evaluating.worst(ITEMS, 3)] == ["ba", "cc", "abc"]
    assert len(evaluating.worst(ITEMS, 99)) == 4


def test_confusions_are_counted_over_all_errors() -> None:
    found = evaluating.confusions(ITEMS, "symbols", 9)
    assert found[0] == ("b", "x", 3) and ("c", "", 1) in found and ("a", "y", 1) in found
    assert sum(count for _, _, count in found) == sum(item.edits for item in ITEMS)


def test_groups_by_length_hold_each_item_once() -> None:
    found = evaluating.by_length(ITEMS, "word_error_rate")
    assert sum(count for _, count, _ in found) == len(ITEMS)
    assert found[0] == ("1", 1, 0.0) and found[1][0] == "2" and found[1][2] == pytest.approx(200 / 3)
    many = [item_of("a" * (1 + i % 40), "a", "a") for i in range(400)]
    found = evaluating.by_length(many, "word_error_rate")
    assert len(found) == evaluating.BINS and sum(count for _, count, _ in found) == 400
    assert max(count for _, count, _ in found) <= 80


def test_pairs_that_are_shown_are_wrong_and_right() -> None:
    assert [item.source for item in evaluating.telling(ITEMS)] == ["ba", "cc", "ab"]
    right = [item for item in ITEMS if item.correct]
    assert [item.source for item in evaluating.telling(right)] == ["ab", "b"]


# --- heads --------------------------------------------------------------------------


def test_weights_are_those_of_the_model_with_its_tokens_names(done: Done) -> None:
    translator = done.translator
    pairs = sorted(pairs_of(done.rows, "dev"), key=lambda pair: len(pair[0]))
    items = evaluating.evaluate_pairs(translator, [pairs[0], pairs[-1]]).items
    for item, found in zip(items, heads.heads_of(translator, items), strict=True):
        encoder, decoder, cross = found
        letters, written = [*item.source, "</s>"], [*item.output.split(), "</s>"]
        assert encoder.rows == encoder.columns == cross.columns == letters
        assert decoder.rows == cross.rows == written and decoder.columns == ["<s>", *written[:-1]]
        for one in found:
            assert one.weights_LNTS.shape == (1, 2, len(one.rows), len(one.columns))
            np.testing.assert_allclose(one.weights_LNTS.sum(axis=-1), 1.0, atol=1e-5)
        assert np.triu(decoder.weights_LNTS, 1).max() == 0.0
    # The longer one's own forward pass, without a neighbour.
    source = translator.tokenizers.source_ids(items[1].source)
    tokens = jnp.asarray([[START, *items[1].ids[:-1]]])
    batch = Batch(tokens, tokens, jnp.ones(tokens.shape), source_BS=jnp.asarray([source]))
    traces = jit(lambda p, b: forward(p, translator.config, translator.hyper, b, trace=True)[1])(
        translator.models[0], batch
    )
    alone = heads.heads_of(translator, items)[1]
    for one, trace in zip(alone, (traces.encoder, traces.decoder, traces.cross), strict=True):
        np.testing.assert_allclose(one.weights_LNTS, trace.weights_BNTS[:, 0], atol=1e-5)


def test_a_glyph_that_no_font_has_is_seen() -> None:
    assert plots_pairs.drawable("ɑ̃ʃʔ") == "ɑ̃ʃʔ"
    assert plots_pairs.drawable("\U000e0041") == "<E0041>"
    assert plots_pairs.drawable("a" * 30) == "a" * 11 + "…"
    assert plots_pairs.drawable("a" * plots_pairs.LONGEST) == "a" * plots_pairs.LONGEST


def test_a_picture_of_tokens_without_glyphs_is_drawn(tmp_path: Path) -> None:
    names = ["\U000e0041", "中", "$x_1$", "</s>"]
    width = plots_pairs.attention(tmp_path / "a.png", np.full((2, 3, 4, 4), 0.25), names, names)
    from PIL import Image

    with Image.open(tmp_path / "a.png") as picture:
        assert picture.width == pytest.approx(width * plots_pairs.plots.DPI, abs=2)


# --- around it ----------------------------------------------------------------------


def test_samples_of_a_training_are_texts(done: Done) -> None:
    task = make_task(done.translator.config.replace(pairs=done.translator.config.dev), done.translator.tokenizers)
    hyper = loop.device_hyper(done.translator.hyper)
    lines = samples(done.translator.config, done.translator.models[0], hyper, task)
    pairs = pairs_of(done.rows, "dev")[:3]
    greedy = dataclasses.replace(done.translator, beam=1)
    made = translating.translate(greedy, [source for source, _ in pairs]).best()
    want = [line for (source, several), out in zip(pairs, made, strict=True) for line in (source, several[0], out)]
    assert [line[15:] for line in lines] == want
    broken = jax.tree.map(lambda x: x * jnp.nan, done.translator.models[0])
    assert [line[15:] for line in samples(done.translator.config, broken, hyper, task)[2::3]] == ["diverged"] * 3


def test_a_folder_of_something_else_is_left_alone(done: Done, capsys: Any) -> None:
    before = (done.run / "config.json").read_bytes()
    command = ["launch.py", "--experiment=evaluate", f"--restore={done.run}", "--beam=2", f"--workdir={done.run}"]
    assert launch.main(command) == 2
    assert "holds another configuration" in capsys.readouterr().err
    assert (done.run / "config.json").read_bytes() == before


MISTAKES = {
    "--task=copy": "is a model of task pairs; give it other pairs by",
    "--mesh=data:2": "--mesh has no effect on the evaluation of pairs",
    "--pairs=none.tsv": "--pairs='none.tsv': no such file",
    "--test=none.tsv": "--test='none.tsv': no such file",
    "--n_best=2": "n_best=2 is out of range: from 1 to beam=1",
    "--average=3": "--average=3 wants as many checkpoints",
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_a_mistake_is_one_line(done: Done, flags: str, capsys: Any) -> None:
    assert launch.main(["launch.py", "--experiment=evaluate", f"--restore={done.run}", flags]) == 2
    err = capsys.readouterr().err
    assert MISTAKES[flags] in err and err.count("\n") == 1


def test_flags_of_pairs_are_refused_for_another_task(done: Done, tmp_path: Path, capsys: Any) -> None:
    held = json.loads((done.run / "config.json").read_text())
    held["identity"]["config"]["task"] = "copy"
    (tmp_path / "config.json").write_text(json.dumps(held))
    for flag in ("--beam=2", "--show=a", "--workdir=w", "--strict", "--metrics=bleu"):
        assert launch.main(["launch.py", "--experiment=evaluate", f"--restore={tmp_path}", flag]) == 2
        name = flag.split("=")[0]
        assert f"{name} has no effect on a model of task copy" in capsys.readouterr().err


def test_splits_are_those_asked_for(done: Done) -> None:
    config, names = done.translator.config, done.translator.tokenizers
    found = evaluation.splits_of(config, names, {}, False)
    assert {name: len(task.text.pairs[split]) for name, (task, split) in found.items()} == {"dev": DEV, "test": TEST}
    found = evaluation.splits_of(config, names, {"test": config.dev, "pairs": config.test}, False)
    assert {name: len(task.text.pairs[split]) for name, (task, split) in found.items()} == {
        "test": DEV, "test.tsv": TEST,
    }  # fmt: skip
    # Held out by a hash, and no test: its own dev alone.
    found = evaluation.splits_of(config.replace(pairs=config.dev, dev="", test=""), names, {}, False)
    assert list(found) == ["dev"]
