"""Mixture of experts: E feed-forward nets, of which each token uses k (Shazeer et al. 2017).

    p = softmax(x Wr)                                float32 whatever the compute type
    y = sum over the k experts of largest p of gate_e ffn_e(x),   gate_e = p_e / (sum of the k p's)

The gates are made anew from the chosen k, as Mixtral does (Jiang et al. 2024): they sum to 1.
With k = 1 the gate would then always be 1 and the task's loss would never reach the router: it is
p_e itself, as in Switch. Of equal probabilities the expert of the lower number goes first.

Two ways, by `Config.expert_capacity`:

    above 0   a row of the batch gives each expert ceil(k T factor / E) slots (GShard, Lepikhin et
              al. 2020), in order of position and then of choice. A token that finds its expert full
              loses that part of its output: the gate is lost, not shared out (Switch, Fedus et al.
              2021). A later token takes nothing from an earlier one, and no row from another.
              T is the number of a row's real tokens: padding changes nothing. But a longer row has more
              slots, so that a token that is dropped may be kept once others follow it: what drops is no
              function of the past alone (nor is it in GShard), and packed documents are refused.
    0         none is dropped: the assignments of the whole batch are sorted by expert.

Where nothing overflows the two are equal.
"""

import math

import jax
import jax.numpy as jnp
from flax import struct

from transformer_jax import keys
from transformer_jax.config import Config, Hyper
from transformer_jax.errors import ConfigError
from transformer_jax.ffn import FFN, ffn, init_ffn
from transformer_jax.numerics import product


@struct.dataclass
class MoE:
    """The router wr_DE, and the weights of `ffn.FFN` with a leading E."""

    wr_DE: jax.Array
    w1_EDF: jax.Array
    w2_EFD: jax.Array
    wg_EDF: jax.Array | None
    b1_EF: jax.Array | None
    b2_ED: jax.Array | None
    bg_EF: jax.Array | None


@struct.dataclass
class MoELosses:
    """Sums over real tokens, float32 scalars that add; each over `tokens` is a mean.

    load_balance: E sum_e f_e P_e of a token's own row (Switch, eq. 4). f_e is the part of the row's
        assignments that go to expert e, before any is dropped; P_e the mean of p_e. Only P has a
        gradient. 1 where P is uniform, at most E / k: k experts at best share what is sent, so f_e
        is at most 1/k. A product of means over a batch would not add: it is taken over one row, as
        GShard takes it over one group, times the row's tokens. Any split of a batch by rows thus
        gives the sum of the whole; a split of the rows themselves does not.
    z: logsumexp(logits)^2 (ST-MoE, Zoph et al. 2022).
    dropped: the part of a token's k assignments that found no slot.

    Added over layers, `tokens` adds too: the means are then means over layers as well.
    """

    load_balance: jax.Array
    z: jax.Array
    dropped: jax.Array
    tokens: jax.Array

    def __add__(self, other: "MoELosses") -> "MoELosses":
        return jax.tree.map(jnp.add, self, other)

    @classmethod
    def zero(cls) -> "MoELosses":
        return cls(*(jnp.zeros(()) for _ in range(4)))

    def mean(self) -> "MoELosses":
        """Each sum for a token, `tokens` as it is; 0 where no token is real."""
        per = 1.0 / jnp.maximum(self.tokens, 1.0)
        return MoELosses(self.load_balance * per, self.z * per, self.dropped * per, self.tokens)

    def weighted(self, hyper: Hyper) -> jax.Array:
        """What is added to an objective that is a sum over tokens (of a `mean`: to a mean)."""
        return hyper.load_balance * self.load_balance + hyper.router_z_loss * self.z


def init_moe(key: jax.Array, config: Config) -> MoE:
    """Weights N(0, 1/fan-in), biases 0. Expert e draws alike however many experts there are.

    Raises ConfigError where the config has no experts.
    """
    if config.E < 1:
        raise ConfigError(f"num_experts={config.E}: a mixture has at least one expert")

    def expert(e: jax.Array) -> tuple[jax.Array, FFN]:
        own = jax.random.fold_in(keys.named(key, "experts"), e)
        return keys.normal(own, "wr_D", (config.D,), config.D**-0.5), init_ffn(own, config)

    wr_ED, nets = jax.vmap(expert)(jnp.arange(config.E))
    return MoE(wr_ED.T, nets.w1_DF, nets.w2_FD, nets.wg_DF, nets.b1_F, nets.b2_D, nets.bg_F)


