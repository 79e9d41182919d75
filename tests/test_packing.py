"""Packing: several texts in one row, each once, none seen by another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.quick import jit
from transformer_jax.batch import Batch
from transformer_jax.config import Config, Hyper
from transformer_jax.data import SPLITS, make_task, prompt_and_reference, resolve
from transformer_jax.data.packing import documents, first_fit, pack_documents, pack_pairs
from transformer_jax.data.rows import Ragged, Rows
from transformer_jax.data.tasks import END, START
from transformer_jax.data.text import split_bytes
from transformer_jax.dependencies import predicted
from transformer_jax.encoder_decoder import forward, init_transformer
from transformer_jax.errors import ConfigError, DataError
from transformer_jax.losses import cross_entropy

V, T = 23, 11
PIECES = st.lists(st.integers(1, T), max_size=30)


def naive_first_fit(lengths: list[int], room: int) -> list[tuple[int, int]]:
    used: list[int] = []
    places = []
    for length in lengths:
        row = next((r for r, n in enumerate(used) if n + length <= room), len(used))
        used += [0] * (row == len(used))
        places.append((row, used[row]))
        used[row] += length
    return places


@given(PIECES)
def test_first_fit_is_that_of_a_plain_loop(lengths):
    rows, starts = first_fit(lengths, T)
    assert list(zip(rows.tolist(), starts.tolist(), strict=True)) == naive_first_fit(lengths, T)


def test_a_piece_that_no_row_holds():
    with pytest.raises(DataError, match="piece 1 has 12 tokens, and a row holds 11"):
        first_fit([11, 12], 11)


def segments_of(batch: Batch) -> list[tuple[list[int], list[int]]]:
    """(inputs, targets) of each segment, row by row."""
    found = []
    assert batch.segments_BT is not None and batch.positions_BT is not None
    for row in range(len(batch.tokens_BT)):
        ids = np.asarray(batch.segments_BT[row])
        assert ((ids > 0) == (np.asarray(batch.weights_BT[row]) == 1)).all()
        assert (ids[: (ids > 0).sum()] > 0).all() and (np.diff(ids[ids > 0]) >= 0).all()  # padding stands at the end
        assert np.unique(ids[ids > 0]).tolist() == list(range(1, ids.max() + 1))
        for number in range(1, ids.max() + 1):
            inside = ids == number
            assert np.asarray(batch.positions_BT[row])[inside].tolist() == list(range(inside.sum()))
            found.append((batch.tokens_BT[row][inside].tolist(), batch.targets_BT[row][inside].tolist()))
    return found


@given(st.lists(st.lists(st.integers(3, V - 1), max_size=3 * T), max_size=12))
def test_f15_no_target_crosses_a_border(docs):
    """Every id but a document's first is a target once, behind the id before it; long documents are cut."""
    batch = pack_documents(docs, T)
    seen = segments_of(batch)
    assert all(y[:-1] == x[1:] and len(x) <= T for x, y in seen)
    wanted = [
        (doc[i : i + T][: len(doc) - 1 - i], doc[i + 1 : i + T + 1]) for doc in docs for i in range(0, len(doc) - 1, T)
    ]
    assert sorted(seen) == sorted(wanted)
    assert batch.tokens_BT.dtype == batch.segments_BT.dtype == np.int32 and batch.lengths_B.dtype == np.int32


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 6)), min_size=1, max_size=15))
def test_f16_packed_pairs_keep_together(lengths):
    """Segment i of the targets is the answer to segment i of the sources, and begins with START."""
    x, y = (
        [[3 + (7 * i + j) % 20 for j in range(n)] for i, n in enumerate(side)] for side in zip(*lengths, strict=True)
    )
    sources = [[*ids, END] for ids in x]
    batch = pack_pairs(Rows(Ragged.of(sources, V), Ragged.of(y, V)), 9, T)
    seen = segments_of(batch)
    flipped = Batch(
        batch.source_BS, batch.source_BS, (batch.source_segments_BS > 0) * 1.0,
        segments_BT=batch.source_segments_BS, positions_BT=batch.source_positions_BS,
    )  # fmt: skip
    read = [source for source, _ in segments_of(flipped)]
    both = [(s, inputs, targets) for s, (inputs, targets) in zip(read, seen, strict=True)]
    assert sorted(both) == sorted((s, [START, *answer], [*answer, END]) for s, answer in zip(sources, y, strict=True))
    used = (batch.segments_BT > 0).sum(axis=1), (batch.source_segments_BS > 0).sum(axis=1)
    np.testing.assert_array_equal((batch.lengths_B, batch.source_lengths_B), used)


