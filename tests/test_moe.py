"""Mixture of experts: by hand and by loop, slots and what is lost, causality, padding, losses, memory."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import reference
from tests.quick import jit
from transformer_jax.config import GATED, Config, Hyper
from transformer_jax.errors import ConfigError
from transformer_jax.ffn import ACTIVATIONS, FFN, ffn, init_ffn
from transformer_jax.moe import MoE, MoELosses, capacity, init_moe, moe
from transformer_jax.optim import decays

apply = jit(moe, static_argnums=2)
LOSSES = tuple(f.name for f in dataclasses.fields(MoELosses))


def config(kind: str = "swiglu", **changes: Any) -> Config:
    small = {"d_model": 3, "num_heads": 1, "d_ff": 7, "positions": "none", "num_experts": 5, "expert_capacity": 0.0}
    return Config(ffn=kind, **{**small, **changes})


def random_params(c: Config, seed: int = 0) -> MoE:
    """As `init_moe`, with biases that are not 0."""
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda k: init_moe(k, c), jax.random.key(0))
    return jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape), jnp.float32), shapes)


def tokens(B: int = 2, T: int = 11, D: int = 3, seed: int = 1) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(B, T, D)), jnp.float32)


def nets(p: MoE) -> FFN:
    return FFN(p.w1_EDF, p.w2_EFD, p.wg_EDF, p.b1_EF, p.b2_ED, p.bg_EF)


def one(tree: Any, i: int) -> Any:
    return jax.tree.map(lambda a: a[i], tree)


Reference = tuple[np.ndarray, dict[str, float], np.ndarray]


def loop(p: MoE, x: jax.Array, c: Config, real: np.ndarray | None = None) -> Reference:
    """One token and one choice after the other, in float64: y, the losses, and kept [B, T, E], -1 where not chosen."""
    p, x = reference.to_float64(p), np.asarray(x, np.float64)
    (B, T, D), E, k = x.shape, c.E, c.experts_per_token
    y, kept, sums = np.zeros_like(x), np.full((B, T, E), -1), dict.fromkeys(LOSSES, 0.0)
    for b in range(B):
        taken, sent, mass, n = [0] * E, [0] * E, np.zeros(E), 0
        length = T if real is None else int(real[b].sum())
        slots = max(1, math.ceil(k * length * c.expert_capacity / E)) if c.expert_capacity else T
        for t in range(T):
            if real is not None and not real[b, t]:
                continue
            logits = np.array([sum(x[b, t, d] * p.wr_DE[d, e] for d in range(D)) for e in range(E)])
            probs = np.exp(logits) / np.exp(logits).sum()
            chosen = sorted(range(E), key=lambda e: (-probs[e], e))[:k]
            for e in chosen:
                sent[e] += 1
                kept[b, t, e] = taken[e] < slots
                taken[e] += kept[b, t, e]
                sums["dropped"] += (1 - kept[b, t, e]) / k
                out = reference.ffn(one(nets(p), e), x[b : b + 1, t : t + 1], c.ffn)[0, 0]
                total = 1.0 if len(chosen) == 1 else probs[chosen].sum()
                y[b, t] += kept[b, t, e] * probs[e] / total * out
            sums["z"] += np.log(np.exp(logits).sum()) ** 2
            mass += probs
            n += 1
        if n:
            sums["load_balance"] += n * E * sum(sent[e] / (k * n) * mass[e] / n for e in range(E))
        sums["tokens"] += n
    return y, sums, kept


def dense(p: MoE, x: jax.Array, c: Config, kept: np.ndarray) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Every (gated) net on every token, then weighed: y, load balance and z of whole rows; differentiable."""
    logits = jnp.einsum("btd,de->bte", x, p.wr_DE)
    probs = jax.nn.softmax(logits)
    chosen = probs * (kept >= 0)
    total = 1.0 if c.experts_per_token == 1 else chosen.sum(axis=-1, keepdims=True)
    gates = chosen / total * (kept > 0)
    hidden = jnp.einsum("btd,edf->btef", x, p.w1_EDF) + p.b1_EF[None, None]
    hidden *= ACTIVATIONS[c.ffn](jnp.einsum("btd,edf->btef", x, p.wg_EDF) + p.bg_EF[None, None])
    y = jnp.einsum("bte,bted->btd", gates, jnp.einsum("btef,efd->bted", hidden, p.w2_EFD) + p.b2_ED[None, None])
    share = (kept >= 0).mean(axis=1) / c.experts_per_token
    balance = x.shape[1] * c.E * jnp.sum(share * probs.mean(axis=1))
    return y, balance, jnp.sum(jax.nn.logsumexp(logits, axis=-1) ** 2)


