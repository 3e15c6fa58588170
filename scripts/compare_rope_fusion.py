"""Train twice, fused and with --no-rope-fusion, and compare: ``compare_rope_fusion.py --help``."""

import sys

from megatron_mla.recipe.compare import main

if __name__ == "__main__":
    sys.exit(main())