def capacity(config: Config, T: int) -> int:
    """Slots of an expert in a row of T tokens; never above T, which already hold all of them."""
    fair = config.experts_per_token * T / config.E
    return max(1, min(T, math.ceil(fair * config.expert_capacity - 1e-9)))


def moe(
    params: MoE,
    x_BTD: jax.Array,
    config: Config,
    hyper: Hyper,
    key: jax.Array | None = None,
    real_BT: jax.Array | None = None,
) -> tuple[jax.Array, MoELosses]:
    """[B, T, D] -> [B, T, D], and the router's losses.

    real_BT: booleans, False for padding, which takes no slot, counts in no loss and gives 0; its
    values, NaN included, reach nothing. key: for activation dropout, None at evaluation.
    Memory is O(k T (D + F)) a row; without dropping, at most three copies of the experts more.
    Raises ConfigError for a real_BT of another shape than the tokens'.
    """
    B, T, D = x_BTD.shape
    k, E = config.experts_per_token, config.E
    if real_BT is None:
        real_BT = jnp.ones((B, T), bool)
    elif real_BT.shape != (B, T):
        raise ConfigError(f"real_BT is of shape {real_BT.shape}, the tokens are {B} x {T}")
    x_BTD = jnp.where(real_BT[:, :, None], x_BTD, jnp.zeros((), x_BTD.dtype))
    with jax.named_scope("router"):
        gates_BTk, experts_BTk, logits_BTE, p_BTE = _route(params.wr_DE, x_BTD, k)
        # Padding is sent to an expert that is not there.
        experts_BTk = jnp.where(real_BT[:, :, None], experts_BTk, E)

    nets = FFN(params.w1_EDF, params.w2_EFD, params.wg_EDF, params.b1_EF, params.b2_ED, params.bg_EF)
    if config.expert_capacity > 0:
        slots = capacity(config, T)
        # What a row of as many real tokens would have without padding.
        limits = jnp.asarray([capacity(config, n) for n in range(T + 1)])[jnp.sum(real_BT, axis=1)]
        place = jax.vmap(lambda e, limit: _slots(e, E, slots, limit))(experts_BTk.reshape(B, T * k), limits)
        size = (E, slots)
        x = x_BTD
    else:
        place, net_of_block, size = _blocks(experts_BTk.reshape(-1), E)
        nets = jax.tree.map(lambda w: w[net_of_block], nets)
        place, x = place[None], x_BTD.reshape(1, B * T, D)

    with jax.named_scope("experts"):
        picked = _dispatch(nets, x, place, size, k, config, hyper, key).reshape(B, T, k, D)
    y = jnp.sum(gates_BTk[..., None] * picked.astype(jnp.float32), axis=2).astype(x_BTD.dtype)
    found = place.reshape(B, T, k) < size[0] * size[1]
    return y, _losses(logits_BTE, p_BTE, experts_BTk, found, real_BT)


