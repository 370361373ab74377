"""The tiny composite model as one straight function of tensors: what every deployment of it has to compute.

Imports torch and nothing else: no cache, no batching, no loops split over workers, every sequence recomputed whole.

    media ── encoder ── features ─┬─ prompt ─ LLM ─ token, hidden, frame 0
                                  │             └─ loop: LLM ─ token, hidden ─ loop of NUM_CODES: code ─ frame
                                  └─ flow loop of NUM_FLOW_STEPS, also given the last hidden ─ image
    frames ── windows of WINDOW, advancing by STRIDE ── codec ── audio
"""

import torch

WIDTH = 32
NUM_HEADS = 4
NUM_KV_HEADS = 2
HEAD_DIM = 8
MLP_WIDTH = 48
NUM_LAYERS = 2
VOCAB = 64
ROPE_THETA = 1000.0
EPS = 1e-5

MEDIA_WIDTH = 6
NUM_CODES = 3  # per frame, one inner iteration each
CODE_VOCAB = 16
NUM_FLOW_STEPS = 5
LATENT_ROWS = 4
LATENT_WIDTH = 10
WINDOW = 4
STRIDE = 2
SAMPLES = 8  # audio samples per frame


class Outputs:
    """`tokens`: sampled text tokens. `frames` `[1 + steps, NUM_CODES]`. `image` `[LATENT_ROWS, LATENT_WIDTH]`.
    `audio`: one `[frames in the window * SAMPLES]` per codec pass, in order."""

    def __init__(self, tokens: list[int], frames: torch.Tensor, image: torch.Tensor, audio: list[torch.Tensor]) -> None:
        self.tokens = tokens
        self.frames = frames
        self.image = image
        self.audio = audio


