"""A front of a tiny Qwen3.5 with a scripted worker: it thinks, calls tools, and takes images and videos."""

import io
from base64 import b64encode
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image
from support.running_front import MODEL, RunningFront
from tokenizers import Tokenizer

from mstar.communication.address import FRONT_RANK, peer_name
from mstar.conductor.front_spec import FrontSpec
from mstar.config.schema import ServerConfig
from mstar.model.base import ModelSetup
from mstar.model.loader.checkpoint import resolve_checkpoint
from mstar.model.loader.tokenizer_writing import write_tokenizer
from mstar.model.qwen3_5.random_checkpoint import write_random_checkpoint
from mstar.model.registry import find_card

MAX_SEQ_LEN = 2048


def build_qwen_spec(directory: Path, size: str = "tiny", **changes: Any) -> FrontSpec:
    write_random_checkpoint(size, directory / "checkpoint", seed=0)
    checkpoint = resolve_checkpoint(str(directory / "checkpoint"), cache_dir=directory)
    write_tokenizer(checkpoint, directory / "tokenizer")
    spec = FrontSpec(
        address=peer_name(FRONT_RANK),
        supervisor_address=None,
        card=find_card("qwen3_5"),
        setup=ModelSetup(checkpoint.config(), directory / "tokenizer", MAX_SEQ_LEN),
        served_names=(MODEL,),
        placement={"LLM": 0, "Vision": 0} if size != "tiny-text" else {"LLM": 0},
        server=ServerConfig(),
    )
    return replace(spec, **changes)


def running_qwen(spec: FrontSpec) -> RunningFront:
    assert spec.setup.tokenizer_dir is not None
    tokenizer = Tokenizer.from_file(str(spec.setup.tokenizer_dir / "tokenizer.json"))
    return RunningFront(spec, tokenizer, lambda _: ())


def image_bytes(form: str = "PNG", *, size: tuple[int, int] = (48, 32), mode: str = "RGB") -> bytes:
    """A picture with something in it."""
    picture = Image.radial_gradient("L").resize(size).convert(mode)
    file = io.BytesIO()
    picture.save(file, form)
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{b64encode(data).decode()}"


def image_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}