def check(got: tuple[jax.Array, MoELosses], want: Reference) -> None:
    np.testing.assert_allclose(got[0], want[0], rtol=2e-5, atol=2e-5)
    for name in LOSSES:
        value = getattr(got[1], name)
        assert value.shape == () and value.dtype == jnp.float32
        np.testing.assert_allclose(value, want[1][name], rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("kind", "bias", "factor", "k"),
    [("swiglu", True, 0.0, 2), ("relu", False, 0.0, 1), ("swiglu", False, 0.5, 2),
     ("relu", True, 1.25, 1), ("geglu", True, 0.7, 3)],
)  # fmt: skip
def test_equals_the_loop(kind: str, bias: bool, factor: float, k: int) -> None:
    c = config(kind, ffn_bias=bias, expert_capacity=factor, experts_per_token=k)
    real = np.random.default_rng(2).random((2, 11)) < 0.8
    for seed in range(3):
        p, x = random_params(c, seed), tokens(seed=seed + 10)
        assert (p.wg_EDF is not None) == (kind in GATED)
        assert [b is not None for b in (p.b1_EF, p.b2_ED, p.bg_EF)] == [bias, bias, bias and kind in GATED]
        mask = real if seed else np.ones((2, 11), bool)
        want = loop(p, x, c, mask)
        assert (want[1]["dropped"] > 0) == (factor > 0)
        check(apply(p, x, c, Hyper(), None, jnp.asarray(mask)), want)


def test_both_ways_are_one_whatever_the_router_does_where_nothing_overflows() -> None:
    c = config("relu", ffn_bias=False)
    x = tokens(B=3, T=7).at[:, :, 0].set(1.0)
    for seed in range(12):
        p = random_params(c, seed)
        # The first coordinate is 1: its row of the router shifts the logits, here by up to ±30.
        shift = np.random.default_rng(seed).normal(size=5) * 3 * seed
        p = p.replace(wr_DE=p.wr_DE.at[0].set(jnp.asarray(shift, jnp.float32)))
        want = loop(p, x, c)
        for factor in (0.0, 5 / 2):  # none dropped; as many slots as tokens
            check(apply(p, x, c.replace(expert_capacity=factor), Hyper()), want)


@pytest.mark.parametrize("factor", [0.0, 0.6])
def test_gradients_and_curvature_equal_those_of_all_nets_on_all_tokens(factor: float) -> None:
    c = config("swiglu", expert_capacity=factor)
    p, x = random_params(c), tokens()
    kept = loop(p, x, c)[2]
    assert (kept == 0).any() == (factor > 0)
    cotangent, hyper = tokens(seed=5), Hyper(load_balance=0.3, router_z_loss=0.2)

    def ours(p: MoE, x: jax.Array) -> jax.Array:
        y, losses = moe(p, x, c, hyper)
        return jnp.sum(y * cotangent) + losses.weighted(hyper)

    def theirs(p: MoE, x: jax.Array) -> jax.Array:
        y, balance, z = dense(p, x, c, kept)
        return jnp.sum(y * cotangent) + 0.3 * balance + 0.2 * z

    def derivatives(f: Any) -> Any:
        return jit(lambda v: jax.jvp(jax.grad(f, argnums=(0, 1)), v, jax.tree.map(jnp.cos, v)))((p, x))

    got, want = derivatives(ours), derivatives(theirs)
    for order in (0, 1):
        leaves = jax.tree_util.tree_leaves_with_path(got[order])
        for (path, a), b in zip(leaves, jax.tree.leaves(want[order]), strict=True):
            name = f"{order} {jax.tree_util.keystr(path)}"
            assert float(jnp.abs(b).max()) > 0.01, name
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4 * float(jnp.abs(b).max()), err_msg=name)


