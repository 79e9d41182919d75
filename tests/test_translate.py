"""`--experiment=translate` as a person or a pipe meets it, and what stands behind it."""

import dataclasses
import io
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import launch
from experiments import lines, restoring, translate, translating
from experiments.translating import Translator
from tests.pairs_run import BASE, loaded, make_run, phones, words, write_pairs
from tests.quick import jit
from transformer_jax import beam
from transformer_jax.beam import Penalty, beam_search
from transformer_jax.config import Hyper
from transformer_jax.data import END, PAD, START, Tokenizers, resolve
from transformer_jax.data.tokenizers import Bytes
from transformer_jax.encoder_decoder import init_transformer
from transformer_jax.errors import CheckpointError, DataError, UserError


class Runs(NamedTuple):
    """Two runs that differ in their seed, words that neither has seen, and the first one's greedy translator."""

    a: Path
    b: Path
    unseen: list[str]
    greedy: Translator


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("translate")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(beam, "_search", jit(beam.search, static_argnames=("beam", "n_best")))
        made = words(330, 0)
        files = {"pairs": made[:300], "dev": made[300:]}
        config = BASE.replace(**{n: str(write_pairs(folder / f"{n}.tsv", part)) for n, part in files.items()})
        a = make_run(folder / "a", config, seed=0, saves=(100, 200, 300))
        b = make_run(folder / "b", config, seed=1, saves=(150,))
        yield Runs(a, b, made[300:], loaded(f"--restore={a}").translator)


def says(capsys: Any, monkeypatch: Any, given: bytes, *args: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(given)))
    capsys.readouterr()
    code = launch.main(["launch.py", "--experiment=translate", *args])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_a_closed_stdin_is_one_line(runs: Runs, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert launch.main(["launch.py", "--experiment=translate", f"--restore={runs.a}"]) == 2
    assert "stdin is closed" in capsys.readouterr().err


# --- lines ------------------------------------------------------------------------


def test_lines_end_as_they_may() -> None:
    given = "\ufeffa\r\nb\rc\n\n d\u2028e\x0b \nlast".encode()
    assert [line for part in lines.windows(io.BytesIO(given)) for line in part] == [
        "a", "b\rc", "", " d\u2028e\x0b ", "last",
    ]  # fmt: skip
    assert list(lines.windows(io.BytesIO(b"a\rb\r\rlast"))) == [["a", "b", "", "last"]]
    assert list(lines.windows(io.BytesIO(b"a\rb\r"))) == [["a", "b"]]
    assert list(lines.windows(io.BytesIO(b""))) == []
    assert list(lines.windows(io.BytesIO(b"\n"))) == [[""]]
    assert list(lines.windows(io.BytesIO(b"a\n\n"))) == [["a", ""]]


def test_lines_are_whole_however_the_bytes_come() -> None:
    given = "né\r\n😀\r\n\r\nz".encode()

    class Slow(io.BytesIO):
        def read1(self, size: int | None = -1) -> bytes:
            return self.read(1)

    assert [line for part in lines.windows(Slow(given)) for line in part] == ["né", "😀", "", "z"]


def test_bytes_that_are_no_text_come_after_the_lines_before_them() -> None:
    parts = lines.windows(io.BytesIO(b"one\ntwo\nth\xff\n"))
    assert next(parts) == ["one", "two"]
    with pytest.raises(DataError, match="line 3 of stdin is not UTF-8: byte 0xff"):
        next(parts)
    parts = lines.windows(io.BytesIO(b"one\rtwo\rth\xff\r"))
    assert next(parts) == ["one", "two"]
    with pytest.raises(DataError, match="line 3 of stdin is not UTF-8: byte 0xff"):
        next(parts)


def test_many_lines_come_in_windows_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "WINDOW", 3)
    parts = list(lines.windows(io.BytesIO(b"".join(b"%d\n" % i for i in range(8)))))
    assert [len(part) for part in parts] == [3, 3, 2]
    assert [line for part in parts for line in part] == [str(i) for i in range(8)]