def test_segments_of_the_source_alone_are_refused():
    """A target of one document would see all of them; several documents may be of one source."""
    config = Config(architecture="encoder_decoder", vocab_size=V, d_model=8, num_heads=2, num_layers=1, seq_len=4)
    ids, parts = jnp.zeros((1, 4), jnp.int32), jnp.array([[1, 1, 2, 2]])
    both = Batch(ids, ids, jnp.ones((1, 4)), segments_BT=parts, source_BS=ids, source_segments_BS=parts)
    params = init_transformer(jax.random.key(0), config)
    for see in (lambda batch: forward(params, config, Hyper(), batch), lambda batch: predicted(config, Hyper(), batch)):
        jax.eval_shape(see, both)
        jax.eval_shape(see, both.replace(source_segments_BS=None))
        with pytest.raises(ConfigError, match="source_segments_BS and no segments_BT: which segment is the target's"):
            jax.eval_shape(see, both.replace(segments_BT=None))


def test_a_pair_that_no_row_holds():
    rows = Rows(Ragged.of([[3, END], [3, 4, END]], V), Ragged.of([[3], [3, 4]], V))
    with pytest.raises(DataError, match="pair 1 takes 3 and 3 tokens, and a row holds 3 and 2"):
        pack_pairs(rows, 3, 2)


# --- through the model -------------------------------------------------------------------

SMALL = Config(vocab_size=V, d_model=8, num_heads=2, num_layers=2, d_ff=11, seq_len=T)
INIT = jit(init_transformer, static_argnums=1)
LOGITS = jit(lambda params, config, batch: forward(params, config, Hyper(), batch)[0], static_argnums=1)


def on_device(batch: Batch) -> Batch:
    return jax.tree.map(jnp.asarray, batch)


def nats(logits: jax.Array, batch: Batch) -> tuple[float, float]:
    sums = cross_entropy(logits, batch.targets_BT, batch.weights_BT)
    return float(sums.nats), float(sums.count)


def test_f15_packed_documents_are_as_if_alone():
    params = INIT(jax.random.key(0), SMALL)
    a, b, other = [3, 9, 4, 17, 5], [8, 8, 20, 3, 11, 6], [5, 5, 21, 4, 3]
    together = on_device(pack_documents([a, b], T))
    assert together.tokens_BT.shape == (1, T)
    logits = LOGITS(params, SMALL, together)
    np.testing.assert_array_equal(
        LOGITS(params, SMALL, on_device(pack_documents([other, b], T)))[:, 4:9], logits[:, 4:9]
    )
    alone = [on_device(pack_documents([doc], T)) for doc in (a, b)]
    single = [LOGITS(params, SMALL, batch) for batch in alone]
    np.testing.assert_allclose(logits[0, :4], single[0][0, :4], atol=1e-5)
    np.testing.assert_allclose(logits[0, 4:9], single[1][0, :5], atol=1e-5)
    parts = np.array([nats(x, batch) for x, batch in zip(single, alone, strict=True)])
    np.testing.assert_allclose(nats(logits, together), parts.sum(axis=0), rtol=1e-5)


def test_f16_a_packed_answer_reads_its_own_source_alone():
    config = SMALL.replace(architecture="encoder_decoder")
    params = INIT(jax.random.key(0), config)
    sources, answers = [[3, 9, END], [8, 20, 4, END]], [[5, 6], [7, 3, 9]]

    def packed(sources: list[list[int]], answers: list[list[int]]) -> Batch:
        return on_device(pack_pairs(Rows(Ragged.of(sources, V), Ragged.of(answers, V)), 8, T))

    together = packed(sources, answers)
    assert together.tokens_BT[0].tolist() == [START, 5, 6, START, 7, 3, 9, 0, 0, 0, 0]
    logits = LOGITS(params, config, together)
    changed = packed([[4, 11, END], sources[1]], [[17, 2 + 1], answers[1]])
    np.testing.assert_array_equal(LOGITS(params, config, changed)[:, 3:7], logits[:, 3:7])
    alone = [packed([s], [y]) for s, y in zip(sources, answers, strict=True)]
    single = [LOGITS(params, config, batch) for batch in alone]
    np.testing.assert_allclose(logits[0, :3], single[0][0, :3], atol=1e-5)
    np.testing.assert_allclose(logits[0, 3:7], single[1][0, :4], atol=1e-5)