def constant_nets(outputs: list[float]) -> MoE:
    """Net e gives outputs[e] whatever the token; a token is its own logits."""
    E = len(outputs)
    return MoE(
        wr_DE=jnp.eye(E), w1_EDF=jnp.zeros((E, E, 1)), w2_EFD=jnp.asarray(outputs)[:, None, None] * jnp.ones((1, 1, E)),
        wg_EDF=None, b1_EF=jnp.ones((E, 1)), b2_ED=jnp.zeros((E, E)), bg_EF=None,
    )  # fmt: skip


def test_a_full_expert_loses_the_later_tokens_part() -> None:
    c = config("relu", num_experts=3, d_ff=1, expert_capacity=0.75)
    assert capacity(c, 4) == 2  # 2 x 4 x 0.75 / 3
    ln3 = math.log(3.0)
    a = [ln3, 0.0, -9.0]  # 3/4 of expert 0 and 1/4 of expert 1: 3.25
    b = [-9.0, ln3, 0.0]  # 3/4 of expert 1 and 1/4 of expert 2: 32.5
    d = [ln3, -9.0, 0.0]  # 3/4 of expert 0 and 1/4 of expert 2: 25.75
    x = jnp.asarray([[a, a, d, b], [a, a, d, b], [a, a, a, a], [b, a, d, a]])
    real = jnp.ones((4, 4), bool).at[1, 0].set(False)
    y, losses = apply(constant_nets([1.0, 10.0, 100.0]), x, c, Hyper(), None, real)
    # Row 0: two tokens fill experts 0 and 1, and what is left to the others is not scaled up.
    # Row 1: without the first token, all find a slot.
    want = [[3.25, 3.25, 25.0, 25.0], [0.0, 3.25, 25.75, 32.5], [3.25, 3.25, 0.0, 0.0], [32.5, 3.25, 25.75, 0.0]]
    np.testing.assert_allclose(y, np.repeat(want, 3).reshape(4, 4, 3), rtol=1e-5, atol=1e-6)
    assert float(losses.dropped) == 1.0 + 0.0 + 2.0 + 1.0 and float(losses.tokens) == 15.0


@pytest.mark.parametrize(
    # 5.5; 11, but no more than the tokens; in binary 55.00000000000001; none; one token
    ("k", "T", "factor", "E", "slots"),
    [(2, 11, 1.25, 5, 6), (2, 10, 1.1, 2, 10), (1, 100, 1.1, 2, 55), (1, 7, 1e-12, 5, 1), (2, 1, 1.25, 8, 1)],
)
def test_capacity(k: int, T: int, factor: float, E: int, slots: int) -> None:
    assert capacity(config(num_experts=E, experts_per_token=k, expert_capacity=factor), T) == slots


@pytest.mark.parametrize("factor", [0.0, 0.6])
def test_no_later_token_and_no_other_row_is_felt(factor: float) -> None:
    c = config("gelu", expert_capacity=factor)
    p, x = random_params(c), tokens(B=2, T=7)
    jacobian = jit(jax.jacrev(lambda x: moe(p, x, c, Hyper())[0]))(x)  # [B, T, D, B, T, D]
    felt = np.abs(np.asarray(jacobian)).max(axis=(2, 5))
    alive = np.asarray(loop(p, x, c)[2] > 0).any(axis=2)
    for b in range(2):
        for t in range(7):
            assert (felt[b, t, b, t] > 0) == alive[b, t]
            felt[b, t, b, t] = 0.0
    np.testing.assert_array_equal(felt, 0.0)
    # Nor through the slots, which no derivative sees: earlier outputs stay, whatever comes later.
    y = np.asarray(apply(p, x, c, Hyper())[0])
    for t in range(1, 7):
        changed = apply(p, x.at[:, t:].set(tokens(B=2, T=7, seed=20 + t)[:, t:]), c, Hyper())[0]
        np.testing.assert_allclose(changed[:, :t], y[:, :t], rtol=0, atol=0 if factor else 1e-5)


