"""The exact distribution: hand values, and what `generate` draws held to it by chi-square."""

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import launch
from experiments import decoding
from experiments.decoding import misfit
from transformer_jax.config import Config, Hyper
from transformer_jax.decode import generate
from transformer_jax.encoder_decoder import Transformer, init_transformer
from transformer_jax.errors import ConfigError, UserError
from transformer_jax.exact import Outcomes, distribution, outcomes
from transformer_jax.samplers import Sampler

pytestmark = pytest.mark.usefixtures("quick_decoding")
V, NEW, STOP = 4, 4, 3
CONFIG = Config(vocab_size=V, d_model=8, num_heads=2, num_layers=1, positions="alibi", seq_len=8, tie_embeddings=False)
HYPER, PROMPT = Hyper(), [0, 2]
ROWS, DRAWS = 4096, 12288
SAMPLERS = decoding.SETTINGS


@functools.cache
def parameters() -> Transformer:
    params = init_transformer(jax.random.key(3), CONFIG)
    return jax.tree.map(lambda x: 1.4 * x, params)


def exact(name: str, **options: Any) -> Outcomes:
    return outcomes(
        parameters(), CONFIG, HYPER, PROMPT, SAMPLERS[name], max_new_tokens=NEW, stop_ids=(STOP,), **options
    )


@functools.cache
def drawn(name: str) -> dict[tuple[int, ...], int]:
    """How often `generate` wrote each sequence."""
    counts: dict[tuple[int, ...], int] = {}
    for start in range(0, DRAWS, ROWS):
        made = generate(
            parameters(), CONFIG, HYPER, [PROMPT] * ROWS, jax.random.key(11), max_new_tokens=NEW,
            sampler=SAMPLERS[name], stop_ids=(STOP,), row_ids=range(start, start + ROWS),
        )  # fmt: skip
        for ids, length in zip(np.asarray(made.ids_BT).tolist(), made.lengths_B.tolist(), strict=True):
            counts[tuple(ids[:length])] = counts.get(tuple(ids[:length]), 0) + 1
    return counts


@pytest.mark.parametrize("name", SAMPLERS)
def test_what_is_drawn_is_distributed_as_the_enumeration_says(name: str) -> None:
    found, counts = exact(name), drawn(name)
    assert sum(counts.values()) == DRAWS
    assert misfit(counts, found) > 0.001, name


# --- the same test must refuse each of these: what a wrong sampler would draw ---------


def _temperature_last(logits: np.ndarray, seen: Any, sampler: Sampler) -> np.ndarray:
    p = distribution(logits, seen, dataclasses.replace(sampler, temperature=1.0)) ** (1 / sampler.temperature)
    return p / p.sum()


def _top_p_without_the_crossing(logits: np.ndarray, seen: Any, sampler: Sampler) -> np.ndarray:
    p = distribution(logits, seen, dataclasses.replace(sampler, top_p=1.0, min_p=0.0))
    order = np.argsort(-p, kind="stable")
    p[order[np.cumsum(p[order]) > sampler.top_p][: len(p) - 1]] = 0.0
    return p / p.sum() if p.sum() else np.eye(len(p))[order[0]]


def _top_p_before_top_k(logits: np.ndarray, seen: Any, sampler: Sampler) -> np.ndarray:
    p = distribution(logits, seen, dataclasses.replace(sampler, top_k=0))
    p[np.argsort(-p, kind="stable")[sampler.top_k :]] = 0.0
    return p / p.sum()


def _changed(**changes: Any) -> Any:
    return lambda logits, seen, sampler: distribution(logits, seen, dataclasses.replace(sampler, **changes))


def _penalty_divides(logits: np.ndarray, seen: Any, sampler: Sampler) -> np.ndarray:
    lowered = np.where(np.isin(np.arange(len(logits)), list(seen)), logits / sampler.repetition_penalty, logits)
    return distribution(lowered, set(), dataclasses.replace(sampler, repetition_penalty=1.0))


def _penalty_forgets_the_prompt(logits: np.ndarray, seen: Any, sampler: Sampler) -> np.ndarray:
    return distribution(logits, set(seen) - set(PROMPT), sampler)


def _min_p_of_1(logits: np.ndarray, seen: Any, sampler: Sampler) -> np.ndarray:
    p = distribution(logits, seen, Sampler())
    p = np.where(p < min(sampler.min_p, p.max()), 0.0, p)
    return p / p.sum()


