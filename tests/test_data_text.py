"""The text task: splits, windows, and what is refused."""

import math
import os
import random
from collections import Counter

import numpy as np
import pytest

from tests.test_data import evaluation, many, small
from transformer_jax.data import SPLITS, make_task
from transformer_jax.data.text import read_text, split_bytes
from transformer_jax.errors import DataError

# A prime length, accents in NFC and NFD, CJK, an emoji, CRLF, tabs, and words that do not repeat.
PIECES = "a\n\nb\t c\r\né e\u0301 漢字 😀 "


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory):
    """A UTF-8 file of 4001 bytes, a prime, in which no 5 bytes occur twice."""
    draw = random.Random(7)
    content = PIECES.encode()
    grams = {content[i : i + 5] for i in range(len(content) - 4)}
    while len(content) < 4001:
        byte = bytes([draw.randrange(32, 127)])
        if (content + byte)[-5:] not in grams:
            content += byte
            grams.add(content[-5:])
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_bytes(content)
    return path, content


def test_text_round_trip(book):
    path, content = book
    task = make_task(small("text", text=str(path)))
    parts = [bytes(np.asarray(task.data[s]).tolist()) for s in ("train", *SPLITS)]
    assert b"".join(parts) == content and [len(p) for p in parts] == [3601, 200, 200]
    assert task.show(np.frombuffer(content, np.uint8)) == content.decode()
    assert task.show(list(PIECES.encode())) == PIECES
    assert task.show([0x41, 0xC3, 300, -1]) == "A\ufffd\ufffd\ufffd"  # half a character; ids that are no bytes
    assert task.vocab_size == 256 and task.floor is None


@pytest.mark.parametrize("length", [60, 61, 69, 79, 1009])
def test_split_borders(length):
    content = bytes(i % 251 for i in range(length))
    parts = split_bytes(content)
    assert b"".join(parts.values()) == content and list(parts) == ["train", *SPLITS]
    assert len(parts["selection"]) + len(parts["report"]) == length // 10
    assert 0 <= len(parts["report"]) - len(parts["selection"]) <= 1


@pytest.mark.parametrize("batch_size,seq_len", [(5, 7), (3, 23), (2, 199), (1, 1), (8, 64)])
def test_each_held_out_byte_is_a_target_once(book, batch_size, seq_len):
    path, content = book
    task = make_task(small("text", text=str(path), batch_size=batch_size, seq_len=seq_len))
    for split in SPLITS:
        held_out = split_bytes(content)[split]
        batch = evaluation(task, split)
        counted = batch.weights_BT == 1
        assert bytes(batch.targets_BT[counted].tolist()) == held_out[1:]
        assert bytes(batch.tokens_BT[counted].tolist()) == held_out[:-1]
        assert set(np.unique(batch.weights_BT)) <= {0.0, 1.0}
        assert (batch.targets_BT[~counted] == 0).all()
        # No batch is empty, and one batch fewer would not do.
        assert counted.reshape(task.eval_batches[split], -1).any(axis=1).all()
        with pytest.raises(DataError, match=f"{task.eval_batches[split]} of {split}"):
            task.eval_batch(task.data, split, task.eval_batches[split])


def test_train_windows_reach_every_start_and_no_border(book):
    path, content = book
    T = 4
    content = content[:1009]
    cut = path.with_name("cut.txt")
    cut.write_bytes(content)
    task = make_task(small("text", text=str(cut), seq_len=T, batch_size=20))
    train = split_bytes(content)["train"]
    places = {train[i : i + T + 1]: i for i in range(len(train) - T)}
    assert len(places) == len(train) - T  # a window tells its start
    batch = many(task)
    windows = np.concatenate([batch.tokens_BT, batch.targets_BT[..., -1:]], -1).reshape(-1, T + 1)
    starts = Counter(places[bytes(w)] for w in windows.tolist())
    assert set(starts) == set(range(len(train) - T))
    mean = len(windows) / len(starts)
    chi2 = sum((n - mean) ** 2 / mean for n in starts.values())
    assert abs(chi2 - len(starts)) < 4 * math.sqrt(2 * len(starts))


def test_text_targets_are_the_next_byte(book):
    """F8: one-hot logits on the next byte lose nothing; on this byte, or the one after the next, much."""
    path, _ = book
    batch = many(small("text", text=str(path)))
    tokens, targets = batch.tokens_BT, batch.targets_BT
    assert (targets[..., :-1] == tokens[..., 1:]).all()
    assert (targets == tokens).mean() < 0.05 and (targets[..., :-2] == tokens[..., 2:]).mean() < 0.05
    assert (batch.weights_BT == 1).all() and batch.lengths_B is None


def test_default_text():
    task = make_task(small("text"))
    from pydoc_data.topics import topics

    name, content = read_text("")
    assert name == "pydoc_data.topics" and all(t.encode() in content for t in topics.values())
    assert len(task.sha256) == 64 and task.sha256 == make_task(small("text", seq_len=7)).sha256
    assert sum(x.size for x in task.data.values()) == len(content)


def test_text_hash_follows_the_file(book, tmp_path):
    path, content = book
    changed = tmp_path / "changed.txt"
    changed.write_bytes(content[:-1] + b"!")
    assert make_task(small("text", text=str(path))).sha256 != make_task(small("text", text=str(changed))).sha256


@pytest.mark.parametrize(
    "content,settings,words",
    [
        (None, {}, ["no such file"]),
        ("directory", {}, ["is a directory"]),
        (b"", {}, ["is empty"]),
        (b"abc" * 90 + b"\xff" + b"abc" * 90, {}, ["not UTF-8", "0xff", "offset 270"]),
        (b"abc" * 79, {}, ["237 bytes", "selection split has 11", "seq_len=23"]),
        (b"x" * 479, {}, ["479 bytes", "selection split has 23", "seq_len=23"]),
        (b"abc\x7f" + b"abc" * 200, {"vocab_size": 127}, ["byte 127", "offset 3", "vocab_size=127"]),
    ],
)
def test_bad_texts(tmp_path, content, settings, words):
    path = tmp_path / "bad.txt"
    if content == "directory":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError) as caught:
        make_task(small("text", text=str(path), **settings))
    message = str(caught.value)
    assert all(word in message for word in [*words, str(path), "--text"]) and "\n" not in message


def test_odd_paths(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, words in ((tmp_path / "pipe", "not a regular file"), ("x" * 5000, "cannot be read: File name too long")):
        with pytest.raises(DataError, match=words):
            read_text(str(path))


def test_shortest_text_and_smallest_vocabulary(tmp_path):
    path = tmp_path / "short.txt"
    path.write_bytes(b"abc\x7f" * 120)  # 480 bytes: each half of the last tenth is one window
    task = make_task(small("text", text=str(path), vocab_size=128))
    assert task.eval_batches == {"selection": 1, "report": 1}
    assert task.eval_batch(task.data, "report", 0).weights_BT.sum() == 23
