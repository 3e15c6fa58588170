"""Compare two recordings of chosen keys: ``index_overlap.py --help``."""

import sys

from megatron_mla.recipe.index_overlap import main

if __name__ == "__main__":
    sys.exit(main())
