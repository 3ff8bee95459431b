"""The page in a real browser: it draws what its charts have, without an error, and nothing is wider than a phone."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

import functional_ds as fds
from functional_ds import comm
from functional_ds import pipelining as pp
from functional_ds import transforms as T
from functional_ds.comm.debug import Chart
from functional_ds.comm.debug.trace import Slice
from tests.planting import Bug, planted

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not on PATH")

PHONE, DESK = 390, 1200
Curve = list[tuple[float, int]]
MEASURES = """<body style="margin: 0">
<iframe id="page" style="border: 0; width: WIDTHpx; height: 900px" srcdoc="PAGE"></iframe><script>
document.getElementById("page").onload = event => {
  const page = event.target.contentDocument, root = page.documentElement, all = name => [...page.querySelectorAll(name)];
  const box = node => node.getBoundingClientRect(), width = node => box(node).width;
  const first = page.querySelector("svg.spans"), before = width(first);
  const inside = (node, other) => {
    const a = box(node), b = box(other);
    return a.width > 0 && a.left >= b.left - 1 && a.right <= b.right + 1 && a.top >= b.top - 1 && a.bottom <= b.bottom + 1;
  };
  const seen = {
    too_wide: root.scrollWidth - root.clientWidth,
    spans: all("svg.span").length,
    outside: all("svg.span > rect, svg.spans > text").filter(node => !inside(node, node.closest("svg.spans"))).length,
    arrows: all("line").length,
    heads: all(".head").map(node => node.textContent),
    lower: all("svg.spans").map(svg => box(svg).top - box(svg.parentElement.previousSibling.firstChild).top),
    clipped: all("svg.span text").filter(node => node.getBBox().width > width(node.previousSibling)).length,
    curve: all("svg.spans path").filter(node => box(node).height > 20)
      .map(node => width(node) / width(node.closest("svg.spans"))),
  };
  first.dispatchEvent(new page.defaultView.WheelEvent("wheel", { deltaY: -1, ctrlKey: true, bubbles: true, cancelable: true }));
  seen.zoomed = width(first) / before;
  document.title = JSON.stringify(seen);
};
</script></body>"""


def seen(page: str, folder: Path, width: int) -> dict[str, Any]:
    """What the browser has drawn of a page; fails where its console has a word."""
    (folder / "frame.html").write_text(MEASURES.replace("WIDTH", str(width)).replace("PAGE", html.escape(page)))
    words = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    words += ["--enable-logging=stderr", f"--window-size={DESK},1000", "--dump-dom", (folder / "frame.html").as_uri()]
    run = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    said = [line for line in run.stderr.splitlines() if "CONSOLE" in line]
    assert not said, said
    found = re.search("<title>(.*?)</title>", run.stdout)
    assert found is not None, run.stdout[:500]
    result: dict[str, Any] = json.loads(html.unescape(found.group(1)))
    return result


def loss_fn(params: Any, x: torch.Tensor) -> torch.Tensor:
    return (torch.tanh(x @ params["a"]) @ params["b"]).square().mean()


def sharded_run() -> tuple[comm.Ledger, Curve]:
    step = T.zero(3)(fds.train_step(loss_fn, fds.sgd(0.1)))
    state = step.init({"a": torch.ones(8, 8), "b": torch.ones(8, 8)})
    with fds.memory.recorded(state) as run, comm.ledger(times=True) as book:
        step(state, torch.ones(4, 8))
    return book, run.events.curve()


def calls() -> Chart:
    books, memory = zip(*comm.simulate(sharded_run, world_size=4), strict=True)
    return comm.debug.calls_chart(books, memory=memory[0])


def priced() -> Chart:
    machine = fds.scaling.Machine("mine", flops=1e12, flops_fp32=1e9, memory_bandwidth=1e10, link_bandwidth=1e8)
    step = fds.jit(T.zero(3)(fds.train_step(loss_fn, fds.sgd(0.1))))
    state, _ = step(step.init({"a": torch.ones(8, 8), "b": torch.ones(8, 8)}), torch.ones(4, 8))
    return step.graph(state, torch.ones(4, 8)).cost(machine).chart()


def ring() -> None:
    here = comm.world()
    comm.send(torch.ones(1), (here.rank + 1) % here.size)
    comm.recv(torch.ones(1), (here.rank - 1) % here.size)


def deadlock() -> Chart:
    with pytest.raises(comm.errors.DeadlockError) as caught:
        comm.simulate(ring, world_size=4)
    return comm.debug.waits_chart(caught.value)


def recorded_pipeline() -> pp.Timeline:
    schedule, recorder = pp.one_f_one_b(4, 8), pp.Recorder()
    params = [torch.eye(8)] * 4
    layers = [lambda w, x: torch.tanh(x @ w)] * 4
    stages = pp.stages(layers, params, loss=lambda y, batch: y.square().mean())
    step = T.pipeline(schedule, stages, recorder=recorder)(fds.train_step(stages, fds.sgd(0.1)))
    step(step.init(params), (torch.ones(16, 8),))
    return recorder.run(schedule, comm.world())


def pipelines() -> list[Chart]:
    """A run, and what its mean times predict."""
    run = comm.simulate(recorded_pipeline, world_size=4)[0]
    return [pp.timeline(run.schedule, pp.measured(run)).chart(), run.chart()]


def check(charts: list[Chart], folder: Path, width: int) -> None:
    comm.debug.write_page(charts, folder / "run.html", title="a run")
    found = seen((folder / "run.html").read_text(encoding="utf-8"), folder, width)
    assert found["too_wide"] <= 0
    assert found["spans"] == sum(len(lane) for chart in charts for lane in chart.lanes.values())
    assert found["outside"] == 0
    assert found["arrows"] == sum(len(chart.arrows) for chart in charts)
    lanes = [name for name in found["heads"] if not name.startswith("memory, at most")]
    assert lanes == [lane for chart in charts for lane in chart.lanes]
    assert set(found["lower"]) == {0}  # names stand beside their lanes
    assert len(found["curve"]) == sum(bool(chart.curve) for chart in charts)
    assert all(0.98 < part < 1.02 for part in found["curve"])
    assert found["zoomed"] > 1.2
    if width == DESK:
        assert found["clipped"] == 0


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_what_a_browser_draws(width: int, tmp_path: Path) -> None:
    charts = [calls(), comm.simulate(priced, world_size=2)[0], deadlock(), *pipelines()]
    assert [bool(chart.curve) for chart in charts] == [True, True, False, False, False]
    check(charts, tmp_path, width)


BUGS = [
    Bug("a legend in one line", "comm.debug.page:Chart._repr_html_", "' '.join", "''.join"),
    Bug(
        "places in tenths of percent",
        "comm.debug.page:Chart._drawn",
        "(time - start) / length * 100",
        "(time - start) / length * 1000",
    ),
    Bug("a curve that begins before the spans", "comm.debug.page:Chart._area", "min(max(x(time), 0), 100)", "x(time)"),
    Bug("names higher than their lanes", "comm.debug.page:Chart._drawn", "_head(name, _LANE)", "_head(name, _LANE) * 2"),
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_bug_is_seen(bug: Bug, tmp_path: Path) -> None:
    names = [f"a long name of number {index}" for index in range(5)]
    chart = Chart(
        "long names", {name: [Slice("", name, index, index + 1)] for index, name in enumerate(names)}, curve=[(-1, 8)]
    )
    check([chart], tmp_path, PHONE)
    with planted(bug), pytest.raises(bug.shows):
        check([chart], tmp_path, PHONE)


def test_an_error_of_a_script_is_seen(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no_such_name"):
        seen("<svg class='spans'></svg><script>no_such_name()</script>", tmp_path, PHONE)