@pytest.mark.parametrize("factor", [0.0, 0.6])
def test_a_row_alone_is_the_row_among_others(factor: float) -> None:
    c = config("swiglu", expert_capacity=factor)
    p, x = random_params(c), tokens(B=3)
    y, whole = apply(p, x, c, Hyper())
    parts = [apply(p, x[b : b + 1], c, Hyper()) for b in range(3)]
    np.testing.assert_allclose(y, np.concatenate([part[0] for part in parts]), rtol=1e-5, atol=1e-5)
    # Sums of micro-batches are the sums of the batch.
    total = sum((part[1] for part in parts), MoELosses.zero())
    assert float(total.tokens) == 33.0 and (float(total.dropped) > 0) == (factor > 0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), total, whole)


@pytest.mark.parametrize("factor", [0.0, 5 / 2])
def test_padding_changes_nothing_for_real_tokens(factor: float) -> None:
    # Slots of all T tokens: that rows are longer changes their number, but none overflows.
    c = config("gelu", expert_capacity=factor)
    p, x = random_params(c), tokens(B=2, T=7)
    real = jnp.asarray([[True] * 5 + [False] * 2, [False] * 7])
    padded = jnp.where(real[:, :, None], x, jnp.nan)

    def objective(x: jax.Array, real: jax.Array | None) -> tuple[jax.Array, Any]:
        y, losses = moe(p, x, c, Hyper(), None, real)
        return jnp.sum(jnp.sin(y)) + losses.weighted(Hyper()), (y, losses)

    run = jit(jax.value_and_grad(objective, has_aux=True))
    (_, (y, losses)), dx = run(padded, real)
    (_, (y_short, losses_short)), dx_short = run(x[:1, :5], None)
    for whole, short in ((y, y_short), (dx, dx_short)):
        np.testing.assert_allclose(whole[:1, :5], short, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(np.stack([y, dx])[:, ~np.asarray(real)], 0.0)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), losses, losses_short)
    nothing = run(jnp.full_like(x, jnp.nan), jnp.zeros_like(real))
    jax.tree.map(lambda a: np.testing.assert_array_equal(a, 0.0), (nothing, nothing[0][1][1].mean()))


@pytest.mark.parametrize("k", [1, 2])
def test_losses_by_hand(k: int) -> None:
    c = config(experts_per_token=k)
    p, x = random_params(c), tokens(B=2, T=11)
    losses = apply(p.replace(wr_DE=jnp.zeros((3, 5))), x, c, Hyper())[1].mean()
    assert float(losses.load_balance) == pytest.approx(1.0, rel=1e-5)
    assert float(losses.z) == pytest.approx(math.log(5.0) ** 2, rel=1e-5)
    assert float(losses.dropped) == 0.0 and float(losses.tokens) == 22.0
    # Logits 40 for the first k experts: they take all, 1/k of the assignments and of the mass each.
    p = p.replace(wr_DE=jnp.zeros((3, 5)).at[0, :k].set(40.0))
    losses = apply(p, x.at[:, :, 0].set(1.0), c, Hyper())[1].mean()
    assert float(losses.load_balance) == pytest.approx(5 / k, rel=1e-5)
    assert float(losses.z) == pytest.approx((40 + math.log(k)) ** 2, rel=1e-5)
    both = Hyper(load_balance=50.0, router_z_loss=0.25)
    assert float(losses.weighted(both)) == pytest.approx(250 / k + 0.25 * (40 + math.log(k)) ** 2, rel=1e-5)


def test_what_teaches_the_router() -> None:
    def gradients(k: int) -> list[float]:
        c = config("relu", experts_per_token=k)
        p, x = random_params(c), tokens()

        def all_three(wr: jax.Array) -> jax.Array:
            y, losses = moe(p.replace(wr_DE=wr), x, c, Hyper())
            return jnp.stack([jnp.sum(jnp.sin(y)), losses.load_balance, losses.z])

        return [float(jnp.abs(g).max()) for g in jit(jax.jacrev(all_three))(p.wr_DE)]

    for k in (1, 2):
        gates, balance, z = gradients(k)
        assert min(gates, balance, z) > 0.01, k


