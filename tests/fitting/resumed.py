"""Run by a cluster's launcher: trains, and leaves the rank's process id, so that a test can kill it. resumed.py FOLDER"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parents[2]))

from functional_ds import comm
from tests.fitting import programs


def main(folder: str) -> None:
    comm.init_distributed("gloo")
    Path(folder, f"pid-{comm.world().rank}").write_text(str(os.getpid()))
    programs.trained(folder, milliseconds=50)
    comm.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
