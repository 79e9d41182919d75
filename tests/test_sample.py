"""`--experiment=sample` as a person meets it: train, restore, write; and the samples of evaluations."""

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import launch
from experiments import loop, sample, samples, train
from experiments.evaluate import saved_configuration
from experiments.program import run_key
from experiments.sample import before_stop
from experiments.workdir import open_workdir
from tests.quick import jit
from transformer_jax import checkpoint
from transformer_jax.batch import Batch
from transformer_jax.config import Config, Hyper
from transformer_jax.data import END, START, make_task
from transformer_jax.decode import generate
from transformer_jax.encoder_decoder import init_transformer
from transformer_jax.samplers import Sampler
from transformer_jax.saver import Saver
from transformer_jax.train import init_state

pytestmark = pytest.mark.usefixtures("quick_decoding")
TINY = ["--experiment=train", "--d_model=8", "--num_heads=2", "--num_layers=1", "--seq_len=16", "--batch_size=2",
        "--steps=3", "--learning_rate=0.05"]  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 256 bytes, and a file that is gone when it is asked to write."""
    folder = tmp_path_factory.mktemp("text")
    file = folder / "text.txt"
    file.write_text("à l'œil nu — ça va. " * 100, encoding="utf-8")
    assert launch.main(["launch.py", *TINY, f"--text={file}", f"--workdir={folder / 'w'}"]) == 0
    file.unlink()
    return folder / "w"


@pytest.fixture(scope="module")
def reverse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder-decoder as `train` saves it before its first step."""
    folder, hyper = tmp_path_factory.mktemp("reverse") / "w", Hyper()
    config = Config(
        task="reverse", architecture="encoder_decoder", vocab_size=32, d_model=8, num_heads=2, num_layers=1, seq_len=16
    )  # fmt: skip
    open_workdir(str(folder), train.identity(config, hyper, 0, make_task(config)), {"steps": config.steps})
    state = jit(lambda: init_state(config, hyper, run_key(0)))()
    with Saver(folder / "checkpoints", keep=1) as saver:
        saver.save(0, state, {"step": 0})
    return folder


