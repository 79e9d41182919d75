"""One small decoder and its gradient by hand, in float64: what chapter J holds automatic differentiation to."""

from collections.abc import Mapping
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
EPSILON = 1e-5


def named(params: Any) -> Arrays:
    """The parameters of a decoder of one layer and one head, RMSNorm before each sub-layer, ReLU, untied, no biases."""
    layer = params.decoder.layers
    leaves = {
        "embedding": params.embedding.embed_VD,
        "norm 1": layer.attention_norms.norm.scale_D[0],
        "W_Q": layer.attention.wq_DNH[0, :, 0],
        "W_K": layer.attention.wk_DKH[0, :, 0],
        "W_V": layer.attention.wv_DKH[0, :, 0],
        "W_O": layer.attention.wo_NHD[0, 0],
        "norm 2": layer.ffn_norms.norm.scale_D[0],
        "W_1": layer.ffn.w1_DF[0],
        "W_2": layer.ffn.w2_FD[0],
        "norm 3": params.decoder.final_norm.scale_D,
        "output": params.embedding.wout_DV,
    }
    return {name: np.asarray(leaf, np.float64) for name, leaf in leaves.items()}


def _norm(x: np.ndarray, scale: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    root = np.sqrt(np.mean(x**2, axis=1, keepdims=True) + EPSILON)
    return x / root * scale, root


def _norm_back(dy: np.ndarray, x: np.ndarray, scale: np.ndarray, root: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """By the input and by the scale."""
    by = dy * scale
    return by / root - x * np.mean(by * x, axis=1, keepdims=True) / root**3, np.sum(dy * x / root, axis=0)


def _forward(w: Mapping[str, np.ndarray], ids: np.ndarray, targets: np.ndarray) -> tuple[float, Arrays]:
    """(mean cross-entropy, everything on the way) of one row of ids [T]."""
    T, (D, H) = len(ids), w["W_Q"].shape
    a = {"x": w["embedding"][ids] * np.sqrt(D)}
    a["n1"], a["r1"] = _norm(a["x"], w["norm 1"])
    a["q"], a["k"], a["v"] = (a["n1"] @ w[name] for name in ("W_Q", "W_K", "W_V"))
    scores = np.where(np.tri(T, dtype=bool), a["q"] @ a["k"].T / np.sqrt(H), -np.inf)
    a["A"] = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    a["o"] = a["A"] @ a["v"]
    a["h"] = a["x"] + a["o"] @ w["W_O"]
    a["n2"], a["r2"] = _norm(a["h"], w["norm 2"])
    a["u"] = a["n2"] @ w["W_1"]
    a["z"] = a["h"] + np.maximum(a["u"], 0) @ w["W_2"]
    a["n3"], a["r3"] = _norm(a["z"], w["norm 3"])
    logits = a["n3"] @ w["output"]
    a["p"] = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    return float(-np.mean(np.log(a["p"][np.arange(T), targets]))), a


def loss(w: Mapping[str, np.ndarray], ids: np.ndarray, targets: np.ndarray) -> float:
    """Mean cross-entropy in nats."""
    return _forward(w, ids, targets)[0]


def backward(w: Mapping[str, np.ndarray], ids: np.ndarray, targets: np.ndarray, chain: bool = False) -> Arrays:
    """The gradient of `loss`, a line a product.

    chain: along the article's path alone, from the logits over attention and values to the embedding: without
    what passes by the residual connections, the feed-forward net, queries and keys.
    """
    T, (D, H) = len(ids), w["W_Q"].shape
    _, a = _forward(w, ids, targets)
    g = {name: np.zeros_like(x) for name, x in w.items()}
    dlogits = (a["p"] - np.eye(len(w["embedding"]))[targets]) / T
    g["output"] = a["n3"].T @ dlogits
    dz, g["norm 3"] = _norm_back(dlogits @ w["output"].T, a["z"], w["norm 3"], a["r3"])
    dh = dz.copy()
    if not chain:
        du = (dz @ w["W_2"].T) * (a["u"] > 0)
        g["W_2"], g["W_1"] = np.maximum(a["u"], 0).T @ dz, a["n2"].T @ du
        through, g["norm 2"] = _norm_back(du @ w["W_1"].T, a["h"], w["norm 2"], a["r2"])
        dh += through
    g["W_O"], do = a["o"].T @ dh, dh @ w["W_O"].T
    dv = a["A"].T @ do
    g["W_V"], dn1 = a["n1"].T @ dv, dv @ w["W_V"].T
    if not chain:
        dA = do @ a["v"].T
        dS = a["A"] * (dA - np.sum(dA * a["A"], axis=1, keepdims=True)) / np.sqrt(H)
        dq, dk = dS @ a["k"], dS.T @ a["q"]
        g["W_Q"], g["W_K"] = a["n1"].T @ dq, a["n1"].T @ dk
        dn1 = dn1 + dq @ w["W_Q"].T + dk @ w["W_K"].T
    dx, g["norm 1"] = _norm_back(dn1, a["x"], w["norm 1"], a["r1"])
    np.add.at(g["embedding"], ids, (dx if chain else dx + dh) * np.sqrt(D))
    return g


def differences(w: Arrays, ids: np.ndarray, targets: np.ndarray, step: float = 1e-5) -> Arrays:
    """Central differences of `loss` by every number of w."""
    found = {}
    for name, x in w.items():
        found[name] = np.zeros_like(x)
        for place in np.ndindex(x.shape):
            ends = []
            for sign in (1, -1):
                moved = x.copy()
                moved[place] += sign * step
                ends.append(loss({**w, name: moved}, ids, targets))
            found[name][place] = (ends[0] - ends[1]) / (2 * step)
    return found