# --- the text task -------------------------------------------------------------------------

TEXT = "".join(f"document {i}\nhas {'a ' * (i % 9)}few\n" + "\n" * (1 + i % 3) for i in range(60))


def test_documents_are_what_stands_between_empty_lines():
    assert documents("a\nb\n\nc\n\n\nd") == ["a\nb", "c", "d"]
    assert documents("\n\na\r\nb\r\n\r\nc\r\rd\n") == ["a\r\nb", "c", "d\n"]
    assert documents("\n\n") == documents("") == [] and documents(" \n\n") == [" "]


def text_config(path, **changes) -> Config:
    path.write_bytes(TEXT.encode())
    return resolve(
        Config(**{"task": "text", "text": str(path), "packing": True, "seq_len": 37, "batch_size": 3} | changes)
    )


def rows_of(task, split: str) -> Batch:
    batches = [task.eval_batch(task.data, split, i) for i in range(task.eval_batches[split])]
    return jax.tree.map(lambda *x: np.concatenate(x), *batches)


def test_text_in_packed_rows(tmp_path):
    config = text_config(tmp_path / "docs.txt")
    task = make_task(config)
    for split in SPLITS:
        batch = rows_of(task, split)
        docs = [list(doc) for part in documents(split_bytes(TEXT)[split]) for doc in [part.encode()]]
        wanted = sum(len(doc) - 1 for doc in docs)
        assert batch.weights_BT.sum() == wanted
        seen = sorted(segments_of(batch))
        assert seen == sorted(segments_of(pack_documents(docs, 37)))
        assert (batch.lengths_B == batch.weights_BT.sum(axis=1)).all()
    trained = jax.jit(task.train_batch)(task.data, jax.random.key(0))
    assert trained.tokens_BT.shape == (3, 37) and trained.tokens_BT.dtype == trained.segments_BT.dtype == np.int32
    assert task.data["train"]["tokens"].dtype == task.data["train"]["segments"].dtype == np.uint8
    rows = {bytes(row.tolist()) for row in np.asarray(task.data["train"]["tokens"])}
    assert {bytes(row.tolist()) for row in np.asarray(trained.tokens_BT)} <= rows
    assert task.vocab_size == 256 and task.text is None
    prompt, reference = prompt_and_reference(config, task, task.eval_batch(task.data, "report", 0))
    assert prompt and reference and prompt + reference in TEXT
    empty = tmp_path / "empty.txt"
    with pytest.raises(DataError, match="its selection split no document of two tokens"):
        config = text_config(empty)
        empty.write_bytes(b"a\n" * 45 + b"\n" * 10)
        make_task(config)


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("kind", ["chars", "bytes", "bpe"])
def test_text_of_a_tokenizer(tmp_path, kind, packing):
    if kind == "bpe":
        pytest.importorskip("tokenizers")
    config = text_config(tmp_path / "docs.txt", tokenizer=kind, packing=packing, bpe_size=270, seq_len=47)
    task = make_task(config)
    tokenizer = task.text.tokenizers.target
    assert tokenizer.kind == kind and task.vocab_size == config.V == tokenizer.size
    train = split_bytes(TEXT)["train"]
    if packing:
        seen = segments_of(rows_of(task, "report"))
        docs = documents(split_bytes(TEXT)["report"])
        assert sum(y.count(END) for _, y in seen) == len(docs) and not any(END in x for x, _ in seen)
        assert any(tokenizer.decode([*x, y[-1]]) == docs[-1] for x, y in seen)
    else:
        assert task.show(task.data["train"]) == train
    again = make_task(config, task.text.tokenizers)
    assert again.sha256 == task.sha256 != make_task(text_config(tmp_path / "docs.txt", seq_len=47)).sha256
    with pytest.raises(DataError, match=f"vocab_size={config.V + 1}, but the tokenizer has {config.V}"):
        make_task(config.replace(vocab_size=config.V + 1))
    with pytest.raises(DataError, match="target_tokenizer=chars with task text"):
        resolve(config.replace(vocab_size=0, target_tokenizer="chars"))
