// Attention of each row's queries over its pages, with a running softmax over tiles of TILE keys.
//
// A query's result depends on its own row only. It is defined over segments of SEGMENT keys, counted from the row's
// first key: a running softmax of its own in each, over tiles in order up to the query's last visible key, and the
// segments' results folded one after the other. Decode and prefill of any length give the same bits, and the segments
// of a long row can be computed by several threads.
#include <algorithm>
#include <atomic>
#include <type_traits>
#include <vector>

#include "pool.h"
#include "softmax.h"

namespace mstar {
namespace {

constexpr int64_t SEGMENT = 512;         // a multiple of TILE
constexpr int64_t MAX_QUERIES = 96;      // query vectors of a head that share one packing of a tile
constexpr int64_t FEW_QUERIES = 24;      // to pack a tile for these and again for others may pay
constexpr int64_t MAX_HEADS = 4;         // heads that a task takes together: their keys lie side by side in memory
constexpr int64_t PACKING = 12;          // what packing a key costs, in queries that meet it
constexpr int64_t TASKS_PER_THREAD = 4;  // tasks that weigh more than one of so many equal shares are split
constexpr int64_t LATE_QUERIES = 12;     // so many per tile and head cover the fetching of the next tile
constexpr int64_t GRAIN = 1 << 16;       // products that are worth another thread

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

// Tokens [first, end) of a row's queries with the share of kv heads [head, head_end) of the heads, over keys
// [begin, keys): of all segments, or of one of them, whose results lie in `partials` then.
struct Task {
    int64_t row, first, end, head, head_end, begin, keys, split;  // split: index of its `Split`, or -1

