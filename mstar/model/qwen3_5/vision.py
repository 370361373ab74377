"""The vision tower of Qwen3.5 on packed patches of several media: blocks from one to another, so that the encoding of
a large image can be spread over steps. Tensor in, tensor out; grids are host integers, here in patches.

Module names follow the checkpoint's. Formulas: Dosovitskiy et al. 2021 (ViT), Wang et al. 2024 (Qwen2-VL: 2D rotary
positions and merging), with a learned position grid that is interpolated to the size of the image.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mstar.layers.linear import Linear
from mstar.layers.rotary import rotate
from mstar.layers.segment_attention import attend_all, segment_attend
from mstar.model.qwen3_5.config import VisionConfig
from mstar.model.qwen3_5.encode_steps import Grid, Part

_EPS = 1e-6
_CACHED_GRIDS = 64


class Segments(NamedTuple):
    """What a forward over packed patches knows of them. `lengths`: patches that see each other, one frame (or frame
    group) each; None: only `starts` knows, int32 [segments + 1], their borders. `cos`, `sin` fp32
    [patches, head_dim / 2], in which patch i has row `places[i]`, int32."""

    lengths: tuple[int, ...] | None
    starts: Tensor
    places: Tensor
    cos: Tensor
    sin: Tensor


class LayerNorm(nn.Module):
    def __init__(self, width: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype, device=device), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(width, dtype=dtype, device=device), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, _EPS)


class VisionAttention(nn.Module):
    """Every patch attends to all of its segment."""

    def __init__(self, c: VisionConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.num_heads = c.num_heads
        self.head_dim = c.hidden_size // c.num_heads
        self.qkv = Linear(c.hidden_size, 3 * c.hidden_size, bias=True, dtype=dtype, device=device)
        self.proj = Linear(c.hidden_size, c.hidden_size, bias=True, dtype=dtype, device=device)

    def project(self, x: Tensor, segments: Segments) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each `[patches, heads, head_dim]`; the first two rotated."""
        qkv = self.qkv(x)
        rotate(qkv, segments.places, segments.cos, segments.sin, num_heads=2 * self.num_heads, head_dim=self.head_dim)
        q, k, v = qkv.view(x.shape[0], 3, self.num_heads, self.head_dim).unbind(1)
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
        """`[patches, hidden]`, before the output's product."""
        return segment_attend(q, k, v, segments.starts, segments.lengths).flatten(1)

    def attend_part(self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], begin: int) -> Tensor:
        """As `attend` with segments of these lengths, of the queries `q` alone, which are those of the patches from
        `begin` on."""
        pieces: list[Tensor] = []
        end, first = begin + q.shape[0], 0
        for length in lengths:
            last = first + length
            own = slice(max(begin, first) - begin, min(end, last) - begin)
            if own.start < own.stop:
                pieces.append(attend_all(q[None, own], k[None, first:last], v[None, first:last])[0])
            first = last
        return torch.cat(pieces).flatten(1)