def says(capsys: pytest.CaptureFixture[str], folder: Path, *args: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = launch.main(["launch.py", "--experiment=sample", f"--restore={folder}", *args])
    out = capsys.readouterr()
    return code, out.out, out.err


def restored(folder: Path) -> tuple[Any, Config, Hyper]:
    config, hyper = saved_configuration(str(folder))
    state = checkpoint.restore_latest(folder / "checkpoints", loop.abstract_state(config, hyper)).state
    return state.params, config, hyper


def test_the_same_seed_writes_the_same_and_what_generate_does(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--prompt=ça ", "--sample_temperature=0.9", "--top_p=0.95", "--max_new_tokens=11", "--num_samples=2"]
    code, out, err = says(capsys, text, *asked, "--seed=3")
    assert code == 0 and "step 3" in err
    assert out == says(capsys, text, *asked, "--seed=3")[1] != says(capsys, text, *asked, "--seed=4")[1]
    params, config, hyper = restored(text)
    prompt = "ça ".encode()
    made = generate(
        params, config, hyper, [[*prompt]] * 2, jax.random.key(3), max_new_tokens=11,
        sampler=Sampler(temperature=0.9, top_p=0.95),
    )  # fmt: skip
    first, second = (bytes(ids).decode("utf-8", "replace") for ids in made.ids_BT.tolist())
    assert out == f"--- 1 of 2\nça {first}\n--- 2 of 2\nça {second}\n" and first != second


def test_a_translation_of_a_source(reverse: Path, capsys: pytest.CaptureFixture[str]) -> None:
    params, config, hyper = restored(reverse)
    made = generate(
        params, config, hyper, [[START]], jax.random.key(0), sources=[[3, 4, 5]], max_new_tokens=15,
        sampler=Sampler(temperature=0.0), stop_ids=(END,),
    )  # fmt: skip
    ids = made.ids_BT[0, : made.lengths_B[0]].tolist()
    for prompt in ("a b c", "3 b 5"):
        code, out, _ = says(capsys, reverse, f"--prompt={prompt}", "--sample_temperature=0")
        assert code == 0 and out.split() == make_task(config).show(ids).split()


def test_text_comes_as_it_is_written(text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    seen = []

    def slow(*args: Any, **options: Any) -> Iterator[np.ndarray]:
        for byte in "né€".encode():
            yield np.array([byte])
            seen.append(capsys.readouterr().out)

    monkeypatch.setattr(sample, "stream", slow)
    assert says(capsys, text, "--prompt=x")[0] == 0
    assert seen == ["xn", "", "é", "", "", "€"]


def test_a_term_that_was_not_trained_with_is_in_the_program(text: Path, monkeypatch: Any) -> None:
    given: list[Any] = []
    monkeypatch.setattr(sample, "stream", lambda params, config, hyper, *a, **o: given.append((config, hyper)) or [])
    command = ["launch.py", "--experiment=sample", f"--restore={text}", "--prompt=x", "--attention_softcap=3"]
    assert launch.main(command) == 0
    ((config, hyper),) = given
    assert config.terms == ("clip", "attention_softcap") and hyper.attention_softcap == 3


def test_no_character_is_ever_cut() -> None:
    show = sample._bytes_shower()
    parts = [show([byte]) for byte in "aé€😀".encode()]
    assert [part for part in parts if part] == ["a", "é", "€", "😀"] and show([]) == ""
    show = sample._bytes_shower()
    assert show([0xE2, 0x82]) == "" and show([65]) == "\ufffdA" and show([300]) == "\ufffd"
    assert show([0xC3]) == "" and show([]) == "\ufffd"


def test_a_stop_is_found_wherever_it_begins() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        ids, stop = rng.integers(0, 2, 12).tolist(), rng.integers(0, 2, int(rng.integers(0, 5))).tolist()
        parts = list(before_stop(iter(ids), stop))
        places = [i for i in range(len(ids)) if stop and ids[i : i + len(stop)] == stop]
        assert [i for part in parts for i in part] == (ids[: places[0]] if places else ids), (ids, stop)
    # Nothing is held back for longer than it may be the stop's beginning.
    assert list(before_stop([7, 1, 1, 2, 5], [1, 2])) == [[7], [], [1], []]
    assert list(before_stop([7, 1, 5], [1, 2])) == [[7], [], [1, 5], []]


def test_a_stop_text_ends_the_writing(text: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(sample, "stream", lambda *a, **o: (np.array([byte]) for byte in b"one\n\ntwo"))
    assert says(capsys, text, "--prompt=x", "--stop=\n\n")[1] == "xone\n"
    assert says(capsys, text, "--prompt=x", "--stop=three")[1] == "xone\n\ntwo\n"


def test_a_terminal_without_a_character_shows_another(monkeypatch: Any) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", out)
    sample.show("aé")
    assert out.buffer.getvalue() == b"a?"  # pyright: ignore


def test_notes_go_to_stderr(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = says(capsys, text, "--max_new_tokens=21", "--sample_temperature=0")
    assert code == 0 and "no --prompt: the text begins after a line break" in err
    assert "22 positions: those past seq_len=16 were never trained" in err
    assert "positions" not in out and "step" not in out
    assert "never trained" not in says(capsys, text, "--prompt=x")[2]


MISTAKES = {
    "--prompt=12345678901234567": "--prompt has 17 tokens, and the model reads seq_len=16",
    "--prompt=1234567890123456": "give --max_new_tokens",
    "--prompt=x --positions=learned --max_positions=16 --max_new_tokens=16": (
        "--prompt of 1 and --max_new_tokens=16: 17 positions are past the position table (max_positions=16)"),
    "--prompt=x --sample_temperature=-1": "--sample_temperature=-1.0 is out of range",
    "--prompt=x --sample_temperature=nan": "temperature=nan is out of range",
    "--prompt=x --top_k=257": "top_k=257 is out of range: a whole number from 0 to the vocabulary's 256",
    "--prompt=x --top_k=-1": "--top_k=-1 is out of range",
    "--prompt=x --top_p=0": "top_p=0 is out of range: above 0, at most 1",
    "--prompt=x --min_p=1.5": "min_p=1.5 is out of range",
    "--prompt=x --repetition_penalty=0": "repetition_penalty=0 is out of range",
    "--prompt=x --num_samples=0": "--num_samples=0 is out of range",
    "--prompt=x --mask=none": "mask=none lets a position see later ones",
    "--prompt=x --vocab_size=100": "id 120 at 0 is outside the vocabulary of 100",
    "--prompt=x --seeds=2": "--seeds has no effect in --experiment=sample",
}  # fmt: skip


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_one_line(line: str, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = says(capsys, text, *line.split())
    assert (code, out) == (2, "") and err.count("\n") == 1 and MISTAKES[line] in err, err


def test_mistakes_in_ids(reverse: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for args, message in (
        (["--prompt=a 99"], "id 99 at 1 is outside the vocabulary of 32"),
        (["--prompt=a -1"], "id -1 at 1 is outside the vocabulary of 32"),
        (["--prompt=a bb"], "unknown symbol of task reverse 'bb'"),
        ([], "--prompt is empty: task reverse begins with at least one id"),
        (["--prompt=" + "a " * 17], "--prompt has 17 tokens, and the model reads seq_len=16"),
    ):
        code, out, err = says(capsys, reverse, *args)
        assert (code, out) == (2, "") and err.count("\n") == 1 and message in err, err
    code, _, err = says(capsys, reverse.parent / "nowhere", "--prompt=a")
    assert code == 2 and "no config.json" in err


# --- samples at evaluations -----------------------------------------------------------

SMALL = Config(vocab_size=11, d_model=8, num_heads=2, num_layers=1, seq_len=9, max_positions=9)


@pytest.mark.parametrize(
    "changes",
    [
        {"positions": "learned"},
        {"architecture": "encoder_decoder", "positions": "t5"},
        {"mask": "window", "attention_implementation": "banded", "band": 3},
    ],
)
def test_samples_are_those_without_a_cache(changes: dict[str, Any], monkeypatch: Any) -> None:
    config, rng = SMALL.replace(**changes), np.random.default_rng(1)
    params = jax.tree.map(lambda x: 2.0 * x, init_transformer(jax.random.key(1), config))
    tokens = jnp.asarray(rng.integers(0, 11, (3, 9)), jnp.int32)
    weights = jnp.asarray([[0, 0, 0, 1, 1, 1, 0, 0, 0], [0, 0, 0, 0, 1, 0, 1, 1, 1], [1] * 9], jnp.float32)
    batch = Batch(tokens, tokens, weights, lengths_B=jnp.asarray([6, 9, 9]))
    if "architecture" in changes:
        batch = batch.replace(source_BS=tokens[:, :5], source_lengths_B=jnp.asarray([5, 2, 4]))  # pyright: ignore
    assert samples._can_cache(config, batch)
    hyper = Hyper(window=3)
    got = jit(lambda p, b: samples.free_running(config, p, hyper, b))(params, batch)
    monkeypatch.setattr(samples, "_can_cache", lambda config, batch: False)
    want = jit(lambda p, b: samples.free_running(config, p, hyper, b))(params, batch)
    np.testing.assert_array_equal(np.asarray(got)[weights > 0], np.asarray(want)[weights > 0])


def test_where_a_cache_is_another_function_samples_go_without() -> None:
    batch = Batch(jnp.zeros((1, 9), int), jnp.zeros((1, 9), int), jnp.ones((1, 9)))
    for changes in (
        {"mask": "none"}, {"mask": "prefix"}, {"attention_implementation": "linear"}, {"num_experts": 2},
        {"rope_scaling": "dynamic", "rope_original_positions": 8},
    ):  # fmt: skip
        assert not samples._can_cache(SMALL.replace(**changes), batch), changes
    for changes in ({"num_experts": 2, "expert_capacity": 0.0}, {"rope_scaling": "dynamic"}):
        assert samples._can_cache(SMALL.replace(**changes), batch), changes


def test_the_workdir_is_left_as_it_is(text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in text.rglob("*") if path.is_file()}
    assert says(capsys, text, "--prompt=x", "--max_new_tokens=2")[0] == 0
    assert before == {path: path.read_bytes() for path in text.rglob("*") if path.is_file()}
    assert json.loads((text / "config.json").read_text())["identity"]["experiment"] == "train"
