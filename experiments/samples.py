"""Three samples at each evaluation: what went in, what was wanted, what came out."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import processes
from experiments.report import DIVERGED
from experiments.translating import Translator, translate
from transformer_jax.batch import Batch
from transformer_jax.cache import check_cacheable, extend, init_cache, most_positions, read_source
from transformer_jax.config import Config, Hyper
from transformer_jax.data import Task, prompt_and_reference
from transformer_jax.data.pairs_task import PAIR_TASKS
from transformer_jax.encoder_decoder import forward, logits_of
from transformer_jax.errors import ConfigError, NotFiniteError

SHOWN = 3
WRITTEN = 40  # ids that a text sample continues
WIDTH = 44  # characters shown of each part


def free_running(config: Config, params: Any, hyper: Hyper, batch: Batch) -> jax.Array:
    """Greedy outputs [B, T]: at each counted position the most probable id, fed back as the next input.

    Positions that do not count keep the given input. An encoder predicts all positions at once.
    """

    def predict(tokens: jax.Array) -> jax.Array:
        logits, _ = forward(params, config, hyper, dataclasses.replace(batch, tokens_BT=tokens))
        return jnp.argmax(logits, axis=-1).astype(tokens.dtype)

    if config.architecture == "encoder":
        return predict(batch.tokens_BT)
    if _can_cache(config, batch):
        return _cached(config, params, hyper, batch)
    T = batch.tokens_BT.shape[1]

    def step(t: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        tokens, out = carry
        made = predict(tokens)[:, t]
        out = out.at[:, t].set(made)
        following = jnp.minimum(t + 1, T - 1)
        counts = (batch.weights_BT[:, t] > 0) & (t + 1 < T)
        return tokens.at[:, following].set(jnp.where(counts, made, tokens[:, following])), out

    first = jnp.argmax(jnp.any(batch.weights_BT > 0, axis=0))  # nothing is written before it
    return jax.lax.fori_loop(first, T, step, (batch.tokens_BT, jnp.zeros_like(batch.tokens_BT)))[1]


def _is_cacheable(config: Config) -> bool:
    try:
        check_cacheable(config)
    except ConfigError:
        return False
    return True


def _can_cache(config: Config, batch: Batch) -> bool:
    """Whether one token at a time with a cache is the same function as `forward` on the whole row."""
    if not _is_cacheable(config):
        return False
    given = (batch.positions_BT, batch.segments_BT, batch.source_positions_BS, batch.source_segments_BS)
    fits = (most_positions(config) or batch.tokens_BT.shape[1]) >= batch.tokens_BT.shape[1]
    drops = config.E > 0 and config.expert_capacity > 0
    return fits and not drops and config.mask != "prefix" and all(part is None for part in given)


def _cached(config: Config, params: Any, hyper: Hyper, batch: Batch) -> jax.Array:
    """`free_running`, a token's work for each token."""
    B, T = batch.tokens_BT.shape
    cache = init_cache(config, B, T)
    if batch.source_BS is not None:
        cache = read_source(params, config, hyper, cache, batch.source_BS, batch.source_lengths_B)
    lengths_B = jnp.full(B, T) if batch.lengths_B is None else batch.lengths_B

    def step(
        carry: tuple[Any, jax.Array, jax.Array], t: jax.Array
    ) -> tuple[tuple[Any, jax.Array, jax.Array], jax.Array]:
        cache, made, counted = carry
        tokens = jnp.where(counted, made, batch.tokens_BT[:, t])
        x_BTD, cache = extend(params, config, hyper, cache, tokens[:, None], (t < lengths_B)[:, None])
        made = jnp.argmax(logits_of(params, config, hyper, x_BTD)[:, 0], axis=-1).astype(tokens.dtype)
        return (cache, made, batch.weights_BT[:, t] > 0), made

    first = cache, batch.tokens_BT[:, 0], jnp.zeros(B, bool)
    return jax.lax.scan(step, first, jnp.arange(T))[1].T


@jax.jit(static_argnums=0)
def _outputs(config: Config, params: Any, hyper: Hyper, batch: Batch) -> jax.Array:
    return free_running(config, params, hyper, batch)


def sample_batch(config: Config, task: Task) -> Batch:
    """The first rows of the selection split; of a text, only the last WRITTEN ids of a row are to be written."""
    batch = task.eval_batch(task.data, "selection", jnp.zeros((), jnp.int32))
    batch = jax.tree.map(lambda x: x[:SHOWN], batch)
    if config.task != "text":
        return batch
    last = jnp.arange(config.seq_len)[None] >= config.seq_len - min(WRITTEN, config.seq_len // 2)
    return batch.replace(weights_BT=jnp.where(last, batch.weights_BT, 0.0))


def samples(config: Config, params: Any, hyper: Hyper, task: Task) -> list[str]:
    """Three lines for each sample: input, reference, output.

    Of pairs the output is what the model writes for the source, however long.
    """
    if config.task in PAIR_TASKS and processes.count() == 1 and _is_cacheable(config):
        return _translations(config, params, hyper, task)
    batch = sample_batch(config, task)
    outputs = np.asarray(jax.block_until_ready(_outputs(config, params, hyper, batch)))
    lines = []
    for row in range(min(SHOWN, len(outputs))):
        prompt, reference = prompt_and_reference(config, task, batch, row)
        counted = np.asarray(batch.weights_BT[row]) > 0
        lines += _three(prompt, reference, task.show(outputs[row][counted]))
    return lines


def _translations(config: Config, params: Any, hyper: Hyper, task: Task) -> list[str]:
    assert task.text is not None
    pairs = task.text.pairs["selection" if "selection" in task.text.pairs else "report"][:SHOWN]
    translator = Translator((params,), config, hyper, task.text.tokenizers)
    try:
        outputs = translate(translator, [source for source, _ in pairs]).best()
    except NotFiniteError:  # nothing finite to choose from
        outputs = [DIVERGED] * len(pairs)
    return [
        line
        for (source, references), output in zip(pairs, outputs, strict=True)
        for line in _three(source, references[0], output)
    ]


def _three(prompt: str, reference: str, output: str) -> list[str]:
    shown = ("input", prompt), ("reference", reference), ("output", output)
    return [f"    {name:>9}  {_short(text)}" for name, text in shown]


def _short(text: str) -> str:
    text = repr(text)[1:-1]
    return text if len(text) <= WIDTH else "…" + text[-WIDTH:]
