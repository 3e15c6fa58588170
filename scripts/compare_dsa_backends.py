"""Train twice, dsa_kernel_backend="triton" and "none", and compare: ``--help`` says how."""

import sys

from megatron_mla.recipe.compare import DSA, main

if __name__ == "__main__":
    sys.exit(main(pair=DSA))
