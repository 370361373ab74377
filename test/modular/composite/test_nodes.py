"""The composite's nodes one by one against the reference, with resources for one sequence and no engine."""

import numpy as np
import pytest
import torch
from support.composite import reference
from support.composite.declarations import CODEC, CODES, ENCODER, FLOW, FRAME, LLM, MEDIA_TOKEN
from support.composite.deployment import CARD, CONFIG, make_requests, write_checkpoint
from support.composite.model import CompositeModel
from support.solo_resources import SoloResources

from mstar.engine.submodule import EngineInputs, RowColumns
from mstar.model.base import ModelSetup
from mstar.model.loader.checkpoint import resolve_checkpoint
from mstar.model.registry import build_submodule, find_card
from mstar.model.submodule_context import SubmoduleContext

WEIGHTS = reference.make_weights(0)
REQUESTS = make_requests(4, seed=2, max_tokens=6)


@pytest.fixture(scope="module")
def context(tmp_path_factory) -> SubmoduleContext:
    checkpoint = resolve_checkpoint(str(write_checkpoint(tmp_path_factory.mktemp("composite"))), cache_dir=None)
    return SubmoduleContext(ModelSetup(checkpoint.config(), None, 256), checkpoint, torch.float32, torch.device("cpu"))


def _node(context: SubmoduleContext, name: str):
    return build_submodule(find_card(CARD), name, context)


def _inputs(
    num_rows: int, tensors=None, ragged=None, tokens=None, last=None, iterations=None, features=None
) -> EngineInputs:
    return EngineInputs(
        num_rows=num_rows,
        tokens=tokens,
        last=last,
        tensors=tensors or {},
        ragged=ragged or {},
        iterations=torch.zeros(num_rows, dtype=torch.int64) if iterations is None else iterations,
        token_columns={} if features is None else {"feature": torch.tensor(features)},
    )


def _close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_encoder_stacked_and_ragged(context: SubmoduleContext):
    node = _node(context, ENCODER)
    media = [request.media for request in REQUESTS]
    ours = node.forward_batched("prefill", _inputs(len(media), ragged={"media": media}))["features"]
    for one, m in zip(ours, media, strict=True):
        _close(one, reference.encode(WEIGHTS, m))
    same = torch.stack([media[0], media[0] + 1])
    ours = node.forward_batched("prefill", _inputs(2, {"media": same}))["features"]
    _close(ours[1], reference.encode(WEIGHTS, same[1]))


class _Argmax:
    """In place of the sampler resource."""

    def __init__(self) -> None:
        self.logits = torch.empty(0)

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        self.logits = logits
        return logits.argmax(-1).int()


@pytest.mark.parametrize("request_", REQUESTS, ids=range(len(REQUESTS)))
@torch.no_grad()
def test_language_model_and_codes_follow_the_reference(context: SubmoduleContext, request_):
    expected = request_.expected(WEIGHTS)
    llm, codes, join = (_node(context, name) for name in (LLM, CODES, FRAME))
    spec = CompositeModel(context.setup).get_node_resources()[0]
    angles = torch.arange(64)[:, None] * reference.ROPE_THETA ** (-torch.arange(4) / 4)
    solo = SoloResources(spec, angles.cos(), angles.sin())
    argmax = _Argmax()
    for module in (llm, codes):
        for layer in module.modules():
            if hasattr(layer, "bind_resources"):
                layer.bind_resources(lambda key, i: argmax if "sampler" in key else solo.find(key, i))
    features = reference.encode(WEIGHTS, request_.media)
    ids = [MEDIA_TOKEN] * len(features) + list(request_.prompt)
    solo.begin(len(ids))
    place = [*range(len(features)), *[-1] * len(request_.prompt)]
    last = torch.tensor([len(ids) - 1])
    out = llm.forward_batched(
        "prefill", _inputs(1, {"features": features[None]}, tokens=torch.tensor(ids), last=last, features=place)
    )
    tokens, frames = [int(out["token"])], [out["frame"]]
    for _ in range(len(expected.tokens) - 1):
        solo.begin(1)
        out = llm.forward_batched(
            "speak", _inputs(1, {"frame": frames[-1]}, tokens=torch.tensor(tokens[-1:]), last=torch.tensor([0]))
        )
        tokens.append(int(out["token"]))
        code, entries = torch.tensor([reference.CODE_VOCAB]), []
        for index in range(reference.NUM_CODES):
            made = codes.forward_batched(
                "speak",
                _inputs(1, {"hidden": out["hidden"]}, tokens=code, iterations=torch.tensor([index])),
            )
            code = made["code"].long()
            entries.append(made["entry"][0])
        frames.append(join.forward_batched("speak", _inputs(1, ragged={"entry": [torch.stack(entries)]}))["frame"])
    assert tokens == expected.tokens
    assert torch.cat(frames).tolist() == expected.frames.tolist()


