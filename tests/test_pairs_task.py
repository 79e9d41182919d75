"""The tasks on pairs: what rows hold, which splits there are, what is refused."""

import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.quick import jit
from transformer_jax.batch import Batch
from transformer_jax.config import Config, Hyper
from transformer_jax.data import (
    END,
    PAD,
    SPLITS,
    START,
    Tokenizers,
    check_ids,
    evaluation_task,
    make_task,
    prompt_and_reference,
    resolve,
)
from transformer_jax.data import pairs_task as module
from transformer_jax.data.rows import Ragged
from transformer_jax.data.tokenizers import UNKNOWN
from transformer_jax.encoder_decoder import init_transformer
from transformer_jax.errors import DataError
from transformer_jax.train import eval_step, evaluate

SHARED = Path(os.environ.get("TRANSFORMER_JAX_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"))
LETTERS = "abcdefg"
TRAIN = [(LETTERS[: 1 + i % 7], " ".join(LETTERS[i % 3 : 1 + i % 5 + i % 3])) for i in range(23)]
DEV = [(LETTERS[i % 4 :], LETTERS[i % 7]) for i in range(10)]


def tsv(folder: Path, name: str, pairs: list[tuple[str, str]]) -> str:
    path = folder / name
    path.write_text("".join(f"{a}\t{b}\n" for a, b in pairs), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pairs")
    return {"pairs": tsv(folder, "train.tsv", TRAIN), "dev": tsv(folder, "dev.tsv", DEV)}


def small(**changes) -> Config:
    sizes = {"task": "pairs", "architecture": "encoder_decoder", "seq_len": 13, "batch_size": 4}
    return resolve(Config(**sizes | changes))


def every(task, split: str) -> Batch:
    """All evaluation batches of a split, one under the other."""
    made = jit(task.eval_batch, static_argnums=1)
    batches = [made(task.data, split, i) for i in range(task.eval_batches[split])]
    return jax.tree.map(lambda *x: np.concatenate(x), *batches)


def check_rows(config: Config, task, batch: Batch, want: list[tuple[str, str]]) -> None:
    """Each real row is the layout of its pair, spelt out; the rows behind them are empty."""
    source, target = task.text.tokenizers.source, task.text.tokenizers.target
    rows = jax.tree.map(np.asarray, batch)
    B, T = rows.tokens_BT.shape
    for array in (rows.tokens_BT, rows.targets_BT, rows.lengths_B, rows.source_BS, rows.source_lengths_B):
        assert array is None or array.dtype == np.int32
    assert rows.weights_BT.dtype == np.float32
    for i in range(B):
        if i >= len(want):
            assert rows.lengths_B[i] == 0 and not rows.weights_BT[i].any()
            assert rows.source_lengths_B is None or rows.source_lengths_B[i] == 0
            continue
        x, y = source.encode(want[i][0]), target.encode(want[i][1])
        if config.architecture == "encoder_decoder":
            n, S = rows.source_lengths_B[i], rows.source_BS.shape[1]
            assert rows.source_BS[i].tolist() == [*x, END] + [PAD] * (S - len(x) - 1) and n == len(x) + 1
            x = []
        row = [*x, START, *y, END]
        counted = [0.0] * len(x) + [1.0] * (len(y) + 1)
        assert rows.tokens_BT[i].tolist() == (row + [PAD] * T)[:T] and row.count(START) == 1
        assert rows.targets_BT[i].tolist() == row[1:] + [PAD] * (T + 1 - len(row))
        assert rows.weights_BT[i].tolist() == counted + [0.0] * (T - len(counted))
        assert rows.lengths_B[i] == min(len(row), T)


@pytest.mark.parametrize("architecture", ["encoder_decoder", "decoder"])
def test_f9_q1_rows_of_evaluation_by_hand(files, architecture):
    """Every pair once, in order; inputs are targets shifted by one behind exactly one START."""
    config = small(**files, architecture=architecture, tokenizer="chars")
    task = make_task(config)
    check_rows(config, task, every(task, "selection"), DEV)
    assert task.eval_batches == {"selection": 3, "report": 3}  # the last one holds 2 of 4
    counted = sum(len(y) + 1 for _, y in DEV)
    assert every(task, "selection").weights_BT.sum() == counted
    with pytest.raises(DataError, match="batch 3 of selection: it has 3"):
        task.eval_batch(task.data, "selection", 3)
    batch = task.eval_batch(task.data, "selection", 0)
    assert [prompt_and_reference(config, task, batch, i) for i in range(4)] == DEV[:4]


def test_rows_are_as_wide_as_the_longest_pair(files):
    config = small(**files, seq_len=1000)
    task = make_task(config)
    batch = jit(task.train_batch)(task.data, jax.random.key(0))
    assert batch.source_BS is not None
    longest = max(len(x) for x, _ in TRAIN) + 1, max(len(y.split()) for _, y in TRAIN) + 1
    assert (batch.source_BS.shape[1], batch.tokens_BT.shape[1]) == longest
    assert {array.dtype for name in ("source", "target") for array in [task.data["train"][name]]} == {np.dtype("uint8")}
    same = make_task(config.replace(d_model=128, num_layers=5, seq_len=17))
    jax.tree.map(np.testing.assert_array_equal, jit(same.train_batch)(same.data, jax.random.key(0)), batch)


def test_training_rows_are_pairs_drawn_alike(files):
    config = small(**files, tokenizer="bytes", batch_size=64)
    task = make_task(config)
    batches = jit(jax.vmap(task.train_batch, in_axes=(None, 0)))(task.data, jax.random.split(jax.random.key(1), 72))
    flat = jax.tree.map(lambda x: np.asarray(x).reshape(-1, *x.shape[2:]), batches)
    show = task.text.tokenizers.target.decode
    seen = [(show(s.tolist()), show(t.tolist())) for s, t in zip(flat.source_BS, flat.targets_BT, strict=True)]
    check_rows(config, task, jax.tree.map(lambda x: x[:50], flat), seen[:50])
    counts = {pair: TRAIN.count(pair) for pair in TRAIN}
    assert set(seen) == set(counts)
    chi2 = sum((seen.count(p) - (mean := 4608 * n / 23)) ** 2 / mean for p, n in counts.items())
    assert chi2 < len(counts) + 4 * (2 * len(counts)) ** 0.5
    one = jit(task.train_batch)(task.data, jax.random.split(jax.random.key(1), 72)[5])
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[5]), one, batches)