    int64_t tokens() const { return end - first; }
};

// What the tasks of the segments of some queries share: where their results lie, one after the other, and how many
// tasks are still to come. Who ends last folds them.
struct Split {
    int64_t offset, segments;
};

template <class T> void find_tile(const Call<T>& c, const Task& task, int64_t head, int64_t start, Tile<T>& tile) {
    const int32_t* page = c.block_table + task.row * c.max_pages + start / c.page_size;
    const int64_t step = c.kv_heads * c.dim;
    tile.present = task.keys - start < TILE ? task.keys - start : TILE;
    int64_t offset = start % c.page_size;
    for (int64_t j = 0; j < tile.present; page++, offset = 0) {
        int64_t at = ((*page * c.page_size + offset) * c.kv_heads + head) * c.dim;
        for (; offset < c.page_size && j < tile.present; offset++, j++, at += step) {
            tile.keys[j] = c.k_pages + at;
            tile.values[j] = c.v_pages + at;
        }
    }
}

// Sizes that follow from a task.
template <class T> struct Extent {
    int64_t group, words, width, padded_dim, queries, heads;

    Extent(const Call<T>& c, const Task& task)
        : group(c.heads / c.kv_heads), words((c.dim + WORD<T> - 1) / WORD<T>), width(words * WORD<T>),
          padded_dim((c.dim + VW - 1) / VW * VW), queries(task.tokens() * group), heads(task.head_end - task.head) {}
    int64_t running_size() const { return Running::size(queries * heads, padded_dim); }
};

// One thread's buffers for a task.
template <class T> struct Buffers {
    uint32_t *keys, *values;
    T* q;           // [heads][queries][width]
    float* scores;  // [MR][TILE]
    T* probs;       // [MR][TILE]
    float* running[2];
    T* zeros;       // [padded_dim]

    Buffers(Scratch& scratch, const Extent<T>& e) {
        char* base = nullptr;
        for (int pass = 0; pass < 2; pass++) {  // measure, then lay out
            char* at = base;
            auto take = [&](auto*& p, int64_t n) {
                p = reinterpret_cast<std::remove_reference_t<decltype(p)>>(at);
                at += (n * int64_t(sizeof(*p)) + 63) / 64 * 64;
            };
            take(keys, TILE * e.width / WORD<T>);
            take(values, TILE * e.padded_dim / WORD<T>);
            take(q, e.heads * e.queries * e.width);
            take(scores, MR * TILE);
            take(probs, MR * TILE);
            take(running[0], e.running_size());
            take(running[1], e.running_size());
            take(zeros, e.padded_dim);
            if (!pass) base = scratch.reserve(size_t(at - base));
        }
        std::memset(q, 0, size_t(e.heads * e.queries * e.width) * sizeof(T));
        std::memset(zeros, 0, size_t(e.padded_dim) * sizeof(T));
    }
};

// Brings a tile into the second-level cache, a part at a time.
template <class T> struct Ahead {
    const Tile<T>& tile;
    int64_t rows, dim, done = 0;  // rows: of each part

    void fetch() {
        const int64_t end = done + rows < tile.present ? done + rows : tile.present;
        mstar::fetch(tile.keys, done, end, dim);
        mstar::fetch(tile.values, done, end, dim);
        done = end;
    }
};

// The queries of one head, from query `base` of the running ones, meet the packed tile of the keys from `start`.
template <class T>
void meet(const Call<T>& c, const Task& task, const Extent<T>& e, const Buffers<T>& b, const Running& running,
          int64_t base, int64_t start, Ahead<T> ahead) {
    const int64_t value_stride = TILE / WORD<T> * VW, padded_dim = e.padded_dim;
    const T* q = b.q + base * e.width;
    float* sums = running.sums + base * padded_dim;
    // Tokens that see no key of this tile come first; then those that see a part, one by one; then the others.
    int64_t token = task.first;
    while (token < task.end && c.visible_keys(task.row, token) <= start) token++;
    while (token < task.end) {
        const int64_t seen = c.visible_keys(task.row, token) - start, columns = seen < TILE ? seen : TILE;
        const int64_t token_end = seen < TILE && c.causal ? token + 1 : task.end;
        const int64_t end = (token_end - task.first) * e.group;
        for (int64_t i = (token - task.first) * e.group; i < end; i += MR) {
            const int64_t n = end - i < MR ? end - i : MR, vectors = (columns + VW - 1) / VW;
            for (int64_t j = 0; j < vectors; j += NR)
                panel_of<T>(n, vectors - j < NR ? vectors - j : NR)(
                    q + i * e.width, e.width, b.keys + j * e.words * VW, e.words * VW, e.words, false,
                    b.scores + j * VW, TILE, true, {});
            for (int64_t r = i; r < i + n; r++) {
                const int64_t at = (r - i) * TILE, query = base + r;
                const float shrink = soften(b.scores + at, b.probs + at, columns, float(c.scale), running.top[query],
                                            running.mass + query * VW);
                ahead.fetch();
                if (shrink != 1.0f)
                    for (float* sum = sums + r * padded_dim; sum < sums + (r + 1) * padded_dim; sum += VW)
                        store(sum, load<vf>(sum) * shrink);
            }
            for (int64_t d = 0; d < padded_dim / VW; d += NR)
                panel_of<T>(n, padded_dim / VW - d < NR ? padded_dim / VW - d : NR)(
                    b.probs, TILE, b.values + d * value_stride, value_stride, columns / WORD<T>,
                    columns % WORD<T> != 0, sums + i * padded_dim + d * VW, padded_dim, false, {});
        }
        token = token_end;
    }
    while (ahead.done < ahead.tile.present) ahead.fetch();
}

// Folds a later segment, whose keys are from `start`, into what the task's queries have.
template <class T>
void fold(const Call<T>& c, const Task& task, const Extent<T>& e, const Running& sums, const Running& later,
          int64_t start) {
    for (int64_t i = 0; i < e.heads * e.queries; i++)
        if (c.visible_keys(task.row, task.first + i % e.queries / e.group) > start) sums.fold(later, i, e.padded_dim);
}

template <class T> void write_out(const Call<T>& c, const Task& task, const Extent<T>& e, const Running& result) {
    for (int64_t i = 0; i < e.heads * e.queries; i++) {
        const int64_t token = c.q_starts[task.row] + task.first + i % e.queries / e.group;
        T* out = c.out + token * c.out_stride + ((task.head + i / e.queries) * e.group + i % e.group) * c.dim;
        const float total = sum(load<vf>(result.mass + i * VW)), inverse = total != 0 ? 1.0f / total : 0.0f;
        for (int64_t d = 0; d < c.dim; d += VW) {
            const vf y = load<vf>(result.sums + i * e.padded_dim + d) * inverse;
            if (d + VW <= c.dim)
                store_vector(out + d, y);
            else
                for (int64_t j = d; j < c.dim; j++) from_float(y[j - d], out[j]);
        }
    }
}

// `tile` holds the first tile of the task's first head; on return, that of `next_task`. `partial`: null, or where the
// result of the task's one segment goes.
template <class T>
void attend(const Call<T>& c, const Task& task, const Task* next_task, Tile<T>& tile, float* partial) {
    static thread_local Scratch scratch;
    const Extent<T> e(c, task);
    const Buffers<T> b(scratch, e);
    const int64_t queries = e.heads * e.queries;
    for (int64_t i = 0; i < queries; i++) {
        const int64_t token = c.q_starts[task.row] + task.first + i % e.queries / e.group;
        const int64_t head = (task.head + i / e.queries) * e.group + i % e.group;
        std::memcpy(b.q + i * e.width, c.q + token * c.q_stride + head * c.dim, size_t(c.dim) * sizeof(T));
    }

    const Running result(partial ? partial : b.running[0], queries, e.padded_dim);
    const Running later(b.running[1], queries, e.padded_dim);
    // A next tile is fetched bit by bit, while this one is packed or, better, while many queries meet it.
    const bool fetch_late = e.queries >= LATE_QUERIES;
    const int64_t rows_per_query = fetch_late ? (TILE + e.queries - 1) / e.queries : 0;
    Tile<T> next, none;
    for (int64_t segment = task.begin; segment < task.keys || segment == task.begin; segment += SEGMENT) {
        const Running& running = segment == task.begin ? result : later;
        running.begin(queries, e.padded_dim);
        const int64_t end = segment + SEGMENT < task.keys ? segment + SEGMENT : task.keys;
        for (int64_t start = segment; start < end || start == task.begin; start += TILE)
            for (int64_t head = task.head; head < task.head_end; head++) {
                next.present = 0;
                if (head + 1 < task.head_end)
                    find_tile(c, task, head + 1, start, next);
                else if (start + TILE < task.keys)
                    find_tile(c, task, task.head, start + TILE, next);
                else if (next_task)
                    find_tile(c, *next_task, next_task->head, next_task->begin, next);
                const Tile<T>&early = fetch_late ? none : next, &late = fetch_late ? next : none;
                pack_keys(tile, early, c.dim, b.keys);
                pack_values(tile, early, c.dim, b.zeros, b.values);
                const Ahead<T> ahead{late, rows_per_query, c.dim};
                meet(c, task, e, b, running, (head - task.head) * e.queries, start, ahead);
                tile = next;
            }
        if (segment > task.begin) fold(c, task, e, result, later, segment);
    }
    if (!partial) write_out(c, task, e, result);
}

// The tasks of one call, and where those of split segments meet. Kept from call to call by the calling thread.
template <class T> struct Plan {
    std::vector<Task> tasks;
    std::vector<int64_t> costs;  // sum of the costs of the tasks before each
    std::vector<Split> splits;
    std::vector<std::atomic<int64_t>> left;  // by split: tasks that have not ended
    Scratch partials;
    int64_t floats;  // of partials

    static int64_t cost(int64_t keys, int64_t queries) { return (keys + TILE) * (queries + PACKING); }

    // Tokens [first, end) of a row. What weighs more than `limit` is split: by segments, heads, and tokens.
    void add(const Call<T>& c, int64_t row, int64_t first, int64_t end, int64_t limit) {
        const int64_t keys = c.visible_keys(row, end - 1), queries = (end - first) * (c.heads / c.kv_heads);
        const int64_t segments = cost(keys, queries) * c.kv_heads > limit ? (keys + SEGMENT - 1) / SEGMENT : 1;
        const int64_t span = segments > 1 ? SEGMENT : keys;
        const int64_t middle = (first + end) / 2;
        if (cost(span, queries) > limit && queries > FEW_QUERIES && first < middle) {
            add(c, row, first, middle, limit);
            return add(c, row, middle, end, limit);
        }
        const bool apart = cost(span, queries) * c.kv_heads > limit;
        const int64_t groups = apart ? c.kv_heads : (c.kv_heads + MAX_HEADS - 1) / MAX_HEADS;
        for (int64_t group = 0; group < groups; group++) {
            const int64_t head = share(c.kv_heads, groups, group), head_end = share(c.kv_heads, groups, group + 1);
            Task task{row, first, end, head, head_end, 0, keys, -1};
            if (segments > 1) {
                task.split = int64_t(splits.size());
                splits.push_back({floats, segments});
                floats += segments * Extent<T>(c, task).running_size();
            }
            for (int64_t i = 0; i < (segments > 1 ? segments : 1); i++) {
                task.begin = i * span;
                task.keys = i + 1 < segments ? (i + 1) * span : keys;
                tasks.push_back(task);
                costs.push_back(costs.back() + cost(task.keys - task.begin, queries) * (head_end - head));
            }
        }
    }

    void run(const Call<T>& c, int64_t i, Tile<T>& tile, const Task* next) {
        const Task& task = tasks[i];
        if (task.split < 0) return attend(c, task, next, tile, nullptr);
        const Extent<T> e(c, task);
        const Split& split = splits[task.split];
        float* first = reinterpret_cast<float*>(partials.reserve(0)) + split.offset;
        attend(c, task, next, tile, first + task.begin / SEGMENT * e.running_size());
        if (left[task.split].fetch_sub(1, std::memory_order_acq_rel) > 1) return;
        auto of_segment = [&](int64_t j) {
            return Running(first + j * e.running_size(), e.heads * e.queries, e.padded_dim);
        };
        const Running result = of_segment(0);
        for (int64_t j = 1; j < split.segments; j++) fold(c, task, e, result, of_segment(j), j * SEGMENT);
        write_out(c, task, e, result);
    }
};

template <class T> int paged_attend(const Arg* arg) {
    const Call<T>& c = *reinterpret_cast<const Call<T>*>(arg);
    const int64_t group = c.heads / c.kv_heads, most = group < MAX_QUERIES ? MAX_QUERIES / group : 1;
    static thread_local Plan<T> kept;
    Plan<T>& plan = kept;
    plan.tasks.clear();
    plan.splits.clear();
    plan.costs.assign(1, 0);
    plan.floats = 0;
    int64_t total = 0;
    auto each_span = [&](int64_t row, auto&& f) {
        const int64_t q_len = c.q_starts[row + 1] - c.q_starts[row], spans = (q_len + most - 1) / most;
        for (int64_t i = 0; i < spans; i++) f(share(q_len, spans, i), share(q_len, spans, i + 1));
    };
    for (int64_t row = 0; row < c.rows; row++) {
        const int64_t q_len = c.q_starts[row + 1] - c.q_starts[row], kv_len = c.kv_lens[row];
        if (q_len < 0 || kv_len < 0 || (q_len && kv_len > c.max_pages * c.page_size)) return BAD_LENGTH;
        for (int64_t i = 0; q_len && i * c.page_size < kv_len; i++) {
            const int64_t page = c.block_table[row * c.max_pages + i];
            if (page < 0 || page >= c.num_pages) return BAD_PAGE;
        }
        each_span(row, [&](int64_t first, int64_t end) {
            total += plan.cost(c.visible_keys(row, end - 1), (end - first) * group) * c.kv_heads;
        });
    }
    const int64_t wanted = total * c.dim / GRAIN, threads = wanted < c.threads ? wanted : c.threads;
    const int64_t limit = threads <= 1 ? total : total / (threads * TASKS_PER_THREAD);
    for (int64_t row = 0; row < c.rows; row++)
        each_span(row, [&](int64_t first, int64_t end) { plan.add(c, row, first, end, limit); });
    plan.partials.reserve(size_t(plan.floats) * sizeof(float));
    const size_t splits = plan.splits.size();
    if (plan.left.size() < splits) plan.left = std::vector<std::atomic<int64_t>>(2 * splits);
    for (size_t i = 0; i < splits; i++) plan.left[i].store(plan.splits[i].segments, std::memory_order_relaxed);

    const std::vector<int64_t>& costs = plan.costs;
    const int64_t count = int64_t(plan.tasks.size());
    // Parts of equal cost, of neighbours in order: a thread fetches its next task's first tile during the last one.
    const int64_t parts = threads <= 1 ? 1 : threads * TASKS_PER_THREAD;
    parallel(threads, parts, [&](int64_t part) {
        auto first_of = [&](int64_t i) {
            return std::lower_bound(costs.begin(), costs.end() - 1, share(costs.back(), parts, i)) - costs.begin();
        };
        const int64_t begin = first_of(part), end = part + 1 < parts ? first_of(part + 1) : count;
        Tile<T> tile;
        if (begin < end) find_tile(c, plan.tasks[begin], plan.tasks[begin].head, plan.tasks[begin].begin, tile);
        for (int64_t i = begin; i < end; i++) plan.run(c, i, tile, i + 1 < end ? &plan.tasks[i + 1] : nullptr);
    });
    return OK;
}

}  // namespace
}  // namespace mstar

using namespace mstar;

KERNEL(mstar_paged_attend) { return arg[11].i ? paged_attend<bf16>(arg) : paged_attend<float>(arg); }
