// Mixture of experts: choosing experts by their logits, and the MLPs of the chosen ones over the tokens that chose them.
//
// Tokens are grouped by expert, so that an expert's weights come from memory once. A token's result is the same bits
// whatever tokens share its experts: products accumulate as in panel.h, and the experts' results are summed in the
// token's own order.
#include <algorithm>
#include <limits>
#include <type_traits>
#include <vector>

#include "gates.h"
#include "matrix.h"

namespace mstar {
namespace {

constexpr int64_t GRAIN = 1 << 12;  // elements that are worth another thread

// The arguments of the call, in order.
template <class T> struct Call {
    int64_t threads, tokens, per_token, experts, hidden, width;   // width: of an expert's MLP
    int64_t x_stride, plus_stride, out_stride, is_bf16;           // strides of a token
    const T* x;
    const int32_t* ids;
    const float* weights;
    const uint32_t *gate_up, *down;
    const T* plus;  // or null
    T* out;
};

// Pairs of a token and one of its experts, by expert.
struct Grouping {
    std::vector<int64_t> starts;  // [experts + 1] of each expert's pairs
    std::vector<int64_t> place;   // [tokens · per_token] of a token's pairs

    bool sort(const int32_t* ids, int64_t pairs, int64_t experts) {
        starts.assign(experts + 1, 0);
        place.resize(pairs);
        for (int64_t i = 0; i < pairs; i++) {
            if (ids[i] < 0 || ids[i] >= experts) return false;
            place[i] = starts[ids[i] + 1]++;
        }
        for (int64_t e = 0; e < experts; e++) starts[e + 1] += starts[e];
        for (int64_t i = 0; i < pairs; i++) place[i] += starts[ids[i]];
        return true;
    }
};

// y [pairs][out] = x [pairs][in] · Wᵀ of each pair's expert.
template <class T, class O>
void multiply(const Grouping& grouping, const T* x, const uint32_t* w, O* y, int64_t in, int64_t out, int64_t threads) {
    struct Task {
        int64_t expert, part, parts;  // parts of the columns
    };
    static thread_local std::vector<Task> kept_tasks;
    std::vector<Task>& tasks = kept_tasks;
    tasks.clear();
    const int64_t cols = (out + VW - 1) / VW, groups = (cols + NR - 1) / NR;
    const int64_t expert_words = cols * ((in + WORD<T> - 1) / WORD<T>) * VW;
    const int64_t experts = int64_t(grouping.starts.size()) - 1;
    auto cost = [&](int64_t e) {  // the weights cost something for few pairs too
        const int64_t pairs = grouping.starts[e + 1] - grouping.starts[e];
        return pairs ? pairs + MR : 0;
    };
    int64_t total = 0;
    for (int64_t e = 0; e < experts; e++) total += cost(e);
    for (int64_t e = 0; e < experts; e++) {
        const int64_t all = threads <= 1 ? 1 : threads * 2 * PARTS_PER_THREAD;
        const int64_t parts = cost(e) ? std::min((cost(e) * all + total - 1) / total, groups) : 0;
        for (int64_t part = 0; part < parts; part++) tasks.push_back({e, part, parts});
    }
    parallel(threads, int64_t(tasks.size()), [&](int64_t i) {
        const Task& task = tasks[i];
        const int64_t first = grouping.starts[task.expert], rows = grouping.starts[task.expert + 1] - first;
        block(Shape{rows, in, out, in, out}, x + first * in, w + task.expert * expert_words, nullptr, y + first * out, 0,
              rows, share(cols, task.parts, task.part), share(cols, task.parts, task.part + 1));
    });
}

template <class T> int moe_mlp(const Arg* arg) {
    const Call<T>& c = *reinterpret_cast<const Call<T>*>(arg);
    static thread_local Grouping kept_grouping;
    static thread_local Scratch scratch;
    Grouping& grouping = kept_grouping;
    const int64_t pairs = c.tokens * c.per_token;
    if (!grouping.sort(c.ids, pairs, c.experts)) return BAD_EXPERT;

    T *x, *hidden, *gated;  // [pairs][hidden], [pairs][2 · width], [pairs][width]
    float* y;               // [pairs][hidden]
    char* base = nullptr;
    for (int pass = 0; pass < 2; pass++) {  // measure, then lay out
        char* at = base;
        auto take = [&](auto*& p, int64_t n) {
            p = reinterpret_cast<std::remove_reference_t<decltype(p)>>(at);
            at += (n * int64_t(sizeof(*p)) + 63) / 64 * 64;
        };
        take(x, pairs * c.hidden);
        take(hidden, pairs * 2 * c.width);
        take(gated, pairs * c.width);
        take(y, pairs * c.hidden);
        if (!pass) base = scratch.reserve(size_t(at - base) + 64);
    }

    const int64_t wanted = pairs * c.hidden * c.width * 3 / PRODUCTS_PER_THREAD;
    const int64_t threads = wanted < c.threads ? wanted : c.threads;
    parallel_ranges(threads, pairs, pairs * c.hidden, GRAIN, [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; i++)
            std::memcpy(x + grouping.place[i] * c.hidden, c.x + i / c.per_token * c.x_stride, c.hidden * sizeof(T));
    });
    multiply(grouping, x, c.gate_up, hidden, c.hidden, 2 * c.width, threads);
    parallel_ranges(threads, pairs, pairs * c.width * 4, GRAIN, [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; i++) silu_and_mul_row(hidden + i * 2 * c.width, c.width, gated + i * c.width);
    });
    multiply(grouping, gated, c.down, y, c.width, c.hidden, threads);
    parallel_ranges(threads, c.tokens, pairs * c.hidden, GRAIN, [&](int64_t from, int64_t to) {
        for (int64_t t = from; t < to; t++) {
            const int64_t* place = grouping.place.data() + t * c.per_token;
            const float* weights = c.weights + t * c.per_token;
            const T* plus = c.plus ? c.plus + t * c.plus_stride : nullptr;
            T* out = c.out + t * c.out_stride;
            const int64_t whole = c.hidden / VW * VW;
            for (int64_t i = 0; i < whole; i += VW) {
                vf sum{};
                for (int64_t j = 0; j < c.per_token; j++) sum += load<vf>(y + place[j] * c.hidden + i) * weights[j];
                store_vector(out + i, plus ? sum + load_vector(plus + i) : sum);
            }
            for (int64_t i = whole; i < c.hidden; i++) {
                float sum = 0;
                for (int64_t j = 0; j < c.per_token; j++) sum += y[place[j] * c.hidden + i] * weights[j];
                from_float(plus ? sum + to_float(plus[i]) : sum, out[i]);
            }
        }
    });
    return OK;
}

