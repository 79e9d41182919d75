"""From the mathematics to the code: the tables of S3 §6 and S1 §1.1, with the functions that the ledger exercised.

A row names claims; its functions are those that the claims' checks call.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from experiments.claims.ledger import name_of
from experiments.claims.record import Chapter, Words


class Row(NamedTuple):
    """A row of an article's table. claims: ids."""

    source: str
    mathematics: Words
    formula: str
    component: Words
    claims: tuple[str, ...]


ROWS = (
    Row("S3 §6", Words("dot product of vectors", "向量的点积"), r"a \cdot b = |a|\,|b| \cos\theta",
        Words("attention scores", "注意力得分"), ("H03", "H05", "H07")),
    Row("S3 §6", Words("complex numbers, Euler", "复数与欧拉公式"), r"e^{i\theta} = \cos\theta + i \sin\theta",
        Words("rotary positions", "旋转位置编码"), ("A05", "A09", "A10", "A12")),
    Row("S3 §6", Words("variance of a sum", "和的方差"), r"\mathrm{Var}(X + Y) = \mathrm{Var} X + \mathrm{Var} Y",
        Words("scores divided by √d_k", "得分除以 √d_k"), ("B04", "B16", "B20")),
    Row("S3 §6", Words("limit of the exponential", "指数函数的极限"), r"\lim_{x \to -\infty} e^x = 0",
        Words("causal mask", "因果掩码"), ("D01", "D02", "D03", "D11")),
    Row("S3 §6", Words("root mean square", "均方根"), r"\sqrt{\tfrac{1}{d} \sum_i x_i^2}",
        Words("RMSNorm before each sub-layer", "子层之前的 RMSNorm"), ("C01", "C02", "C04")),
    Row("S3 §6", Words("chain rule of probability", "概率的链式法则"), r"P(A, B) = P(A)\, P(B \mid A)",
        Words("autoregressive cross-entropy", "自回归交叉熵"), ("E01", "E03", "E04")),
    Row("S1 §1.1", Words("linear algebra", "线性代数"), r"Q = X W_Q",
        Words("embeddings, QKV, feed-forward", "词嵌入、QKV、前馈网络"), ("G01", "H01", "H08", "H12")),
    Row("S1 §1.1", Words("probability and statistics", "概率与统计"), r"p_i = e^{z_i / T} / \sum_j e^{z_j / T}",
        Words("softmax, sampling, loss", "softmax、采样、损失函数"), ("F01", "F05", "F08", "E07")),
    Row("S1 §1.1", Words("calculus, optimisation", "微积分与最优化"), r"W \leftarrow W - \eta\, \nabla_W L",
        Words("backpropagation, updates", "反向传播与参数更新"), ("J01", "J02", "J04")),
    Row("S1 §1.1", Words("information theory", "信息论"), r"H(p, q) = H(p) + \mathrm{KL}(p \,\|\, q)",
        Words("cross-entropy, KL divergence", "交叉熵与 KL 散度"), ("E10", "E12", "E14", "E15")),
    Row("S1 §1.1", Words("combinatorics", "组合数学"), r"\mathrm{PE}_{pos + k} = M_k\, \mathrm{PE}_{pos}",
        Words("positions, complexity, permutations", "位置编码、复杂度、排列"), ("G03", "G05", "G08", "I01", "I02")),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Mapped:
    """A row with the full names of its functions."""

    row: Row
    functions: tuple[str, ...]


def mapped(chapters: Sequence[Chapter], rows: Sequence[Row] = ROWS) -> list[Mapped]:
    """The rows with what their claims exercise. Raises KeyError for a claim that is not in the chapters."""
    claims = {claim.id: claim for chapter in chapters for claim in chapter.claims}
    return [
        Mapped(row, tuple(dict.fromkeys(name_of(use) for id in row.claims for use in claims[id].uses))) for row in rows
    ]
