"""Where the heads of a trained model look, for texts that it wrote: weights with the tokens' names."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.evaluating import Item
from experiments.translating import Translator, source_ids
from transformer_jax.batch import Batch
from transformer_jax.config import Config, Hyper
from transformer_jax.data import START
from transformer_jax.decode import bucket, on_device, padded
from transformer_jax.encoder_decoder import Traces, Transformer, forward


class Heads(NamedTuple):
    """weights_LNTS of one attention ("encoder", "decoder", "cross"); the names of the T tokens that look, and the S."""

    kind: str
    weights_LNTS: np.ndarray
    rows: list[str]
    columns: list[str]


def heads_of(translator: Translator, items: Sequence[Item]) -> list[list[Heads]]:
    """The attentions of each item, of the first model as it writes the item's output.

    A row of decoder and cross attention is named by the token that it writes, a column by the token that it
    reads. Only dense attention has weights: blockwise and banded attention are the same function; for
    linear attention, which has none, the lists are empty.
    """
    config, names = translator.config, translator.tokenizers
    if config.attention_implementation == "linear" or not items:
        return [[] for _ in items]
    config = config.replace(attention_implementation="dense")
    both = config.architecture == "encoder_decoder"
    sources = [source_ids(config, names, item.source) for item in items]
    begun = [[START] if both else row for row in sources]
    tokens = [[*first, *item.ids[:-1]] for first, item in zip(begun, items, strict=True)]
    batch = _batch(config, tokens, sources if both else None)
    traces = _traced(config, translator.models[0], on_device(translator.hyper), batch)
    out = []
    for i, item in enumerate(items):
        read = [names.target.piece(token) for token in tokens[i]]
        written = [*read[1 : len(begun[i])], *(names.target.piece(token) for token in item.ids)]
        own = Heads("decoder", _part(traces.decoder, i, len(read), len(read)), written, read)
        found = [own]
        if both:
            source = [names.source.piece(token) for token in sources[i]]
            encoder = Heads("encoder", _part(traces.encoder, i, len(source), len(source)), source, source)
            cross = Heads("cross", _part(traces.cross, i, len(read), len(source)), written, source)
            found = [encoder, own, cross]
        out.append(found)
    return out


def most_tokens(config: Config, item: Item) -> int:
    """The most tokens on a side of an item's pictures."""
    if config.architecture == "encoder_decoder":
        return max(item.length + 1, len(item.ids))
    return item.length + len(item.ids)


def _batch(config: Config, tokens: list[list[int]], sources: list[list[int]] | None) -> Batch:
    """One batch for all items: they share a program."""
    most = config.P if config.positions == "learned" else None

    def array(rows: list[list[int]]) -> jax.Array:
        return jnp.asarray(padded(rows, bucket(max(map(len, rows)), most))[0])

    tokens_BT = array(tokens)
    batch = Batch(tokens_BT, tokens_BT, jnp.ones(tokens_BT.shape), lengths_B=_lengths(tokens))
    if sources is None:
        return batch
    return dataclasses.replace(batch, source_BS=array(sources), source_lengths_B=_lengths(sources))


def _lengths(rows: list[list[int]]) -> jax.Array:
    return jnp.asarray([len(row) for row in rows], jnp.int32)


@functools.partial(jax.jit, static_argnums=0)
def _traced(config: Config, params: Transformer, hyper: Hyper, batch: Batch) -> Traces:
    return forward(params, config, hyper, batch, trace=True)[1]


def _part(trace: Any, row: int, T: int, S: int) -> np.ndarray:
    """[L, N, T, S] of a batch's row, without its padding."""
    return np.asarray(trace.weights_BNTS[:, row, :, :T, :S], np.float32)
