"""Position-wise feed-forward layers, plain and gated.

plain: act(x W1 + b1) W2 + b2            (Vaswani et al. 2017 §3.3: ReLU)
gated: (act(x Wg + bg) * (x W1 + b1)) W2 + b2    (Shazeer 2020: SwiGLU, GEGLU, ReGLU)
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct

from transformer_jax import keys
from transformer_jax.config import GATED, Config, Hyper
from transformer_jax.numerics import product

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "silu": jax.nn.silu,
    "swiglu": jax.nn.silu,
    "geglu": lambda x: jax.nn.gelu(x, approximate=False),
    "reglu": jax.nn.relu,
}


@struct.dataclass
class FFN:
    """w1_DF and w2_FD; gated kinds add wg_DF; biases where the config has them."""

    w1_DF: jax.Array
    w2_FD: jax.Array
    wg_DF: jax.Array | None
    b1_F: jax.Array | None
    b2_D: jax.Array | None
    bg_F: jax.Array | None


def init_ffn(key: jax.Array, config: Config) -> FFN:
    """Weights N(0, 1/fan-in), biases 0."""
    D, F, gated, bias = config.D, config.F, config.ffn in GATED, config.ffn_bias
    return FFN(
        w1_DF=keys.normal(key, "w1_DF", (D, F), D**-0.5),
        w2_FD=keys.normal(key, "w2_FD", (F, D), F**-0.5),
        wg_DF=keys.normal(key, "wg_DF", (D, F), D**-0.5) if gated else None,
        b1_F=jnp.zeros(F) if bias else None,
        b2_D=jnp.zeros(D) if bias else None,
        bg_F=jnp.zeros(F) if bias and gated else None,
    )


def ffn(params: FFN, x_BTD: jax.Array, config: Config, hyper: Hyper, key: jax.Array | None = None) -> jax.Array:
    """[B, T, D] -> [B, T, D]; each position by itself. key: for activation dropout, None at evaluation."""
    act = ACTIVATIONS[config.ffn]
    hidden = _shift(product("btd,df->btf", x_BTD, params.w1_DF), params.b1_F)
    if params.wg_DF is None:
        hidden = act(hidden)
    else:
        hidden = act(_shift(product("btd,df->btf", x_BTD, params.wg_DF), params.bg_F)) * hidden
    if config.has("activation_dropout"):
        hidden = keys.dropout(hidden, hyper.activation_dropout_rate, key, "activation")
    return _shift(product("btf,fd->btd", hidden, params.w2_FD), params.b2_D)


def _shift(x: jax.Array, bias: jax.Array | None) -> jax.Array:
    return x if bias is None else x + bias.astype(x.dtype)[None, None, :]
