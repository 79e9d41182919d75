"""The model in float64 numpy, one loop per batch row, head, query and position: slow, and meant to be read.

Nothing here calls the library, and nothing is batched: rotary positions turn complex
numbers, masks are predicates on two integers, activations go through `math`.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

Predicate = Callable[[int, int, int, int], bool]  # (row, head, query, key) -> may attend


def to_float64(tree: Any) -> Any:
    """Every floating leaf as a float64 numpy array."""
    return jax.tree.map(lambda a: np.asarray(a, np.float64), tree)


# --- masks ------------------------------------------------------------------------


def predicate(kind: str, *, window: int = 0, prefix: int = 0, block: int = 1) -> Callable[[int, int], bool]:
    """(query, key) -> may attend, for the kinds of `Config.mask`."""
    return {
        "causal": lambda i, j: j <= i,
        "none": lambda i, j: True,
        "inverted": lambda i, j: i <= j,
        "window": lambda i, j: i - window + 1 <= j <= i,
        "prefix": lambda i, j: j <= i or j < prefix,
        "block_sparse": lambda i, j: j <= i and (j // block in (i // block, i // block - 1) or j < block),
    }[kind]


def mask_array(may: Predicate, B: int, N: int, T: int, S: int) -> np.ndarray:
    """Booleans [B, N, T, S] by four loops."""
    out = np.zeros((B, N, T, S), bool)
    for b in range(B):
        for n in range(N):
            for i in range(T):
                for j in range(S):
                    out[b, n, i, j] = may(b, n, i, j)
    return out


# --- attention --------------------------------------------------------------------


def attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    allowed: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    dk_exponent: float = 0.5,
    temperature: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """q [B, T, N, H], k and v [B, S, K, .] -> out [B, T, N, .] and weights [B, N, T, S]."""
    B, T, N, H = q.shape
    S, K = k.shape[1:3]
    group = N // K
    out, weights = np.zeros((B, T, N, v.shape[3])), np.zeros((B, N, T, S))
    for b in range(B):
        for n in range(N):
            for i in range(T):
                scores, visible = [], []
                for j in range(S):
                    score = sum(q[b, i, n, h] * k[b, j, n // group, h] for h in range(H))
                    score = score / H**dk_exponent / temperature
                    if bias is not None:
                        score += bias[b % bias.shape[0], n % bias.shape[1], i, j]
                    if allowed is None or allowed[b % allowed.shape[0], n % allowed.shape[1], i, j]:
                        scores.append(score)
                        visible.append(j)
                if not visible:
                    continue
                powers = [math.exp(s - max(scores)) for s in scores]
                for j, power in zip(visible, powers, strict=True):
                    weights[b, n, i, j] = power / sum(powers)
                    out[b, i, n] += weights[b, n, i, j] * v[b, j, n // group]
    return out, weights


def rope(x: np.ndarray, position: int, rotated: int, base: float, layout: str) -> np.ndarray:
    """One head [H] at one position: pair i becomes a complex number times e^(i position theta_i)."""
    out = x.copy()
    for i in range(rotated // 2):
        a, b = (i, i + rotated // 2) if layout == "half" else (2 * i, 2 * i + 1)
        theta = base ** (-2 * i / rotated)
        z = complex(x[a], x[b]) * complex(math.cos(position * theta), math.sin(position * theta))
        out[a], out[b] = z.real, z.imag
    return out


def attention(p: Any, x: np.ndarray, source: np.ndarray, allowed: np.ndarray, settings: Any, turn: bool) -> np.ndarray:
    """Projections, rotation, heads, output projection: [B, T, D]."""
    config, hyper = settings

    def project(y: np.ndarray, w: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
        out = np.zeros((*y.shape[:2], *w.shape[1:]))
        for b in range(y.shape[0]):
            for t in range(y.shape[1]):
                for n in range(w.shape[1]):
                    out[b, t, n] = y[b, t] @ w[:, n, :] + (0 if bias is None else bias[n])
                    if turn and w is not p.wv_DKH:
                        out[b, t, n] = rope(out[b, t, n], t, config.rotated, hyper.rope_base, config.rope_layout)
        return out

    q, k = project(x, p.wq_DNH, p.bq_NH), project(source, p.wk_DKH, p.bk_KH)
    heads, _ = attend(
        q,
        k,
        project(source, p.wv_DKH, p.bv_KH),
        allowed,
        dk_exponent=hyper.dk_exponent,
        temperature=hyper.attention_temperature,
    )
    out = np.zeros(x.shape)
    for n in range(heads.shape[2]):
        out += heads[:, :, n] @ p.wo_NHD[n]
    return out if p.bo_D is None else out + p.bo_D


# --- norms, feed-forward, positions -----------------------------------------------


def norm(p: Any, x: np.ndarray, kind: str, epsilon: float) -> np.ndarray:
    """Row by row, over the last axis."""
    out = np.zeros(x.shape)
    for where in np.ndindex(x.shape[:-1]):
        row = x[where]
        mean = sum(row) / len(row) if kind == "layernorm" else 0.0
        second = sum((value - mean) ** 2 for value in row) / len(row)
        out[where] = (row - mean) / math.sqrt(second + epsilon) * p.scale_D
        if p.bias_D is not None:
            out[where] += p.bias_D
    return out


def activation(kind: str, x: float) -> float:
    """relu, gelu (exact), gelu_tanh, silu of a number."""
    if kind in ("relu", "reglu"):
        return max(x, 0.0)
    if kind in ("gelu", "geglu"):
        return x * 0.5 * (1 + math.erf(x / math.sqrt(2)))
    if kind == "gelu_tanh":
        return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return x / (1 + math.exp(-x))  # silu, swiglu


def ffn(p: Any, x: np.ndarray, kind: str) -> np.ndarray:
    """Position by position: act(x W1 + b1) W2 + b2, gated kinds act(x Wg + bg) (x W1 + b1) W2 + b2."""
    out = np.zeros(x.shape)
    for where in np.ndindex(x.shape[:-1]):
        hidden = x[where] @ p.w1_DF + (0 if p.b1_F is None else p.b1_F)
        gate = hidden if p.wg_DF is None else x[where] @ p.wg_DF + (0 if p.bg_F is None else p.bg_F)
        opened = np.array([activation(kind, value) for value in gate])
        out[where] = (opened if p.wg_DF is None else opened * hidden) @ p.w2_FD + (0 if p.b2_D is None else p.b2_D)
    return out


def sinusoid(position: int, D: int) -> np.ndarray:
    """sin(pos / 10000^(2i/D)) in column 2i, cos in 2i + 1."""
    row = np.zeros(D)
    for i in range(D // 2):
        angle = position / 10000 ** (2 * i / D)
        row[2 * i], row[2 * i + 1] = math.sin(angle), math.cos(angle)
    return row


# --- whole models -----------------------------------------------------------------


def embed(p: Any, tokens: np.ndarray, config: Any, source: bool = False) -> np.ndarray:
    """[B, T] ids -> [B, T, D]: scaled rows (of the source's own table), then absolute positions."""
    table = p.source_VD if source and config.source_vocab_size else p.embed_VD
    scale = math.sqrt(config.D) if config.scale_embeddings else 1.0
    out = np.zeros((*tokens.shape, config.D))
    for b, t in np.ndindex(tokens.shape):
        out[b, t] = table[tokens[b, t]] * scale
        if config.positions == "sinusoidal":
            out[b, t] += sinusoid(t, config.D)
        elif config.positions == "learned":
            out[b, t] += p.position_PD[t] * scale
    return out


def stack(
    p: Any,
    x: np.ndarray,
    settings: Any,
    allowed: np.ndarray,
    memory: np.ndarray | None = None,
    memory_allowed: np.ndarray | None = None,
) -> np.ndarray:
    """The layers one after another, and the final norm."""
    config, _ = settings

    def normed(q: Any, y: np.ndarray) -> np.ndarray:
        return norm(q, y, config.norm, config.norm_epsilon)

    def residual(y: np.ndarray, f: Callable[[np.ndarray], np.ndarray], norms: Any) -> np.ndarray:
        if config.norm_placement == "pre":
            return y + f(normed(norms.norm, y))
        if config.norm_placement == "post":
            return normed(norms.norm, y + f(y))
        if config.norm_placement == "sandwich":
            return y + normed(norms.post_norm, f(normed(norms.norm, y)))
        return y + f(y)

    turn = config.positions == "rope"
    layers = len(jax.tree.leaves(p.layers)[0])
    for i in range(layers):
        layer = jax.tree.map(lambda a, i=i: a[i], p.layers)
        x = residual(x, lambda y, q=layer.attention: attention(q, y, y, allowed, settings, turn), layer.attention_norms)
        if layer.cross is not None:
            x = residual(
                x,
                lambda y, q=layer.cross: attention(q, y, memory, memory_allowed, settings, False),
                layer.cross_norms,
            )
        x = residual(x, lambda y, q=layer.ffn: ffn(q, y, config.ffn), layer.ffn_norms)
    return x if config.norm_placement in ("post", "none") else normed(p.final_norm, x)


def transformer(params: Any, config: Any, hyper: Any, batch: Any) -> np.ndarray:
    """Logits [B, T, V] in float64 of any architecture, with padding and source padding."""
    p, settings = to_float64(params), (config, hyper)
    tokens = np.asarray(batch.tokens_BT)
    B, T = tokens.shape

    def real(lengths: Any, b: int, j: int) -> bool:
        return lengths is None or j < int(lengths[b])

    see = predicate(config.mask, window=hyper.window, prefix=hyper.prefix, block=config.block_size)
    if config.architecture == "encoder":
        see = predicate("none")
    allowed = mask_array(lambda b, n, i, j: see(i, j) and real(batch.lengths_B, b, j), B, config.N, T, T)
    memory = memory_allowed = None
    if config.architecture == "encoder_decoder":
        source, lengths = np.asarray(batch.source_BS), batch.source_lengths_B
        S = source.shape[1]
        both_ways = mask_array(lambda b, n, i, j: real(lengths, b, j), B, config.N, S, S)
        memory = stack(p.encoder, embed(p.embedding, source, config, True), settings, both_ways)
        memory_allowed = mask_array(lambda b, n, i, j: real(lengths, b, j), B, config.N, T, S)
    main = p.encoder if config.architecture == "encoder" else p.decoder
    x = stack(main, embed(p.embedding, tokens, config), settings, allowed, memory, memory_allowed)
    logits = x @ (p.embedding.embed_VD.T if p.embedding.wout_DV is None else p.embedding.wout_DV)
    return logits + p.embedding.bout_V if config.output_bias else logits