MUTANTS: dict[str, tuple[str, Any]] = {
    "temperature after the others": ("temperature 1.7, top_p 0.7", _temperature_last),
    "temperature multiplies": ("temperature 1.7", lambda x, seen, s: distribution(x * s.temperature, seen, Sampler())),
    "top-k keeps one more": ("top_k 2", _changed(top_k=3)),
    "top-k keeps one fewer": ("top_k 2", _changed(top_k=1)),
    "top-p drops the crossing id": ("top_p 0.7", _top_p_without_the_crossing),
    "top-p before top-k": ("top_k 3, top_p 0.75", _top_p_before_top_k),
    "min-p of 1, not of the largest": ("min_p 0.35", _min_p_of_1),
    "penalty divides negative logits": ("penalty 1.8", _penalty_divides),
    "penalty forgets the prompt": ("penalty 1.8", _penalty_forgets_the_prompt),
    "no sampler": ("temperature 0.6", _changed(temperature=1.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_sampler_is_refused(name: str) -> None:
    setting, process = MUTANTS[name]
    assert misfit(drawn(setting), exact(setting, process=process)) < 1e-9


# --- the enumeration itself -----------------------------------------------------------


def test_two_ids_by_hand() -> None:
    """A model that sees no position and says p(1) = 1/4 after anything; 1 stops."""
    config = CONFIG.replace(vocab_size=2, positions="none", norm_placement="none", num_layers=1)
    params = jax.tree.map(jnp.zeros_like, init_transformer(jax.random.key(0), config))
    embedding = dataclasses.replace(
        params.embedding, embed_VD=params.embedding.embed_VD.at[:, 0].set(1 / math.sqrt(config.D)),
        wout_DV=params.embedding.wout_DV.at[0].set(jnp.log(jnp.asarray([3.0, 1.0]))),
    )  # fmt: skip
    params = dataclasses.replace(params, embedding=embedding)
    found = outcomes(params, config, HYPER, [0], max_new_tokens=3, stop_ids=(1,))
    want = {(0, 0, 0): 27 / 64, (1,): 1 / 4, (0, 1): 3 / 16, (0, 0, 1): 9 / 64}
    assert found.sequences == tuple(want)
    np.testing.assert_allclose(found.p, list(want.values()), rtol=1e-6)
    assert found.mode == (0, 0, 0) and found.probability((0, 1)) == pytest.approx(3 / 16)
    assert found.probability((1, 0)) == 0.0
    assert found.expected_length == pytest.approx(1 / 4 + 2 * 3 / 16 + 3 * 36 / 64)
    assert found.entropy == pytest.approx(-sum(p * math.log(p) for p in want.values()))
    greedy = outcomes(params, config, HYPER, [0], Sampler(temperature=0.0), max_new_tokens=3, stop_ids=(1,))
    assert greedy.sequences == ((0, 0, 0),) and greedy.entropy == 0.0


def test_probabilities_are_those_that_generate_reports() -> None:
    sampler = SAMPLERS["all five"]
    found = exact("all five")
    made = generate(
        parameters(), CONFIG, HYPER, [PROMPT] * ROWS, jax.random.key(0), max_new_tokens=NEW, sampler=sampler,
        stop_ids=(STOP,),
    )  # fmt: skip
    for row in range(20):
        ids = made.ids_BT[row, : made.lengths_B[row]].tolist()
        assert float(made.sampler_logp_BT[row].sum()) == pytest.approx(math.log(found.probability(ids)), abs=1e-5)


def test_a_translation_follows_its_source() -> None:
    config = CONFIG.replace(architecture="encoder_decoder")
    params = init_transformer(jax.random.key(3), config)
    options: Any = {"max_new_tokens": 2, "stop_ids": (STOP,)}
    found = {s: outcomes(params, config, HYPER, [0], source=s, **options) for s in ((1, 2), (2, 2))}
    assert all(abs(one.p.sum() - 1) < 1e-12 for one in found.values())
    assert abs(found[1, 2].entropy - found[2, 2].entropy) > 1e-4
    made = generate(
        params, config, HYPER, [[0]], jax.random.key(0), sources=[(1, 2)], sampler=Sampler(temperature=0.0), **options
    )
    greedy = outcomes(params, config, HYPER, [0], Sampler(temperature=0.0), source=(1, 2), **options)
    assert tuple(made.ids_BT[0, : made.lengths_B[0]].tolist()) == greedy.mode


def test_too_many_sequences_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"4\*\*9 sequences"):
        outcomes(parameters(), CONFIG, HYPER, PROMPT, max_new_tokens=9)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "prompt 0 is empty": ({}, {"prompt": []}),
    "max_new_tokens=0 is out of range": ({}, {"max_new_tokens": 0}),
    "mask=none lets a position see later ones": ({"mask": "none"}, {}),
    "prefix=8 with 2 prompt tokens": ({"mask": "prefix"}, {}),
    "architecture=decoder has no sources": ({}, {"source": [1]}),
    "architecture=encoder_decoder needs sources": ({"architecture": "encoder_decoder"}, {}),
    "source 0 is empty": ({"architecture": "encoder_decoder"}, {"source": []}),
    "id 4 at 1 is outside the vocabulary of 4": ({"architecture": "encoder_decoder"}, {"source": [1, 4]}),
    "a source of 9 is past the position table (max_positions=8)": (
        {"architecture": "encoder_decoder", "positions": "learned", "max_positions": 8}, {"source": [1] * 9}),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_what_generate_refuses_is_refused(message: str) -> None:
    changes, options = REFUSED[message]
    options = {"prompt": PROMPT, "max_new_tokens": 2} | options
    with pytest.raises(UserError) as error:
        outcomes(None, CONFIG.replace(**changes), HYPER, options.pop("prompt"), **options)  # pyright: ignore
    assert message in str(error.value) and "\n" not in str(error.value)


# --- the lab as an experiment -----------------------------------------------------------


def test_the_lab_holds_samplers_to_the_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decoding, "ROUNDS", 1)
    monkeypatch.setattr(decoding, "SETTINGS", {name: decoding.SETTINGS[name] for name in ("greedy", "top_p 0.7")})
    command = ["launch.py", "--experiment=decoding", f"--workdir={tmp_path / 'lab'}"]
    assert launch.main(command) == 0
    found = json.loads((tmp_path / "lab" / "results.json").read_text())["settings"]
    listed = exact("top_p 0.7")
    assert found["greedy"]["entropy"] == 0 and found["greedy"]["sequences"] == 1
    assert found["top_p 0.7"]["mode"] == list(listed.mode)
    assert found["top_p 0.7"]["expected_length"] == pytest.approx(listed.expected_length, abs=1e-6)
    assert f"{listed.entropy:.3f}" in capsys.readouterr().out
    other = [*command[:2], f"--workdir={tmp_path / 'capped'}", "--final_softcap=0.4"]
    assert launch.main(other) == 0
    assert launch.main([*other[:2], command[2], *other[3:]]) == 2
    assert "hyper.final_softcap is 0.0 there, 0.4 here" in capsys.readouterr().err
    capped = json.loads((tmp_path / "capped" / "results.json").read_text())["settings"]
    with_term, hyper = CONFIG.replace(terms=("final_softcap",)), dataclasses.replace(HYPER, final_softcap=0.4)
    listed = outcomes(
        parameters(), with_term, hyper, PROMPT, SAMPLERS["top_p 0.7"], max_new_tokens=NEW, stop_ids=(STOP,)
    )  # fmt: skip
    assert capped["top_p 0.7"]["entropy"] == pytest.approx(listed.entropy, abs=1e-6)
    assert abs(listed.entropy - found["top_p 0.7"]["entropy"]) > 0.1
    warm = decoding.drawn(parameters(), CONFIG, HYPER, SAMPLERS["temperature 1.7, top_p 0.7"], jax.random.key(1))
    monkeypatch.setattr(decoding, "drawn", lambda *_: warm)
    assert launch.main(command) == 1
    assert "NOT as listed: greedy, top_p 0.7" in capsys.readouterr().out


def test_distance_by_hand() -> None:
    found = Outcomes(((0,), (1,)), np.array([0.75, 0.25]))
    assert decoding.distance({(0,): 3, (1,): 1}, found) == 0
    assert decoding.distance({(0,): 1, (1,): 3}, found) == pytest.approx(0.5)
    assert decoding.distance({(2,): 4}, found) == pytest.approx(1)


def test_the_lab_s_mistakes_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, named in (("--top_k=9", "top_k=9"), ("--top_p=0", "top_p=0"), ("--sample_temperature=-1", "-1")):
        assert launch.main(["launch.py", "--experiment=decoding", flag]) == 2
        err = capsys.readouterr().err
        assert named in err and err.count("\n") == 1
