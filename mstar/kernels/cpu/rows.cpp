// Operations on each token by itself: norms, gates, token embedding and greedy choice.
#include <limits>

#include "gates.h"
#include "pool.h"

namespace mstar {
namespace {

constexpr int64_t GRAIN = 1 << 12;  // elements that are worth another thread

template <class T> vf rounded(vf x);
template <> vf rounded<float>(vf x) { return x; }
template <> vf rounded<bf16>(vf x) {
    bf16 y[VW];
    store_vector(y, x);
    return load_vector(y);
}

template <class T> T scaled(float normalized, T weight, bool zero_centered) {
    if (zero_centered) return rounded_to<T>(normalized * (1.0f + to_float(weight)));
    return rounded_to<T>(to_float(rounded_to<T>(normalized)) * to_float(weight));
}

// out = x / sqrt(mean(x²) + eps) · weight; with a residual, x + residual is rounded into it first and normalized.
template <class T>
void norm_row(const T* x, T* residual, const T* weight, T* out, int64_t width, float eps, bool zero_centered) {
    const int64_t whole = width / VW * VW;
    vf squares{};
    float tail = 0;
    const T* from = x;
    if (residual) {
        for (int64_t i = 0; i < whole; i += VW) {
            vf y = rounded<T>(load_vector(x + i) + load_vector(residual + i));
            store_vector(residual + i, y);
            squares += y * y;
        }
        for (int64_t i = whole; i < width; i++) {
            from_float(to_float(x[i]) + to_float(residual[i]), residual[i]);
            tail += to_float(residual[i]) * to_float(residual[i]);
        }
        from = residual;
    } else {
        for (int64_t i = 0; i < whole; i += VW) {
            vf y = load_vector(x + i);
            squares += y * y;
        }
        for (int64_t i = whole; i < width; i++) tail += to_float(x[i]) * to_float(x[i]);
    }
    const float scale = 1.0f / std::sqrt((sum(squares) + tail) / float(width) + eps);
    for (int64_t i = 0; i < whole; i += VW) {
        vf y = load_vector(from + i) * scale, w = load_vector(weight + i);
        store_vector(out + i, zero_centered ? y * (1.0f + w) : rounded<T>(y) * w);
    }
    for (int64_t i = whole; i < width; i++) out[i] = scaled(to_float(from[i]) * scale, weight[i], zero_centered);
}

template <class T> void norm(const Arg* arg) {
    const int64_t outer = arg[1].i, inner = arg[2].i, width = arg[3].i, n = outer * inner;
    T* residual = arg[12].as<T>();
    parallel_ranges(arg[0].i, n, n * width, GRAIN, [&](int64_t from, int64_t to) {
        for (int64_t t = from; t < to; t++) {
            const int64_t i = t / inner, j = t % inner;
            norm_row(arg[11].as<const T>() + i * arg[4].i + j * arg[5].i, residual ? residual + i * width : nullptr,
                     arg[13].as<const T>(), arg[14].as<T>() + i * arg[6].i + j * arg[7].i, width, float(arg[10].d),
                     arg[8].i);
        }
    });
}

template <class T> void silu_and_mul(const Arg* arg) {
    const int64_t tokens = arg[1].i, width = arg[2].i;
    parallel_ranges(arg[0].i, tokens, tokens * width * 4, GRAIN, [&](int64_t from, int64_t to) {
        for (int64_t t = from; t < to; t++)
            silu_and_mul_row(arg[6].as<const T>() + t * arg[3].i, width, arg[7].as<T>() + t * arg[4].i);
    });
}

template <class T> void sigmoid_mul(const Arg* arg) {
    const int64_t tokens = arg[1].i, width = arg[2].i;
    parallel_ranges(arg[0].i, tokens, tokens * width * 4, GRAIN, [&](int64_t from, int64_t to) {
        for (int64_t t = from; t < to; t++) {
            T* x = arg[7].as<T>() + t * arg[3].i;
            const int64_t at = t * arg[4].i;
            if (!arg[5].i) {
                gate_row(x, arg[8].as<const T>() + at, width, [](vf g) { return sigmoid(g); });
                continue;
            }
            const float gate = arg[5].i == 1 ? to_float(arg[8].as<const T>()[at]) : arg[8].as<const float>()[at];
            const vf all = sigmoid(splat(gate));
            gate_row(x, x, width, [&](vf) { return all; });
        }
    });
}

template <class T> void gated_norm(const Arg* arg) {
    const int64_t tokens = arg[1].i, heads = arg[2].i, dim = arg[3].i, n = tokens * heads;
    parallel_ranges(arg[0].i, n, n * dim * 5, GRAIN, [&](int64_t from, int64_t to) {
        for (int64_t i = from; i < to; i++) {
            const int64_t t = i / heads, at = i % heads * dim;
            T* out = arg[12].as<T>() + t * arg[6].i + at;
            norm_row<T>(arg[9].as<const T>() + t * arg[4].i + at, nullptr, arg[11].as<const T>(), out, dim,
                        float(arg[8].d), false);
            gate_row(out, arg[10].as<const T>() + t * arg[5].i + at, dim, [](vf z) { return silu(z); });
        }
    });
}

// Rows of a plain table, or of one in the packed layout of panel.h, where a row's words lie VW words apart.
template <class T> int embedding(const Arg* arg) {
    const int64_t tokens = arg[1].i, width = arg[2].i, vocab = arg[3].i, out_stride = arg[4].i;
    const bool wide_ids = arg[6].i, packed = arg[7].i;
    for (int64_t t = 0; t < tokens; t++) {
        const int64_t id = wide_ids ? arg[8].as<int64_t>()[t] : arg[8].as<int32_t>()[t];
        if (id < 0 || id >= vocab) return BAD_TOKEN;
        T* out = arg[10].as<T>() + t * out_stride;
        if (!packed) {
            std::memcpy(out, arg[9].as<T>() + id * width, width * sizeof(T));
            continue;
        }
        const int64_t words = (width + WORD<T> - 1) / WORD<T>;
        const uint32_t* from = arg[9].as<uint32_t>() + id / VW * words * VW + id % VW;
        for (int64_t k = 0; k < width / WORD<T>; k++) std::memcpy(out + k * WORD<T>, from + k * VW, 4);
        if (width % WORD<T>) std::memcpy(out + width - 1, from + (words - 1) * VW, sizeof(T));
    }
    return OK;
}

// Lowest index of the largest value; the first NaN is larger than everything.
template <class T> int32_t index_of_largest(const T* x, int64_t n) {
    const int64_t whole = n / VW * VW;
    vf best = splat(-std::numeric_limits<float>::infinity());
    vi index{}, here{}, nan{};
    for (int i = 0; i < VW; i++) here[i] = index[i] = i;
    for (int64_t i = 0; i < whole; i += VW, here += VW) {
        vf y = load_vector(x + i);
        vi more = y > best;
        best = more ? y : best;
        index = more ? here : index;
        nan |= y != y;
    }
    int32_t winner = 0;
    float value = -std::numeric_limits<float>::infinity();
    bool found_nan = false;
    for (int i = 0; i < VW && whole; i++) {
        found_nan |= nan[i] != 0;
        if (best[i] > value || (best[i] == value && index[i] < winner)) value = best[i], winner = index[i];
    }
    for (int64_t i = whole; i < n; i++) {
        float y = to_float(x[i]);
        found_nan |= y != y;
        if (y > value) value = y, winner = int32_t(i);
    }
    for (int64_t i = 0; found_nan; i++) {
        float y = to_float(x[i]);
        if (y != y) return int32_t(i);
    }
    return winner;
}

template <class T> void greedy(const Arg* arg) {
    const int64_t rows = arg[1].i, vocab = arg[2].i;
    parallel_ranges(arg[0].i, rows, rows * vocab, GRAIN, [&](int64_t from, int64_t to) {
        for (int64_t r = from; r < to; r++)
            arg[6].as<int32_t>()[r] = index_of_largest(arg[5].as<T>() + r * arg[3].i, vocab);
    });
}

}  // namespace
}  // namespace mstar