@pytest.fixture(scope="module")
def model(files):
    """(config, parameters) of a model that reads and writes characters."""
    config = small(**files, tokenizer="chars", d_model=8, num_heads=2, num_layers=1)
    return config, jit(init_transformer, static_argnums=1)(jax.random.key(0), config)


def test_j2_q1_q5_fillers_do_not_change_a_metric(model):
    """10 pairs in batches of 4 and of 5: the same sums; whatever stands in the filler rows."""
    config, params = model

    def sums(config: Config):
        task = make_task(config)

        def batch_of(i: jax.Array, absurd: jax.Array) -> Batch:
            batch = task.eval_batch(task.data, "selection", i)
            filler_B1 = absurd & (i * config.batch_size + jnp.arange(config.batch_size) >= 10)[:, None]
            tokens, targets = (jnp.where(filler_B1, 7, part) for part in (batch.tokens_BT, batch.targets_BT))
            return batch.replace(
                tokens_BT=tokens, targets_BT=targets, source_BS=jnp.where(filler_B1, 8, batch.source_BS)
            )

        count = task.eval_batches["selection"]
        return jit(lambda p, absurd: evaluate(config, p, Hyper(), lambda i: batch_of(i, absurd), count))

    wanted = sums(config.replace(batch_size=5))(params, False)
    assert wanted.count == sum(len(y) + 1 for _, y in DEV) and np.isfinite(wanted.nats)
    in_fours = sums(config)
    for found in (in_fours(params, False), in_fours(params, True)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6), found, wanted)