class VisionMLP(nn.Module):
    def __init__(self, c: VisionConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.approximate = "tanh" if c.hidden_act == "gelu_pytorch_tanh" else "none"
        self.linear_fc1 = Linear(c.hidden_size, c.intermediate_size, bias=True, dtype=dtype, device=device)
        self.linear_fc2 = Linear(c.intermediate_size, c.hidden_size, bias=True, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(F.gelu(self.linear_fc1(x), approximate=self.approximate))


class VisionBlock(nn.Module):
    def __init__(self, c: VisionConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.norm1 = LayerNorm(c.hidden_size, dtype=dtype, device=device)
        self.norm2 = LayerNorm(c.hidden_size, dtype=dtype, device=device)
        self.attn = VisionAttention(c, dtype=dtype, device=device)
        self.mlp = VisionMLP(c, dtype=dtype, device=device)

    def forward(self, x: Tensor, segments: Segments) -> Tensor:
        q, k, v = self.attn.project(self.norm1(x), segments)
        return self.finish(x, self.attn.attend(q, k, v, segments))

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """What follows attention, patch by patch."""
        x = x + self.attn.proj(attended)
        return x + self.mlp(self.norm2(x))


class PatchMerger(nn.Module):
    """The patches of a token, one after the other, become its feature."""

    def __init__(self, c: VisionConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        self.width = c.hidden_size * c.spatial_merge_size**2
        self.norm = LayerNorm(c.hidden_size, dtype=dtype, device=device)
        self.linear_fc1 = Linear(self.width, self.width, bias=True, dtype=dtype, device=device)
        self.linear_fc2 = Linear(self.width, c.out_hidden_size, bias=True, dtype=dtype, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_fc2(F.gelu(self.linear_fc1(self.norm(x).view(-1, self.width))))


class PatchEmbedding(nn.Module):
    def __init__(self, c: VisionConfig, *, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        values = c.in_channels * c.temporal_patch_size * c.patch_size**2
        self.proj = Linear(values, c.hidden_size, bias=True, dtype=dtype, device=device)

    def forward(self, patches: Tensor) -> Tensor:
        return self.proj(patches)


class VisionTower(nn.Module):
    """Built on the meta device, loaded, packed. `mean`, `std`: of red, green and blue in 0 to 1."""

    def __init__(
        self,
        c: VisionConfig,
        mean: Sequence[float],
        std: Sequence[float],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.config = c
        self.dtype = dtype
        self.patch_embed = PatchEmbedding(c, dtype=dtype, device=device)
        # Frozen, and not drawn at random first: on the meta device that loads torch's compiler.
        table = torch.empty(c.grid_side**2, c.hidden_size, dtype=dtype, device=device)
        self.pos_embed = nn.Embedding.from_pretrained(table)
        blocks = (VisionBlock(c, dtype=dtype, device=device) for _ in range(c.depth))
        self.blocks = cast("Sequence[VisionBlock]", nn.ModuleList(blocks))
        self.merger = PatchMerger(c, dtype=dtype, device=device)
        head_dim = c.hidden_size // c.num_heads
        exponents = torch.arange(0, head_dim // 2, 2, dtype=torch.float32) / (head_dim // 2)
        self.frequencies = 1.0 / c.rope_theta**exponents  # fp32 [head_dim / 4], of rows as of columns
        values = c.temporal_patch_size * c.patch_size**2
        self.scale = (1 / torch.tensor(std)).repeat_interleave(values) / 255
        self.offset = -(torch.tensor(mean) / torch.tensor(std)).repeat_interleave(values)

    def place_constants(self, device: torch.device) -> None:
        """Bring what is no weight to where the loaded weights are."""
        self.frequencies = self.frequencies.to(device)
        self.scale, self.offset = self.scale.to(device), self.offset.to(device)

    def embed(self, pixels: Tensor, grids: Sequence[Grid], begin: int = 0, end: int | None = None) -> Tensor:
        """`[patches, hidden]` of `pixels` uint8 `[patches, values]`, where the media with `grids` follow each other: of
        all patches, or of `begin:end`."""
        rows = slice(begin, end)
        patches = torch.addcmul(self.offset, pixels[rows].float(), self.scale)
        x = self.patch_embed(patches.to(self.dtype))
        return x.add_(self._positions(grids, rows).to(x.dtype))

    def segments(self, grids: Sequence[Grid], begin: int = 0, end: int | None = None) -> Segments:
        """For the patches of media with these grids, one after the other, of which `begin:end` are rotated."""
        places = torch.cat([self._places(grid) for grid in grids])[begin:end]
        angles = (places[:, :, None] * self.frequencies).flatten(1)  # rows' frequencies, then columns'
        lengths = tuple(height * width for times, height, width in grids for _ in range(times))
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(places.device, non_blocking=True)
        order = torch.arange(places.shape[0], dtype=torch.int32, device=places.device)
        return Segments(lengths, starts, order, angles.cos(), angles.sin())

    def run_blocks(self, x: Tensor, segments: Segments, blocks: range) -> Tensor:
        """`[patches, hidden]` after these blocks."""
        for index in blocks:
            x = self.blocks[index](x, segments)
        return x

    def embed_part(self, state: Tensor | None, pixels: Tensor, grids: Sequence[Grid], part: Part) -> Tensor:
        """`[patches, hidden]`, of which those before `part.end` are there. `state`: that of the part before it."""
        x = self.embed(pixels, grids, part.begin, part.end)
        whole = x.new_empty(pixels.shape[0], x.shape[1]) if state is None else state.clone()
        whole[part.begin : part.end] = x
        return whole

    def merge_part(self, state: Tensor, part: Part) -> Tensor:
        """`state`: the patches, `[patches, hidden]`, or what the part before this one made of them: the same, flat, and
        behind it all features, of which those before `part.begin` are there."""
        c = self.config
        if state.ndim == 2:
            features = state.shape[0] // c.spatial_merge_size**2 * c.out_hidden_size
            whole = torch.cat([state.flatten(), state.new_empty(features)])
        else:
            whole = state.clone()
        patches = whole[part.begin * c.hidden_size : part.end * c.hidden_size].view(-1, c.hidden_size)
        own = slice(part.begin // c.spatial_merge_size**2, part.end // c.spatial_merge_size**2)
        self.merged(whole)[own] = self.merge(patches)
        return whole

    def merged(self, state: Tensor) -> Tensor:
        """The features in what `merge_part` made."""
        c = self.config
        per_token = c.hidden_size * c.spatial_merge_size**2
        tokens = state.shape[0] // (per_token + c.out_hidden_size)
        return state[tokens * per_token :].view(tokens, c.out_hidden_size)

    def run_part(self, state: Tensor, segments: Segments, part: Part) -> Tensor:
        """A part of one block. `state`: `[patches, hidden]` before the block's first part and after its last; between
        them `[5, patches, hidden]`: the same, then queries, keys, values and results as far as they are there.
        `segments`: for the part's patches."""
        block = self.blocks[part.block]
        rows = slice(part.begin, part.end)
        if state.ndim == 2:
            whole = state.new_empty(5, *state.shape)
            whole[0] = state
        else:
            whole = state.clone()  # a stored signal is never written
        x, q, k, v, done = (whole[place] for place in range(5))
        if part.kind == "project":
            made = block.attn.project(block.norm1(x[rows]), segments)
            for place, values in zip((q, k, v), made, strict=True):
                place[rows] = values.flatten(1)
            return whole
        heads = (self.config.num_heads, -1)
        assert segments.lengths is not None
        attended = block.attn.attend_part(
            q[rows].unflatten(1, heads), k.unflatten(1, heads), v.unflatten(1, heads), segments.lengths, part.begin
        )
        done[rows] = block.finish(x[rows], attended)
        return done if part.end == done.shape[0] else whole

    def merge(self, x: Tensor) -> Tensor:
        """Features `[patches / spatial_merge_size², out_hidden]` of patches that all blocks have seen."""
        return self.merger(x)

    def _places(self, grid: Grid) -> Tensor:
        return patch_places(*grid, self.config.spatial_merge_size, self.scale.device)

    def _positions(self, grids: Sequence[Grid], rows: slice) -> Tensor:
        """fp32 `[patches, hidden]`: the learned grid, laid over each medium from corner to corner, bilinear."""
        c, device = self.config, self.scale.device
        found = [grid_corners(*grid, c.spatial_merge_size, c.grid_side, device) for grid in grids]
        corners, shares = (torch.cat(each, 1)[:, rows] for each in zip(*found, strict=True))
        return (self.pos_embed(corners) * shares[:, :, None]).sum(0)


@lru_cache(maxsize=_CACHED_GRIDS)
def patch_places(times: int, height: int, width: int, merge: int, device: torch.device) -> Tensor:
    """fp32 `[patches, 2]`: row and column of each patch, in the order of the patches: tokens along rows, and in a token
    along rows."""
    row, column = torch.meshgrid(torch.arange(height, device=device), torch.arange(width, device=device), indexing="ij")
    places = torch.stack([row, column], -1).view(height // merge, merge, width // merge, merge, 2)
    return places.transpose(1, 2).reshape(-1, 2).repeat(times, 1).float()


@lru_cache(maxsize=_CACHED_GRIDS)
def grid_corners(
    times: int, height: int, width: int, merge: int, side: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """int32 and fp32 `[4, patches]`: the entries around each patch in a grid of `side` rows and columns whose corners
    are the medium's, and their shares in what is between them."""
    most = torch.tensor([max(height - 1, 1), max(width - 1, 1)]).to(device, non_blocking=True)
    source = patch_places(times, height, width, merge, device) * (side - 1) / most
    near = source.floor()
    down, across = (source - near).unbind(1)
    near = near.int()
    (top, left), (bottom, right) = near.unbind(1), (near + 1).clamp(max=side - 1).unbind(1)
    corners = torch.stack([row * side + column for row in (top, bottom) for column in (left, right)])
    shares = torch.stack([rows * columns for rows in (1 - down, down) for columns in (1 - across, across)])
    return corners, shares
