"""Run by torchrun: trains, and in some attempts one rank is killed at a random moment.

killed.py FOLDER SEED ATTEMPTS: in each of so many attempts, a rank and a moment that the seed picks: up to 30 ms after a
batch was drawn, in a step or while a checkpoint is written.
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


def kill_oneself(delay: float, note: Path, index: int) -> None:
    """SIGKILL, from a thread, whatever the main thread does then; notes before what was there."""
    time.sleep(delay)
    folder = note.parent / "checkpoints"
    saving = any(path.name.startswith(".saving") for path in folder.iterdir())
    note.write_text(f"{1000 * delay:.0f} ms after batch {index}{', while saving' if saving else ''}")
    os.kill(os.getpid(), signal.SIGKILL)


def main(folder: str, seed: str, attempts: str) -> None:
    comm.init_distributed("gloo")
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), comm.world().rank
    random_ = random.Random(f"{seed} {attempt}")
    victim, moment, delay = (
        random_.randrange(comm.world().size),
        random_.randrange(programs.STEPS - 10),
        random_.uniform(0, 0.03),
    )
    armed = [attempt < int(attempts) and rank == victim]

    def drawn(index: int) -> None:
        if armed[0] and index >= moment:
            armed[0] = False
            words = (delay, Path(folder, f"killed-{attempt}-{rank}"), index)
            threading.Thread(target=kill_oneself, args=words, daemon=True).start()

    programs.trained(folder, drawn=drawn)
    comm.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
