"""How Sphinx builds the site: ``make docs``. The pages are markdown, the reference comes from the docstrings."""

import re
from pathlib import Path
from typing import Any

from docutils.nodes import SkipNode
from latex2mathml.converter import convert

DOCS = Path(__file__).parent

project = "functional_ds"
author = "the functional_ds authors"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_math_renderer = "mathml"
html_css_files = ["site.css"]
html_static_path = ["static"]
html_title = "functional_ds"
html_show_copyright = False
html_show_sourcelink = False

myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
highlight_language = "text"  # of blocks that name no language: diagrams and output

autodoc_member_order = "groupwise"
autodoc_default_options = {"members": True, "imported-members": True}
autodoc_typehints_format = "short"
python_maximum_signature_line_length = 100
napoleon_use_ivar = True  # attrs classes list their fields under Attributes


# What readers search for, and the page that they want first. Lower case, as the search compares.
KEYWORDS = {
    "index": "install, installation, getting started",
    "quickstart-llama": "lora, peft, fine-tuning, llama, hugging face, transformers",
    "quickstart-optimizer": "tutorial, custom optimizer, custom transform",
    "quickstart-schedule": "custom schedule, custom collective",
    "which-strategy": "3d parallelism, 4d parallelism, 5d parallelism, combining parallelism, tuning, device mesh",
    "migrating": "ddp, fsdp2, megatron, megatron-lm, torchtitan, jax, optax, comparison",
    "zero": (
        "zero, zero-1, zero-2, zero-3, fsdp, hsdp, zero++, mics, mixed precision, loss scaling, bf16, fp16, amp, "
        "8-bit, int8, quantization, overlap, prefetch"
    ),
    "remat": (
        "gradient checkpointing, activation checkpointing, recomputation, offload, cpu offload, offloading, nvme, "
        "nvme offload, zero-infinity"
    ),
    "optimizers": (
        "optimizers, learning rate schedule, learning rate scheduler, warmup, ema, muon, shampoo, soap, galore, "
        "adamw, weight decay, param groups, parameter groups"
    ),
    "cheat-sheet": "cheat sheet, glossary, gradient accumulation, gradient clipping",
    "pipelines": "pipeline, pipeline parallelism, 1f1b, zero bubble, interleaved, dualpipe, micro-batches",
    "tensor-parallel": "tensor parallelism, tensor parallel",
    "sequence-parallel": (
        "context parallel, context parallelism, sequence parallel, sequence parallelism, ring attention, ulysses, long context"
    ),
    "experts": "moe, mixture of experts, expert parallelism, expert parallel",
    "fitting": (
        "training loop, resume, fault tolerance, elastic training, tensorboard, wandb, dataloader, data loader, gan, watchdog, "
        "launcher, torchrun, slurm, kubernetes, ray, multi-node"
    ),
    "checkpoints": "checkpoint, checkpoints, resharding, checkpoint resharding, elastic, safetensors, export",
    "jit": "torch.compile, compile, compilation, inductor",
    "profile": "profiler, profiling, mfu, flops, memory estimate, memory",
    "troubleshooting": "faq, error messages, nan, hangs, out of memory, oom, limitations, unsupported, inference, fp8",
    "steps": "dropout, random seed, frozen parameters, batchnorm",
    "phases": "custom transform, hooks, callbacks, diloco, local sgd, powersgd, gradient compression",
    "second-order": "hessian, hypergradient, meta-learning, maml",
    "gallery": "sam, dp-sgd, sophia, research methods",
    "simulator": (
        "collectives, all-reduce, all_reduce, reduce-scatter, deadlock, debugging, simulation, race condition, notebooks"
    ),
    "command-line": "command line, cli, functional-ds, job file",
    "deepspeed": "deepspeed, deepspeed engine, deepspeed quickstart, deepspeed script",
    "deepspeed-config": "deepspeed config, ds_config.json",
    "processes": "nccl, gloo, cuda streams",
    "benchmarks": "benchmarks, performance, speed, throughput",
    "security": "security, pickle",
}