def test_an_answer_is_possible_before_the_stream_ends() -> None:
    read, write = os.pipe()
    end = threading.Timer(20, os.close, [write])  # who waits for the end gets it, and is found out
    end.start()
    with os.fdopen(read, "rb") as stream:
        parts = lines.windows(stream)
        os.write(write, b"first\nsec")
        assert next(parts) == ["first"]
        os.write(write, b"ond\nthird\n")
        assert next(parts) == ["second", "third"]
        end.cancel()
        os.close(write)
        assert list(parts) == []


def test_an_output_stays_one_line() -> None:
    found = [translating.Output("a\tb\nc\r\nd\u2028e", -1.0, (3,))]
    assert list(translate._lines(found, 1)) == ["a b c d e"]
    assert list(translate._lines(found, 2)) == ["1\t-1.000000\ta b c d e", "2\t\t"]


# --- translating --------------------------------------------------------------------


def test_o2_a_line_in_a_line_out(runs: Runs, capsys: Any, monkeypatch: Any) -> None:
    code, out, err = says(capsys, monkeypatch, b"abc\r\n\r\n \r\ncab", f"--restore={runs.a}", "--batch_size=1")
    first, *blank, last = out.split("\n")[:-1]
    assert code == 0 and blank == ["", ""] and first and last and out.endswith("\n")
    assert "step 300" in err and "4 lines, 2 blank" in err
    alone = [says(capsys, monkeypatch, word, f"--restore={runs.a}")[1] for word in (b"abc", b"cab")]
    assert alone == [f"{first}\n", f"{last}\n"]
    assert says(capsys, monkeypatch, b"", f"--restore={runs.a}")[:2] == (0, "")


def test_the_model_has_learnt_what_it_is_asked(runs: Runs) -> None:
    made = translating.translate(runs.greedy, runs.unseen)
    right = sum(text == phones(word) for word, text in zip(runs.unseen, made.best(), strict=True))
    assert right > len(runs.unseen) / 3


def test_blank_lines_reach_no_model(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translating, "beam_search", lambda *a, **o: pytest.fail("a model was asked"))
    made = translating.translate(runs.greedy, ["", "  ", "\t"])
    assert made.best() == ["", "", ""] and made.blank == 3


@pytest.mark.parametrize("width", [1, 4])
def test_m3_a_row_never_depends_on_its_batch(runs: Runs, width: int) -> None:
    translator = dataclasses.replace(runs.greedy, beam=width, n_best=min(width, 3))
    together = translating.translate(translator, runs.unseen).outputs
    alone = translating.translate(dataclasses.replace(translator, rows=1), runs.unseen).outputs
    assert [made[0].ids for made in together] == [made[0].ids for made in alone]
    np.testing.assert_allclose([m[0].score for m in together], [m[0].score for m in alone], atol=1e-5)


