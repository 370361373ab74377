"""The project's rules about source text, as functions from a syntax tree to complaints. `test_source_rules.py` runs
them over the package, and over snippets that break each one."""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from support.repository import chains, dotted, imported_names

Complaint = tuple[int, str]
Check = Callable[[ast.Module], Iterator[Complaint]]

UNTYPED_SERIALIZERS = ("pickle", "cloudpickle", "dill", "marshal", "shelve")
DEVICE_MODULES = ("torch.cuda", "torch.cpu", "torch.xpu", "torch.accelerator", "torch.version", "torch.backends")
DEVICE_ORDER_CALLS = ("synchronize", "wait_stream", "record_stream", "wait_event", "record_event")
HOST_READS = ("item", "cpu", "tolist", "numpy")


def _under(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def reads_environment(module: ast.Module) -> Iterator[Complaint]:
    """os.environ, os.getenv and their kin, under any import."""
    names = ("os.environ", "os.environb", "os.getenv", "os.getenvb", "os.putenv", "os.unsetenv")
    for line, name in (*chains(module), *imported_names(module)):
        if _under(name, names):
            yield line, f"{name}: only mstar/envs.py touches the environment"


def imports_untyped_serializer(module: ast.Module) -> Iterator[Complaint]:
    for line, name in imported_names(module):
        if _under(name, UNTYPED_SERIALIZERS):
            yield line, f"{name}: what leaves a process is a typed message"


def touches_the_device(module: ast.Module) -> Iterator[Complaint]:
    """Graph capture, streams, events, synchronization and raw device facts."""
    for line, name in (*chains(module), *imported_names(module)):
        if _under(name, DEVICE_MODULES):
            yield line, f"{name}: the engine captures and orders work; facts come from mstar.platforms"
        elif name.rpartition(".")[2] in DEVICE_ORDER_CALLS:
            yield line, f"{name}: the engine orders work on the device"


def reads_host_values_in_forward(module: ast.Module) -> Iterator[Complaint]:
    """`.item()` and the like anywhere inside a function whose name starts with forward."""
    for function in ast.walk(module):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) or not function.name.startswith("forward"):
            continue
        for node in ast.walk(function):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            to_cpu = node.func.attr == "to" and any(
                isinstance(argument, ast.Constant) and argument.value == "cpu" for argument in node.args
            )
            if node.func.attr in HOST_READS or to_cpu:
                yield node.lineno, f"{dotted(node.func)}() in {function.name}: a forward never waits for the device"


def asks_torch_about_the_platform(module: ast.Module) -> Iterator[Complaint]:
    names = ("torch.version", "torch.cuda.get_device_capability", "torch.cuda.get_device_properties")
    for line, name in (*chains(module), *imported_names(module)):
        if _under(name, names):
            yield line, f"{name}: ask mstar.platforms.current_platform"


def sleeps(module: ast.Module) -> Iterator[Complaint]:
    """A loop blocks on its poller; a pause is a poll."""
    for line, name in (*chains(module), *imported_names(module)):
        if name in ("time.sleep", "asyncio.sleep"):
            yield line, f"{name}: block on the poller, with a timeout if something is due"


def catches_everything(module: ast.Module) -> Iterator[Complaint]:
    """Handlers of every exception that may swallow it; one that ends by raising again only cleans up."""
    for node in ast.walk(module):
        if not isinstance(node, ast.ExceptHandler):
            continue
        last = node.body[-1]
        if isinstance(last, ast.Raise) and last.exc is None:
            continue
        caught = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        names = ["" if kind is None else dotted(kind).rpartition(".")[2] for kind in caught]
        if any(name in ("", "Exception", "BaseException") for name in names):
            yield node.lineno, "catches everything: only process entries and per-message guards may"


def uses_reference_model_class(module: ast.Module) -> Iterator[Complaint]:
    """transformers gives tokenizers, processors and configs; its model classes are references for tests."""
    pattern = re.compile(r"(^AutoModel|Model$|For[A-Z]\w+$|^modeling_)")
    for line, name in (*imported_names(module), *chains(module)):
        if _under(name, ("transformers",)) and any(pattern.search(part) for part in name.split(".")[1:]):
            yield line, f"{name}: models run on mstar.layers"


@dataclass(frozen=True)
class Rule:
    """A check, the files it covers (prefixes of paths below the root) and those it leaves out."""

    check: Check
    covers: tuple[str, ...]
    leaves_out: tuple[str, ...] = ()

    def applies(self, path: str) -> bool:
        return path.startswith(self.covers) and not path.startswith(self.leaves_out or ("\0",))


RULES: dict[str, Rule] = {
    "environment": Rule(reads_environment, ("mstar/",), ("mstar/envs.py",)),
    "serializers": Rule(imports_untyped_serializer, ("mstar/",)),
    "platform": Rule(asks_torch_about_the_platform, ("mstar/",), ("mstar/platforms/",)),
    "device": Rule(touches_the_device, ("mstar/model/", "mstar/layers/")),
    "host_reads": Rule(reads_host_values_in_forward, ("mstar/model/", "mstar/layers/")),
    "sleep": Rule(
        sleeps,
        ("mstar/worker/", "mstar/engine/", "mstar/conductor/", "mstar/communication/", "mstar/graph/",
         "mstar/streaming/", "mstar/api_server/", "mstar/launch/"),
    ),
    "reference_models": Rule(uses_reference_model_class, ("mstar/",)),
}  # fmt: skip