def test_empty_rows_give_no_gradient_and_no_nan(model):
    config, params = model
    task = make_task(config)
    last = jit(task.eval_batch, static_argnums=1)(task.data, "selection", 2)
    absurd = last.replace(
        tokens_BT=last.tokens_BT.at[2:].set(7),
        targets_BT=last.targets_BT.at[2:].set(9),
        source_BS=last.source_BS.at[2:].set(8),
    )
    gradient = jit(jax.grad(lambda p, batch: eval_step(config, p, Hyper(), batch).nats))
    got, want = gradient(params, absurd), gradient(params, last)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(want)) and np.any(want.embedding.embed_VD)


# --- splits --------------------------------------------------------------------------


def test_splits_and_what_is_said(files, tmp_path):
    task = make_task(small(**files))
    assert task.text.pairs["selection"] == [(x, [y]) for x, y in DEV] == task.text.pairs["report"]
    assert task.text.notes[:3] == (
        "train.tsv: 23 pairs", "dev.tsv: 10 pairs", "no --test: the report is on the pairs of dev"
    )  # fmt: skip
    both = sum(x in {a for a, _ in TRAIN} for x, _ in DEV)
    assert f"dev.tsv: {both} of 10 sources are in the training data too" in task.text.notes
    assert task.text.notes[-1].startswith("tokenizers: chars of the source, 11 ids; symbols of the target")
    other = make_task(small(**files, test=tsv(tmp_path, "test.tsv", DEV[:3])))
    assert other.text.pairs["report"] == [(x, [y]) for x, y in DEV[:3]]
    assert other.text.notes[2] == "test.tsv: 3 pairs" and other.sha256 != task.sha256
    batch = jit(task.eval_batch, static_argnums=1)(task.data, "report", 0)
    assert prompt_and_reference(small(**files), task, batch, 1) == DEV[1]  # each side by its own tokenizer
    # Lines are questions of their own, though their sources be equal: scores are over lines.
    twice = make_task(small(**files, test=tsv(tmp_path, "test.tsv", [("a", "b"), ("a", "c")])))
    assert twice.text.pairs["report"] == [("a", ["b"]), ("a", ["c"])]


def test_all_files_go_the_way_of_the_training_file(tmp_path):
    """Translations by language, the other way round in dev: what is trained from is asked there too."""
    given = {}
    for name, first, second in (("pairs", "de", "en"), ("dev", "en", "de"), ("test", "en", "de")):
        row = {first: f"{name} {first}", second: f"{name} {second}"}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"translation": row}) + "\n")
        given[name] = str(tmp_path / f"{name}.jsonl")
    task = make_task(small(**given))
    assert task.text.pairs["selection"] == [("dev de", ["dev en"])]
    assert task.text.pairs["report"] == [("test de", ["test en"])]
    assert "dev.jsonl: 1 pairs; de is the source, en the target" in task.text.notes


def test_dev_is_held_out_where_there_is_none(tmp_path):
    path = tsv(tmp_path, "all.tsv", [(f"w{i}", f"a {i % 9}") for i in range(101)])
    task = make_task(small(pairs=path))
    rows = {split: len(part) for split, part in task.text.rows.items()}
    assert rows["train"] + rows["selection"] == 101 and rows["selection"] == rows["report"] > 0
    assert any(note.startswith(f"no --dev: {rows['selection']} pairs are held out") for note in task.text.notes)
    sources = [{source for source, _ in task.text.pairs[split]} for split in ("train", "selection")]
    assert not sources[0] & sources[1]
    assert make_task(small(pairs=path, d_model=128)).text is task.text  # arms of a sweep share the rows


def test_vocabularies_are_of_the_training_side_alone(files, tmp_path):
    dev = tsv(tmp_path, "strange.tsv", [("aξb", "a ζ ζ"), ("a", "b")])
    task = make_task(small(**files | {"dev": dev}))
    assert task.vocab_size == small(**files).vocab_size
    source = np.asarray(task.data["selection"]["source"])
    assert source[0, 1] == UNKNOWN and (source == UNKNOWN).sum() == 1
    assert "strange.tsv: 1 symbols of the source are not in its chars vocabulary" in task.text.notes
    assert "strange.tsv: 2 symbols of the target are not in its symbols vocabulary" in task.text.notes
    assert task.text.pairs["selection"][0] == ("aξb", ["a ζ ζ"])  # metrics see the text, not the ids