def test_q5_what_fills_a_batch_up_changes_nothing(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = translating.translate(runs.greedy, runs.unseen[:20]).best()
    filled = []

    def absurd(models: Any, config: Any, hyper: Any, prompts: Any, *, sources: Any, **options: Any) -> Any:
        rows = [*sources[:20], *[[END] * 12] * 44]
        filled.append(len(sources))
        return beam_search(models, config, hyper, prompts, sources=rows, **options)

    monkeypatch.setattr(translating, "beam_search", absurd)
    assert translating.translate(runs.greedy, runs.unseen[:20]).best() == plain and filled == [64]


def test_outputs_stand_in_the_order_of_the_lines(runs: Runs) -> None:
    translator = dataclasses.replace(runs.greedy, rows=1)
    asked = ["bbbbbb", "", "a" * 12, "ab", "dca", "c"]
    forwards = translating.translate(translator, asked)
    backwards = translating.translate(translator, asked[::-1])
    assert forwards.best() == backwards.best()[::-1] and len(set(forwards.best())) == 5
    assert (forwards.too_long, backwards.too_long) == ([2], [3])


def test_nothing_is_compiled_twice(runs: Runs) -> None:
    translating.translate(runs.greedy, runs.unseen)
    before = beam._search._cache_size()
    other = loaded(f"--restore={runs.b}").translator
    for asked in (runs.unseen, runs.unseen[::-1], [word[::-1] for word in runs.unseen]):
        translating.translate(other, asked)
    assert beam._search._cache_size() == before


def test_what_is_too_long_or_unknown_is_counted(runs: Runs, capsys: Any, monkeypatch: Any) -> None:
    given = b"abc\nabcabcabcabc\nabx\n"
    code, out, err = says(capsys, monkeypatch, given, f"--restore={runs.a}", "--batch_size=1")
    assert code == 0 and out.split("\n")[1] == "" and len(out.split("\n")) == 4
    assert "1 longer than seq_len=12, left blank (the first: line 2)" in err
    assert "1 symbols outside the vocabulary" in err
    code, _, err = says(capsys, monkeypatch, given, f"--restore={runs.a}", "--strict")
    assert code == 2 and err.endswith("source 2, 'abcabcabcabc': 13 tokens are longer than seq_len=12\n")
    code, _, err = says(capsys, monkeypatch, b"ab\nabx\n", f"--restore={runs.a}", "--strict", "--batch_size=1")
    assert code == 2 and "source 2, 'abx': 1 of its symbols are not in the vocabulary" in err
    assert "cut off" not in err and [translating.cut(ids) for ids in ((), (END,), (9, END), (9, 9))] == [False] * 3 + [
        True
    ]
    monkeypatch.setattr(translate, "cut", lambda ids: len(ids) == 3)  # ab and its END
    _, _, err = says(capsys, monkeypatch, b"ab\n\nabc\nabcabcabcabc\n", f"--restore={runs.a}")
    assert "1 output cut off without an end" in err
    # Exactly as long as a row, with END, is none too long.
    assert translating.translate(dataclasses.replace(runs.greedy, rows=1), ["a" * 11]).too_long == []


def test_the_n_best_come_ranked(runs: Runs, capsys: Any, monkeypatch: Any) -> None:
    flags = [f"--restore={runs.a}", "--beam=4", "--n_best=3", "--penalty=gnmt", "--length_penalty=0.6"]
    _, out, _ = says(capsys, monkeypatch, b"cab\n\ndab\n", *flags, "--batch_size=1")
    rows = [line.split("\t") for line in out.split("\n")[:-1]]
    assert [row[0] for row in rows] == ["1", "2", "3"] * 3 and [row[1:] for row in rows[3:6]] == [["", ""]] * 3
    translator = loaded(*flags).translator
    found = beam_search(
        translator.models[0], translator.config, translator.hyper, [[START]], max_new_tokens=12, beam=4, n_best=3,
        sources=[translator.tokenizers.source_ids("cab")], stop_ids=(END,), penalty=Penalty("gnmt", 0.6),
        banned_ids=(0, START),
    )  # fmt: skip
    decode = translator.tokenizers.target.decode
    assert [row[2] for row in rows[:3]] == [decode(ids) for ids in np.asarray(found.ids_BWT[0]).tolist()]
    np.testing.assert_allclose([float(row[1]) for row in rows[:3]], found.scores_BW[0], atol=1e-5)
    assert float(rows[0][1]) >= float(rows[1][1]) >= float(rows[2][1])


def test_a_decoder_alone_translates_too() -> None:
    config = resolve(BASE.replace(architecture="decoder", vocab_size=Bytes().size, seq_len=14, output_bias=True))
    params = jit(lambda: init_transformer(jax.random.key(3), config))()
    # A model that would write marks alone, if it might.
    wants = params.embedding.bout_V.at[jnp.array([PAD, START])].set(99.0)
    params = dataclasses.replace(params, embedding=dataclasses.replace(params.embedding, bout_V=wants))
    both = Bytes()
    translator = Translator((params,), config, Hyper(), Tokenizers(both, both), rows=2)
    asked = ["ab", "né", "abcd", "x" * 13, "x" * 14]
    made = translating.translate(translator, asked)
    assert made.too_long == [4] and made.unknown == 0
    # The text, START and what is written fill the row; its END may stand past it.
    assert [len(found[0].ids) for found in made.outputs[:4]] == [12, 11, 10, 1]
    assert not {PAD, START} & {i for found in made.outputs[:4] for i in found[0].ids}
    for i, text in enumerate(asked[:4]):
        assert translating.translate(translator, [text]).outputs[0][0].ids == made.outputs[i][0].ids


# --- which models -------------------------------------------------------------------


def test_an_ensemble_is_the_mean_of_probabilities(runs: Runs) -> None:
    one, two = loaded(f"--restore={runs.a}").translator, loaded(f"--restore={runs.b}").translator
    both = loaded(f"--restore={runs.a},{runs.b}", "--beam=2").translator
    assert len(both.models) == 2
    made = translating.translate(dataclasses.replace(both, rows=4), runs.unseen[:4]).outputs
    sources = [both.tokenizers.source_ids(word) for word in runs.unseen[:4]]
    found = beam_search(
        [one.models[0], two.models[0]], both.config, both.hyper, [[START]] * 4, max_new_tokens=12, beam=2,
        sources=sources, stop_ids=(END,), penalty=Penalty("power", 1.0), banned_ids=(0, START),
    )  # fmt: skip
    for row, ids, length in zip(made, np.asarray(found.ids_BWT), np.asarray(found.lengths_BW), strict=True):
        assert row[0].ids == tuple(ids[0, : length[0]].tolist())


def spoilt(source: Path, folder: Path, name: str, change: Any) -> Path:
    """A copy of a workdir with one of its JSON files changed."""
    shutil.copytree(source, folder)
    held = json.loads((folder / name).read_text(encoding="utf-8"))
    change(held)
    (folder / name).write_text(json.dumps(held), encoding="utf-8")
    return folder


def test_models_that_cannot_write_together_are_named(runs: Runs, tmp_path: Path) -> None:
    def decoder(held: Any) -> None:
        held["identity"]["config"] |= {"architecture": "decoder", "source_vocab_size": 0}

    def other(held: Any) -> None:
        held["target"]["symbols"][0] = "q"

    def learning(held: Any) -> None:
        held["identity"]["hyper"]["learning_rate"] = 0.5
        held["identity"]["config"]["batch_size"] = 4

    alone = spoilt(runs.b, tmp_path / "alone", "config.json", decoder)
    with pytest.raises(UserError, match="cannot write together: architecture is 'encoder_decoder' there"):
        loaded(f"--restore={runs.a},{alone}")
    changed = spoilt(runs.b, tmp_path / "changed", "tokenizers.json", other)
    with pytest.raises(UserError, match="cannot write together: the target tokenizers differ"):
        loaded(f"--restore={runs.a},{changed}")
    alike = spoilt(runs.b, tmp_path / "alike", "config.json", learning)
    made = loaded(f"--restore={runs.a},{alike}").translator
    assert len(made.models) == 2 and made.settings[0] == made.settings[1]  # one program for both


def test_models_of_several_kinds_write_together(runs: Runs, tmp_path: Path) -> None:
    """Deeper, with norms after the sums and shorter rows: each by its own config, within what both can read."""
    config = restoring.saved_configuration(str(runs.b))[0]
    config = config.replace(num_layers=2, norm_placement="post", seq_len=6)
    other = make_run(tmp_path / "other", config, seed=2, saves=(60,))
    alone = [loaded(f"--restore={path}").translator for path in (runs.a, other)]
    both = loaded(f"--restore={runs.a},{other}", "--beam=2").translator
    assert [(c.num_layers, c.seq_len) for c, _ in both.settings] == [(1, 12), (2, 6)]
    words = [word for word in runs.unseen if len(word) < 6][:4]
    made = translating.translate(dataclasses.replace(both, rows=4), words).outputs
    found = beam_search(
        [one.models[0] for one in alone], [one.config for one in alone], [one.hyper for one in alone],
        [[START]] * 4, max_new_tokens=6, beam=2, sources=[both.tokenizers.source_ids(word) for word in words],
        stop_ids=(END,), penalty=Penalty("power", 1.0), banned_ids=(0, START),
    )  # fmt: skip
    for row, ids, length in zip(made, np.asarray(found.ids_BWT), np.asarray(found.lengths_BW), strict=True):
        assert row[0].ids == tuple(ids[0, : length[0]].tolist())
    assert translating.translate(both, ["abcdab"]).too_long == [0]  # END is the seventh


def test_a_checkpoint_of_other_tokenizers_is_refused(runs: Runs, tmp_path: Path) -> None:
    def other(held: Any) -> None:
        held["target"]["symbols"].reverse()

    changed = spoilt(runs.b, tmp_path / "changed", "tokenizers.json", other)
    with pytest.raises(CheckpointError, match="was trained with other tokenizers than its tokenizers.json"):
        loaded(f"--restore={changed}")
    (changed / "tokenizers.json").unlink()
    with pytest.raises(UserError, match="no tokenizers.json there"):
        loaded(f"--restore={changed}")


def test_a_restored_step_is_the_one_that_is_named(runs: Runs) -> None:
    early, late = (
        loaded(f"--restore={runs.a}", "--restore_step=100").translator,
        loaded(f"--restore={runs.a}").translator,
    )
    assert not np.array_equal(early.models[0].embedding.embed_VD, late.models[0].embedding.embed_VD)


MISTAKES = {
    "--beam=0": "--beam=0 is out of range: at least 1",
    "--n_best=3 --beam=2": "n_best=3 is out of range: from 1 to beam=2",
    "--penalty=marian": "--penalty=marian: choose from power, gnmt",
    "--length_penalty=nan": "alpha=nan of the length penalty is out of range",
    "--beam=99": "--beam=99 is wider than the vocabulary of 9",
    "--show=a": "--show has no effect in --experiment=translate: leave it out",
    "--d_model=24": "is of another configuration",
    "--restore_step=7": "no checkpoint of step 7",
}


@pytest.mark.parametrize("flags", MISTAKES)
def test_a_mistake_is_one_line(runs: Runs, flags: str, capsys: Any, monkeypatch: Any) -> None:
    code, out, err = says(capsys, monkeypatch, b"abc\n", f"--restore={runs.a}", *flags.split())
    assert code == 2 and out == "" and err.count("\n") == 1 and MISTAKES[flags] in err


def test_a_model_of_another_task_is_refused(runs: Runs, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    held = json.loads((runs.a / "config.json").read_text())
    held["identity"]["config"]["task"] = "copy"
    (tmp_path / "config.json").write_text(json.dumps(held))
    code, _, err = says(capsys, monkeypatch, b"", f"--restore={tmp_path}")
    assert code == 2 and "was trained on task copy: one of pairs, cmudict" in err
    code, _, err = says(capsys, monkeypatch, b"", f"--restore={tmp_path / 'none'}")
    assert code == 2 and "no config.json there" in err


def test_nobody_reads_on(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.BytesIO):
        def flush(self) -> None:
            raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"abc\n")))
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(Closed()))
    # launch.py's last lines end the program quietly.
    with pytest.raises(BrokenPipeError):
        launch.main(["launch.py", "--experiment=translate", f"--restore={runs.a}"])