def _route(wr_DE: jax.Array, x_BTD: jax.Array, k: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Gates and experts [B, T, k], best first; logits and probabilities [B, T, E]."""
    # A rounded logit changes which expert is chosen: no half products on accelerators either.
    with jax.default_matmul_precision("highest"):
        logits = product("btd,de->bte", x_BTD.astype(jnp.float32), wr_DE)
    p = jax.nn.softmax(logits, axis=-1)
    best, experts = jax.lax.top_k(p, k)
    # Renormalised, a single gate would be 1 and the task's loss would never reach the router.
    gates = best if k == 1 else best / jnp.sum(best, axis=-1, keepdims=True)
    return gates, experts, logits, p


def _rank(expert_A: jax.Array, E: int) -> tuple[jax.Array, jax.Array]:
    """How many earlier assignments have the same expert, [A]; and assignments of each expert, [E]."""
    order = jnp.argsort(expert_A, stable=True)
    count_E = jnp.zeros(E, jnp.int32).at[expert_A].add(1, mode="drop")
    start = (jnp.cumsum(count_E) - count_E)[expert_A.clip(max=E - 1)]
    nth = jnp.zeros_like(expert_A).at[order].set(jnp.arange(expert_A.size, dtype=expert_A.dtype), unique_indices=True)
    return nth - start, count_E


def _slots(expert_A: jax.Array, E: int, slots: int, limit: jax.Array) -> jax.Array:
    """Where each assignment of a row goes among E x slots places; past them where there is none.

    limit: the slots of an expert that may be filled, at most `slots`. Places past the end are all
    different, so that indices are unique as scatters are told.
    """
    rank, _ = _rank(expert_A, E)
    kept = (expert_A < E) & (rank < limit)
    return jnp.where(kept, expert_A * slots + rank, E * slots + jnp.arange(expert_A.size))


def _blocks(expert_A: jax.Array, E: int) -> tuple[jax.Array, jax.Array, tuple[int, int]]:
    """Where each assignment goes in blocks that belong to one expert each; the blocks' experts; blocks x rows.

    An expert begins a new block, and its last one is part empty. With blocks of half a fair share
    that costs at most half as much again, and three copies of the weights, whatever the router
    does. `lax.ragged_dot` needs no blocks, but cannot be mapped over one operand alone, as a
    Jacobian is, and costs E products on CPU: 732 ms against 185 for a layer of D256 F1024 E8 k2
    on 2048 tokens, forward and backward, two cores (blocks of a share: 225, of a quarter: 174).
    """
    A = expert_A.size
    rows = -(-A // (2 * E))
    blocks = (A + E * (rows - 1)) // rows  # the most that part-empty ones can make
    rank, count_E = _rank(expert_A, E)
    blocks_E = -(-count_E // rows)
    end_E = jnp.cumsum(blocks_E)
    first = (end_E - blocks_E)[expert_A.clip(max=E - 1)]
    place = jnp.where(expert_A < E, first * rows + rank, blocks * rows + jnp.arange(A))
    # Blocks past the last hold nothing: any expert will do.
    owner = jnp.searchsorted(end_E, jnp.arange(blocks), side="right", method="compare_all").clip(max=E - 1)
    return place, owner, (blocks, rows)


def _dispatch(
    nets: FFN,
    x: jax.Array,
    place: jax.Array,
    size: tuple[int, int],
    k: int,
    config: Config,
    hyper: Hyper,
    key: jax.Array | None,
) -> jax.Array:
    """Tokens [G, T, D] to the places [G, T k] of nets x rows, each net on its rows, and back: [G, T k, D].

    A place past the end takes nothing and gives 0.
    """
    G, T, D = x.shape
    sent = jnp.broadcast_to(x[:, :, None], (G, T, k, D)).reshape(G, T * k, D)

    def put(x: jax.Array, place: jax.Array) -> jax.Array:
        empty = jnp.zeros((size[0] * size[1], D), x.dtype)
        return empty.at[place].add(x, mode="drop", unique_indices=True)

    def take(y: jax.Array, place: jax.Array) -> jax.Array:
        return y.at[place].get(mode="fill", fill_value=0, unique_indices=True)

    def run(net: FFN, x: jax.Array, key: jax.Array | None) -> jax.Array:
        return ffn(net, x, config, hyper, key)

    # A key for each net: under a common one all would drop the same units.
    own = None if key is None else jax.random.split(key, size[0])
    rows = jax.vmap(put)(sent, place).reshape(G, *size, D)
    y = jax.vmap(run, in_axes=(0, 1, None if key is None else 0), out_axes=1)(nets, rows, own)
    return jax.vmap(take)(y.reshape(G, -1, D), place)


def _losses(
    logits_BTE: jax.Array, p_BTE: jax.Array, experts_BTk: jax.Array, found_BTk: jax.Array, real_BT: jax.Array
) -> MoELosses:
    B, T, E = p_BTE.shape
    k = experts_BTk.shape[2]
    real = real_BT.astype(jnp.float32)
    tokens_B = jnp.sum(real, axis=1)
    sent_BE = jax.vmap(lambda e: jnp.zeros(E).at[e].add(1.0, mode="drop"))(experts_BTk.reshape(B, T * k))
    p_BE = jnp.sum(p_BTE * real[:, :, None], axis=1)
    # tokens * E * sum_e (sent / (k tokens)) (p / tokens)
    balance_B = E / k * jnp.sum(sent_BE * p_BE, axis=1) / jnp.maximum(tokens_B, 1.0)
    z = jnp.sum(real * jnp.square(jax.nn.logsumexp(logits_BTE, axis=-1)))
    lost = jnp.sum(real[:, :, None] * ~found_BTk) / k
    return MoELosses(jnp.sum(balance_B), z, lost, jnp.sum(tokens_B))
