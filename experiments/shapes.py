"""The shape of every array from ids to logits: article S1 §7.1's table, from a real forward pass.

    python launch.py --experiment=shapes
    python launch.py --experiment=shapes --batch_size=3 --seq_len=5 --d_model=16 --num_heads=4

By default B=2, L=4 (the article's length, T here), D=8, H=2 heads of 4. The article writes
"token text (B, L)" for the input; it is ids. Every array is made, none is assumed.
"""

import jax
import jax.numpy as jnp
from einops import rearrange

from experiments.flags import Settings
from transformer_jax import masks
from transformer_jax.attention import init_attention
from transformer_jax.config import Config
from transformer_jax.embedding import embed, init_embedding, unembed
from transformer_jax.ffn import ffn, init_ffn
from transformer_jax.numerics import product
from transformer_jax.scores import Scoring, attention_scores, masked_softmax

FLAGS = ("preset",)
BASE = Config(
    vocab_size=11, d_model=8, num_heads=2, num_layers=1, seq_len=4, batch_size=2, positions="sinusoidal", ffn="relu"
)


def arrays(settings: Settings) -> list[tuple[str, str, str, jax.Array]]:
    """(step, formula, the article's shape, array) in the order of the computation."""
    config, hyper = settings.configure(BASE)
    config = config if config.vocab_size else config.replace(vocab_size=11)
    key = jax.random.key(0)
    ids = jax.random.randint(key, (config.batch_size, config.seq_len), 0, config.V)
    positions = jnp.arange(config.seq_len)[None]
    embedding, weights, net = init_embedding(key, config), init_attention(key, config), init_ffn(key, config)
    words = embed(embedding, ids, positions, config.replace(positions="none"))
    x = embed(embedding, ids, positions, config)
    q, k, v = (
        product(f"btd,d{n}h->bt{n}h", x, w)
        for n, w in (("n", weights.wq_DNH), ("k", weights.wk_DKH), ("k", weights.wv_DKH))
    )
    scores = attention_scores(q, k, Scoring(dk_exponent=hyper.dk_exponent, temperature=hyper.attention_temperature))
    mask = masks.from_config(config, hyper)
    probs = masked_softmax(scores, mask.dense(config.seq_len, config.seq_len))
    heads = product("bkgts,bskh->btkgh", rearrange(probs, "b (k g) t s -> b k g t s", k=config.K), v)
    heads = rearrange(heads, "b t k g h -> b t (k g) h")
    merged = product("btnh,nhd->btd", heads, weights.wo_NHD)
    hidden = product("btd,df->btf", merged, net.w1_DF)

    def by_head(a: jax.Array) -> jax.Array:
        return rearrange(a, "b t n h -> b n t h")

    return [
        ("input ids", "ids", "(B, L)", ids),
        ("embedding", "X = W_E[ids]", "(B, L, D)", words),
        ("positions added", "X = X + PE", "(B, L, D)", x),
        ("Q projection", "Q = X W_Q", "(B, H, L, D_head)", by_head(q)),
        ("K projection", "K = X W_K", "(B, H, L, D_head)", by_head(k)),
        ("V projection", "V = X W_V", "(B, H, L, D_head)", by_head(v)),
        ("attention scores", "Q Kᵀ / √D_head", "(B, H, L, L)", scores),
        ("softmax", "softmax(scores, dim=-1)", "(B, H, L, L)", probs),
        ("weighted sum", "probs V", "(B, H, L, D_head)", by_head(heads)),
        ("heads merged", "concat W_O", "(B, L, D)", merged),
        ("feed-forward, inner", "act(x W_1 + b_1)", "(B, L, 4D)", hidden),
        ("feed-forward", "… W_2 + b_2", "(B, L, D)", ffn(net, merged, config, hyper)),
        ("logits", "x W_Eᵀ", "(B, L, V)", unembed(embedding, merged, config, hyper)),
    ]


def run(settings: Settings) -> int:
    """Print the table."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    config, _ = settings.configure(BASE)
    title = f"B={config.batch_size} L={config.seq_len} D={config.D} H={config.N} D_head={config.H}"
    table = Table("step", "formula", "shape", "array", title=title)
    for step, formula, letters, array in arrays(settings):
        table.add_row(step, escape(formula), letters, str(array.shape))
    Console().print(table)
    return 0
