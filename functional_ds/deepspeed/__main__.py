"""``python -m functional_ds.deepspeed script.py``: see ``run_script``."""

import sys

from functional_ds.deepspeed.run_script import main

if __name__ == "__main__":
    main(sys.argv[1:])
