"""Named configurations, with where their figures come from."""

from transformer_jax.config import Config
from transformer_jax.errors import unknown

# What the Llama 3 models share.
LLAMA = Config(
    vocab_size=128256,
    num_heads=32,
    num_kv_heads=8,
    ffn="swiglu",
    ffn_bias=False,
    norm="rmsnorm",
    scale_embeddings=False,
    rope_scaling="llama3",
    rope_original_positions=8192,
    attention_implementation="blockwise",
    remat=True,
    loss_chunks=8,
    compute_dtype="bfloat16",
    optimizer="adamw",
    schedule="cosine",
    steps=100_000,
    warmup_steps=2000,
    seq_len=4096,
    batch_size=64,
)

PRESETS: dict[str, Config] = {
    # Small enough for a test, with every part present.
    "tiny": Config(vocab_size=64, d_model=32, num_layers=2, num_heads=2, d_ff=64, seq_len=16),
    # Article S0's running example, Mini-LLaMA-0.04B: 41.8 M parameters.
    "mini_llama_40m": Config(
        vocab_size=6400,
        d_model=512,
        num_layers=12,
        num_heads=8,
        d_ff=1408,
        ffn="swiglu",
        ffn_bias=False,
        norm="rmsnorm",
        scale_embeddings=False,
        optimizer="adamw",
        schedule="cosine",
        steps=2000,
        warmup_steps=100,
        seq_len=256,
    ),
    # The sizes of Llama 3.2 1B: 1,235,814,400 parameters, embedding tied (its config.json). Long rows in
    # blocks, layers computed again in the backward pass, half-precision products: as it is trained.
    "llama_1b": LLAMA.replace(d_model=2048, num_layers=16, head_dim=64, d_ff=8192),
    # The sizes of Llama 3.1 8B: 8,030,261,248 parameters, untied (its config.json).
    "llama_8b": LLAMA.replace(d_model=4096, num_layers=32, head_dim=128, d_ff=14336, tie_embeddings=False),
    # Vaswani et al. 2017, table 3 "base". With D=512, F=2048, L=6, h d_k = D and no biases
    # in attention: V D + L(4D^2 + (2DF+F+D) + 4D) + L(8D^2 + (2DF+F+D) + 6D)
    # = 63,045,632 at V = 37,000.
    "vaswani_base": Config(
        architecture="encoder_decoder",
        vocab_size=37000,
        d_model=512,
        num_layers=6,
        num_heads=8,
        d_ff=2048,
        ffn="relu",
        norm_placement="post",
        positions="sinusoidal",
        schedule="inverse_sqrt",
        steps=100_000,
        warmup_steps=4000,
        task="copy",
    ),
}


# Numbers of Hyper that belong to a preset.
NUMBERS: dict[str, dict[str, float]] = {
    "llama_1b": {"rope_base": 500_000.0, "rope_factor": 32.0},
    "llama_8b": {"rope_base": 500_000.0, "rope_factor": 8.0},
}


def preset(name: str) -> Config:
    """A named Config; an unknown name is refused with its nearest one."""
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    return PRESETS[name]
