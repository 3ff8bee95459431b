"""Twenty-four published methods: where each is in the examples and pages, and what ``holds`` is given of it."""

import ast
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import attrs

__all__ = ["PUBLISHED", "Published"]

TOP = Path(__file__).parents[2]
_EACH = "0 to 3 in each worker"


@cache
def sources(file: str) -> dict[str, str]:
    """The functions and classes of a program of the gallery, or of a page's blocks."""
    source = (TOP / ("docs" if file.endswith(".md") else "examples/research") / file).read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", source, re.MULTILINE | re.DOTALL) if file.endswith(".md") else [source]
    found: dict[str, str] = {}
    for block in blocks:
        lines = block.splitlines()
        for node in ast.parse(block).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                found[node.name] = "\n".join(lines[start - 1 : node.end_lineno])
    return found


@attrs.frozen
class Published:
    """A published method.

    Attributes:
        name: what it is called, with the papers.
        code: its functions, as "file: names"; of the gallery or of a page.
        uses: what of the library it is made of.
        tested: its names in ``METHODS``.
        stages: in which stages of ZeRO it is right.
        instead: what checks it, if ``holds`` cannot.
    """

    name: str
    code: Sequence[str]
    uses: Sequence[str]
    tested: Sequence[str] = ()
    stages: str = "0 to 3"
    instead: str = ""

    def places(self) -> list[tuple[str, list[str]]]:
        """Files, and the names of functions and classes in them."""
        return [(file, names.split()) for file, _, names in (place.partition(": ") for place in self.code)]

    @property
    def lines(self) -> int:
        """The lines of its functions that are not empty."""
        return sum(
            bool(line.strip()) for file, names in self.places() for name in names for line in sources(file)[name].splitlines()
        )


PUBLISHED = (
    Published(
        "DiLoCo, streaming DiLoCo (Douillard et al. 2023, 2025)",
        ["diloco.py: diloco", "streaming_diloco.py: streaming"],
        ["T.every", "T.apart"],
        ["research diloco", "research streaming"],
        _EACH,
    ),
    Published(
        "local and post-local SGD (Stich 2019, Lin et al. 2020)",
        ["gossip.py: complete gossip"],
        ["T.every", "T.apart"],
        ["research post-local"],
        _EACH,
    ),
    Published(
        "PowerSGD with error feedback (Vogels et al. 2019)",
        ["phases.md: power_sgd"],
        ["T.Combine"],
        ["docs power_sgd", "power_sgd 3"],
    ),
    Published(
        "signSGD with majority vote (Bernstein et al. 2018)",
        ["phases.md: majority"],
        ["T.replicated", "T.Combine"],
        ["majority", "majority 3"],
    ),
    Published(
        "top-k with error feedback between replicas (Stich et al. 2018)",
        ["compression.py: top_k_between"],
        ["step.reduce", "fds.wrap"],
        ["research top_k"],
        "0; 1 to 3 by shard",
    ),
    Published(
        "SAM and ASAM (Foret et al. 2021, Kwon et al. 2021)",
        ["sharpness.py: sam"],
        ["step.reduce", "step.with_trained"],
        ["research sam", "research asam"],
    ),
    Published("GaLore with Adam (Zhao et al. 2024)", ["optimizers.md: galore"], ["fds.per_matrix"], ["galore"]),
    Published("SOAP (Vyas et al. 2024)", ["soap.py: soap"], ["fds.per_matrix"], ["research soap"]),
    Published("Sophia-H (Liu et al. 2023)", ["sophia.py: signs sophia"], ["fds.hvp", "step.placed"], ["research sophia"]),
    Published(
        "Lanczos spectrum (Ghorbani et al. 2019)",
        ["spectrum.py: lanczos", "shared.py: hessian_times"],
        ["fds.hvp", "step.placed"],
        instead="the whole Hessian",
    ),
    Published(
        "gradient noise scale that chooses the batch (McCandlish et al. 2018)",
        ["noise_scale.py: noise_scale"],
        ["step.reduce", "step.norm"],
        ["research noise_scale"],
    ),
    Published(
        "DP-SGD by `vmap` (Abadi et al. 2016)",
        ["dp_sgd.py: normal dp_sgd"],
        ["step.placed", "fds.Key"],
        ["research dp_sgd"],
    ),
    Published(
        "distillation from a mean teacher in shards (Tarvainen and Valpola 2017)",
        ["teacher.py: Taught distilled"],
        ["step.run", "step.with_trained"],
        ["research distilled"],
    ),
    Published("stale gradients (Langford et al. 2009)", ["stale.py: stale"], ["fds.innermost"], ["research stale"]),
    Published(
        "LARS, rates by layer (You et al. 2017)",
        ["optimizers.md: lars layerwise"],
        ["fds.per_leaf", "fds.param_groups"],
        ["lars", "layerwise"],
    ),
    Published(
        "an ensemble by `vmap`, clipped by member (Lakshminarayanan et al. 2017)",
        ["ensemble.py: of_members clip_members"],
        ["step.leaf_map", "step.norm"],
        ["research ensemble"],
    ),
    Published(
        "hypergradients (Maclaurin et al. 2015)",
        ["hypergradient.py: after"],
        ["fds.differentiable"],
        instead="finite differences",
    ),
    Published(
        "gossip over a random matching, a ring (Boyd et al. 2006, Lian et al. 2017)",
        ["gossip.py: ring matching gossip"],
        ["T.every", "comm.permute"],
        ["research matching", "research gossip"],
        _EACH,
    ),
    Published(
        "ZeRO-1 with whole leaves (Rajbhandari et al. 2020)",
        ["own_zero.py: Owned owned_in_turn"],
        ["fds.LeafMap", "comm.broadcast"],
        ["research own_zero", "round_robin"],
        "itself",
    ),
    Published(
        "a pipeline schedule (Zhuang et al. 2022)",
        ["eager_pipeline.py: eager_1f1b"],
        ["pp.Schedule"],
        stages="along another axis",
        instead="`pp.validate`",
    ),
    Published(
        "swing and 2D-torus all-reduces (De Sensi et al. 2024, Mikami et al. 2018)",
        ["swing.py: distance peer blocks swing torus"],
        ["comm.permute", "comm.reduce_scatter"],
        stages="0",
        instead="`collective_holds`",
    ),
    Published(
        "a pass that fuses all-reduces (Li et al. 2020)",
        ["fused_reductions.py: fused"],
        ["fds.compiling.merge"],
        stages="0",
        instead="`check_pass`",
    ),
    Published(
        "muP (Yang et al. 2022)",
        ["mup.py: start adam"],
        ["fds.param_groups"],
        ["research mup"],
    ),
    Published(
        "sparsity of micro-batches in a slot (Aji and Heafield 2017)",
        ["sparsity.py: sparsity"],
        ["step.reduce", "step.per_leaf"],
        ["research sparsity"],
    ),
)
