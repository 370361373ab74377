"""The tiny composite model's nodes on the engine's contract, with layers and resources. Workers only."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from support.composite.declarations import CODEC, CODES, ENCODER, FLOW, FRAME, LLM, MEDIA_TOKEN
from torch import Tensor, nn

from mstar.engine.chunking import ChunkingPolicy
from mstar.engine.cuda_graph_config import BatchedCudaGraphConfig, CudaGraphConfig, StaticInput
from mstar.engine.step import AttentionStep, KVStep, PositionStep, Rows, SamplerStep, SubmoduleStep
from mstar.engine.submodule import (
    LIVE_TOKEN,
    EngineInputs,
    NodeBatch,
    NodeOutputs,
    NodeSubmodule,
    RowColumns,
    StopDecision,
)
from mstar.layers.attention import SelfAttention
from mstar.layers.embedding import OutputHead, TokenEmbedding
from mstar.layers.linear import Linear, pack_weights
from mstar.layers.mlp import GatedMLP
from mstar.layers.norm import RMSNorm
from mstar.layers.sampling import Sampler
from mstar.model.loader.load_rules import LoadRules, RenameRule, StackRule
from mstar.model.loader.module_loading import load_weights
from mstar.model.loader.weights import iter_weights
from mstar.model.submodule_context import SubmoduleContext

Config = Mapping[str, int]


def _rows_of(inputs: EngineInputs, name: str) -> Sequence[Tensor]:
    """An input as one tensor per row, whether the engine could stack it or not."""
    return inputs.ragged[name] if name in inputs.ragged else inputs.tensors[name].unbind(0)


def _no_tokens(rows: RowColumns) -> NodeBatch:
    return NodeBatch(np.zeros(len(rows.handles), np.int32))


class Encoder(NodeSubmodule):
    """`media` → `features`. Rows of one shape share products; others run one by one."""

    def __init__(self, c: Config, dtype: torch.dtype) -> None:
        super().__init__()
        self.patch = Linear(2 * c["media_width"], c["width"], bias=True, dtype=dtype, device="meta")
        self.mix = Linear(c["width"], c["width"], dtype=dtype, device="meta")

    def forward_batched(self, graph_walk: str, inputs: EngineInputs) -> NodeOutputs:
        if "media" in inputs.tensors:
            return {"features": self.encode(inputs.tensors["media"])}
        return {"features": [self.encode(media[None])[0] for media in inputs.ragged["media"]]}

    def encode(self, media: Tensor) -> Tensor:
        """`[rows, 2 n, media_width]` → `[rows, n, width]`."""
        patches = torch.tanh(self.patch(media.reshape(media.shape[0], media.shape[1] // 2, -1)))
        return patches + torch.tanh(self.mix(patches.mean(1)))[:, None]


class DecoderLayer(nn.Module):
    def __init__(self, c: Config, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(c["width"], 1e-5, dtype=dtype, device="meta")
        self.self_attn = SelfAttention(
            index,
            hidden_size=c["width"],
            num_heads=c["num_heads"],
            num_kv_heads=c["num_kv_heads"],
            head_dim=c["head_dim"],
            bias=False,
            attn_key="attn",
            pos_key="rope",
            dtype=dtype,
            device="meta",
        )
        self.post_attention_layernorm = RMSNorm(c["width"], 1e-5, dtype=dtype, device="meta")
        self.mlp = GatedMLP(c["width"], c["mlp_width"], dtype=dtype, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class LanguageModel(NodeSubmodule):
    """Prefill: features and prompt → first token, hidden state, first frame. Speak: the last token and frame → the next
    token and hidden state. Token column `feature`: which of the row's features stands in the token's place (-1: none),
    so that a chunk of a prompt can begin anywhere."""

    host_signals = frozenset({"token"})
    token_columns = ("feature",)

    def __init__(self, c: Config, dtype: torch.dtype) -> None:
        super().__init__()
        width, num_codes, code_vocab = c["width"], c["num_codes"], c["code_vocab"]
        self.num_codes = num_codes
        self.embed_tokens = TokenEmbedding(c["vocab_size"], width, dtype=dtype, device="meta")
        self.code_embeddings = TokenEmbedding(num_codes * code_vocab, width, dtype=dtype, device="meta")
        self.layers = nn.ModuleList(DecoderLayer(c, index, dtype) for index in range(c["num_layers"]))
        self.norm = RMSNorm(width, 1e-5, dtype=dtype, device="meta")
        self.lm_head = OutputHead(width, c["vocab_size"], dtype=dtype, device="meta")
        self.first_frame = OutputHead(width, num_codes * code_vocab, dtype=dtype, device="meta")
        self.sampler = Sampler("sampler")
        self.offsets = code_vocab * torch.arange(num_codes)

    def get_cuda_graph_configs(self) -> Sequence[CudaGraphConfig]:
        return (BatchedCudaGraphConfig("speak", static_inputs=(StaticInput("frame", (self.num_codes,), "int64"),)),)

    def prepare_batch(self, graph_walk: str, rows: RowColumns) -> NodeBatch:
        num_rows = len(rows.handles)
        if graph_walk == "speak":
            return NodeBatch(np.ones(num_rows, np.int32), np.full(num_rows, LIVE_TOKEN, np.int32))
        token_ids: list[np.ndarray] = []
        features: list[np.ndarray] = []
        for prompt, length in zip(rows.prompts, rows.lengths.tolist(), strict=True):
            assert prompt is not None
            is_media = prompt == MEDIA_TOKEN
            token_ids.append(prompt[length:])
            features.append(np.where(is_media, np.cumsum(is_media) - 1, -1)[length:].astype(np.int32))
        spans = rows.num_prompt - rows.lengths
        return NodeBatch(spans, np.concatenate(token_ids), None, {"feature": np.concatenate(features)})

    def get_chunking_policy(self, graph_walk: str) -> ChunkingPolicy | None:
        if graph_walk != "prefill":
            return None
        return ChunkingPolicy(chunked=True, keep_final_chunk_samples=True, reuse_prefix=True)

    def declare_step(self, graph_walk: str, rows: Rows, kept: np.ndarray | None) -> SubmoduleStep:
        return SubmoduleStep(
            {"kv": KVStep(), "attn": AttentionStep(), "rope": PositionStep(), "sampler": SamplerStep(kept=kept)}, rows
        )

    def forward_batched(self, graph_walk: str, inputs: EngineInputs) -> NodeOutputs:
        assert inputs.tokens is not None and inputs.last is not None
        x = self.embed_tokens.embed(inputs.tokens)
        if graph_walk == "prefill":
            x = self._with_features(x, inputs)
        else:
            rows = inputs.tensors["frame"] + self.offsets
            x = x + self.code_embeddings.embed(rows.flatten()).view(*rows.shape, -1).sum(1)
        for layer in self.layers:
            x = layer(x)
        hidden = self.norm(x)[inputs.last]
        token = self.sampler(self.lm_head(hidden))
        if graph_walk != "prefill":
            return {"token": token, "hidden": hidden}
        frame = self.first_frame(hidden).view(hidden.shape[0], self.num_codes, -1).argmax(-1)
        return {"token": token, "hidden": hidden, "frame": frame}

    @staticmethod
    def _with_features(x: Tensor, inputs: EngineInputs) -> Tensor:
        """Features in place of the media tokens of the packed chunks `[tokens, width]`."""
        assert inputs.last is not None
        rows = _rows_of(inputs, "features")
        before = torch.tensor([0, *(features.shape[0] for features in rows[:-1])]).cumsum(0)  # features of earlier rows
        row = torch.searchsorted(inputs.last, torch.arange(x.shape[0]))
        place = inputs.token_columns["feature"]
        return torch.where(place[:, None] < 0, x, torch.cat(tuple(rows))[before[row] + place.clamp(min=0)])

    def check_stop(self, graph_walk: str, rows: RowColumns, host_rows: Mapping[str, np.ndarray]) -> list[StopDecision]:
        """Ends the loop only: the image is still to be painted."""
        if graph_walk != "speak":
            return []
        stopped = np.flatnonzero(self.sampler.stopped(rows.handles, host_rows["token"]))
        return [StopDecision(stopped, "speak", finish=False)] if stopped.size else []


class CodePredictor(NodeSubmodule):
    """One code of a frame per iteration, from the outer hidden state and the code before, which lives on the device."""

    def __init__(self, c: Config, dtype: torch.dtype) -> None:
        super().__init__()
        width, code_vocab = c["width"], c["code_vocab"]
        self.width = width
        self.before_first = code_vocab
        self.last_place = c["num_codes"] - 1
        self.hidden = Linear(width, width, dtype=dtype, device="meta")
        self.embedding = TokenEmbedding(code_vocab + 1, width, dtype=dtype, device="meta")
        self.position = TokenEmbedding(c["num_codes"], width, dtype=dtype, device="meta")
        self.head = OutputHead(width, code_vocab, dtype=dtype, device="meta")
        self.sampler = Sampler("code_sampler")

    def get_cuda_graph_configs(self) -> Sequence[CudaGraphConfig]:
        return (BatchedCudaGraphConfig("speak", static_inputs=(StaticInput("hidden", (self.width,), "float32"),)),)

    def prepare_batch(self, graph_walk: str, rows: RowColumns) -> NodeBatch:
        tokens = np.where(rows.iterations == 0, self.before_first, LIVE_TOKEN).astype(np.int32)
        return NodeBatch(np.ones(len(rows.handles), np.int32), tokens)

    def declare_step(self, graph_walk: str, rows: Rows, kept: np.ndarray | None) -> SubmoduleStep:
        return SubmoduleStep({"code_sampler": SamplerStep(kept=kept)}, rows)

    def forward_batched(self, graph_walk: str, inputs: EngineInputs) -> NodeOutputs:
        assert inputs.tokens is not None
        mixed = self.hidden(inputs.tensors["hidden"]) + self.embedding.embed(inputs.tokens)
        place = inputs.iterations.clamp(0, self.last_place)  # padding rows may hold anything
        state = torch.tanh(mixed + self.position.embed(place))
        code = self.sampler(self.head(state))
        return {"code": code, "entry": code.long()}


class FrameJoiner(NodeSubmodule):
    """The codes of one outer iteration as one frame."""

    def prepare_batch(self, graph_walk: str, rows: RowColumns) -> NodeBatch:
        return _no_tokens(rows)

    def forward_batched(self, graph_walk: str, inputs: EngineInputs) -> NodeOutputs:
        return {"frame": torch.stack(tuple(_rows_of(inputs, "entry")))}


class FlowStep(NodeSubmodule):
    """One Euler step; its time is the loop's iteration."""

    def __init__(self, c: Config, dtype: torch.dtype) -> None:
        super().__init__()
        self.num_steps = c["num_flow_steps"]
        self.condition = Linear(2 * c["width"], c["width"], dtype=dtype, device="meta")
        self.inward = Linear(c["latent_width"], c["width"], dtype=dtype, device="meta")
        self.time = Linear(2, c["width"], dtype=dtype, device="meta")
        self.outward = Linear(c["width"], c["latent_width"], dtype=dtype, device="meta")

    def prepare_batch(self, graph_walk: str, rows: RowColumns) -> NodeBatch:
        return _no_tokens(rows)

    def forward_batched(self, graph_walk: str, inputs: EngineInputs) -> NodeOutputs:
        latent = inputs.tensors["latent"]  # [rows, latent_rows, latent_width]
        mean = torch.stack([features.mean(0) for features in _rows_of(inputs, "features")])
        condition = self.condition(torch.cat([mean, inputs.tensors["hidden"]], -1))
        time = inputs.iterations.to(latent.dtype) / self.num_steps
        clock = self.time(torch.stack([torch.sin(3 * time), torch.cos(3 * time)], -1))
        inner = torch.tanh(self.inward(latent) + (condition + clock)[:, None])
        return {"latent": latent + self.outward(inner) / self.num_steps}


