// Attention of each row's queries over its pages, with a running softmax over tiles of TILE keys.
//
// A query's result depends on its own row only: tiles are cut at multiples of TILE from the row's first key, taken in
// order, and a query stops at its last visible key. Decode and prefill of any length give the same bits.
#include <omp.h>

#include <limits>
#include <vector>

#include "tile.h"

namespace mstar {
namespace {

constexpr int64_t MAX_QUERIES = 48;  // query vectors that share one packing of a tile

struct Shape {
    int64_t threads, rows, heads, kv_heads, dim, page_size, num_pages, max_pages;  // max_pages: width of the table
    int64_t q_stride, out_stride, causal, is_bf16;                                 // strides of a token
    double scale;
};

template <class T> struct Pointers {
    const T *q, *k_pages, *v_pages;
    const int32_t *block_table, *kv_lens, *q_starts;
    T* out;
};

// Tokens [first, end) of `row`'s queries.
struct Span {
    int64_t row, first, end;
};

int64_t visible_keys(const Shape& s, int64_t kv_len, int64_t q_len, int64_t token) {
    const int64_t keys = s.causal ? kv_len - q_len + token + 1 : kv_len;
    return keys < 0 ? 0 : keys;
}

// One row of scores -> probabilities in place, the rest of the tile zero. Returns by how much older sums shrink.
template <class T> float soften(float* scores, T* probs, int64_t keys, float scale, float& top, float& total) {
    vf lanes = splat(-std::numeric_limits<float>::infinity());
    for (int64_t j = 0; j < TILE; j += VW) {
        vf s = load<vf>(scores + j) * scale;
        vi index;
        for (int i = 0; i < VW; i++) index[i] = int32_t(j + i);
        s = index < vi{} + int32_t(keys) ? s : splat(-std::numeric_limits<float>::infinity());
        store(scores + j, s);
        lanes = s > lanes ? s : lanes;
    }
    float high = top;
    for (int i = 0; i < VW; i++) high = lanes[i] > high ? lanes[i] : high;
    vf mass{};
    for (int64_t j = 0; j < TILE; j += VW) {
        vf p = exp(load<vf>(scores + j) - high);
        mass += p;
        store_vector(probs + j, p);
    }
    const float shrink = exp(splat(top - high))[0];
    total = total * shrink + sum(mass);
    top = high;
    return shrink;
}

template <class T> void attend(const Shape& s, const Pointers<T>& p, const Span& span, int64_t kv_head) {
    const int64_t group = s.heads / s.kv_heads, words = (s.dim + WORD<T> - 1) / WORD<T>;
    const int64_t padded_dim = (s.dim + VW - 1) / VW * VW, width = words * WORD<T>;
    const int64_t row_start = p.q_starts[span.row], q_len = p.q_starts[span.row + 1] - row_start;
    const int64_t kv_len = p.kv_lens[span.row], queries = (span.end - span.first) * group;

    static thread_local Scratch scratch;
    const int64_t sizes[] = {TILE * words * 4, padded_dim * TILE * 4 / WORD<T>, queries * width * int64_t(sizeof(T)),
                             queries * padded_dim * 4, queries * TILE * 4, queries * TILE * int64_t(sizeof(T)),
                             queries * 4, queries * 4};
    char* parts[9] = {nullptr};
    int64_t bytes = 0;
    for (int64_t size : sizes) bytes += (size + 63) / 64 * 64;
    parts[0] = scratch.reserve(size_t(bytes));
    for (int i = 0; i < 8; i++) parts[i + 1] = parts[i] + (sizes[i] + 63) / 64 * 64;
    auto* keys = reinterpret_cast<uint32_t*>(parts[0]);
    auto* values = reinterpret_cast<uint32_t*>(parts[1]);
    auto* q = reinterpret_cast<T*>(parts[2]);           // [queries][width]
    auto* sums = reinterpret_cast<float*>(parts[3]);    // [queries][padded_dim]
    auto* scores = reinterpret_cast<float*>(parts[4]);  // [queries][TILE]
    auto* probs = reinterpret_cast<T*>(parts[5]);       // [queries][TILE]
    auto* top = reinterpret_cast<float*>(parts[6]);     // [queries] largest score so far
    auto* total = reinterpret_cast<float*>(parts[7]);   // [queries] sum of exp(score - top)
    std::memset(parts[2], 0, size_t(sizes[2]));
    std::memset(parts[3], 0, size_t(sizes[3]));
    for (int64_t i = 0; i < queries; i++) {
        const T* from = p.q + (row_start + span.first + i / group) * s.q_stride + (kv_head * group + i % group) * s.dim;
        std::memcpy(q + i * width, from, s.dim * sizeof(T));
        top[i] = -std::numeric_limits<float>::infinity();
        total[i] = 0;
    }

    const int64_t end = visible_keys(s, kv_len, q_len, span.end - 1);
    for (int64_t start = 0; start < end; start += TILE) {
        const T *k_rows[TILE], *v_rows[TILE];
        const int32_t* table = p.block_table + span.row * s.max_pages + start / s.page_size;
        int64_t offset = start % s.page_size;
        for (int64_t j = 0; j < TILE; j++, offset++) {
            if (offset == s.page_size) offset = 0, table++;
            const bool present = start + j < end;
            const int64_t at = present ? ((*table * s.page_size + offset) * s.kv_heads + kv_head) * s.dim : 0;
            k_rows[j] = present ? p.k_pages + at : nullptr;
            v_rows[j] = present ? p.v_pages + at : nullptr;
        }
        pack_keys(k_rows, s.dim, keys);
        pack_values(v_rows, s.dim, values);

        // Queries that see no key of this tile lie before `begin`; the others up to the tile's end or their own last key.
        int64_t token = span.first;
        while (visible_keys(s, kv_len, q_len, token) <= start) token++;
        while (token < span.end) {
            const int64_t seen = visible_keys(s, kv_len, q_len, token) - start;
            const int64_t columns = seen < TILE ? seen : TILE;
            const int64_t token_end = seen < TILE && s.causal ? token + 1 : span.end;
            const int64_t begin = (token - span.first) * group, count = (token_end - token) * group;
            for (int64_t i = begin; i < begin + count; i += MR) {
                const int64_t n = begin + count - i < MR ? begin + count - i : MR;
                for (int64_t c = 0; c < (columns + VW - 1) / VW; c += NR) {
                    const int64_t left = (columns + VW - 1) / VW - c;
                    panel_of<T>(n, left < NR ? left : NR)(q + i * width, width, keys + c * words * VW, words * VW, words,
                                                          false, scores + i * TILE + c * VW, TILE, true, {});
                }
                for (int64_t r = i; r < i + n; r++) {
                    const float shrink = soften(scores + r * TILE, probs + r * TILE, columns, float(s.scale), top[r], total[r]);
                    if (shrink != 1.0f)
                        for (int64_t d = 0; d < padded_dim; d += VW)
                            store(sums + r * padded_dim + d, load<vf>(sums + r * padded_dim + d) * shrink);
                }
                for (int64_t d = 0; d < padded_dim / VW; d += NR) {
                    const int64_t left = padded_dim / VW - d, stride = TILE / WORD<T> * VW;
                    panel_of<T>(n, left < NR ? left : NR)(probs + i * TILE, TILE, values + d * stride, stride,
                                                          columns / WORD<T>, columns % WORD<T> != 0,
                                                          sums + i * padded_dim + d * VW, padded_dim, false, {});
                }
            }
            token = token_end;
        }
    }

    for (int64_t i = 0; i < queries; i++) {
        T* to = p.out + (row_start + span.first + i / group) * s.out_stride + (kv_head * group + i % group) * s.dim;
        const float inverse = total[i] != 0 ? 1.0f / total[i] : 0.0f;
        for (int64_t d = 0; d < s.dim; d += VW) {
            const vf y = load<vf>(sums + i * padded_dim + d) * inverse;
            if (d + VW <= s.dim)
                store_vector(to + d, y);
            else
                for (int64_t e = d; e < s.dim; e++) from_float(y[e - d], to[e]);
        }
    }
}

template <class T> int paged_attend(const Arg* arg) {
    const Shape& s = *reinterpret_cast<const Shape*>(arg);
    const Pointers<T> p{arg[13].as<T>(),       arg[14].as<T>(),       arg[15].as<T>(), arg[16].as<int32_t>(),
                        arg[17].as<int32_t>(), arg[18].as<int32_t>(), arg[19].as<T>()};
    const int64_t group = s.heads / s.kv_heads;
    const int64_t tokens_per_span = group < MAX_QUERIES ? MAX_QUERIES / group : 1;
    static thread_local std::vector<Span> spans_of_thread;
    auto& spans = spans_of_thread;
    spans.clear();
    int64_t work = 0;
    for (int64_t row = 0; row < s.rows; row++) {
        const int64_t q_len = p.q_starts[row + 1] - p.q_starts[row], kv_len = p.kv_lens[row];
        if (q_len < 0 || kv_len < 0 || (q_len && kv_len > s.max_pages * s.page_size)) return BAD_LENGTH;
        for (int64_t i = 0; q_len && i * s.page_size < kv_len; i++) {
            const int64_t page = p.block_table[row * s.max_pages + i];
            if (page < 0 || page >= s.num_pages) return BAD_PAGE;
        }
        const int64_t count = (q_len + tokens_per_span - 1) / tokens_per_span;
        for (int64_t i = 0; i < count; i++) spans.push_back({row, share(q_len, count, i), share(q_len, count, i + 1)});
        work += count * kv_len * s.heads * s.dim;
    }
    const int64_t tasks = int64_t(spans.size()) * s.kv_heads;
    const int threads = threads_for(work, 1 << 14, s.threads < tasks ? s.threads : tasks);
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (threads > 1)
    for (int64_t i = tasks - 1; i >= 0; i--)  // the longest spans of a prefill are its last
        attend(s, p, spans[i / s.kv_heads], i % s.kv_heads);
    return OK;
}

}  // namespace
}  // namespace mstar

using namespace mstar;

// the fields of Shape, q, k_pages, v_pages, block_table, kv_lens, q_starts, out
KERNEL(mstar_paged_attend) {
    return arg[11].i ? paged_attend<bf16>(arg) : paged_attend<float>(arg);
}
