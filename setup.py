"""Packaging; tool settings are in pyproject.toml."""

from setuptools import find_packages, setup

# The host pipeline, tokenizers and metrics of pairs; the tests need them too.
DATA = ["eng-to-ipa>=0.0.2", "grain>=0.2.3", "tokenizers>=0.21", "sacrebleu>=2.4", "rapidfuzz>=3.9"]

setup(
    name="transformer-jax",
    version="0.1.0",
    description="A laboratory in which Transformers are built, trained, ablated and proved, in JAX",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["transformer_jax*", "experiments*"]),
    package_data={"experiments": ["templates/*.html"]},
    # Ranges that were run: the low ends on Python 3.11, the high ends on 3.12.
    install_requires=[
        "jax>=0.10.2,<0.13",
        "flax>=0.12.8,<0.13",
        "optax>=0.2.8,<0.3",
        "orbax-checkpoint>=0.12.8,<0.13",
        "einops>=0.8,<0.9",
        "chex>=0.1.92,<0.2",
        "absl-py>=2.3,<3",
        "numpy>=2.0",
        "scipy>=1.14",
        "matplotlib>=3.9",
        "jinja2>=3.1",
        "latex2mathml>=3.78",
        "rich>=13.9",
    ],
    extras_require={
        "cuda": ["jax[cuda12]>=0.10.2,<0.13"],
        "tpu": ["jax[tpu]>=0.10.2,<0.13"],
        "data": DATA,
        "test": [*DATA, "pytest>=8.3", "pytest-xdist>=3.7", "hypothesis>=6.100", "ruff>=0.9", "basedpyright>=1.29"],
        "bench": ["torch==2.13.0", "transformers>=5", "ctranslate2>=4.6"],
        "slurm": ["submitit>=1.5"],
    },
)
