"""The built site in a browser: pages fit a phone, links and search lead somewhere, formulas are drawn: `make docs-check`."""

import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

SITE = Path(os.environ.get("FUNCTIONAL_DS_SITE", ""))
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTH = 390  # of a phone, in CSS pixels
DESKS = (800, 1100, 1400, 1920)
PATIENCE = 600  # seconds; a tenth of it where the machine has nothing else to do
WANTED = {  # pages, and what readers search for who want one of them
    "zero": "FSDP, ZeRO, ZeRO-3, HSDP, mixed precision, bf16, loss scaling, 8-bit, quantization",
    "remat": "activation checkpointing, gradient checkpointing, offload, NVMe",
    "cheat-sheet": "gradient accumulation, gradient clipping, glossary",
    "pipelines": "pipeline, pipeline parallelism, 1F1B, zero bubble",
    "tensor-parallel": "tensor parallel, tensor parallelism",
    "sequence-parallel": (
        "sequence parallel, sequence parallelism, context parallel, context parallelism, ring attention, Ulysses"
    ),
    "experts": "mixture of experts, MoE, expert parallelism",
    "which-strategy": "3D parallelism",
    "fitting": "fault tolerance, resume, data loader, GAN, torchrun, SLURM, launch, launcher",
    "checkpoints": "checkpoint, checkpoint resharding, safetensors, elastic",
    "optimizers": "learning rate schedule, learning rate scheduler, EMA, Muon",
    "quickstart-llama": "LoRA, Hugging Face",
    "simulator": "deadlock, all-reduce",
    "jit": "compile, torch.compile",
    "profile": "profiler",
    "processes": "NCCL",
    "second-order": "Hessian",
    "migrating": "FSDP2, Megatron",
    "deepspeed-config": "deepspeed config",
    "phases": "DiLoCo, PowerSGD",
    "troubleshooting": "FAQ, OOM, limitations",
    "index": "install",
}
WORDS = {word: page for page, words in WANTED.items() for word in words.split(", ")}

pytestmark = [
    pytest.mark.skipif("FUNCTIONAL_DS_SITE" not in os.environ, reason="a part of make docs-check, which builds the site"),
    pytest.mark.skipif(BROWSER is None, reason="there is no chromium"),
    pytest.mark.timeout(PATIENCE + 30),
]


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Serves the site and the page that looks at it; takes what that has found."""

    def __init__(self, *args: Any, harness: str, found: dict[str, Any], ready: threading.Event) -> None:
        self.harness, self.found, self.ready = harness, found, ready
        super().__init__(*args, directory=str(SITE))

    def do_GET(self) -> None:
        if self.path != "/harness":
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(self.harness.encode())
        return None

    def do_POST(self) -> None:
        self.found.update(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()
        self.ready.set()

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pages = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html") if not path.name.startswith("gen"))
    pages.remove("search.html")
    plan = json.dumps({"pages": pages, "words": [*WORDS], "width": WIDTH, "desks": DESKS})
    script = Path(__file__).with_name("site.js").read_text(encoding="utf-8")
    harness = f'<iframe width="{WIDTH}" height="800" style="border:0"></iframe><script>const plan = {plan};\n{script}</script>'
    kept: dict[str, Any] = {}
    ready = threading.Event()
    handler = functools.partial(_Handler, harness=harness, found=kept, ready=ready)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        profile = tmp_path_factory.mktemp("browser")
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,1000", "--remote-debugging-port=0"]
        address = f"http://127.0.0.1:{server.server_port}/harness"
        command = [str(BROWSER), *flags, f"--user-data-dir={profile}", address]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as browser:
            try:
                assert ready.wait(PATIENCE), "the browser has not answered"
            finally:
                browser.terminate()
        server.shutdown()
    assert "error" not in kept, kept["error"]
    return kept


def test_pages_are_as_wide_as_the_window(found: dict[str, Any]) -> None:
    """Of a phone, and of larger screens: nothing reaches beyond it; wide tables, code and formulas scroll within themselves."""
    assert found["wide"] == {}
    assert len(found["formulas"]) > 40


def test_links_lead_somewhere(found: dict[str, Any]) -> None:
    """Links and images of the site's pages: files that are there, and places within pages."""
    assert found["dead"] == {}


def test_search_finds_the_words_of_the_field(found: dict[str, Any]) -> None:
    """Among the first three pages is the one that the reader wants (docs/conf.py has the keywords of each page)."""
    first = {word: [link.partition(".html")[0] for link in found["searched"][word][:3]] for word in WORDS}
    assert len(WORDS) >= 30
    assert {word: pages for word, pages in first.items() if WORDS[word] not in pages} == {}


def test_formulas_are_drawn(found: dict[str, Any]) -> None:
    """Each page of which the source has formulas shows as many."""
    docs = Path(__file__).parents[1] / "docs"
    expected = {}
    for path in docs.glob("*.md"):
        prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        if count := len(re.findall(r"\$\$.+?\$\$|(?<![\\$])\$[^$\n]+\$", prose, re.DOTALL)):
            expected[f"{path.stem}.html"] = count
    assert len(expected) >= 3
    assert {name: found["formulas"][name] for name in expected} == expected
