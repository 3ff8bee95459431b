"""The generated parts of docs/contributing.md, the contents, names and keys in pages, and the pins of what builds the site."""

import ast
import importlib
import importlib.util
import inspect
import json
import re
import tomllib
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

import functional_ds as fds
from functional_ds import checkpointing, comm, compiling, fitting, memory, moe, seq, testing
from functional_ds import pipelining as pp
from functional_ds import transforms as T
from functional_ds.deepspeed.config.keys.config_key import Fate
from functional_ds.deepspeed.config.keys.config_table import KEYS

TOP = Path(__file__).parents[1]
DOCS = TOP / "docs"
INDEX = (DOCS / "index.md").read_text(encoding="utf-8")
MAP = (DOCS / "contributing.md").read_text(encoding="utf-8")
_SPEC = importlib.util.spec_from_file_location("docs_tree", DOCS / "tree.py")
assert _SPEC is not None
assert _SPEC.loader is not None
tree = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(tree)

NUMBER = re.compile(r"(?<=[ |])\d[\d,]*(?=[ |])")


def _numbers(text: str) -> list[int]:
    return [int(found.replace(",", "")) for found in NUMBER.findall(text)]


def _words(text: str) -> list[str]:
    """What is left without numbers and without the padding that their width brings."""
    return NUMBER.sub("#", text).split()


