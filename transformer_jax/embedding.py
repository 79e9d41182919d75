"""Token embeddings and output layer, tied or not, with the sqrt(D) scale (Vaswani et al. 2017 §3.4).

Rows are drawn N(0, 1/D): times sqrt(D) they have unit coordinates and the sinusoid does
not drown in them (drawn N(0, 1) they would drown it); tied, the first logits have unit variance.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import struct

from transformer_jax import keys, positions
from transformer_jax.config import Config, Hyper
from transformer_jax.numerics import product_f32
from transformer_jax.scores import softcap


@struct.dataclass
class Embedding:
    """embed_VD; position_PD where positions are learned; wout_DV where the output is not tied.

    source_VD: the encoder's table where its vocabulary is another. bout_V: added to the logits.
    """

    embed_VD: jax.Array
    position_PD: jax.Array | None
    wout_DV: jax.Array | None
    source_VD: jax.Array | None = None
    bout_V: jax.Array | None = None


def init_embedding(key: jax.Array, config: Config) -> Embedding:
    """All N(0, 1/D), but for the bias, which is 0; float32."""
    V, D = config.V, config.D
    source = config.source_vocab_size
    return Embedding(
        embed_VD=keys.normal(key, "embed_VD", (V, D), D**-0.5),
        position_PD=positions.init_learned(key, config.P, D) if config.positions == "learned" else None,
        wout_DV=None if config.tie_embeddings else keys.normal(key, "wout_DV", (D, V), D**-0.5),
        source_VD=keys.normal(key, "source_VD", (source, D), D**-0.5) if source else None,
        bout_V=jnp.zeros(V) if config.output_bias else None,
    )


def of_source(params: Embedding) -> Embedding:
    """As `embed` wants them for the encoder's ids: with the source's own table where there is one."""
    return params if params.source_VD is None else replace(params, embed_VD=params.source_VD)


def embed(params: Embedding, tokens_BT: jax.Array, positions_BT: jax.Array, config: Config) -> jax.Array:
    """ids [B, T] -> [B, T, D] in the compute type, absolute positions added.

    An id outside the vocabulary gives NaN, not another token's row; hosts check before
    (data.check_ids). Raises ConfigError past the learned table.
    """
    x = params.embed_VD.at[tokens_BT].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
    if config.scale_embeddings:
        x = x * config.D**0.5
    if config.positions == "sinusoidal":
        x = x + positions.sinusoidal(positions_BT, config.D)
    elif params.position_PD is not None:
        # Scaled as the embedding is, so that the two start at one size.
        table = positions.learned(params.position_PD, positions_BT)
        x = x + (table * config.D**0.5 if config.scale_embeddings else table)
    return x.astype(config.compute_dtype)


def unembed(params: Embedding, x_BTD: jax.Array, config: Config, hyper: Hyper) -> jax.Array:
    """[B, T, D] -> logits [B, T, V] in float32, soft-capped where the config has the term.

    Tied, they are x.embed, with scale_logits over sqrt(D) (T5); untied, x.wout and no factor. The bias is
    added after the factor and before the cap.
    """
    if params.wout_DV is None:
        logits = product_f32("btd,vd->btv", x_BTD, params.embed_VD)
        logits = logits * config.D**-0.5 if config.scale_logits else logits
    else:
        logits = product_f32("btd,dv->btv", x_BTD, params.wout_DV)
    if params.bout_V is not None:
        logits = logits + params.bout_V.astype(logits.dtype)[None, None]
    return softcap(logits, hyper.final_softcap) if config.has("final_softcap") else logits