def make_weights(seed: int) -> dict[str, torch.Tensor]:
    """All weights, fp32, by name. Scaled so that choices are not close calls and no value saturates."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (gain / columns**0.5)

    def norm(width: int) -> torch.Tensor:
        return 1 + 0.2 * torch.randn(width, generator=generator)

    weights = {
        "encoder.patch.weight": matrix(WIDTH, 2 * MEDIA_WIDTH, 1.5),
        "encoder.patch.bias": 0.3 * torch.randn(WIDTH, generator=generator),
        "encoder.mix.weight": matrix(WIDTH, WIDTH, 1.5),
        "llm.embed_tokens.weight": 1.5 * torch.randn(VOCAB, WIDTH, generator=generator),
        "llm.code_embeddings.weight": torch.randn(NUM_CODES * CODE_VOCAB, WIDTH, generator=generator),
        "llm.norm.weight": norm(WIDTH),
        "llm.lm_head.weight": matrix(VOCAB, WIDTH, 4.0),
        "llm.first_frame.weight": matrix(NUM_CODES * CODE_VOCAB, WIDTH, 4.0),
    }
    for layer in range(NUM_LAYERS):
        name = f"llm.layers.{layer}."
        weights[name + "input_layernorm.weight"] = norm(WIDTH)
        weights[name + "self_attn.q_proj.weight"] = matrix(NUM_HEADS * HEAD_DIM, WIDTH, 2.0)
        weights[name + "self_attn.k_proj.weight"] = matrix(NUM_KV_HEADS * HEAD_DIM, WIDTH, 2.0)
        weights[name + "self_attn.v_proj.weight"] = matrix(NUM_KV_HEADS * HEAD_DIM, WIDTH, 2.0)
        weights[name + "self_attn.o_proj.weight"] = matrix(WIDTH, NUM_HEADS * HEAD_DIM, 2.0)
        weights[name + "post_attention_layernorm.weight"] = norm(WIDTH)
        weights[name + "mlp.gate_proj.weight"] = matrix(MLP_WIDTH, WIDTH, 2.0)
        weights[name + "mlp.up_proj.weight"] = matrix(MLP_WIDTH, WIDTH, 2.0)
        weights[name + "mlp.down_proj.weight"] = matrix(WIDTH, MLP_WIDTH, 2.0)
    weights |= {
        "codes.hidden.weight": matrix(WIDTH, WIDTH, 2.0),
        # The last row is the code before the first.
        "codes.embedding.weight": torch.randn(CODE_VOCAB + 1, WIDTH, generator=generator),
        "codes.position.weight": torch.randn(NUM_CODES, WIDTH, generator=generator),
        "codes.head.weight": matrix(CODE_VOCAB, WIDTH, 5.0),
        "flow.condition.weight": matrix(WIDTH, 2 * WIDTH, 1.5),
        "flow.inward.weight": matrix(WIDTH, LATENT_WIDTH, 1.5),
        "flow.time.weight": matrix(WIDTH, 2, 1.5),
        "flow.outward.weight": matrix(LATENT_WIDTH, WIDTH, 1.5),
        "codec.embedding.weight": torch.randn(NUM_CODES * CODE_VOCAB, WIDTH, generator=generator),
        "codec.place.weight": 0.5 * torch.randn(2 * WINDOW, WIDTH, generator=generator),
        "codec.mix.weight": matrix(WIDTH, WIDTH, 1.5),
        "codec.wave.weight": matrix(SAMPLES, WIDTH, 1.5),
    }
    return weights


def run(
    weights: dict[str, torch.Tensor],
    media: torch.Tensor,
    latent: torch.Tensor,
    prompt: list[int],
    max_tokens: int,
    stop_tokens: tuple[int, ...] = (),
) -> Outputs:
    """One request: `media` fp32 `[2 n, MEDIA_WIDTH]`, `latent` fp32 `[LATENT_ROWS, LATENT_WIDTH]`, token ids `prompt`.

    The prompt samples the first token, each outer iteration one more, at most `max_tokens` together. An iteration that
    samples a stop token completes, frame included, and is the last; the first token stops nothing.
    """
    features = encode(weights, media)  # [n, WIDTH]
    inputs = torch.cat([features, weights["llm.embed_tokens.weight"][torch.tensor(prompt)]])
    hidden = language_model(weights, inputs)[-1]  # [WIDTH]
    tokens = [int((weights["llm.lm_head.weight"] @ hidden).argmax())]
    frame = (weights["llm.first_frame.weight"] @ hidden).view(NUM_CODES, CODE_VOCAB).argmax(-1)  # [NUM_CODES]
    frames = [frame]
    while len(tokens) < max_tokens:
        rows = frame + CODE_VOCAB * torch.arange(NUM_CODES)
        step = weights["llm.embed_tokens.weight"][tokens[-1]] + weights["llm.code_embeddings.weight"][rows].sum(0)
        inputs = torch.cat([inputs, step[None]])
        hidden = language_model(weights, inputs)[-1]
        tokens.append(int((weights["llm.lm_head.weight"] @ hidden).argmax()))
        frame = predict_codes(weights, hidden)
        frames.append(frame)
        if tokens[-1] in stop_tokens:
            break
    image = flow(weights, latent, features, hidden)
    stacked = torch.stack(frames)
    return Outputs(tokens, stacked, image, codec(weights, stacked))


def encode(weights: dict[str, torch.Tensor], media: torch.Tensor) -> torch.Tensor:
    """`[2 n, MEDIA_WIDTH]` → `[n, WIDTH]`: pairs of rows, each then sees the mean of all."""
    pairs = media.reshape(-1, 2 * MEDIA_WIDTH)
    patches = torch.tanh(pairs @ weights["encoder.patch.weight"].T + weights["encoder.patch.bias"])
    return patches + torch.tanh(patches.mean(0) @ weights["encoder.mix.weight"].T)


def language_model(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Decoder over embedded inputs `[tokens, WIDTH]` → hidden states `[tokens, WIDTH]`."""
    for layer in range(NUM_LAYERS):
        name = f"llm.layers.{layer}."
        x = x + attention(weights, name + "self_attn.", rms_norm(x, weights[name + "input_layernorm.weight"]))
        y = rms_norm(x, weights[name + "post_attention_layernorm.weight"])
        gate, up = y @ weights[name + "mlp.gate_proj.weight"].T, y @ weights[name + "mlp.up_proj.weight"].T
        x = x + (torch.nn.functional.silu(gate) * up) @ weights[name + "mlp.down_proj.weight"].T
    return rms_norm(x, weights["llm.norm.weight"])


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def attention(weights: dict[str, torch.Tensor], name: str, x: torch.Tensor) -> torch.Tensor:
    """Causal attention with grouped queries and rotate-half rotary embedding."""
    n = x.shape[0]
    positions = torch.arange(n)
    q = rotate((x @ weights[name + "q_proj.weight"].T).view(n, NUM_HEADS, HEAD_DIM), positions)
    k = rotate((x @ weights[name + "k_proj.weight"].T).view(n, NUM_KV_HEADS, HEAD_DIM), positions)
    v = (x @ weights[name + "v_proj.weight"].T).view(n, NUM_KV_HEADS, HEAD_DIM)
    group = NUM_HEADS // NUM_KV_HEADS
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) / HEAD_DIM**0.5
    later = torch.ones(n, n, dtype=torch.bool).triu(1)
    attended = torch.softmax(scores.masked_fill(later, float("-inf")), -1)
    out = torch.einsum("hqk,khd->qhd", attended, v.repeat_interleave(group, 1))
    return out.reshape(n, NUM_HEADS * HEAD_DIM) @ weights[name + "o_proj.weight"].T


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    half = HEAD_DIM // 2
    frequencies = ROPE_THETA ** (-torch.arange(half) / half)
    angles = (positions[:, None] * frequencies)[:, None]  # [tokens, 1, half]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def predict_codes(weights: dict[str, torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
    """The frame of one outer iteration, int64 `[NUM_CODES]`: a code depends on the hidden state and the one before."""
    codes = [CODE_VOCAB]
    for index in range(NUM_CODES):
        mixed = weights["codes.hidden.weight"] @ hidden + weights["codes.embedding.weight"][codes[-1]]
        state = torch.tanh(mixed + weights["codes.position.weight"][index])
        codes.append(int((weights["codes.head.weight"] @ state).argmax()))
    return torch.tensor(codes[1:])