// The k largest logits, in order, the lowest index first among equals, and their shares of the sum of exponentials.
void top_k(const float* logits, int64_t experts, int64_t k, int32_t* ids, float* weights) {
    constexpr float LOWEST = -std::numeric_limits<float>::infinity();
    int64_t found = 0;
    bool broken = false;
    for (int64_t i = 0; i < experts; i++) {
        broken |= logits[i] != logits[i];
        const float x = logits[i] > LOWEST ? logits[i] : LOWEST;
        if (found == k && !(x > weights[k - 1])) continue;
        int64_t at = found < k ? found++ : k - 1;
        for (; at && x > weights[at - 1]; at--) weights[at] = weights[at - 1], ids[at] = ids[at - 1];
        weights[at] = x;
        ids[at] = int32_t(i);
    }
    const float top = weights[0];
    float total = 0;
    for (int64_t j = 0; j < k; j++) total += weights[j] = std::exp(weights[j] - top);
    for (int64_t j = 0; j < k; j++)
        weights[j] = broken ? std::numeric_limits<float>::quiet_NaN() : weights[j] / total;
}

}  // namespace
}  // namespace mstar

using namespace mstar;

KERNEL(mstar_moe_mlp) { return arg[9].i ? moe_mlp<bf16>(arg) : moe_mlp<float>(arg); }

// threads, tokens, experts, k, logits stride, logits, ids, weights
KERNEL(mstar_router_top_k) {
    const int64_t tokens = arg[1].i, experts = arg[2].i, k = arg[3].i;
    parallel_ranges(arg[0].i, tokens, tokens * experts, GRAIN, [&](int64_t from, int64_t to) {
        for (int64_t t = from; t < to; t++)
            top_k(arg[5].as<const float>() + t * arg[4].i, experts, k, arg[6].as<int32_t>() + t * k,
                  arg[7].as<float>() + t * k);
    });
    return OK;
}
