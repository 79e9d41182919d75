"""Models that others trained and ran, from beside the project: files, and rules that map them onto ours."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from transformer_jax.config import Config
from transformer_jax.importing import Rule


def folder(name: str) -> Path:
    """Of a model; the test is skipped where it is absent."""
    data = os.environ.get("TRANSFORMER_JAX_DATA", Path(__file__).parents[2] / "shared" / "data")
    path = Path(data).parent / "models" / name
    if not path.exists():
        pytest.skip(f"{path} is absent")
    return path


def safetensors(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a float32 file: the length of a JSON header in 8 bytes, the header, the data."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    made = {}
    for name, about in header.items():
        if name != "__metadata__":
            assert about["dtype"] == "F32"
            first, last = (start + at for at in about["data_offsets"])
            made[name] = np.frombuffer(raw[first:last], "<f4").reshape(about["shape"])
    return made


# --- a transliteration model of CTranslate2's ----------------------------------------

TRANSLITERATION = Config(
    architecture="encoder_decoder", vocab_size=43, source_vocab_size=51, d_model=32, num_layers=6, num_heads=8,
    d_ff=128, ffn="relu", norm="layernorm", norm_placement="pre", norm_epsilon=1e-5, positions="learned",
    max_positions=64, tie_embeddings=False, output_bias=True, attention_bias=True, ffn_bias=True,
)  # fmt: skip


def sinusoid(P: int, D: int) -> np.ndarray:
    """[P, D]: all sines, then all cosines, of positions from 1 on; the last frequency is 1/10000 itself."""
    half = D // 2
    angles = np.arange(1, P + 1)[:, None] * 10000.0 ** (-np.arange(half) / (half - 1))
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)


def transliteration_rules() -> list[Rule]:
    q, k, v, o = ("wq_DNH", "bq_NH"), ("wk_DKH", "bk_KH"), ("wv_DKH", "bv_KH"), ("wo_NHD", "bo_D")
    linears = {
        "self_attention": ("attention", "attention_norms", ((q, k, v), (o,))),
        "attention": ("cross", "cross_norms", ((q,), (k, v), (o,))),
        "ffn": ("ffn", "ffn_norms", ((("w1_DF", "b1_F"),), (("w2_FD", "b2_D"),))),
    }
    rules = [
        Rule("encoder/embeddings/weight", ("embedding/source_VD",)),
        Rule("decoder/embeddings/weight", ("embedding/embed_VD",)),
        Rule("decoder/projection/weight", ("embedding/wout_DV",), None, 1),
        Rule("decoder/projection/bias", ("embedding/bout_V",)),
    ]
    norm = (("gamma", "scale_D"), ("beta", "bias_D"))
    for stack in ("encoder", "decoder"):
        rules += [Rule(f"{stack}/layer_norm/{a}", (f"{stack}/final_norm/{b}",)) for a, b in norm]
        for i in range(6):
            for theirs, (part, norms, parts) in linears.items():
                if stack == "encoder" and part == "cross":
                    continue
                there, here = f"{stack}/layer_{i}/{theirs}", f"{stack}/layers"
                rules += [Rule(f"{there}/layer_norm/{a}", (f"{here}/{norms}/norm/{b}",), i) for a, b in norm]
                for n, fused in enumerate(parts):
                    weights = tuple(f"{here}/{part}/{weight}" for weight, _ in fused)
                    biases = tuple(f"{here}/{part}/{bias}" for _, bias in fused)
                    inputs = 2 if fused == (o,) else 1
                    rules += [Rule(f"{there}/linear_{n}/weight", weights, i, inputs)]
                    rules += [Rule(f"{there}/linear_{n}/bias", biases, i, 0)]
    return rules
