"""Run by torchrun on several hosts: trains with a pause in each batch. slow.py FOLDER MILLISECONDS SECONDS."""

import sys
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parents[2]))

from functional_ds import comm
from tests.fitting import programs

if __name__ == "__main__":
    comm.init_distributed("gloo", timeout=timedelta(seconds=60))
    programs.trained(sys.argv[1], int(sys.argv[2]), seconds=int(sys.argv[3]))
    comm.destroy_process_group()
