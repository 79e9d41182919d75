"""Checks of chapter H on more than one attention: shapes, cross-attention, the encoder (S1 §7.1; S2 §2, §8.2)."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import shapes
from experiments.claims.attention_loops import ROUND, drawn, gap, heads_by_loop, jit, layer_norm, net_by_numpy, normal
from experiments.claims.record import Numbers, Words, at_least, at_most, near
from experiments.flags import Settings
from transformer_jax import masks
from transformer_jax.attention import attention, init_attention
from transformer_jax.batch import Batch
from transformer_jax.config import Config, Hyper
from transformer_jax.encoder_decoder import encode, forward, init_transformer

HYPER = Hyper()
F32 = "float32"


def listed(B: int, L: int) -> dict[str, tuple[int, ...]]:
    """Step -> its shape, for D = 8, H = 2, D_head = 4."""
    return {
        "input ids": (B, L),
        **dict.fromkeys(("embedding", "positions added", "heads merged", "feed-forward"), (B, L, 8)),
        **dict.fromkeys(("Q projection", "K projection", "V projection", "weighted sum"), (B, 2, L, 4)),
        **dict.fromkeys(("attention scores", "softmax"), (B, 2, L, L)),
        "feed-forward, inner": (B, L, 32),
    }


def shape_table() -> Numbers:
    """H11: the table of S1 §7.1, from a forward pass in steps; and where no two of B, L, H and D_head are equal."""
    config = shapes.BASE

    @jit
    def table(key: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        made = {step: array for step, _, _, array in shapes.arrays(Settings("shapes", {}, frozenset()))}
        x = made["positions added"]
        return made, attention(init_attention(key, config), x, x, masks.causal(), config, HYPER)[0]

    made, whole = table(jax.random.key(0))
    right = [made[step].shape == shape for step, shape in listed(2, 4).items()]
    yield near("right", Words("steps with the listed shape", "形状相符的步骤数"), sum(right), len(right), dtype=F32)
    wider = Settings("shapes", {"batch_size": 3, "seq_len": 5}, frozenset())
    found = jax.eval_shape(lambda: {step: array for step, _, _, array in shapes.arrays(wider)})
    apart = sum(found[step].shape == shape for step, shape in listed(3, 5).items())
    yield near("apart", Words("the same for B = 3, L = 5", "B = 3、L = 5 时"), apart, len(right), dtype=F32)
    integers = jnp.issubdtype(made["input ids"].dtype, jnp.integer)
    yield near("ids", Words("the input is integers", "输入是整数"), integers, 1, dtype="int32")
    # The table shows the library's attention: its steps one by one give what it gives as a whole.
    size = float(jnp.max(jnp.abs(made["positions added"])))
    label = Words("heads merged, against attention as a whole", "多头合并与整体注意力之差")
    yield at_most("gap", label, gap(made["heads merged"], whole), 3 * 8 * ROUND * size, F32)


def cross() -> Numbers:
    """H14: an encoder-decoder of two layers, with one input changed at a time."""
    config = Config(architecture="encoder_decoder", vocab_size=11, d_model=8, num_heads=2, positions="sinusoidal")
    params = drawn(init_transformer, config, 0.7)
    model = jit(lambda params, batch: forward(params, config, HYPER, batch, trace=True))

    def run(params: Any, tokens: list[int], source: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Logits [T, V]; scores and weights of cross-attention [L, N, T, S]. The source's last place is padding."""
        ids, lengths = jnp.array([tokens]), jnp.array([4])
        batch = Batch(ids, ids, jnp.ones((1, 4)), source_BS=jnp.array([source]), source_lengths_B=lengths)
        logits, traces = model(params, batch)
        seen = traces.cross
        return np.asarray(logits)[0], np.asarray(seen.scores_BNTS)[:, 0], np.asarray(seen.weights_BNTS)[:, 0]

    tokens, source = [1, 4, 5, 6], [7, 8, 9, 3, 0]
    logits, scores, weights = run(params, tokens, source)
    other_first = run(params, [2, 4, 5, 6], source)[1]
    label = Words("layer 1: max |Δscore| of row 3 for another token 0", "第 1 层：改动词元 0 时第 3 行 max |Δ得分|")
    yield at_least("before", label, gap(other_first[0, :, 3], scores[0, :, 3]), 1e-3, F32)
    yield near("rows", Words("rows of scores, T = 4", "得分的行数（T = 4）"), scores.shape[2], 4, dtype=F32)
    yield near("columns", Words("columns, S = 5", "列数（S = 5）"), scores.shape[3], 5, dtype=F32)
    label = Words("positive weights on real source tokens", "真实源词元上的正权重数")
    yield near("visible", label, np.count_nonzero(weights[..., :4] > 0), 2 * 2 * 4 * 4, dtype=F32)
    yield near("padding", Words("weight on padding", "填充上的权重"), np.abs(weights[..., 4]).sum(), 0, dtype=F32)
    padded = gap(run(params, tokens, [7, 8, 9, 3, 10])[0], logits)
    yield near("padded", Words("max |Δlogit| for other padding", "改动填充时 max |Δlogit|"), padded, 0, dtype=F32)
    future = gap(run(params, [1, 4, 5, 9], source)[0][:3], logits[:3])
    yield near("future", Words("max |Δlogit| before a change", "改动之前的位置 max |Δlogit|"), future, 0, dtype=F32)
    layers = params.encoder.layers
    last = layers.ffn.replace(b2_D=layers.ffn.b2_D.at[-1].add(normal(3, 8)))
    shifted = params.replace(encoder=params.encoder.replace(layers=layers.replace(ffn=last)))
    change = np.abs(run(shifted, tokens, source)[1] - scores).max(axis=(1, 2, 3))
    label = Words("decoder layers that follow the encoder's last layer", "随编码器最后一层而变的解码器层数")
    yield near("layers", label, np.count_nonzero(change > 1e-3), 2, dtype=F32)


def encoder() -> Numbers:
    """H16: an encoder of two layers against its steps in float64."""
    config = Config(architecture="encoder", vocab_size=11, d_model=8, num_heads=2)
    config = config.replace(norm_placement="post", ffn="relu", positions="sinusoidal")
    params, ids = drawn(init_transformer, config, 0.7, 1), np.array([3, 1, 4, 1, 5])
    made = jit(lambda ids: encode(params, config, HYPER, ids)[0])(ids[None])
    x = math.sqrt(8) * np.asarray(params.embedding.embed_VD, np.float64)[ids]
    for pos, i in np.ndindex(5, 4):
        angle = pos / 10000 ** (2 * i / 8)
        x[pos, 2 * i : 2 * i + 2] += math.sin(angle), math.cos(angle)
    largest = np.max(np.abs(x))
    for i in range(2):
        layer = jax.tree.map(lambda leaf, i=i: leaf[i], params.encoder.layers)
        x = layer_norm(layer.attention_norms.norm, x + heads_by_loop(layer.attention, x))
        x = layer_norm(layer.ffn_norms.norm, x + net_by_numpy("relu", layer.ffn, x))
        largest = max(largest, np.max(np.abs(x)))
    label = Words("max difference from float64 steps, two layers", "与 float64 逐步计算的最大差（两层）")
    # 8, 8, 8 and 8, 32 roundings in the products of each layer, no norm divides by less than about 1/3.
    yield at_most("gap", label, gap(made[0], x), 2 * 64 * 3 * ROUND * largest, F32)
