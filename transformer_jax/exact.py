"""The exact distribution over what a small model writes, by listing every sequence.

    found = outcomes(params, config, hyper, [0, 2], sampler, max_new_tokens=4, stop_ids=(1,))
    found.p, found.sequences, found.entropy, found.mode, found.expected_length

V ids and n new tokens make at most V**n sequences: all their prefixes go through one batched
forward pass without a cache, and the next id's distribution is worked out in float64, id by id,
with nothing in common with `samplers` but its documented order. What `decode.generate` draws can so
be held to the truth, and a sampler's effect (entropy, mode, length) be read without sampling.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet

import jax
import jax.numpy as jnp
import numpy as np

from transformer_jax.batch import Batch
from transformer_jax.config import Config, Hyper
from transformer_jax.decode import check_request
from transformer_jax.encoder_decoder import Transformer, forward
from transformer_jax.errors import ConfigError
from transformer_jax.samplers import Sampler

MOST = 1 << 16  # sequences that are listed
Process = Callable[[np.ndarray, AbstractSet[int], Sampler], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Outcomes:
    """Every sequence that can be written, most probable first, and its probability: float64, sums to 1.

    A sequence ends with a stop id, or has max_new_tokens ids. Those of probability 0 are left out.
    """

    sequences: tuple[tuple[int, ...], ...]
    p: np.ndarray

    @property
    def entropy(self) -> float:
        """-sum p ln p, in nats."""
        return float(np.sum(self.p * -np.log(self.p)))

    @property
    def mode(self) -> tuple[int, ...]:
        """The most probable sequence; of equal ones the first in the order of ids."""
        return self.sequences[0]

    @property
    def expected_length(self) -> float:
        """Mean number of ids, the stop id included."""
        return float(sum(p * len(ids) for ids, p in zip(self.sequences, self.p, strict=True)))

    def probability(self, ids: Sequence[int]) -> float:
        """Of one sequence; 0 for one that cannot be."""
        return float(self.p[self.sequences.index(tuple(ids))]) if tuple(ids) in self.sequences else 0.0


def distribution(logits_V: np.ndarray, seen: AbstractSet[int], sampler: Sampler) -> np.ndarray:
    """The next id's probabilities [V] under a sampler of plain numbers: `samplers`' five steps, in float64."""
    scores = [float(x) for x in logits_V]
    for i in seen:
        scores[i] = scores[i] / sampler.repetition_penalty if scores[i] > 0 else scores[i] * sampler.repetition_penalty
    ranked = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    if sampler.temperature == 0:
        return np.eye(len(scores))[ranked[0]]
    powers = [math.exp((scores[i] - scores[ranked[0]]) / sampler.temperature) for i in ranked]
    if sampler.top_k:
        ranked, powers = ranked[: sampler.top_k], powers[: sampler.top_k]
    if sampler.top_p < 1:
        reached, count = 0.0, 0
        while reached < sampler.top_p and count < len(powers):
            reached += powers[count] / sum(powers)
            count += 1
        ranked, powers = ranked[:count], powers[:count]
    likely = [(i, power) for i, power in zip(ranked, powers, strict=True) if power >= sampler.min_p * powers[0]]
    p = np.zeros(len(scores))
    for i, power in likely:
        p[i] = power / sum(power for _, power in likely)
    return p


def outcomes(
    params: Transformer,
    config: Config,
    hyper: Hyper,
    prompt: Sequence[int],
    sampler: Sampler | None = None,
    *,
    max_new_tokens: int,
    stop_ids: Sequence[int] = (),
    source: Sequence[int] | None = None,
    process: Process = distribution,
) -> Outcomes:
    """Every sequence that `decode.generate` can write after a prompt, with its exact probability.

    sampler: plain numbers; None draws from the model. source: an encoder-decoder's. process: another way from
    logits to probabilities, for experiments with the order of the steps.
    Raises ConfigError for more than 65,536 sequences, a model in which a position sees later ones,
    and what `generate` refuses.
    """
    sampler, V, n = sampler or Sampler(), config.V, max_new_tokens
    check_request(config, hyper, [prompt], n, sampler, stop_ids, None if source is None else [source])
    if V**n > MOST:
        raise ConfigError(f"{V}**{n} sequences of max_new_tokens={n}: at most {MOST}")
    logits = _logits(params, config, hyper, prompt, n, source)
    found: list[tuple[tuple[int, ...], float]] = []

    def follow(ids: tuple[int, ...], p: float) -> None:
        if len(ids) == n or (ids and ids[-1] in stop_ids):
            found.append((ids, p))
            return
        row = sum(i * V ** (n - 2 - k) for k, i in enumerate(ids))
        chances = process(logits[row, len(ids)], {*prompt, *ids}, sampler)
        for i in range(V):
            if chances[i] > 0:
                follow((*ids, i), p * float(chances[i]))

    follow((), 1.0)
    found.sort(key=lambda one: -one[1])
    return Outcomes(tuple(ids for ids, _ in found), np.array([p for _, p in found]))


def _logits(
    params: Transformer, config: Config, hyper: Hyper, prompt: Sequence[int], n: int, source: Sequence[int] | None
) -> np.ndarray:
    """float64 [V**(n-1), n, V]: after the prompt and the first 0 … n-1 ids of each row, rows in the order of ids."""
    config = config.replace(expert_capacity=0.0)  # as decoding does
    tails = np.array(list(itertools.product(range(config.V), repeat=n - 1)), np.int32).reshape(-1, n - 1)
    tokens_BT = jnp.asarray(np.concatenate([np.tile(np.asarray(prompt, np.int32), (len(tails), 1)), tails], axis=1))
    batch = Batch(tokens_BT, tokens_BT, jnp.ones(tokens_BT.shape))
    if source is not None:
        batch = dataclasses.replace(batch, source_BS=jnp.tile(jnp.asarray(source, jnp.int32)[None], (len(tails), 1)))
    logits_BTV, _ = _forward(params, config, hyper, batch)
    return np.asarray(logits_BTV[:, len(prompt) - 1 :], np.float64)


_forward = jax.jit(forward, static_argnames="config")