def contents(app: Any, docname: str, source: list[str]) -> None:
    """Calls pages by their titles where a link has the name of a file; appends the table of contents to the index.

    It is the rows of the index's own tables, a table a part, then the reference. Keywords go below a page's title.
    """
    if docname in KEYWORDS:
        entries = ", ".join(f"! {word}" for word in KEYWORDS[docname].split(", "))
        source[0] = source[0].replace("\n", f"\n\n```{{index}} {entries}\n```\n", 1)
    titled = re.sub(r"\[([\w-]+)\.md\]\((\1\.md)\)", r"[](\2)", source[0])
    if docname != "index":
        source[0] = titled
        return
    tables = source[0]
    source[0] = titled
    for part in re.split(r"^## ", tables, flags=re.MULTILINE)[1:]:
        if rows := re.findall(r"^\| \[([\w-]+)\.md\]\(", part, re.MULTILINE):
            source[0] += _toctree(part.splitlines()[0], rows)
    source[0] += _toctree("API reference", sorted(f"reference/{path.stem}" for path in (DOCS / "reference").glob("*.rst")))


def _toctree(caption: str, names: list[str]) -> str:
    entries = "\n".join(names)
    return f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{entries}\n```\n"


def markdown_in_docstring(app: Any, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    """Turns the markdown of a docstring into reStructuredText, in place: fenced blocks, tables, single asterisks."""
    found: list[str] = []
    rest = iter(lines)
    for line in rest:
        indent, text = re.match(r" *", line)[0], line.strip()
        if text.startswith("```"):
            found += ["", f"{indent}.. code-block:: {text[3:] or 'text'}", ""]
            for inner in rest:
                if inner.strip() == "```":
                    break
                found.append(f"   {inner}")
            found.append("")
        elif text.startswith(">>>"):  # a doctest goes on to the next blank line
            found.append(line)
            for inner in rest:
                found.append(inner)
                if not inner.strip():
                    break
        elif TABLE_ROW.fullmatch(text):
            found += _table_row(text, indent, first=not (found and TABLE_CELL.match(found[-1])))
        else:
            found.append(line if text.startswith("*") else ASTERISK.sub(lambda it: it[0] if it[0] != "*" else r"\*", line))
    lines[:] = found


TABLE_ROW = re.compile(r"\|.*\|")
TABLE_CELL = re.compile(r" *(\*| ) - ")
# ``code``, *emphasis*, **bold**, or an asterisk alone, which alone is escaped
ASTERISK = re.compile(r"``.*?``|(?<![\w\"*])\*[A-Za-z][\w -]*\*(?![\w=*\"])|\*\*\w.*?\*\*|\*")


def _table_row(text: str, indent: str, *, first: bool) -> list[str]:
    """A row of a markdown table as one of a list-table, which the first row opens."""
    cells = [cell.strip() for cell in text[1:-1].split("|")]
    if not any(cell.strip("-:") for cell in cells):  # the rule below the heading
        return []
    opening = ["", f"{indent}.. list-table::", f"{indent}   :header-rows: 1", ""] if first else []
    return opening + [f"{indent}   {'*' if i == 0 else ' '} - {cell}" for i, cell in enumerate(cells)]


def names_of_module(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Lists a module's public names at the top of its page, each with a link."""
    if what == "module":
        lines += ["", " · ".join(f":py:obj:`~{name}.{each}`" for each in obj.__all__), ""]


def mathml(self: Any, node: Any) -> None:
    """Writes a formula as MathML, which browsers draw themselves: a page loads nothing from elsewhere."""
    display = "block" if node.tagname == "math_block" else "inline"
    self.body.append(convert(node.astext(), display=display))
    raise SkipNode


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.add_html_math_renderer("mathml", (mathml, None), (mathml, None))
    app.connect("autodoc-process-docstring", markdown_in_docstring, priority=400)  # before napoleon
    app.connect("autodoc-process-docstring", names_of_module)
    app.connect("source-read", contents)
