"""Run by torchrun: trains, and in some attempts one rank is killed at a random moment.

killed.py FOLDER SEED ATTEMPTS SECONDS: in each of so many attempts, a rank and a moment that the seed picks, up to so many
seconds after the training began.
"""

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).absolute().parents[2]))

from functional_ds import comm
from tests.fitting import programs


def kill_oneself(delay: float, note: Path) -> None:
    """SIGKILL, from a thread, whatever the main thread does then; notes before what that was."""
    time.sleep(delay)
    folder = note.parent / "checkpoints"
    files = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
    note.write_text(f"after {delay:.3f} s, with {files}\n")
    os.kill(os.getpid(), signal.SIGKILL)


def main(folder: str, seed: str, attempts: str, seconds: str) -> None:
    comm.init_distributed("gloo")
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), comm.world().rank
    drawn = random.Random(f"{seed} {attempt}")
    victim, delay = drawn.randrange(comm.world().size), drawn.uniform(0, float(seconds))
    if attempt < int(attempts) and rank == victim:
        words = (delay, Path(folder, f"killed-{attempt}-{rank}"))
        threading.Thread(target=kill_oneself, args=words, daemon=True).start()
    began = time.monotonic()
    programs.trained(folder)
    Path(folder, f"seconds-{attempt}-{rank}").write_text(str(time.monotonic() - began))
    comm.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