@pytest.mark.parametrize("pads", [1, 3, 17])
def test_a10_padding_at_the_end_changes_nothing_even_where_slots_overflow(pads: int) -> None:
    c = config("relu", experts_per_token=2, expert_capacity=0.5)
    p, x = random_params(c), tokens()
    B, T, _ = x.shape
    want, losses = apply(p, x, c, Hyper())
    assert float(losses.dropped) > 0
    longer = jnp.concatenate([x, jnp.ones((B, pads, x.shape[2]))], axis=1)
    got, padded = apply(p, longer, c, Hyper(), None, jnp.broadcast_to(jnp.arange(T + pads) < T, (B, T + pads)))
    np.testing.assert_allclose(got[:, :T], want, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), padded, losses)


@pytest.mark.parametrize("factor", [0.0, 1.0])
def test_arms_of_a_sweep_equal_their_solo_runs(factor: float) -> None:
    c = config("relu", expert_capacity=factor)
    p, x = [random_params(c, seed) for seed in range(3)], jnp.stack([tokens(seed=seed) for seed in range(3)])

    def gradient(p: MoE, x: jax.Array) -> Any:
        return jax.grad(lambda p: jnp.sum(jnp.sin(moe(p, x, c, Hyper())[0])))(p)

    together, alone = jit(jax.vmap(gradient))(jax.tree.map(lambda *a: jnp.stack(a), *p), x), jit(gradient)
    for i in range(3):
        arm = one(together, i)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), arm, alone(p[i], x[i]))


@pytest.mark.parametrize(("kind", "factor"), [("gelu", 0.0), ("swiglu", 1.0)])
def test_one_expert_is_the_feed_forward_layer(kind: str, factor: float) -> None:
    c = config(kind, num_experts=1, experts_per_token=1, expert_capacity=factor)
    p, x = random_params(c), tokens(B=3)
    for dtype, tolerance in ((jnp.float32, 1e-5), (jnp.bfloat16, 0.0)):
        want = jit(ffn, static_argnums=2)(one(nets(p), 0), x.astype(dtype), c, Hyper())
        got = apply(p, x.astype(dtype), c, Hyper())[0]
        np.testing.assert_allclose(got.astype(jnp.float32), want.astype(jnp.float32), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "factor"), [(jnp.bfloat16, 0.0), (jnp.bfloat16, 0.6), (jnp.float16, 0.6)])
def test_half_precision(dtype: Any, factor: float) -> None:
    c = config("swiglu", expert_capacity=factor)
    p, x = random_params(c), tokens().astype(dtype)

    def objective(p: MoE, x: jax.Array) -> tuple[jax.Array, Any]:
        y, losses = moe(p, x, c, Hyper())
        return jnp.sum(y.astype(jnp.float32)), (y, losses)

    grads, (y, losses) = jit(jax.grad(objective, argnums=(0, 1), has_aux=True))(p, x)
    assert y.dtype == grads[1].dtype == dtype
    exact, exact_losses = apply(p, x.astype(jnp.float32), c, Hyper())
    assert float(jnp.abs(y - exact).max()) < 8 * float(jnp.finfo(dtype).eps) * float(jnp.abs(exact).max())
    # The router does not know the compute type: the same choices, bit-equal losses.
    jax.tree.map(np.testing.assert_array_equal, losses, exact_losses)
    assert all(bool(jnp.isfinite(g).all()) for g in jax.tree.leaves(grads))