def flow(
    weights: dict[str, torch.Tensor], latent: torch.Tensor, features: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    """Euler steps over time 0 to 1 from `latent` `[LATENT_ROWS, LATENT_WIDTH]`."""
    condition = weights["flow.condition.weight"] @ torch.cat([features.mean(0), hidden])
    for index in range(NUM_FLOW_STEPS):
        time = torch.tensor(index / NUM_FLOW_STEPS)
        clock = weights["flow.time.weight"] @ torch.stack([torch.sin(3 * time), torch.cos(3 * time)])
        inner = torch.tanh(latent @ weights["flow.inward.weight"].T + condition + clock)
        latent = latent + (inner @ weights["flow.outward.weight"].T) / NUM_FLOW_STEPS
    return latent


def codec(weights: dict[str, torch.Tensor], frames: torch.Tensor) -> list[torch.Tensor]:
    """Waveform pieces: the prompt's frame alone, then windows over the frames of the outer iterations."""
    audio = [codec_pass(weights, frames[:1], "prime")]
    rest = frames[1:]
    start, consumed = 0, 0
    while consumed < len(rest):
        stop = min(start + WINDOW, len(rest))
        audio.append(codec_pass(weights, rest[start:stop], "voice"))
        consumed, start = stop, start + STRIDE
    return audio


def codec_pass(weights: dict[str, torch.Tensor], window: torch.Tensor, walk: str) -> torch.Tensor:
    """`[frames, NUM_CODES]` → `[frames * SAMPLES]`. What a frame sounds like depends on its place in the window, on the
    frames around it and on the walk."""
    n = window.shape[0]
    rows = window + CODE_VOCAB * torch.arange(NUM_CODES)
    places = weights["codec.place.weight"][torch.arange(n) + (WINDOW if walk == "prime" else 0)]
    x = torch.tanh(weights["codec.embedding.weight"][rows].sum(1) + places)  # [frames, WIDTH]
    x = x + torch.tanh(x.mean(0) @ weights["codec.mix.weight"].T)
    return (x @ weights["codec.wave.weight"].T).reshape(-1)