@pytest.mark.parametrize("block", ["tree", "reading", "satellites"])
def test_map_is_what_tree_prints(block: str) -> None:
    """contributing.md's blocks are what docs/tree.py prints, up to a drift of the numbers by a tenth, or by ten lines."""
    there = MAP.split(f"<!-- {block} -->\n")[1].split(f"<!-- /{block} -->")[0]
    printed = tree.BLOCKS[block]()
    assert _words(there) == _words(printed), "run `python docs/tree.py --write`"
    drifted = [
        (old, new) for old, new in zip(_numbers(there), _numbers(printed), strict=True) if abs(old - new) > max(10, new // 10)
    ]
    assert not drifted, f"(contributing.md, now): {drifted}; run `python docs/tree.py --write`"


def test_code_lines_are_counted(tmp_path: Path) -> None:
    """Blank lines, comments and docstrings are no code; other strings are."""
    source = '"""Doc."""\n\n# no\nx = """a\n\nb"""\n\n\ndef f():\n    """One.\n\n    Two.\n    """\n'
    source += "    return (  # why\n        1\n    )\n"
    (tmp_path / "a.py").write_text(source, encoding="utf-8")
    assert tree.lines(tmp_path / "a.py") == (3 + 1 + 3, 1 + 3)


def test_every_file_says_what_it_holds() -> None:
    """The first line of each module's docstring: `docs/tree.py FOLDER` lists them."""
    lines = "".join(tree.listed(TOP / layer) for layer in tree.LAYERS).splitlines()
    paths = [path for layer in tree.LAYERS for path in (TOP / layer).rglob("*.py") if path.name != "__init__.py"]
    assert sorted(lines[::2]) == sorted(path.relative_to(TOP).as_posix() for path in paths)
    assert all(line.strip() for line in lines)


def test_every_page_is_in_the_contents() -> None:
    """index.md's tables link each page once: docs/conf.py makes the site's table of contents of these rows."""
    rows = re.findall(r"^\| \[([\w-]+\.md)\]\(\1\) \|", INDEX, re.MULTILINE)
    assert sorted(rows) == sorted(path.name for path in DOCS.glob("*.md") if path.name != "index.md")


def test_the_site_is_built_with_pinned_versions() -> None:
    """constraints.txt pins what the extra `docs` names."""
    extras = tomllib.loads((TOP / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    pinned = set(re.findall(r"^([\w-]+)==", (TOP / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
    assert {re.split("[<>=]", name)[0] for name in extras["docs"]} <= pinned


# -- sentences that code can check ---------------------------------------------------------------------------------------

README = TOP / "README.md"
PAGES = [README, *sorted(DOCS.glob("*.md"))]
MODULES: dict[str, Any] = {
    "checkpointing": checkpointing,
    "compiling": compiling,
    "memory": memory,
    "moe": moe,
    "seq": seq,
    "testing": testing,
}
NAMESPACES: dict[str, Any] = {"fds": fds, "comm": comm, "T": T, "pp": pp, "fitting": fitting} | MODULES


def _spans(page: Path) -> list[str]:
    """The code in a page's sentences and tables, without that of blocks."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", prose)


def _lacks(dotted: str) -> bool:
    """Whether a name such as ``fds.memory.predicted`` is neither an attribute nor a field of a class."""
    first, *rest = dotted.split(".")
    value = NAMESPACES[first]
    for name in rest:
        if not hasattr(value, name):
            return name not in getattr(value, "__annotations__", {})
        value = getattr(value, name)
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_in_sentences_exist(page: Path) -> None:
    """What a page's sentences and tables call ``fds.``, ``T.``, ``comm.``, ``memory.`` and so on something is there."""
    theirs = MODULES if page.name.startswith("deepspeed") else {}  # DeepSpeed's modules have such names, too
    pattern = rf"(?<![\w./])((?:{'|'.join(NAMESPACES.keys() - theirs.keys())})(?:\.\w+)+)"
    names = {name for span in _spans(page) for name in re.findall(pattern, span)}
    assert [name for name in sorted(names) if _lacks(name)] == []


def _misfits(span: str) -> list[str]:
    """The keyword arguments in a span such as ``T.zero(3, prefetch=)`` that the function does not take."""
    try:
        tree = ast.parse(re.sub(r"=(?=\s*[,)])", "=0", span), mode="eval")
    except SyntaxError:  # a sketch
        return []
    found = []
    for call in ast.walk(tree):
        dotted = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
        if re.fullmatch(rf"(?:{'|'.join(NAMESPACES)})(?:\.\w+)+", dotted) and not _lacks(dotted):
            function = eval(dotted, NAMESPACES)
            taken = inspect.signature(function).parameters.values()
            if all(each.kind is not each.VAR_KEYWORD for each in taken):
                words = [word.arg for word in call.keywords if word.arg is not None]
                found += [f"{dotted}({word}=)" for word in words if word not in {each.name for each in taken}]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_arguments_in_sentences_exist(page: Path) -> None:
    """The functions that a page's sentences and tables call take the keyword arguments that they give."""
    assert [misfit for span in _spans(page) for misfit in _misfits(span)] == []


def test_an_argument_that_is_gone_is_noticed() -> None:
    assert _misfits("T.zero(3, prefetch=1, prefetched=)") == ["T.zero(prefetched=)"]
    assert _misfits("fds.compose(T.zero(3, hpz=True), T.clip(bound=1.0))") == ["T.clip(bound=)"]


def test_collectives_are_where_the_table_says() -> None:
    """docs/simulator.md's table of calls names functions of ``comm``; those of its submodules by their whole names."""
    table = (DOCS / "simulator.md").read_text(encoding="utf-8").split("| call | on every rank |")[1].split("\n\n")[0]
    names = re.findall(r"`(\w+)\(", table)
    assert len(names) >= 12
    assert [name for name in names if not hasattr(comm, name)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_install_the_commands_that_they_run(page: Path) -> None:
    """A page that names the extras it needs and runs ``functional-ds`` names the extra ``cli``."""
    text = page.read_text(encoding="utf-8")
    extras = {extra for group in re.findall(r"pip install '\.\[([\w,]+)\]'", text) for extra in group.split(",")}
    assert not (extras and re.search(r"^\$ functional-ds ", text, re.MULTILINE)) or "cli" in extras


def _of_the_reference() -> set[int]:
    modules = re.findall(
        r"automodule:: (\S+)", "".join(path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.rst"))
    )
    loaded = map(importlib.import_module, modules)
    return {id(getattr(module, name)) for module in loaded for name in module.__all__ if hasattr(module, name)}


@pytest.mark.parametrize("page", [each for each in PAGES if "internals" not in each.name], ids=lambda page: page.name)
def test_what_pages_import_is_in_the_reference(page: Path) -> None:
    """But for names of DeepSpeed's modules, which docs/deepspeed-config.md lists."""
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    imports = [
        node for block in blocks for node in ast.walk(ast.parse(block)) if isinstance(node, ast.ImportFrom) and not node.level
    ]
    documented = _of_the_reference()
    lacking = [
        f"{node.module}.{each.name}"
        for node in imports
        if re.match(r"functional_ds\.(?!deepspeed)", str(node.module))
        for each in node.names
        if id(getattr(importlib.import_module(str(node.module)), each.name)) not in documented
    ]
    assert lacking == []


def test_the_front_door_groups_its_names() -> None:
    """The docstring of ``fds``, with which its page of the reference begins, has each public name once."""
    grouped = re.findall(r"``(?:functional_ds\.)?(\w+)``", str(fds.__doc__))
    assert sorted(grouped) == sorted([*(set(fds.__all__) - {"__version__"}), "step"])


def test_figures_name_files_that_exist() -> None:
    """docs/figures/make.py draws them from a run; the drawings are kept, and the files may move."""
    drawn = "".join(path.read_text(encoding="utf-8") for path in (DOCS / "figures").glob("*.svg"))
    names = set(re.findall(r">((?:functional_ds|comm|transforms)/[\w/]+\.py)<", drawn))
    assert len(names) > 8
    assert sorted(name for name in names if not (TOP / name).is_file()) == []


def _texts(node: ElementTree.Element, x: float = 0.0, y: float = 0.0) -> Iterator[tuple[str, float, float, float]]:
    """Each text below an element of an SVG file, with its place and its height if that is said."""
    for right, down in re.findall(r"translate\(([-\d.]+)[ ,]+([-\d.]+)\)", node.get("transform", "")):
        x, y = x + float(right), y + float(down)
    if node.tag.endswith("}text"):
        size = re.search(r"font(?:-size)?:[\w ]*?([\d.]+)px", node.get("style", ""))
        place = x + float(node.get("x", 0)), y + float(node.get("y", 0))
        yield "".join(node.itertext()), *place, 0.7 * float(size.group(1)) if size else 0.0
    for child in node:
        yield from _texts(child, x, y)


@pytest.mark.parametrize("path", sorted((DOCS / "figures").glob("*.svg")), ids=lambda path: path.stem)
def test_figures_cut_off_no_words(path: Path) -> None:
    """Each text begins, ends or has its middle inside the picture, and is not cut off at the top."""
    root = ElementTree.parse(path).getroot()
    _, _, wide, high = map(float, root.get("viewBox", "").split())
    texts = list(_texts(root))
    assert texts
    assert [text for text, x, y, height in texts if not (0 <= x <= wide and height <= y <= high)] == []


def test_worked_cases_are_read_as_they_are_printed() -> None:
    """docs/which-strategy.md's differences in percent are those of the times that it prints."""
    page = (DOCS / "which-strategy.md").read_text(encoding="utf-8")
    printed = page.partition("```text\n")[2].partition("```")[0]
    read = page.partition("How to read this:")[2].partition("As code,")[0].split("\n- ")
    for case, bullet, choice, other in (
        ("7 B on 8 x h100", "7 B on one node of 80 GB", "ZeRO-1 alone", "ZeRO-3 alone"),
        ("7 B on 8 x a100-40gb", "7 B on one node of 40 GB", "ZeRO-3 and tp", "ZeRO-3 alone"),
        ("13 B on 16 x a100-80gb", "13 B", "ZeRO-1, tp, pp", "ZeRO-3 alone"),
        ("70 B on 64 x h100", "70 B on 64 GPUs", "ZeRO-3 alone", "ZeRO-3 and tp"),
        ("70 B on 64 x h100", "70 B on 64 GPUs", "ZeRO-1, tp, pp", "ZeRO-3 and tp"),
        ("70 B on 128 x h100", "70 B on 128 GPUs", "ZeRO-3 alone", "ZeRO-1, tp, pp"),
    ):
        rows = re.split(r"\n(?=\S)", printed.partition(case)[2])[0]
        seconds = {row[:16].strip(): float(row.split(" s ")[0].split()[-1]) for row in rows.splitlines()[1:] if " s " in row}
        (said,) = [each for each in read if each.startswith(f"**{bullet}")]
        assert f"{100 * abs(seconds[choice] / seconds[other] - 1):.0f} %" in said, (case, choice, other)


def test_masked_batches_move_nothing() -> None:
    """docs/steps.md, docs/troubleshooting.md: where all tokens are masked the loss is NaN, and SGD moves no param."""

    def loss(params: Any, batch: Any) -> Any:
        x, mask = batch
        return fds.Weighted(((x @ params["w"]).square().sum(1) * mask).sum(), mask.sum())

    for optimizer, expected in ((fds.sgd(0.1), 1.0), (fds.adamw(0.1, weight_decay=0.5), 0.95)):
        step = fds.train_step(loss, optimizer)
        state, metrics = step(step.init({"w": torch.ones(3, 2)}), (torch.ones(4, 3), torch.zeros(4)))
        assert metrics["loss"].isnan()
        torch.testing.assert_close(step.params(state)["w"], torch.full((3, 2), expected))


def test_the_order_of_the_cheat_sheet_composes() -> None:
    """docs/cheat-sheet.md names an order of transforms that no transform refuses."""
    sheet = (DOCS / "cheat-sheet.md").read_text(encoding="utf-8")
    (row,) = [line for line in sheet.splitlines() if line.startswith("| order in `compose` |")]
    params = {"w": torch.ones(2)}
    stages = pp.stages(
        [pp.Piece(lambda w, x: x * w, uses="w")],
        params,
        inputs=lambda batch: batch,
        loss=lambda y, _: fds.Weighted(y.sum(), len(y)),
    )

    def program() -> str:
        mesh = comm.mesh(dp=1, pp=1, sp=1, ep=1, tp=1)
        made: dict[str, fds.Transform] = {
            "ema": T.ema(0.5),
            "mixed_precision": T.mixed_precision("bf16"),
            "offload": T.offload("cpu"),
            "zero": T.zero(1, mesh["dp"]),
            "pipeline": T.pipeline(pp.one_f_one_b(1, 1), stages, mesh["pp"]),
            "sequence": T.sequence(mesh["sp"]),
            "experts": T.experts("experts", mesh["ep"]),
            "tensor_parallel": T.tensor_parallel({}, mesh["tp"]),
            "accumulate": T.accumulate(2),
            "remat": T.remat(),
            "clip": T.clip(1.0),
            "schedule": T.schedule(T.warmup_cosine(2, 10)),
        }
        names = re.findall(r"`(\w+)`", row)[1:]
        assert sorted(names) == sorted(made)
        return str(fds.compose(*(made[name] for name in names))(fds.train_step(stages, fds.sgd(0.1))))

    (said,) = comm.simulate(program, world_size=1)
    assert said.count("->") == 12


def test_a_name_that_is_gone_is_noticed() -> None:
    assert _lacks("fds.route")
    assert _lacks("fds.memory.Tracked")
    assert not _lacks("fds.moe.route")


def test_keys_that_the_engine_reads_have_a_meaning() -> None:
    """No key that the code of the DeepSpeed engine asks its config for is called ignored."""
    fates = {key.path: key.fate for key in KEYS.values()}
    assert len(fates) > 250
    files = [path for path in (TOP / "functional_ds/deepspeed/engine").rglob("*.py") if path.name != "config_questions.py"]
    sources = [path.read_text(encoding="utf-8") for path in files]  # but for those that repeat to a script what its config says
    read = {key for source in sources for key in re.findall(r'\bvalue\("([\w.]+)"\)', source)}
    assert {"steps_per_print", "flops_profiler.output_file"} <= read
    assert [key for key in sorted(read) if fates.get(key) is Fate.IGNORED] == []


def _script(name: str) -> Any:
    """A program of .ci as a module."""
    loader = SourceFileLoader(name, str(TOP / ".ci" / name))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def test_words_to_avoid_are_noticed(tmp_path: Path) -> None:
    """In sentences, docstrings, errors and helps, and not in other code; pages for contributors may number laws."""
    words = _script("words")
    words.TOP = tmp_path
    for name in ("docs/page.md", "docs/laws.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("Nobody waits (law 3).\n```python\nnobody\n```\n`whatever`\n", encoding="utf-8")
    function = 'def f(g):\n    """Waits for ever."""\n    raise TypeError(f"{g} is no group; there is no other")\n'
    (tmp_path / "a.py").write_text(function + '    return "nobody", option(help="beside it")\n', encoding="utf-8")
    (tmp_path / "Makefile").write_text("# nobody\ntest: x  ## try whatever\n", encoding="utf-8")
    names = ("docs/page.md", "docs/laws.md", "a.py", "Makefile")
    assert {name: [line.split("'")[1] for line in words.found(tmp_path / name)] for name in names} == {
        "docs/page.md": ["Nobody", "law 3"],
        "docs/laws.md": ["Nobody"],
        "a.py": ["for ever", "is no ", "beside"],
        "Makefile": ["whatever"],
    }


def test_what_ran_on_gpus_is_said() -> None:
    """The README says that nothing has run on a GPU, as long as no result of a benchmark names one."""
    results = [json.loads(path.read_text(encoding="utf-8")) for path in (TOP / "benchmarks/results").glob("*.json")]
    assert len(results) > 10
    gpus = [result for result in results if re.search(r"cuda|nvidia", json.dumps(result.get("machine", {})), re.IGNORECASE)]
    assert not gpus, "a benchmark has run on a GPU: say so in README.md, and here"
    assert "Nothing has been run on a GPU" in " ".join(README.read_text(encoding="utf-8").split())


def test_the_tables_of_hosts_are_their_file() -> None:
    """What was measured; predicted over measured time, and how many of those are within 15 %."""
    tables = _script("../benchmarks/hosts_tables.py")
    known = json.loads((TOP / "benchmarks/results/hosts.json").read_text(encoding="utf-8"))
    page = (TOP / "docs/benchmarks.md").read_text(encoding="utf-8").partition("## Two hosts")[2].partition("\n## ")[0]
    both = [tables.measured(known), tables.predicted(known)]
    assert all(f"| {name} | {' | '.join(row)} |" in page for cells in both for name, row in cells.items())
    assert sum(line.startswith("| ") for line in page.splitlines()) == sum(map(len, both)) + len(both)  # the heads
    near = [[abs(ratio - 1) <= 0.15 for ratio in tables.ratios(known, key).values()] for key in ("plan_ms", "graph_ms")]
    assert f"{sum(near[0])} and {sum(near[1])} of {len(near[0])} are within 15 %" in " ".join(page.split())


def test_tables_of_several_runs() -> None:
    """A run that is added brings its rates and contenders; what the first one has stays."""
    tables = _script("../benchmarks/hosts_tables.py")
    cell = {"ranks_per_host": 1, "sent_mb": 1.0, "median_ms": 10.0}
    first = {**cell, "contender": "ddp", "rate": "1gbit", "plan_ms": 9.0, "graph_ms": 8.0}
    more = [{**first, "median_ms": 20.0}, *({**cell, "contender": name, "rate": "10gbit"} for name in ("ddp", "DiLoCo 10"))]
    known = {"rows": [first], "added": [{"rows": more}]}
    nothing = ["-", "-", "-"]
    assert tables.measured(known) == {"ddp": ["1.0", "10", "10", *nothing], "DiLoCo 10": ["1.0", "10", "-", *nothing]}
    assert tables.predicted(known) == {"ddp": ["0.90", "0.80", "-", "-"]}, "of rates with predictions"


def test_the_tables_of_peers_are_their_files() -> None:
    """Times and memory in docs/benchmarks.md's first table, ratios in its second."""
    page = (TOP / "docs/benchmarks.md").read_text(encoding="utf-8").partition("## A training step")[2].partition("\n## ")[0]
    expected: dict[tuple[str, ...], list[str]] = {}
    runs = ("2-ranks-fp32", "4-ranks-fp32", "2-ranks-bf16", "2-ranks-12x768")
    for place, run in enumerate(runs):
        text = (TOP / f"benchmarks/results/peers-{run}.json").read_text(encoding="utf-8")
        for name, each in json.loads(text)["contenders"].items():
            cells = expected.setdefault((name,), ["-"] * 2 * len(runs))
            cells[2 * place : 2 * place + 2] = f"{each['median_ms']:.0f}", f"{each['peak_mb']:.0f}"
            for rival, ratio in {"floor": each["floor_ratio"], **each["rival_ratios"]}.items():
                if each["ours"] and name != rival and ratio is not None:
                    expected.setdefault((name, rival), ["-"] * len(runs))[place] = f"{ratio:.2f}"
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.count("|") > 4]
    said = {tuple(row[: 2 - len(row) % 2]): row[2 - len(row) % 2 :] for row in rows}  # names, then cells
    assert {key: cells for key, cells in said.items() if key in expected} == expected


def test_the_table_of_a_process_is_its_file() -> None:
    """Of three stages and two sizes; the parts are all of the process, and the prediction is within a per cent."""
    page = (TOP / "docs/profile.md").read_text(encoding="utf-8").partition("### Where a process")[2].partition("\n### ")[0]
    head, _, *found = [line.strip("| ").split(" | ") for line in page.splitlines() if line.count("|") > 9]
    rows = json.loads((TOP / "benchmarks/results/peak.json").read_text(encoding="utf-8"))["rows"]
    assert [(row["size"], row["stage"]) for row in rows] == [*product(("8x384", "12x768"), (0, 1, 3))]
    expected = []
    for row in rows:
        for which in ("measured", "predicted"):
            parts = row[which] | {"alive": sum(row[which][kind] for kind in head[4:-3])}
            numbers = [f"{parts[part] / 1e6:.1f}" if part in parts else "-" for part in head[3:]]
            expected.append([row["size"].replace("x", " × "), str(row["stage"]), which, *numbers])
            assert parts["alive"] == pytest.approx(sum(row["predicted"].values()), rel=0.01)
        assert row["measured"]["kept"] >= 0
        assert sum(row["measured"].values()) == 2 * row["measured"]["peak"]
    assert found == expected


def test_the_line_of_badges_is_the_metadata() -> None:
    """In place of pictures, which a service would draw: no service runs the tests."""
    project = tomllib.loads((TOP / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    python, (torch_,) = project["requires-python"], [need for need in project["dependencies"] if need.startswith("torch>")]
    status, platform = (
        next(each for each in project["classifiers"] if each.startswith(kind)) for kind in ("Development Status", "Operating")
    )
    expected = [f"Python ≥ {python[2:]}", f"PyTorch ≥ {torch_[7:]}", platform.rpartition(" :: ")[2], project["license"]]
    expected.append(status.rpartition(" - ")[2].lower())
    assert README.read_text(encoding="utf-8").splitlines()[2].split(" · ") == expected


def test_the_readme_installs_what_type_checkers_see() -> None:
    """A plain editable install hides the package from type checkers (docs/troubleshooting.md); all extras are listed."""
    assert "pip install ." in README.read_text(encoding="utf-8")
    assert "pip install -e" not in README.read_text(encoding="utf-8")
    extras = tomllib.loads((TOP / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    listed = README.read_text(encoding="utf-8").partition("Extras: ")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", listed)) == extras.keys()


def _sections() -> list[tuple[str, str]]:
    """CHANGELOG.md's versions with their text, newest first."""
    parts = re.split(r"^## \[(.+?)\].*$", (TOP / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return list(zip(parts[::2], parts[1::2], strict=True))


def test_versions_are_those_of_the_changelog() -> None:
    """The citation has the newest release; with unreleased changes the package's version is a development version after it."""
    (unreleased, text), (newest, _) = _sections()[:2]
    version = tomllib.loads((TOP / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert unreleased == "Unreleased"
    assert f"\nversion: {newest}\n" in (TOP / "CITATION.cff").read_text(encoding="utf-8")
    assert (version == newest) is (not text.strip())
    assert not text.strip() or re.fullmatch(r"\d+\.\d+\.\d+\.dev0", version)


def test_the_changelog_has_the_kinds_of_its_format() -> None:
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    found = re.findall(r"^### (.*)$", _sections()[0][1], re.MULTILINE)
    assert len(found) == len(set(found))
    assert set(found) <= kinds


def test_a_published_readme_has_whole_links() -> None:
    """`make release URL=...` leaves no relative link in the README, and adds the URLs to the metadata."""
    publish = _script("publish")
    url = "https://example.org/a/b"
    readme = publish.absolute(README.read_text(encoding="utf-8"), url, "1.0")
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", readme)
    assert len(links) > 20
    assert [link for _, link in links if not link.startswith(("https:", "#"))] == []
    assert ("!", f"{url}/raw/v1.0/docs/figures/zero-life.svg") in links
    metadata = tomllib.loads(publish.with_urls((TOP / "pyproject.toml").read_text(encoding="utf-8"), url, "1.0"))
    assert metadata["project"]["urls"]["Changelog"] == f"{url}/blob/v1.0/CHANGELOG.md"
    assert "functional-ds" in metadata["project"]["scripts"]
