"""Rules that the text of the package keeps, and proof that each rule can be broken."""

import ast
from pathlib import Path

import pytest
from support.repository import ROOT, package_files, relative, tree
from support.source_rules import RULES, catches_everything

# Who may catch everything, and why. An entry without such a handler is stale and fails too.
MAY_CATCH_EVERYTHING: dict[str, str] = {
    "mstar/conductor/conductor.py": "per-message guard: fails the request that the message named",
    "mstar/conductor/handle.py": "entry of a request: whatever goes wrong starting it is that request's 500",
    "mstar/conductor/preprocess.py": "per-message guard: a job fails its own request, the pool goes on",
    "mstar/conductor/preprocess_worker.py": "per-message guard: a model's prompt hook fails its own request",
    "mstar/engine/cuda_executor.py": "what a step's work raises belongs to the step, whose owner waits for the event",
    "mstar/engine/node_hooks.py": "guards around a model's hooks: a row's hook fails its row, a batch's its step",
    "mstar/engine/resource_stages.py": "guards around a step's resources: what they raise fails the step's rows",
    "mstar/launch/child.py": "entry of every child process: logs why it ends",
    "mstar/worker/grammars/builds.py": "per-job guard: a grammar that cannot be compiled fails those who asked for it",
    "mstar/platforms/executor.py": "what a step's work raises belongs to the step's owner, on another thread",
    "mstar/worker/inbox.py": "per-message guard: fails the request that the message named, keeps the rest of the queue",
}

LONGEST_FILE = 400
BANNED_NAMES = {"utils", "util", "helpers", "helper", "common", "misc", "manager", "managers", "base_utils", "types2"}

BREAKS: dict[str, list[str]] = {
    "environment": ["import os\nos.environ['X']", "from os import environ", "import os\nos.getenv('X')"],
    "serializers": ["import pickle", "from pickle import loads", "import cloudpickle as p"],
    "platform": ["import torch\ntorch.version.hip", "import torch\ntorch.cuda.get_device_capability()"],
    "device": [
        "import torch\ng = torch.cuda.CUDAGraph()",
        "import torch\nwith torch.cuda.stream(s): pass",
        "from torch.cuda import Event",
        "def forward(self, x, stream):\n    stream.synchronize()",
        "x.record_stream(s)",
    ],
    "host_reads": [
        "class A:\n    def forward(self, x): return x.sum().item()",
        "class A:\n    def forward_batched(self, x): return x.tolist()",
        "class A:\n    def forward(self, x): return x.to('cpu')",
        "def forward_mlp(x): return x.cpu()",
    ],
    "sleep": ["import time\ntime.sleep(0.001)", "from time import sleep", "import asyncio\nawait asyncio.sleep(1)"],
    "reference_models": [
        "from transformers import LlamaForCausalLM",
        "import transformers\ntransformers.AutoModel.from_pretrained('x')",
        "from transformers.models.llama.modeling_llama import LlamaRMSNorm",
    ],
}
KEEPS: dict[str, str] = {
    "environment": "import os\nos.path.join('a', 'b')\nos.sched_getaffinity(0)",
    "serializers": "import msgspec\nfrom json import loads",
    "platform": "from mstar.platforms import current_platform\ncurrent_platform.is_rocm()",
    "device": "import torch\nx = torch.empty(3, device='cuda')\nx.cpu()",
    "host_reads": "def check_stop(rows, host_rows): return host_rows.tolist()\ndef forward(x): return x.to(x.dtype)",
    "sleep": "import time\ntime.monotonic()",
    "reference_models": "from transformers import AutoTokenizer, AutoConfig, LlamaConfig, PreTrainedTokenizerFast",
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_package_keeps_rule(name: str):
    rule = RULES[name]
    complaints = [
        f"{relative(path)}:{line} {text}"
        for path in package_files()
        if rule.applies(relative(path))
        for line, text in rule.check(tree(path))
    ]
    assert complaints == []


@pytest.mark.parametrize(("name", "source"), [(name, source) for name, sources in BREAKS.items() for source in sources])
def test_rule_sees_a_break(name: str, source: str):
    assert list(RULES[name].check(ast.parse(source))), source


@pytest.mark.parametrize("name", KEEPS)
def test_rule_allows_its_legal_neighbour(name: str):
    assert list(RULES[name].check(ast.parse(KEEPS[name]))) == []


def test_every_rule_has_a_break_and_a_neighbour():
    assert BREAKS.keys() == KEEPS.keys() == RULES.keys()


def test_only_listed_files_catch_everything():
    catching = {relative(path) for path in package_files() if list(catches_everything(tree(path)))}
    assert sorted(catching - MAY_CATCH_EVERYTHING.keys()) == [], "narrow the handler, or list the file with its reason"
    assert sorted(MAY_CATCH_EVERYTHING.keys() - catching) == [], "stale entries"


@pytest.mark.parametrize("handler", ["except Exception: pass", "except: pass", "except (OSError, BaseException): pass"])
def test_catching_everything_is_seen(handler: str):
    assert list(catches_everything(ast.parse(f"try:\n    f()\n{handler}")))


@pytest.mark.parametrize("handler", ["except (OSError, ValueError): pass", "except BaseException:\n    g()\n    raise"])
def test_a_narrow_handler_or_a_clean_up_is_not_catching_everything(handler: str):
    assert list(catches_everything(ast.parse(f"try:\n    f()\n{handler}"))) == []


def _is_banned(path: Path) -> bool:
    names = [part.removesuffix(".py") for part in path.relative_to(ROOT).parts]
    return any(name in BANNED_NAMES or name.endswith(("_v2", "_utils", "_helpers", "_misc")) for name in names)


def test_no_file_or_package_has_an_empty_name():
    sources = [path for folder in ("mstar", "benchmark", "test") for path in (ROOT / folder).rglob("*.py")]
    assert [relative(path) for path in sources if _is_banned(path)] == [], "name it after what it owns"
    assert _is_banned(ROOT / "mstar" / "engine" / "utils.py")
    assert _is_banned(ROOT / "mstar" / "common" / "queue.py")


def test_files_stay_short():
    long = {relative(path): n for path in package_files() if (n := len(path.read_text().splitlines())) > LONGEST_FILE}
    assert long == {}, "does each still own one thing?"