def equations(jaxpr: Any) -> Iterator[Any]:
    """All of a program's equations, inner programs included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def test_the_router_is_exact_whatever_the_products_are() -> None:
    # Accelerators only would show it in numbers: their float32 products are of rounded factors.
    c = config("relu")
    with jax.default_matmul_precision("bfloat16"):
        program = jax.make_jaxpr(lambda p, x: moe(p, x, c, Hyper()))(random_params(c), tokens())
    products = [eqn for eqn in equations(program.jaxpr) if eqn.primitive.name == "dot_general"]
    exact = [eqn for eqn in products if jax.lax.Precision.HIGHEST in (eqn.params["precision"] or ())]
    assert len(products) == 3 and [eqn.outvars[0].aval.shape for eqn in exact] == [(22, 5)]


@pytest.mark.parametrize("factor", [0.0, 1.25])
def test_memory_is_linear_in_the_tokens(factor: float) -> None:
    c = config("gelu", expert_capacity=factor)

    def objective(p: MoE, x: jax.Array) -> jax.Array:
        y, losses = moe(p, x, c, Hyper())
        return jnp.sum(y) + losses.weighted(Hyper())

    for T in (101, 401):
        program = jax.make_jaxpr(jax.grad(objective, argnums=(0, 1)))(random_params(c), tokens(1, T))
        size, what = max((v.aval.size, str(eqn)) for eqn in equations(program.jaxpr) for v in eqn.outvars)
        # The hidden units: k T assignments, a quarter or half as many empty places, F = 7 each.
        assert 2 * T * 7 <= size <= 1.6 * 2 * T * 7, what
        assert size < T * 5 * capacity(c.replace(expert_capacity=1.25), T)


def test_activation_dropout() -> None:
    # Hidden units are all 1 and each output sums them: kept / 997 / (1 - rate) is left.
    c = config("relu", d_ff=997, terms=("activation_dropout",), num_experts=3, experts_per_token=3)
    zero, ones = jnp.zeros((3, 3)), jnp.ones((3, 997))
    p = MoE(zero, jnp.zeros((3, 3, 997)), jnp.ones((3, 997, 3)) / 997, None, ones, zero, None)
    x, hyper = jnp.zeros((2, 5, 3)), Hyper(activation_dropout_rate=0.25)
    np.testing.assert_allclose(apply(p, x, c, hyper)[0], 1.0, atol=1e-5)
    for factor in (0.0, 1.0):
        got = np.asarray(apply(p, x, c.replace(expert_capacity=factor), hyper, jax.random.key(0))[0])[..., 0]
        assert got.mean() == pytest.approx(1.0, abs=0.01)
        # Three nets with masks of their own: sqrt(0.25 / 0.75 / 997 / 3) = 0.0106; with one mask, 0.0183.
        assert 0.006 < got.std() < 0.0145
        assert len(np.unique(got.round(5))) > 5


def test_initial_draws() -> None:
    c = config("swiglu", d_model=101, d_ff=53, num_experts=3, experts_per_token=1)
    init = jit(init_moe, static_argnums=1)
    p, more = init(jax.random.key(0), c), init(jax.random.key(0), c.replace(num_experts=7))
    for w, fan_in in ((p.w1_EDF, 101), (p.wg_EDF, 101), (p.w2_EFD, 53), (more.wr_DE, 101)):
        assert float(np.std(w)) == pytest.approx(fan_in**-0.5, rel=0.05)
    jax.tree.map(np.testing.assert_array_equal, nets(p), jax.tree.map(lambda w: w[:3], nets(more)))
    np.testing.assert_array_equal(p.wr_DE, more.wr_DE[:, :3])
    for w in (p.w1_EDF, p.w2_EFD, p.wr_DE.T):
        assert all(abs(np.corrcoef(w[a].ravel(), w[b].ravel())[0, 1]) < 0.5 for a, b in ((0, 1), (0, 2), (1, 2)))
    jax.tree.map(lambda b: np.testing.assert_array_equal(b, 0), (p.b1_EF, p.b2_ED, p.bg_EF))
    single = jax.eval_shape(lambda k: init_ffn(k, c), jax.random.key(0))
    assert [a.shape for a in jax.tree.leaves(nets(p))] == [(3, *a.shape) for a in jax.tree.leaves(single)]
    assert [name for name, decayed in vars(decays(p)).items() if decayed] == ["wr_DE", "w1_EDF", "w2_EFD", "wg_EDF"]


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="num_experts=0"):
        init_moe(jax.random.key(0), config(num_experts=0))
    with pytest.raises(ConfigError, match=r"\(2, 7\).*2 x 11"):
        moe(random_params(config()), tokens(), config(), Hyper(), None, jnp.ones((2, 7), bool))
