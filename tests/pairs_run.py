"""A workdir as `train` leaves it for a task on pairs, made in a few seconds: for tests of what reads one."""

import functools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from experiments import ensembles, train, translate
from experiments.flags import parse
from experiments.program import run_key
from experiments.workdir import open_workdir, write_json
from tests.quick import jit
from transformer_jax.config import Config, Hyper, to_dict
from transformer_jax.data import make_task, resolve
from transformer_jax.saver import Saver
from transformer_jax.train import batch_key, init_state, train_step

PHONES = {"a": "ɑ̃", "b": "b", "c": "k", "d": "d", "é": "e", "h": ""}
BASE = Config(
    task="pairs", architecture="encoder_decoder", tokenizer="chars", target_tokenizer="symbols", d_model=16,
    num_heads=2, num_layers=1, seq_len=12, batch_size=32, optimizer="adam",
)  # fmt: skip


def words(count: int, seed: int, longest: int = 7) -> list[str]:
    """Different words over the letters of PHONES that are not silent alone."""
    draw, made = random.Random(seed), {}
    while len(made) < count:
        word = "".join(draw.choice("abcdéh") for _ in range(draw.randrange(2, longest)))
        if word.strip("h"):
            made[word] = None
    return list(made)


def phones(word: str) -> str:
    """What a word should become: a phone a letter, none for h."""
    return " ".join(PHONES[letter] for letter in word if PHONES[letter])


def write_pairs(path: Path, sources: Sequence[str]) -> Path:
    """A TSV file of words and phones."""
    path.write_text("".join(f"{word}\t{phones(word)}\n" for word in sources), encoding="utf-8")
    return path


@functools.cache
def _programs(config: Config) -> tuple[Any, Any]:
    """(key -> a fresh state; state, hyper, data, count -> the state after so many updates), each compiled once."""

    def steps(state: Any, hyper: Hyper, data: Any, count: jax.Array) -> Any:
        task = make_task(config)

        def step(_: jax.Array, s: Any) -> Any:
            return train_step(config, s, hyper, task.train_batch(data, batch_key(s.key, s.step)))[0]

        return jax.lax.fori_loop(0, count, step, state)

    return jit(lambda key: init_state(config, Hyper(), key)), jit(steps)


def make_run(folder: Path, config: Config, seed: int = 0, saves: Sequence[int] = (300,), keep: int = 3) -> Path:
    """`folder` with config.json, tokenizers.json and checkpoints of the steps in `saves`."""
    hyper, config = Hyper(learning_rate=5e-3), resolve(config)
    task = make_task(config)
    assert task.text is not None
    open_workdir(str(folder), train.identity(config, hyper, seed, task), {"steps": config.steps})
    write_json(folder / "tokenizers.json", task.text.tokenizers.to_dict())
    init, advance = _programs(config)
    state = init(run_key(seed))
    meta = {"config": to_dict(config), "tokenizers": task.text.tokenizers.sha256}
    with Saver(folder / "checkpoints", keep=keep) as saver:
        for step in saves:
            state = advance(state, hyper, task.data, step - int(state.step))
            saver.save(step, state, json.loads(json.dumps(meta | {"step": step})))
    return folder


def loaded(*args: str) -> ensembles.Loaded:
    """What `translate` loads for these flags."""
    settings, _ = parse(["launch.py", "--experiment=translate", *args], {"translate": translate.FLAGS})
    return ensembles.load(settings)
