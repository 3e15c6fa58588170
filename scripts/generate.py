"""Sample text from a checkpoint of ``pretrain.py``: ``generate.py --help`` says how."""

import sys

from megatron_mla.recipe.generate import main

if __name__ == "__main__":
    sys.exit(main())