using namespace mstar;

// threads, outer, inner, width, x strides (2), out strides (2), zero centred, is bf16, eps, x, residual or null
// (contiguous), weight, out
KERNEL(mstar_norm) { return arg[9].i ? norm<bf16>(arg) : norm<float>(arg), OK; }

// threads, tokens, width, gate_up stride, out stride, is bf16, gate_up, out
KERNEL(mstar_silu_and_mul) { return arg[5].i ? silu_and_mul<bf16>(arg) : silu_and_mul<float>(arg), OK; }

// threads, tokens, width, x stride, gate stride, one gate per token (1; 2: in fp32), is bf16, x, gate
KERNEL(mstar_sigmoid_mul) { return arg[6].i ? sigmoid_mul<bf16>(arg) : sigmoid_mul<float>(arg), OK; }

// threads, tokens, heads, dim, x stride, z stride, out stride, is bf16, eps, x, z, weight, out
KERNEL(mstar_gated_norm) { return arg[7].i ? gated_norm<bf16>(arg) : gated_norm<float>(arg), OK; }

// threads, tokens, width, vocab, out stride, is bf16, ids are int64, packed, ids, table, out
KERNEL(mstar_embedding) { return arg[5].i ? embedding<bf16>(arg) : embedding<float>(arg); }

// threads, rows, vocab, logits stride, is bf16, logits, out
KERNEL(mstar_greedy) { return arg[4].i ? greedy<bf16>(arg) : greedy<float>(arg), OK; }
