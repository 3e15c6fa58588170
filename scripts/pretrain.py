"""Train a GPT with multi-latent attention: ``pretrain.py --help`` says how."""

import logging
import sys
import warnings

if __name__ == "__main__":
    # At import, on every rank, Megatron-Core says that Apex and Transformer Engine are absent and
    # torch that there is no CUDA. None of them is needed.
    warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)

    from megatron_mla.recipe.main import main

    sys.exit(main())
