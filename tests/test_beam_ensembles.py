"""Ensembles: the mean of the members' probabilities, whatever their configurations, against every sequence there is."""

import itertools

import jax
import numpy as np
import pytest

from tests.test_beam import ALL, NEW, PROMPT, STOP, TINY, V, hypotheses, model, ranked, same, tiny
from transformer_jax import exact
from transformer_jax.beam import Penalty, beam_search
from transformer_jax.config import Hyper
from transformer_jax.encoder_decoder import init_transformer
from transformer_jax.errors import ConfigError

pytestmark = pytest.mark.usefixtures("quick_decoding")


def of_table(p_BTV: np.ndarray) -> dict[tuple[int, ...], float]:
    """Every text and its ln p, from the probabilities after each prefix of NEW - 1 ids."""
    want: dict[tuple[int, ...], float] = {}
    for row, tail in enumerate(itertools.product(range(V), repeat=NEW - 1)):
        for last in range(V):
            ids = (*tail, last)
            length = ids.index(STOP) + 1 if STOP in ids else NEW
            want[ids[:length]] = sum(float(np.log(p_BTV[row, t, ids[t]])) for t in range(length))
    return want


def test_an_ensemble_averages_probabilities() -> None:
    tables = [exact._logits(model(seed), TINY, Hyper(), PROMPT, NEW, None) for seed in (0, 1)]
    p_BTV = np.mean([np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in tables], axis=0)
    want, penalty = of_table(p_BTV), Penalty("gnmt", 0.7)
    same(hypotheses(tiny((0, 1), penalty=penalty, n_best=5)), ranked(want, want.values(), penalty)[:5])
    same(hypotheses(tiny((0, 0), penalty=penalty, n_best=5)), hypotheses(tiny(penalty=penalty, n_best=5)))


def test_an_ensemble_of_several_configs_averages_probabilities() -> None:
    """Wider, deeper, without positions and colder: each member runs by its own settings, two of them in one group."""
    other = TINY.replace(d_ff=7, num_layers=2, positions="none", norm_placement="post")
    cold = Hyper(attention_temperature=0.3)
    configs, hypers = [TINY, other, TINY, TINY], [Hyper(), Hyper(), Hyper(), cold]
    members = [model(0), init_transformer(jax.random.key(7), other), model(1), model(2)]
    settings = list(zip(members, configs, hypers, strict=True))
    tables = [exact._logits(p, config, hyper, PROMPT, NEW, None) for p, config, hyper in settings]
    p_BTV = np.mean([np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in tables], axis=0)
    want = of_table(p_BTV)
    found = beam_search(members, configs, hypers, [PROMPT], max_new_tokens=NEW, stop_ids=(STOP,), beam=ALL, n_best=5)
    same(hypotheses(found), ranked(want, want.values(), Penalty())[:5])


def test_members_of_another_shape_are_refused_by_name() -> None:
    other = init_transformer(jax.random.key(0), TINY.replace(d_ff=7))
    with pytest.raises(
        ConfigError, match=r"model 1 .* not fit its Config: decoder/layers/ffn/w1_DF is \(1, 8, 7\), not \(1, 8, 32\)"
    ):
        beam_search([model(0), other], TINY, Hyper(), [PROMPT], max_new_tokens=2)
    wide = TINY.replace(vocab_size=4)
    with pytest.raises(ConfigError, match="model 1 of the ensemble reads other ids: V is 4, in model 0 3"):
        both = [model(0), init_transformer(jax.random.key(0), wide)]
        beam_search(both, [TINY, wide], Hyper(), [PROMPT], max_new_tokens=2)
    with pytest.raises(ConfigError, match="an ensemble of 1 models, 2 Configs and 1 Hypers"):
        beam_search(model(0), [TINY, TINY], Hyper(), [PROMPT], max_new_tokens=2)