def test_long_pairs_are_in_no_batch_and_counted(files, tmp_path):
    pairs = [("abc", "a b"), ("a" * 9, "a"), ("a", " ".join("a" * 8)), ("a" * 7, " ".join("b" * 7))]
    config = small(pairs=tsv(tmp_path, "long.tsv", pairs), dev=files["dev"], seq_len=8)
    task = make_task(config)
    assert len(task.text.rows["train"]) == 2 and task.text.rows["train"].source.lengths.tolist() == [4, 8]
    wanted = "long.tsv: 2 of 4 pairs do not fit seq_len=8 and are in no batch (the longest sides take 10 and 9)"
    assert wanted in task.text.notes
    with pytest.raises(DataError, match="long.tsv: 2 of 4 pairs do not fit seq_len=8: the first is 'aaaaaaaaa'"):
        make_task(config, strict=True)
    with pytest.raises(DataError, match="4 of 4 pairs do not fit seq_len=1"):
        make_task(config.replace(seq_len=1))
    # A decoder's row holds both sides: x START y in seq_len inputs, and END as the last target.
    config = small(
        pairs=config.pairs, dev=files["dev"], test=config.pairs, architecture="decoder", tokenizer="chars", seq_len=11
    )
    task = make_task(config)
    kept = [("abc", "a b"), ("a" * 9, "a")]
    assert len(task.text.pairs["report"]) == 4
    batch = jit(task.eval_batch, static_argnums=1)(task.data, "report", 0)
    assert batch.tokens_BT.shape == (4, 11)
    check_rows(config, task, batch, kept)


def test_several_answers_to_a_source(monkeypatch):
    pytest.importorskip("eng_to_ipa")
    monkeypatch.setattr(
        "transformer_jax.data.cmudict._dictionary",
        lambda: b'{"a": ["ah0", "ey1", "ey2"], "b": ["b iy1"], "c": ["s iy1"], "d": ["d iy1"]}',
    )
    monkeypatch.setattr(module, "place_of", lambda word, parts: {"a": 0, "b": 1}.get(word, 9))
    module._corpus.cache_clear()
    task = make_task(resolve(Config(task="cmudict", architecture="encoder_decoder", batch_size=3)))
    module._corpus.cache_clear()
    assert task.text.pairs["selection"] == [("a", ["ah", "ey"])] and len(task.text.rows["selection"]) == 2
    assert task.text.pairs["report"] == [("b", ["b iy"])]
    assert [x for x, _ in task.text.pairs["train"]] == ["c", "d"]


# --- a trained model's tokenizers ------------------------------------------------------


def test_a_trained_model_keeps_its_tokenizers(files, tmp_path):
    config = small(**files)
    trained = make_task(config).text.tokenizers
    again = Tokenizers.from_dict(trained.to_dict())
    other = tsv(tmp_path, "other.tsv", [("gfe", "a b"), ("axa", "c"), ("a" * 40, "b")])
    gone = config.replace(pairs=str(tmp_path / "gone.tsv"), dev="", test="")
    task = evaluation_task(gone, again, other)
    assert set(task.eval_batches) == {"report"} and task.text.pairs["report"][:2] == [("gfe", ["a b"]), ("axa", ["c"])]
    check_rows(gone, task, every(task, "report"), [("gfe", "a b"), ("axa", "c")])
    assert np.asarray(task.data["report"]["source"])[1, 1] == UNKNOWN
    assert [note.split(":")[0] for note in task.text.notes] == ["other.tsv"] * 3
    with pytest.raises(DataError, match="it has no training pairs"):
        task.train_batch(task.data, jax.random.key(0))
    with pytest.raises(DataError, match=r"--test='.*gone.tsv': no such file"):
        evaluation_task(gone, again, gone.pairs, option="--test")
    # Trained on, with its own ids: a new symbol does not move the others.
    more = make_task(config.replace(pairs=other, dev=files["dev"], vocab_size=0, source_vocab_size=0), again)
    assert more.text.tokenizers == trained and more.vocab_size == config.vocab_size


