"""Train a GPT with multi-latent attention: ``pretrain.py --help`` says how."""

import sys

from megatron_mla.recipe.cli import main

if __name__ == "__main__":
    sys.exit(main())
