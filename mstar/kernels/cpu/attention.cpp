// Attention of each row's queries over its pages, with a running softmax over tiles of TILE keys.
//
// A query's result depends on its own row only: tiles are cut at multiples of TILE from the row's first key, taken in
// order, and a query stops at its last visible key. Decode and prefill of any length give the same bits.
#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "pool.h"
#include "tile.h"

namespace mstar {
namespace {

constexpr int64_t MAX_QUERIES = 48;  // query vectors that share one packing of a tile
constexpr int64_t GRAIN = 1 << 16;      // products that are worth another thread
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

// The arguments of the call, in order.
template <class T> struct Call {
    int64_t threads, rows, heads, kv_heads, dim, page_size, num_pages, max_pages;  // max_pages: width of the table
    int64_t q_stride, out_stride, causal, is_bf16;                                 // strides of a token
    double scale;
    const T *q, *k_pages, *v_pages;
    const int32_t *block_table, *kv_lens, *q_starts;
    T* out;

    int64_t visible_keys(int64_t row, int64_t token) const {
        const int64_t q_len = q_starts[row + 1] - q_starts[row];
        const int64_t keys = causal ? kv_lens[row] - q_len + token + 1 : kv_lens[row];
        return keys < 0 ? 0 : keys;
    }
};

// Tokens [first, end) of a row's queries with one kv head's share of the heads, over keys [0, keys).
struct Task {
    int64_t row, first, end, kv_head, keys;
};

template <class T> void find_tile(const Call<T>& c, const Task& task, int64_t start, Tile<T>& tile) {
    const int32_t* page = c.block_table + task.row * c.max_pages + start / c.page_size;
    const int64_t step = c.kv_heads * c.dim;
    tile.present = task.keys - start < TILE ? task.keys - start : TILE;
    int64_t offset = start % c.page_size;
    for (int64_t j = 0; j < tile.present; page++, offset = 0) {
        int64_t at = ((*page * c.page_size + offset) * c.kv_heads + task.kv_head) * c.dim;
        for (; offset < c.page_size && j < tile.present; offset++, j++, at += step) {
            tile.keys[j] = c.k_pages + at;
            tile.values[j] = c.v_pages + at;
        }
    }
}

// Scores of `keys` keys -> probabilities, those of the other keys of the tile zero. Returns by how much sums of earlier
// tiles shrink.
template <class T> float soften(float* scores, T* probs, int64_t keys, float scale, float& top, float& total) {
    for (int64_t j = keys; j < TILE; j++) scores[j] = LOWEST;
    vf lanes = splat(LOWEST);
    for (int64_t j = 0; j < TILE; j += VW) {
        const vf s = load<vf>(scores + j) * scale;
        lanes = s > lanes ? s : lanes;
    }
    const float tile_top = largest(lanes), high = tile_top > top ? tile_top : top;
    vf mass{};
    for (int64_t j = 0; j < TILE; j += VW) {
        const vf p = exp(load<vf>(scores + j) * scale - high);
        mass += p;
        store_vector(probs + j, p);
    }
    const float shrink = std::exp(top - high);
    total = total * shrink + sum(mass);
    top = high;
    return shrink;
}

// One thread's buffers for a task.
template <class T> struct Buffers {
    uint32_t *keys, *values;
    T* q;           // [queries][width]
    float* sums;    // [queries][padded_dim]
    float* scores;  // [queries][TILE]
    T* probs;       // [queries][TILE]
    float* top;     // [queries] largest score so far
    float* total;   // [queries] sum of exp(score - top)
    T* zeros;       // [padded_dim]

    Buffers(Scratch& scratch, int64_t queries, int64_t width, int64_t padded_dim) {
        char* base = nullptr;
        for (int pass = 0; pass < 2; pass++) {  // measure, then lay out
            char* at = base;
            auto take = [&](auto*& p, int64_t n) {
                p = reinterpret_cast<std::remove_reference_t<decltype(p)>>(at);
                at += (n * int64_t(sizeof(*p)) + 63) / 64 * 64;
            };
            take(keys, TILE * width / WORD<T>);
            take(values, TILE * padded_dim / WORD<T>);
            take(q, queries * width);
            take(sums, queries * padded_dim);
            take(scores, queries * TILE);
            take(probs, queries * TILE);
            take(top, queries);
            take(total, queries);
            take(zeros, padded_dim);
            if (!pass) base = scratch.reserve(size_t(at - base));
        }
        std::memset(q, 0, size_t(queries * width) * sizeof(T));
        std::memset(sums, 0, size_t(queries * padded_dim) * sizeof(float));
        std::memset(total, 0, size_t(queries) * sizeof(float));
        std::memset(zeros, 0, size_t(padded_dim) * sizeof(T));
        for (int64_t i = 0; i < queries; i++) top[i] = LOWEST;
    }
};

// `tile` holds the task's first tile; on return, `next_task`'s.
template <class T> void attend(const Call<T>& c, const Task& task, const Task* next_task, Tile<T>& tile) {
    static thread_local Scratch scratch;
    const int64_t group = c.heads / c.kv_heads, words = (c.dim + WORD<T> - 1) / WORD<T>, width = words * WORD<T>;
    const int64_t padded_dim = (c.dim + VW - 1) / VW * VW, queries = (task.end - task.first) * group;
    const int64_t value_stride = TILE / WORD<T> * VW, first_token = c.q_starts[task.row] + task.first;
    const Buffers<T> b(scratch, queries, width, padded_dim);
    for (int64_t i = 0; i < queries; i++)
        std::memcpy(b.q + i * width, c.q + (first_token + i / group) * c.q_stride + (task.kv_head * group + i % group) * c.dim,
                    size_t(c.dim) * sizeof(T));

    Tile<T> next;
    for (int64_t start = 0; start < task.keys || start == 0; start += TILE) {
        next.present = 0;
        if (start + TILE < task.keys)
            find_tile(c, task, start + TILE, next);
        else if (next_task)
            find_tile(c, *next_task, 0, next);
        pack_keys(tile, next, c.dim, b.keys);
        pack_values(tile, next, c.dim, b.zeros, b.values);

        // Tokens that see no key of this tile come first; then those that see a part, one by one; then the others.
        int64_t token = task.first;
        while (token < task.end && c.visible_keys(task.row, token) <= start) token++;
        while (token < task.end) {
            const int64_t seen = c.visible_keys(task.row, token) - start, columns = seen < TILE ? seen : TILE;
            const int64_t token_end = seen < TILE && c.causal ? token + 1 : task.end;
            const int64_t end = (token_end - task.first) * group;
            for (int64_t i = (token - task.first) * group; i < end; i += MR) {
                const int64_t n = end - i < MR ? end - i : MR, vectors = (columns + VW - 1) / VW;
                for (int64_t j = 0; j < vectors; j += NR)
                    panel_of<T>(n, vectors - j < NR ? vectors - j : NR)(
                        b.q + i * width, width, b.keys + j * words * VW, words * VW, words, false,
                        b.scores + i * TILE + j * VW, TILE, true, {});
                for (int64_t r = i; r < i + n; r++) {
                    const float shrink =
                        soften(b.scores + r * TILE, b.probs + r * TILE, columns, float(c.scale), b.top[r], b.total[r]);
                    if (shrink != 1.0f)
                        for (float* sum = b.sums + r * padded_dim; sum < b.sums + (r + 1) * padded_dim; sum += VW)
                            store(sum, load<vf>(sum) * shrink);
                }
                for (int64_t d = 0; d < padded_dim / VW; d += NR)
                    panel_of<T>(n, padded_dim / VW - d < NR ? padded_dim / VW - d : NR)(
                        b.probs + i * TILE, TILE, b.values + d * value_stride, value_stride, columns / WORD<T>,
                        columns % WORD<T> != 0, b.sums + i * padded_dim + d * VW, padded_dim, false, {});
            }
            token = token_end;
        }
        tile = next;
    }

    for (int64_t i = 0; i < queries; i++) {
        T* out = c.out + (first_token + i / group) * c.out_stride + (task.kv_head * group + i % group) * c.dim;
        const float inverse = b.total[i] != 0 ? 1.0f / b.total[i] : 0.0f;
        for (int64_t d = 0; d < c.dim; d += VW) {
            const vf y = load<vf>(b.sums + i * padded_dim + d) * inverse;
            if (d + VW <= c.dim)
                store_vector(out + d, y);
            else
                for (int64_t e = d; e < c.dim; e++) from_float(y[e - d], out[e]);
        }
    }
}

template <class T> int paged_attend(const Arg* arg) {
    const Call<T>& c = *reinterpret_cast<const Call<T>*>(arg);
    const int64_t group = c.heads / c.kv_heads, most = group < MAX_QUERIES ? MAX_QUERIES / group : 1;
    static thread_local std::vector<Task> kept_tasks;
    static thread_local std::vector<int64_t> kept_costs;
    std::vector<Task>& tasks = kept_tasks;
    std::vector<int64_t>& costs = kept_costs;  // sum of the costs of the tasks before each
    tasks.clear();
    costs.assign(1, 0);
    for (int64_t row = 0; row < c.rows; row++) {
        const int64_t q_len = c.q_starts[row + 1] - c.q_starts[row], kv_len = c.kv_lens[row];
        if (q_len < 0 || kv_len < 0 || (q_len && kv_len > c.max_pages * c.page_size)) return BAD_LENGTH;
        for (int64_t i = 0; q_len && i * c.page_size < kv_len; i++) {
            const int64_t page = c.block_table[row * c.max_pages + i];
            if (page < 0 || page >= c.num_pages) return BAD_PAGE;
        }
        const int64_t spans = (q_len + most - 1) / most;
        for (int64_t i = 0; i < spans; i++)
            for (int64_t head = 0; head < c.kv_heads; head++) {
                const Task task{row, share(q_len, spans, i), share(q_len, spans, i + 1), head,
                                c.visible_keys(row, share(q_len, spans, i + 1) - 1)};
                tasks.push_back(task);
                costs.push_back(costs.back() + (task.keys + TILE) * ((task.end - task.first) * group + MR));
            }
    }
    const int64_t count = int64_t(tasks.size());
    // Parts of equal cost, of neighbours in order: a thread fetches its next task's first tile during the last one.
    const int64_t wanted = costs.back() * c.dim / GRAIN, threads = wanted < c.threads ? wanted : c.threads;
    const int64_t parts = threads <= 1 ? 1 : threads * PARTS_PER_THREAD;
    parallel(threads, parts, [&](int64_t part) {
        auto first_of = [&](int64_t i) {
            return std::lower_bound(costs.begin(), costs.end() - 1, share(costs.back(), parts, i)) - costs.begin();
        };
        const int64_t begin = first_of(part), end = part + 1 < parts ? first_of(part + 1) : count;
        Tile<T> tile;
        if (begin < end) find_tile(c, tasks[begin], 0, tile);
        for (int64_t i = begin; i < end; i++) attend(c, tasks[i], i + 1 < end ? &tasks[i + 1] : nullptr, tile);
    });
    return OK;
}

}  // namespace
}  // namespace mstar

using namespace mstar;

KERNEL(mstar_paged_attend) { return arg[11].i ? paged_attend<bf16>(arg) : paged_attend<float>(arg); }