def test_l8_f17_the_vocabulary_is_the_tokenizer_s(files):
    """A wider output layer could write ids that no text has; a narrower one could not read all ids."""
    config = small(**files)
    for changes in ({"vocab_size": config.V + 1}, {"vocab_size": config.V - 1}, {"source_vocab_size": 0}):
        with pytest.raises(DataError, match=f"but the tokenizers have {config.V} and {config.source_vocab_size}"):
            make_task(config.replace(**changes))
    task = make_task(config)
    for split in ("train", *SPLITS):
        part = task.data[split]
        check_ids(part["source"], config.source_vocab_size)
        check_ids(part["target"], config.V)
    for bad in (4, 11, -1, -100):
        with pytest.raises(DataError, match=f"id {bad} at 1 is outside the vocabulary of 4"):
            Ragged.of([[3], [bad]], 4)


def test_resolve_reads_the_files_once(files, monkeypatch):
    module._corpus.cache_clear()
    module._fitted.cache_clear()
    reads = []
    real = module.read_pairs
    monkeypatch.setattr(module, "read_pairs", lambda *a, **k: reads.append(a) or real(*a, **k))
    config = resolve(Config(task="pairs", architecture="encoder_decoder", **files))
    assert (config.vocab_size, config.source_vocab_size) == (4 + 7, 4 + 7)
    make_task(config), make_task(config.replace(seq_len=9)), resolve(config.replace(vocab_size=0))
    assert len(reads) == 2
    path = Path(files["dev"])
    os.utime(path, ns=(1, 1))
    make_task(config)
    assert len(reads) == 4
    assert resolve(config.replace(pairs="/nowhere")) == config.replace(pairs="/nowhere")  # sizes known: reads nothing


def test_refusals(files):
    for changes, words in [
        ({"pairs": ""}, "task pairs needs --pairs=FILE"),
        ({"pairs": "/nowhere.tsv"}, "--pairs='/nowhere.tsv'"),
        ({"dev": "/nowhere.tsv"}, "--dev='/nowhere.tsv'"),
        ({"architecture": "encoder"}, "architecture=encoder_decoder or decoder, not encoder"),
        ({"architecture": "decoder"}, "one vocabulary, not chars and symbols: give --tokenizer=bytes"),
        ({"task": "cmudict"}, "task cmudict brings its own pairs"),
    ]:
        for ask in (resolve, lambda config: make_task(config.replace(vocab_size=11))):
            with pytest.raises(DataError, match=words) as caught:
                ask(Config(**{"task": "pairs", "architecture": "encoder_decoder"} | files | changes))
            assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="task copy has no pairs"):
        make_task(Config(task="copy"), strict=True)


# --- files of the field ------------------------------------------------------------------


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"no data at {SHARED}: give TRANSFORMER_JAX_DATA")
def test_published_files_are_read_whole():
    g2p = {name: str(SHARED / "g2p" / f"fre_{name}.tsv") for name in ("train", "dev", "test")}
    task = make_task(small(pairs=g2p["train"], dev=g2p["dev"], test=g2p["test"], seq_len=64))
    assert [len(rows) for rows in task.text.rows.values()] == [8000, 1000, 1000]
    kinds = task.text.tokenizers.source.kind, task.text.tokenizers.target.kind
    assert kinds == ("chars", "symbols") and not any("skipped" in note for note in task.text.notes)
    task = make_task(small(pairs=str(SHARED / "scan" / "train_length.txt.gz"), seq_len=64))
    assert sum(len(task.text.rows[split]) for split in ("train", "selection")) == 16_990
    assert task.text.tokenizers.shared and task.text.tokenizers.source.kind == "symbols"
