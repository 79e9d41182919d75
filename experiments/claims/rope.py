"""Chapter A: complex numbers, Euler's formula and rotary positions (S0 and S3, §2)."""

import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.claims.drawn import U, batch_of, logits, model, normal
from experiments.claims.record import Chapter, Curves, Numbers, Verdict, Words, at_least, at_most, near
from transformer_jax import masks
from transformer_jax.attention import attend
from transformer_jax.config import Config
from transformer_jax.encoder_decoder import forward
from transformer_jax.positions import learned
from transformer_jax.rope import Rotation, from_config, half_from_interleaved, rotate, rotation
from transformer_jax.rope_scaling import Scaled, frequencies, scaled_frequencies
from transformer_jax.scores import Scoring, attention_scores

chapter = Chapter("A", Words("Complex numbers and rotary positions", "复数与旋转位置编码"))

H, BASE = 64, 10_000.0
THETA = np.array([BASE ** (-2 * i / H) for i in range(H // 2)])
RAW = Scoring(dk_exponent=0.0)  # the dot product itself


def pair(z: complex) -> jax.Array:
    """A complex number as one head of two coordinates, [1, 1, 1, 2]."""
    return jnp.asarray([z.real, z.imag], jnp.float32).reshape(1, 1, 1, 2)


def number(x: Any) -> np.ndarray:
    """Heads of two coordinates as complex numbers: [..., 2] -> [...]."""
    pairs = np.asarray(x, np.float64)
    return pairs[..., 0] + 1j * pairs[..., 1]


def at(*places: int) -> jax.Array:
    """Positions [1, T]."""
    return jnp.asarray([places], jnp.int32)


def series(angles: np.ndarray) -> np.ndarray:
    """e^{iθ} from its power series: no cosine, no sine."""
    terms = [np.ones_like(angles, complex)]
    for k in range(1, 40):
        terms.append(terms[-1] * 1j * angles / k)
    return sum(reversed(terms), np.zeros_like(angles, complex))


a01 = chapter.claim(
    "A01",
    "S0 §2.1, S3 §2.1",
    Verdict.TRUE,
    Words(
        "Each multiplication by i is a quarter turn anticlockwise; four are a full one.",
        "每乘一次 i 逆时针转四分之一圈，乘四次转满一圈。",
    ),
    formula=r"1 \to i \to -1 \to -i \to 1",
    uses=(rotate,),
)


@a01.quick
def quarter_turns() -> Numbers:
    turns = np.cumprod(np.full(4, 1j))
    yield near("back", Words("|i⁴ − 1|", "|i⁴ − 1|"), abs(turns[-1] - 1), 0.0, dtype="complex128")
    angles = np.diff(np.unwrap(np.angle([1, *turns])))
    yield near(
        "angle", Words("each turn, in degrees", "每次转过的角度"), np.degrees(angles).mean(), 90.0, 1e-12, "complex128"
    )
    x, quarter, gaps = pair(1), Rotation(jnp.zeros((1, 1, 1)), jnp.ones((1, 1, 1))), []
    for place in (1j, -1, -1j, 1):
        x = rotate(x, quarter, "half")
        gaps.append(abs(number(x).item() - place))
    label = Words("the library's quarter turns, distance from i, −1, −i, 1", "程序的四次旋转与 i, −1, −i, 1 的距离")
    yield near("walked", label, max(gaps), 0.0, dtype="float32")


a02 = chapter.claim(
    "A02",
    "S0 §2.1",
    Verdict.WRONG,
    Words("After four multiplications by i the number is back at the origin.", "乘四次 i 之后回到原点。"),
    formula=r"1 \cdot i^4 = 1 \ne 0",
    finding=Words(
        "It is back where it started, at 1. The origin is 0, at distance {nearest:.0f} from every point on the way: a "
        "rotation keeps distances from it. (The English article says “start”, which is right.)",
        "它回到的是起点 1。原点是 0，途中每一点到原点的距离都是 {nearest:.0f}：旋转保持到原点的距离不变。"
        "（英文版写的是“起点”，没有错。）",
    ),
)


@a02.quick
def back_to_start() -> Numbers:
    z = np.cumprod([1, 1j, 1j, 1j, 1j])
    yield near("start", Words("|z₄ − 1|", "|z₄ − 1|"), abs(z[4] - 1), 0.0, dtype="complex128")
    nearest = np.abs(z).min()
    yield near("nearest", Words("least distance from 0", "到 0 的最小距离"), nearest, 1.0, dtype="complex128")


a03 = chapter.claim(
    "A03",
    "S0 §2.1, S3 §2.1",
    Verdict.IMPRECISE,
    Words("Multiplying complex numbers is rotation.", "复数的乘法就是旋转。"),
    formula=r"|zw| = |z|\,|w|, \quad \mathrm{arg}(zw) = \mathrm{arg}\, z + \mathrm{arg}\, w",
    finding=Words(
        "It is rotation and scaling: by w the length is multiplied by |w|, and only |w| = 1 leaves it. YaRN makes use "
        "of that: its factor on cosine and sine makes every rotated vector {stretched:.4f} times as long at four "
        "times the context.",
        "它是旋转加缩放：乘以 w 后长度变为 |w| 倍，只有 |w| = 1 时长度不变。YaRN 正利用了这一点：上下文扩展到四倍时，"
        "余弦和正弦上的系数使每个旋转后的向量变为原来的 {stretched:.4f} 倍长。",
    ),
    uses=(scaled_frequencies, rotation, rotate),
)


@a03.quick
def rotation_and_scaling() -> Numbers:
    rng = np.random.default_rng(3)
    z, w = rng.normal(size=(2, 1000)) + 1j * rng.normal(size=(2, 1000))
    longer = np.max(np.abs(np.abs(z * w) / (np.abs(z) * np.abs(w)) - 1))
    yield at_most("lengths", Words("max | |zw| / |z||w| − 1 |", "max | |zw| / |z||w| − 1 |"), longer, 2e-15)
    apart = np.angle(z * w) - np.angle(z) - np.angle(w)
    apart = np.max(np.abs(apart - 2 * np.pi * np.round(apart / (2 * np.pi))))
    yield at_most("angles", Words("max error of arg zw, mod 2π", "arg zw 的最大误差（模 2π）"), apart, 4e-15)

    @jax.jit
    def stretched(x: jax.Array) -> jax.Array:
        scaled = scaled_frequencies("yarn", H, BASE, factor=4.0, original=1024)
        return rotate(x, rotation(at(0, 1, 10, 100), H, BASE, scaled), "half")

    x = normal(3, 1, 4, 1, H)
    ratio = np.linalg.norm(np.asarray(stretched(x), float)) / np.linalg.norm(x.astype(float))
    label = Words("‖turned by YaRN‖ / ‖x‖, 1 + 0.1 ln 4", "YaRN 旋转后的长度之比，1 + 0.1 ln 4")
    yield near("stretched", label, ratio, 1 + 0.1 * math.log(4), 8 * U, "float32")


a04 = chapter.claim(
    "A04",
    "S0 §2.2, S3 §2.2",
    Verdict.TRUE,
    Words(
        "e^{iθ} is cos θ + i sin θ: 1 at 0, i at π/2, −1 at π, so that e^{iπ} + 1 = 0.",
        "e^{iθ} 等于 cos θ + i sin θ：θ 为 0、π/2、π 时分别是 1、i、−1，因而 e^{iπ} + 1 = 0。",
    ),
    formula=r"e^{i\theta} = \cos\theta + i\sin\theta",
    uses=(rotation,),
)


@a04.quick
def euler() -> Numbers:
    angles = np.linspace(-np.pi, np.pi, 101)
    gap = np.max(np.abs(series(angles) - (np.cos(angles) + 1j * np.sin(angles))))
    # Terms of size π^k / k! add up to e^π = 23, each rounded.
    label = Words("max |series of e^{iθ} − (cos θ + i sin θ)|", "max |e^{iθ} 的级数 − (cos θ + i sin θ)|")
    yield at_most("series", label, gap, 1e-14, "complex128")
    identity = abs(np.exp(1j * np.pi) + 1)
    yield at_most("identity", Words("|e^{iπ} + 1|", "|e^{iπ} + 1|"), identity, 2.0**-52, "complex128")
    quarter = Scaled(jnp.asarray([np.pi / 2], jnp.float32), jnp.float32(1))
    turn = rotation(at(0, 1, 2), 2, BASE, quarter)
    found = number(jnp.stack([turn.cos, turn.sin], axis=-1)).reshape(3)
    label = Words("the library at 0, π/2, π: distance from 1, i, −1", "程序在 0, π/2, π 处与 1, i, −1 的距离")
    yield at_most("landmarks", label, np.max(np.abs(found - [1, 1j, -1])), 2 * np.pi * U, "float32")


a05 = chapter.claim(
    "A05",
    "S0 §2.2, S3 §2.2",
    Verdict.CONDITIONAL,
    Words(
        "Multiplying by e^{iθ} leaves the length exactly as it is and turns anticlockwise by θ.",
        "乘以 e^{iθ} 时长度完全保持，只逆时针转过 θ 角。",
    ),
    formula=r"|z e^{i\theta}| = |z|",
    finding=Words(
        "Exactly only in exact arithmetic: over 4,096 positions the length of a head of 64 changes by up to {f32:.1e} "
        "of itself in float32 and {bf16:.1e} in bfloat16, a single pair by up to {bf16_pair:.1e}.",
        "只有在精确运算中才完全保持：在 4096 个位置上，宽度 64 的一个头的长度在 float32 下相对变动至多 {f32:.1e}，"
        "在 bfloat16 下至多 {bf16:.1e}，单独一对坐标至多 {bf16_pair:.1e}。",
    ),
    uses=(rotation, rotate),
)


@a05.quick
def lengths() -> Numbers:
    @jax.jit
    def turned(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        turn = rotation(jnp.arange(4096, dtype=jnp.int32)[None], H, BASE)
        return rotate(x.astype(jnp.float32), turn, "half"), rotate(x, turn, "half")

    def changes(x: np.ndarray, y: jax.Array) -> tuple[float, float]:
        """Largest relative change of a head's length, and of a pair's."""
        before, after = (np.asarray(z, np.float64).reshape(-1, 2, H // 2) for z in (x, y))
        heads = np.linalg.norm(after, axis=(1, 2)) / np.linalg.norm(before, axis=(1, 2))
        pairs = np.linalg.norm(after, axis=1) / np.linalg.norm(before, axis=1)
        return np.max(np.abs(heads - 1)), np.max(np.abs(pairs - 1))

    # cos, sin, two products and their sum are rounded: 4 U. A bfloat16 result is rounded once more, to 2^-8.
    x = normal(5, 1, 4096, 1, H).astype(jnp.bfloat16)
    single, half = (changes(x, y) for y in turned(x))
    label = Words("max relative change of length", "长度的最大相对变化")
    yield at_most("f32", label, single[0], 4 * U, "float32")
    yield at_most("bf16", label, half[0], 2.0**-8, "bfloat16")
    label = Words("of a pair", "单独一对坐标的")
    yield at_most("bf16_pair", label, half[1], 2.0**-8 + 4 * U, "bfloat16")
    # The largest of 4,096 roundings is far above a 64th of the bound.
    yield at_least("inexact", Words("and not exact", "确实不精确"), half[0], 2.0**-14, "bfloat16")
    one = number(rotate(pair(1 + 0j), rotation(at(1), 2, BASE), "half")).item()
    label = Words("angle at position 1, θ = 1", "位置 1 处转过的角度（θ = 1）")
    yield near("angle", label, np.angle(one), 1.0, 4 * U, "float32")


a06 = chapter.claim(
    "A06",
    "S0 §2.3, S3 §2.3",
    Verdict.TRUE,
    Words("By the addition theorems, the angles of two rotations add up.", "由两角和公式，两次旋转相乘时角度相加。"),
    formula=r"e^{i\alpha} e^{i\beta} = e^{i(\alpha + \beta)}",
    uses=(rotation, rotate),
)


@a06.quick
def angles_add() -> Numbers:
    a, b = np.random.default_rng(6).uniform(-np.pi, np.pi, (2, 1000))

    def turn(angle: np.ndarray) -> np.ndarray:
        return np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]).transpose(2, 0, 1)

    gap = np.max(np.abs(turn(a) @ turn(b) - turn(a + b)))
    yield at_most("matrices", Words("max |R(α)R(β) − R(α+β)|", "max |R(α)R(β) − R(α+β)|"), gap, 1e-15)

    @jax.jit
    def apart(x: jax.Array) -> jax.Array:
        first, second = at(*range(8)), at(3, 1, 4, 1, 5, 9, 2, 6)
        twice = rotate(rotate(x, rotation(first, H, BASE), "half"), rotation(second, H, BASE), "half")
        return twice - rotate(x, rotation(first + second, H, BASE), "half")

    x = normal(6, 1, 8, 1, H)
    gap = np.linalg.norm(np.asarray(apart(x), float), axis=-1) / np.linalg.norm(x.astype(float), axis=-1)
    # Three rotations of 4 U, and three angles of at most 14, each of two roundings.
    label = Words("turned by m, then by n, against m + n: relative", "先转 m 再转 n 与一次转 m + n 的相对差")
    yield at_most("library", label, np.max(gap), (12 + 3 * 2 * 14) * U, "float32")


a07 = chapter.claim(
    "A07",
    "S0 §2.4, S3 §2.4",
    Verdict.TRUE,
    Words(
        "The dot product of two plane vectors is the real part of one number times the other's conjugate.",
        "平面上两个向量的点积等于一个复数与另一个的共轭之积的实部。",
    ),
    formula=r"\vec q \cdot \vec k = \mathrm{Re}(q k^*)",
    uses=(attention_scores,),
)


@a07.quick
def conjugates() -> Numbers:
    q, k = normal(7, 2, 1000, 1, 1, 2)
    a, b = number(q).ravel(), number(k).ravel()
    real, size = np.real(a * b.conj()), np.abs(a) * np.abs(b)
    polar = size * np.cos(np.angle(a) - np.angle(b))
    label = Words(
        "max |Re qk* − |q||k| cos(arg q − arg k)| / |q||k|", "max |Re qk* − |q||k| cos(arg q − arg k)| / |q||k|"
    )
    yield at_most("polar", label, np.max(np.abs(real - polar) / size), 2e-15, "complex128")
    scores = np.asarray(attention_scores(jnp.asarray(q), jnp.asarray(k), RAW), np.float64).ravel()
    label = Words("the library's score against Re qk*, relative", "程序的得分与 Re qk* 的相对差")
    yield at_most("library", label, np.max(np.abs(scores - real) / size), 4 * U, "float32")


a08 = chapter.claim(
    "A08",
    "S0 §2.4",
    Verdict.IMPRECISE,
    Words("Each vector is rotated by as many turns as its position says.", "位置是几，向量就转几圈。"),
    formula=r"q_m = q\, e^{im\theta}",
    finding=Words(
        "By an angle, mθ radians: position 2 with θ = 1 makes {turns:.4f} of a turn. Whole turns would put every "
        "position in the same place.",
        "旋转的是角度 mθ（弧度）：θ = 1 时位置 2 只转 {turns:.4f} 圈。若按整圈旋转，所有位置都会落在同一处。",
    ),
    uses=(rotation, rotate),
)


@a08.quick
def turns() -> Numbers:
    turned = number(rotate(pair(1 + 0j), rotation(at(2), 2, BASE), "half")).item()
    label = Words("turns at position 2, 2/2π", "位置 2 处的圈数，2/2π")
    yield near("turns", label, np.angle(turned) / (2 * np.pi), 1 / np.pi, 4 * U, "float32")
    label = Words("moved by two whole turns", "转两整圈后的位移")
    yield at_most("whole", label, abs(np.exp(2j * np.pi * 2) - 1), 4 * np.pi * 2.0**-52, "complex128")
    label = Words("moved by two radians, 2 sin 1", "转两弧度后的位移，2 sin 1")
    yield near("moved", label, abs(turned - 1), 2 * math.sin(1), 8 * U, "float32")


# --- scores at two positions ----------------------------------------------------------------------


def queries_and_keys() -> tuple[jax.Array, jax.Array]:
    """64 random queries and keys, [64, 1, 1, H] each."""
    q, k = jnp.asarray(normal(0, 2, 64, 1, 1, H))
    return q, k


def scores(q: jax.Array, k: jax.Array, m: int, n: int, layouts: tuple[str, str] = ("half", "half")) -> np.ndarray:
    """The library's scores of queries at position m and keys at n: [64]."""
    q = rotate(q, rotation(at(m), H, BASE), layouts[0])
    k = rotate(k, rotation(at(n), H, BASE), layouts[1])
    return np.asarray(attention_scores(q, k, RAW), np.float64).ravel()


def as_numbers(x: Any) -> np.ndarray:
    """Heads in the half layout as complex numbers: [64, H/2]."""
    heads = np.asarray(x, np.float64).reshape(-1, H)
    return heads[:, : H // 2] + 1j * heads[:, H // 2 :]


def rounding(q: jax.Array, k: jax.Array, m: int, n: int) -> float:
    """The most that float32 may change a score at positions m and n.

    Two rotations of 4 U and a sum of H terms of U each; frequency, angle and its reduction are rounded too, which
    moves the angle by up to 4 U of itself.
    """
    sizes = np.abs(as_numbers(q)) * np.abs(as_numbers(k))
    return float(np.max(sizes @ (U * (8 + H + 4 * (m + n) * THETA))))


a09 = chapter.claim(
    "A09",
    "S0 §2.4, S3 §2.4",
    Verdict.TRUE,
    Words(
        "The score of rotated query and key depends on their positions through m − n alone: −3 for 2 and 5, and for "
        "102 and 105.",
        "旋转后查询与键的得分只通过 m − n 依赖位置：位置 2 与 5、102 与 105 的差都是 −3。",
    ),
    formula=r"\langle R_m q, R_n k \rangle = \mathrm{Re}\left( q k^* e^{i(m - n)\theta} \right)",
    uses=(rotation, rotate, attention_scores),
)


@a09.quick
def relative() -> Numbers:
    q, k = queries_and_keys()
    z, w = as_numbers(q), as_numbers(k)
    exact = np.real(z * w.conj() * np.exp(-3j * THETA)).sum(axis=1)
    turned = [(z * np.exp(1j * m * THETA), w * np.exp(1j * (m + 3) * THETA)) for m in (2, 102)]
    apart = [np.real(a * b.conj()).sum(axis=1) for a, b in turned]
    label = Words("max difference of the two scores", "两处得分的最大差")
    yield at_most("exact", label, np.max(np.abs(apart[0] - apart[1])), 1e-12, "complex128")
    for m in (2, 102):
        label = Words(f"the library's scores at {m}, {m + 3}, error", f"程序在位置 {m}, {m + 3} 处得分的误差")
        gap = np.max(np.abs(scores(q, k, m, m + 3) - exact))
        yield at_most(f"at{m}", label, gap, rounding(q, k, m, m + 3), "float32")
    label = Words("max |score(2, 5) − score(5, 2)|: the sign counts", "max |得分(2, 5) − 得分(5, 2)|：符号有影响")
    yield at_least("sign", label, np.max(np.abs(scores(q, k, 2, 5) - scores(q, k, 5, 2))), 1.0, "float32")


a10 = chapter.claim(
    "A10",
    "S0 §2.4, S3 §2.4",
    Verdict.IMPRECISE,
    Words(
        "Shifting both tokens by 100 positions leaves the score exactly as it was.",
        "两个词元同时右移 100 个位置，注意力得分完全不变。",
    ),
    formula=r"\langle R_{m+100}\, q, R_{n+100}\, k \rangle = \langle R_m q, R_n k \rangle",
    finding=Words(
        "Exact in real numbers only: in float32 {changed:.0f} of 64 scores change at a shift of 100, by up to "
        "{f100:.1e}, and by {f1000000:.1e} at a million, because the angle mθ is rounded before its cosine is taken. "
        "Angles in bfloat16 lose the position: {bf16:.2f} at a shift of 100.",
        "只在实数运算中精确：float32 下位移 100 时 64 个得分中有 {changed:.0f} 个改变，最多 {f100:.1e}，位移一百万时达 "
        "{f1000000:.1e}，因为取余弦之前角度 mθ 已被舍入。角度若用 bfloat16，位置信息就丢失了：位移 100 时变动 "
        "{bf16:.2f}。",
    ),
    uses=(rotation, rotate, attention_scores),
)


@a10.quick
def shifts() -> Numbers:
    q, k = queries_and_keys()
    here = scores(q, k, 2, 5)
    moved = {shift: np.abs(scores(q, k, 2 + shift, 5 + shift) - here) for shift in (100, 1000, 10_000, 1_000_000)}
    for shift, gaps in moved.items():
        label = Words(f"max |Δscore| at a shift of {shift:,}", f"位移 {shift:,} 时的 max |Δ得分|")
        bound = rounding(q, k, 2, 5) + rounding(q, k, 2 + shift, 5 + shift)
        yield at_most(f"f{shift}", label, np.max(gaps), bound, "float32")
    label = Words("scores of 64 that change at 100", "位移 100 时改变的得分数（共 64 个）")
    yield at_least("changed", label, np.sum(moved[100] > 0), 32, "float32")

    def coarse(m: int) -> Rotation:
        angles = (jnp.bfloat16(m) * frequencies(H, BASE).astype(jnp.bfloat16)).astype(jnp.float32)[None, None]
        return Rotation(jnp.cos(angles), jnp.sin(angles))

    turned = [attention_scores(rotate(q, coarse(m), "half"), rotate(k, coarse(m + 3), "half"), RAW) for m in (2, 102)]
    label = Words("with angles in bfloat16, at 100", "角度用 bfloat16，位移 100")
    yield at_least("bf16", label, jnp.max(jnp.abs(turned[0] - turned[1])), 1000 * np.max(moved[100]), "bfloat16")
    caption = Words("How far a shift moves the score, float32.", "位移使得分变动多少（float32）。")
    lines = {"max |Δscore|": (list(moved), [float(np.max(gaps)) for gaps in moved.values()])}
    yield Curves(caption, "shift", "max |Δscore|", lines, log_x=True, log_y=True)


a11 = chapter.claim(
    "A11",
    "S0 §2.4, S3 §2.4, S3 §6",
    Verdict.WRONG,
    Words(
        "Invariance under shifts is the rigorous proof that RoPE extrapolates to longer texts than it was trained on.",
        "平移不变性严格证明了 RoPE 能外推到比训练时更长的文本。",
    ),
    finding=Words(
        "It does not follow. Two attentions that both depend on offsets alone (all of the past, and its nearest 16) "
        "are equal to the last bit on rows of 16, and differ by up to {apart:.2f} on rows of 64: invariance says "
        "nothing about offsets that training never showed, and {unseen:.0%} of the pairs of a row of 4T have one.",
        "推不出来。两种注意力都只依赖相对距离（一种看全部过去，一种只看最近 16 个）：在长度 16 的行上逐位相等，"
        "在长度 64 的行上最多相差 {apart:.2f}。不变性对训练中从未出现的距离毫无约束，而长度 4T 的行中有 {unseen:.0%} "
        "的词元对属于这种距离。",
    ),
    learned=Words(
        "Trained on rows of 32, RoPE has {rope4:.2f} times its loss on rows of 128 ({rope_low:.2f} to "
        "{rope_high:.2f}), sinusoidal positions {sinusoidal4:.2f} times, none {none4:.2f}, ALiBi {alibi4:.2f}; RoPE "
        "stretched afterwards {linear4:.2f} (linear), {ntk4:.2f} (NTK), {yarn4:.2f} (YaRN). A learned "
        "table ends where training did.",
        "在长度 32 的行上训练后，RoPE 在长度 128 的行上的损失是原来的 {rope4:.2f} 倍（{rope_low:.2f} 至 "
        "{rope_high:.2f}），正余弦编码 {sinusoidal4:.2f} 倍，不加位置编码 {none4:.2f} 倍，ALiBi {alibi4:.2f} 倍；"
        "事后缩放的 RoPE 为 {linear4:.2f}（线性）、{ntk4:.2f}（NTK）、{yarn4:.2f}（YaRN）倍。"
        "可学习的位置表到训练长度为止，无法外推。",
    ),
    uses=(attend, masks.causal, masks.window, rotation, rotate),
)


@a11.full
def trained(folder: Path) -> Numbers:
    from experiments.claims import rope_trained

    yield from rope_trained.extrapolation(folder)


@a11.quick
def invariant_both() -> Numbers:
    T, n, width = 16, 64, 16
    kinds = (masks.causal(), masks.window(T))

    @jax.jit
    def outputs(q: jax.Array, k: jax.Array, v: jax.Array, shift: int) -> list[Any]:
        places = jnp.arange(n, dtype=jnp.int32)[None] + shift
        turn = rotation(places, width, BASE)
        q, k = rotate(q, turn, "half"), rotate(k, turn, "half")
        return [attend(q, k, v, mask.at(places, places)) for mask in kinds]

    qkv = normal(11, 3, 1, n, 1, width)
    (every, nearest), shifted = (np.asarray(outputs(*qkv, shift), np.float64)[:, 0, :, 0] for shift in (0, 100))
    moved = np.max(np.abs(shifted - [every, nearest]))
    # Angles up to 164 are off by 4 U of themselves; a score moves by that times |q||k| / √16, less than 16.
    label = Words("both, at a shift of 100: max change", "两者平移 100 的最大变化")
    yield at_most("moved", label, moved, 4 * 164 * U * 16, "float32")
    gap = np.max(np.abs(every - nearest), axis=1)
    yield near(
        "short", Words("max difference, rows of T = 16", "长度 T = 16 时的最大差"), max(gap[:T]), 0, 0, "float32"
    )
    yield at_least("apart", Words("max difference, rows of 4T", "长度 4T 时的最大差"), max(gap), 0.1, "float32")
    unseen = 1 - masks.window(T).pairs(n, n) / masks.causal().pairs(n, n)
    expected = (n - T) * (n - T + 1) / (n * (n + 1))
    yield near(
        "unseen", Words("pairs of unseen offset, 4T", "4T 中距离未见过的词元对"), unseen, expected, 1e-12, "int64"
    )


a12 = chapter.claim(
    "A12",
    "S0 §2.4, S3 §2.4",
    Verdict.GAP,
    Words(
        "The derivation is of two coordinates and one θ; heads of 64 are not described.",
        "推导只针对二维向量和单个 θ，没有说明 64 维的头如何处理。",
    ),
    formula=r"\theta_i = b^{-2i/d}, \quad i = 0, \dots, d/2 - 1",
    finding=Words(
        "A head of d turns d/2 pairs, each by its own θ, and which coordinates make a pair has to be said: the two "
        "conventions in use are equal up to one permutation ({permuted:.0e}); mixed, they change scores by up to "
        "{mixed:.1f}.",
        "d 维的头旋转 d/2 对坐标，每对各有自己的 θ，而且必须说明哪两个坐标成一对：通行的两种约定只差一个固定的置换"
        "（误差 {permuted:.0e}），混用则会使得分改变多达 {mixed:.1f}。",
    ),
    uses=(frequencies, rotation, rotate, half_from_interleaved),
)


@a12.quick
def pairs() -> Numbers:
    found = np.asarray(frequencies(H, BASE), np.float64)
    label = Words("max relative error of θ_i", "θ_i 的最大相对误差")
    yield at_most("theta", label, np.max(np.abs(found / THETA - 1)), 4 * U, "float32")
    q, k = queries_and_keys()
    m, z = 7, np.asarray(q, np.float64).reshape(64, H)
    by_hand = {"half": np.zeros((64, H)), "interleaved": np.zeros((64, H))}
    for i, theta in enumerate(THETA):
        c, s = math.cos(m * theta), math.sin(m * theta)
        for layout, (a, b) in {"half": (i, i + H // 2), "interleaved": (2 * i, 2 * i + 1)}.items():
            by_hand[layout][:, a] = z[:, a] * c - z[:, b] * s
            by_hand[layout][:, b] = z[:, a] * s + z[:, b] * c
    turn = rotation(at(m), H, BASE)
    turned = {layout: np.asarray(rotate(q, turn, layout)).reshape(64, H) for layout in by_hand}
    worst = max(np.max(np.abs(turned[layout] - by_hand[layout])) for layout in by_hand)
    # 4 U of the rotation and 4 m U of the angle, of pairs not longer than the longest.
    bound = (4 + 4 * m) * U * np.max(np.abs(as_numbers(q))) * math.sqrt(2)
    yield at_most("by_hand", Words("both layouts against loops", "两种排列与循环计算的差"), worst, bound, "float32")
    order = np.asarray(half_from_interleaved(H))
    permuted = np.asarray(rotate(q[..., order], turn, "half")).reshape(64, H)
    gap = np.max(np.abs(permuted - turned["interleaved"][:, order]))
    yield at_most(
        "permuted", Words("half, permuted, against interleaved", "置换后的对半排列与交错排列"), gap, bound, "float32"
    )
    mixed = scores(q, k, 7, 3, ("half", "interleaved")) - scores(q, k, 7, 3)
    yield at_least(
        "mixed", Words("scores with layouts mixed", "混用两种排列时的得分变化"), np.abs(mixed).max(), 1, "float32"
    )


a13 = chapter.claim(
    "A13",
    "S0 §2.4, S3 §2.4",
    Verdict.IMPRECISE,
    Words(
        "If a whole sentence moves to the right, nothing changes for the model.",
        "句子整体右移，对模型来说什么都不变。",
    ),
    finding=Words(
        "What is invariant is q·k. Logits of a RoPE model stay (within {hidden:.0e}) when a sentence moves right "
        "behind tokens that are masked, but change by {visible:.2f} when those can be seen, as a causal mask lets "
        "them be: the set of keys decides. With learned positions they change by {learned:.2f} even when masked.",
        "不变的是 q·k。句子右移、前面的词元被掩码挡住时，RoPE 模型的 logits 不变（{hidden:.0e}）；若前面的词元可见"
        "（因果掩码正是如此），则改变 {visible:.2f}：起决定作用的是可见的键的集合。用可学习的位置编码时，"
        "即使挡住也会改变 {learned:.2f}。",
    ),
    uses=(forward, from_config, learned),
)


@a13.quick
def whole_model() -> Numbers:
    n, before = 8, 5
    text, rest = np.arange(3, 3 + n), np.zeros(before, int)
    tokens = np.stack([np.r_[text, rest], np.r_[rest, text], np.r_[rest, text]])
    segments = np.ones((3, n + before), int)
    segments[1, :before] = 0
    batch, gaps = batch_of(tokens, segments_BT=segments), {}
    for kind in ("rope", "learned"):
        config = Config(vocab_size=12, d_model=16, num_heads=2, num_layers=1, d_ff=32, positions=kind)
        made = logits(model(config, 13), config, batch)
        gaps[kind] = [np.max(np.abs(made[row, before:] - made[0, :n])) for row in (1, 2)]
    # Logits of size 1 after a dozen float32 operations on sums of up to 32 terms.
    label = Words("RoPE, shifted behind masked tokens", "RoPE，前面的词元被挡住")
    yield at_most("hidden", label, gaps["rope"][0], 400 * U, "float32")
    label = Words("RoPE, shifted behind visible tokens", "RoPE，前面的词元可见")
    yield at_least("visible", label, gaps["rope"][1], 0.1, "float32")
    label = Words("learned positions, masked tokens", "可学习位置，前面的词元被挡住")
    yield at_least("learned", label, gaps["learned"][0], 0.1, "float32")


a14 = chapter.claim(
    "A14",
    "S0 §2",
    Verdict.UNVERIFIABLE,
    Words("RoPE needs nothing but high-school complex numbers.", "RoPE 只需要高中水平的复数知识。"),
    finding=Words("A statement about readers: no code can check it.", "这是关于读者的说法，代码无法检验。"),
)