def test_prefill_puts_features_into_their_own_rows(context: SubmoduleContext):
    """Three packed chunks of prompts with features of different lengths: each gets its own, wherever it begins."""
    llm = _node(context, LLM)
    features = [torch.arange(n * reference.WIDTH).view(n, -1) + 1000.0 * (row + 1) for row, n in enumerate((2, 1, 3))]
    place = [0, 1, -1, 0, -1, -1, 1, 2, -1]
    x = torch.zeros(len(place), reference.WIDTH)
    last = torch.tensor([2, 5, 8])
    placed = llm._with_features(x, _inputs(3, ragged={"features": features}, last=last, features=place))
    expected = [features[0][0], features[0][1], x[0], features[1][0], x[0], x[0], features[2][1], features[2][2], x[0]]
    assert torch.equal(placed, torch.stack(expected))


def test_a_chunk_of_a_prompt_says_which_features_are_in_it(context: SubmoduleContext):
    llm = _node(context, LLM)
    prompts = [np.array([MEDIA_TOKEN] * 4 + [3, 4], np.int32), np.array([5, MEDIA_TOKEN, 6], np.int32)]
    none = np.zeros(2, np.int32)
    lengths = np.array([2, 0], np.int32)
    sizes = np.array([6, 3], np.int32)
    batch = llm.prepare_batch(
        "prefill", RowColumns(np.arange(2), lengths, sizes, none, none, none > 0, prompts, frozenset())
    )
    assert batch.spans.tolist() == [4, 3]
    assert batch.token_ids.tolist() == [MEDIA_TOKEN, MEDIA_TOKEN, 3, 4, 5, MEDIA_TOKEN, 6]
    assert batch.token_columns["feature"].tolist() == [2, 3, -1, -1, -1, 0, -1]


def test_flow_step_by_iteration(context: SubmoduleContext):
    node = _node(context, FLOW)
    hidden = torch.randn(2, reference.WIDTH, generator=torch.Generator().manual_seed(1))
    latent = torch.stack([REQUESTS[0].latent, REQUESTS[1].latent])
    features = [reference.encode(WEIGHTS, request.media) for request in REQUESTS[:2]]
    expected = [reference.flow(WEIGHTS, latent[i], features[i], hidden[i]) for i in range(2)]
    for index in range(reference.NUM_FLOW_STEPS):
        inputs = _inputs(
            2, {"latent": latent, "hidden": hidden}, {"features": features}, iterations=torch.tensor([index, index])
        )
        latent = node.forward_batched("paint", inputs)["latent"]
    _close(latent, torch.stack(expected))


def test_codec_in_both_walks(context: SubmoduleContext):
    node = _node(context, CODEC)
    frames = REQUESTS[0].expected(WEIGHTS).frames
    windows = [frames[:4], frames[2:5]]
    for walk in ("prime", "voice"):
        ours = node.forward_batched(walk, _inputs(2, ragged={"frame": windows}))["audio"]
        for one, window in zip(ours, windows, strict=True):
            _close(one, reference.codec_pass(WEIGHTS, window, walk))


def test_the_first_code_follows_no_other(context: SubmoduleContext):
    zeros = np.zeros(3, np.int32)
    rows = RowColumns(
        handles=zeros,
        lengths=zeros,
        num_prompt=zeros,
        num_draws=zeros,
        iterations=np.array([0, 2, 1], np.int32),
        finals=np.zeros(3, np.bool_),
        prompts=[None] * 3,
        live=frozenset(),
    )
    batch = _node(context, CODES).prepare_batch("speak", rows)
    assert batch.token_ids.tolist() == [CONFIG["code_vocab"], -1, -1]
