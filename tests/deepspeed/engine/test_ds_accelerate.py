"""A script with accelerate's DeepSpeedPlugin, unchanged, trains as plain PyTorch does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

SCRIPT = """
import json, sys, torch
from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs
plugin = DeepSpeedPlugin(zero_stage=2, gradient_accumulation_steps=2, gradient_clipping=0.05)
accelerator = Accelerator(deepspeed_plugin=plugin, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
torch.manual_seed(0)
model, x = torch.nn.Linear(6, 2), torch.randn(32, 6)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=4)
model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5), loader)
losses = []
for (rows,) in loader:
    with accelerator.accumulate(model):
        loss = (model(rows) - rows[:, :2]).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(accelerator.gather(loss.detach().view(1)).mean().item())
if accelerator.is_main_process:
    print("losses", json.dumps(losses))
"""


def alone() -> list[float]:
    """The mean loss over both ranks' micro-batches, two of them an update, by plain PyTorch."""
    torch.manual_seed(0)
    model, x = nn.Linear(6, 2), torch.randn(32, 6)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.5), []
    for index, rows in enumerate(x.split(8)):
        loss = (model(rows) - rows[:, :2]).square().mean()
        (loss / 2).backward()
        found.append(loss.item())
        if index % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
    return found


def test_accelerates_plugin_trains_on_two_processes(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "functional_ds.deepspeed", str(script)]
    found = subprocess.run(
        [sys.executable, "-m", *launch],
        env={**os.environ, "ACCELERATE_USE_DEEPSPEED": "true", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    lines = [line for line in found.stdout.splitlines() if line.startswith("losses ")]
    assert lines, found.stderr
    assert json.loads(lines[0].removeprefix("losses ")) == pytest.approx(alone(), rel=1e-5)
