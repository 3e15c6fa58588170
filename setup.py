"""Name, version and dependencies of the package; pyproject.toml has the settings of its tools."""

from pathlib import Path

from setuptools import find_packages, setup

TRAIN = ["tqdm", "matplotlib", "tensorboard"]
FLA = ["fla-core>=0.6"]

setup(
    name="megatron-mla",
    version="0.1.0",
    description="Multi-latent attention and DeepSeek sparse attention for stock Megatron-Core",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    python_requires=">=3.12",
    packages=find_packages(include=["megatron_mla", "megatron_mla.*"]),
    # A Megatron user's environment stays theirs: nothing here but what every layer needs.
    install_requires=["torch>=2.10", "megatron-core>=0.19.2", "PyYAML"],
    extras_require={
        "train": TRAIN,
        "te": ["transformer-engine[pytorch]"],
        # The kernels of flash-linear-attention, without its Hugging Face models.
        "fla": FLA,
        "hf": ["transformers", "safetensors"],
        "dev": [*TRAIN, *FLA, "pytest", "pytest-timeout", "hypothesis", "ruff", "codespell"],
    },
    entry_points={
        "console_scripts": [
            "megatron-mla-pretrain = megatron_mla.recipe.cli:main",
            "megatron-mla-generate = megatron_mla.recipe.generate:main",
        ]
    },
)