class Codec(NodeSubmodule):
    """A window of frames → its waveform. Windows differ in length, so rows run one by one."""

    def __init__(self, c: Config, dtype: torch.dtype) -> None:
        super().__init__()
        width = c["width"]
        self.window = c["window"]
        self.embedding = TokenEmbedding(c["num_codes"] * c["code_vocab"], width, dtype=dtype, device="meta")
        self.place = TokenEmbedding(2 * c["window"], width, dtype=dtype, device="meta")
        self.mix = Linear(width, width, dtype=dtype, device="meta")
        self.wave = Linear(width, c["samples"], dtype=dtype, device="meta")
        self.offsets = c["code_vocab"] * torch.arange(c["num_codes"])

    def forward_batched(self, graph_walk: str, inputs: EngineInputs) -> NodeOutputs:
        first_place = self.window if graph_walk == "prime" else 0
        return {"audio": [self.decode(window, first_place) for window in _rows_of(inputs, "frame")]}

    def decode(self, window: Tensor, first_place: int) -> Tensor:
        """`[frames, num_codes]` → `[frames * samples]`."""
        rows = window + self.offsets
        places = self.place.embed(torch.arange(window.shape[0]) + first_place)
        x = torch.tanh(self.embedding.embed(rows.flatten()).view(*rows.shape, -1).sum(1) + places)
        x = x + torch.tanh(self.mix(x.mean(0, keepdim=True)))
        return self.wave(x).flatten()


_PREFIXES = {ENCODER: "encoder.", LLM: "llm.", CODES: "codes.", FLOW: "flow.", CODEC: "codec."}
_CLASSES = {ENCODER: Encoder, LLM: LanguageModel, CODES: CodePredictor, FLOW: FlowStep, CODEC: Codec}
_QKV = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
_STACKS = (
    StackRule("self_attn.qkv_proj.weight", _QKV),
    StackRule("mlp.gate_up_proj.weight", ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
)


def build_submodule(node_name: str, context: SubmoduleContext) -> NodeSubmodule:
    """A node with its share of the checkpoint."""
    if node_name == FRAME:
        return FrameJoiner()
    assert context.checkpoint is not None
    prefix = _PREFIXES[node_name]
    node = _CLASSES[node_name](context.setup.config, context.dtype)
    weights = iter_weights(context.checkpoint, dtype=context.dtype, names=lambda name: name.startswith(prefix))
    rules = LoadRules(renames=(RenameRule(prefix, ""),), stacks=_STACKS)
    load_weights(node, weights, rules, device=context.device, progress=context.progress)
    pack_weights(node)
    return node
