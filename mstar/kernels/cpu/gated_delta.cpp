// Causal convolution, silu and the gated delta rule over the rows' states; the formulas are those of `gated_delta` in
// mstar/kernels/linear_attention.py.
//
// Tokens of a row go one by one through the same arithmetic, whatever is beside them: the same bits in any batch and
// however a prompt is cut. A state is read and written once per call; what lies between are the tiles of one value
// head, small enough for the first-level cache.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "panel.h"
#include "pool.h"

namespace mstar {
namespace {

constexpr int64_t BLOCK = 32;  // tokens that are convolved at once
constexpr int VECTORS = 4;     // columns of a tile of the state, in vectors
constexpr int64_t TILE = VECTORS * VW;
constexpr int64_t STATE_COST = 4;   // reading and writing a state, in tokens
constexpr int64_t GRAIN = 1 << 16;  // products that are worth another thread
constexpr float NORM_EPS = 1e-6f;

// The arguments of the call, in order.
template <class T> struct Call {
    int64_t threads, rows, tokens, slots, key_heads, heads, key_dim, value_dim, taps;
    int64_t qkv_stride, b_stride, a_stride, out_stride, is_bf16;  // strides of a token
    const T *qkv, *b, *a, *conv_weight;
    const float *a_log, *dt_bias;
    T* conv_state;
    float* delta_state;
    const int32_t *slot, *has_state, *q_starts;
    T* out;

    int64_t channels() const { return 2 * key_heads * key_dim + heads * value_dim; }
    int64_t length(int64_t row) const { return q_starts[row + 1] - q_starts[row]; }
    int64_t tiles() const { return (value_dim + TILE - 1) / TILE; }
    T* history(int64_t row) const { return conv_state + slot[row] * (taps - 1) * channels(); }
    // Channels of a value head's queries, keys and values.
    int64_t q_at(int64_t head) const { return head / (heads / key_heads) * key_dim; }
    int64_t k_at(int64_t head) const { return key_heads * key_dim + q_at(head); }
    int64_t v_at(int64_t head) const { return 2 * key_heads * key_dim + head * value_dim; }
};

// One thread's buffers.
template <class T> struct Buffers {
    float* state;      // [tiles][key_dim][TILE]
    float *q, *k;      // [BLOCK][key_dim]
    float* v;          // [BLOCK][TILE]
    float* weights;    // [taps][key_dim, key_dim, value_dim] of one value head
    float *decay, *beta;  // [BLOCK]
    const T** inputs;  // [taps - 1 + BLOCK] tokens' inputs of the convolution; null: zero
    float* result;     // [TILE]

    Buffers(Scratch& scratch, const Call<T>& c) {
        char* base = nullptr;
        for (int pass = 0; pass < 2; pass++) {  // measure, then lay out
            char* at = base;
            auto take = [&](auto*& p, int64_t n) {
                p = reinterpret_cast<std::remove_reference_t<decltype(p)>>(at);
                at += (n * int64_t(sizeof(*p)) + 63) / 64 * 64;
            };
            take(state, c.tiles() * c.key_dim * TILE);
            take(q, BLOCK * c.key_dim);
            take(k, BLOCK * c.key_dim);
            take(v, BLOCK * TILE);
            take(weights, c.taps * (2 * c.key_dim + c.value_dim));
            take(decay, BLOCK);
            take(beta, BLOCK);
            take(inputs, c.taps - 1 + BLOCK);
            take(result, TILE);
            if (!pass) base = scratch.reserve(size_t(at - base));
        }
    }

    // The taps of a value head's channels side by side.
    void load_weights(const Call<T>& c, int64_t head) {
        const int64_t width = 2 * c.key_dim + c.value_dim;
        auto copy = [&](int64_t channel, int64_t n, float* out) {
            for (int64_t i = 0; i < n; i++)
                for (int64_t tap = 0; tap < c.taps; tap++)
                    out[tap * width + i] = to_float(c.conv_weight[(channel + i) * c.taps + tap]);
        };
        copy(c.q_at(head), c.key_dim, weights);
        copy(c.k_at(head), c.key_dim, weights + c.key_dim);
        copy(c.v_at(head), c.value_dim, weights + 2 * c.key_dim);
    }
};

// Sum over the taps of VW channels. A row's first tokens have no input at their oldest taps: those are skipped, for any
// number of taps. (COMMON taps are unrolled.)
constexpr int64_t COMMON = 4;
template <class T>
inline vf convolved(const T* const* inputs, int64_t taps, int64_t channel, const float* weights, int64_t stride) {
    vf sum{};
    if (taps == COMMON && inputs[0]) {
#pragma GCC unroll 4
        for (int64_t tap = 0; tap < COMMON; tap++)
            sum += load_vector(inputs[tap] + channel) * load<vf>(weights + tap * stride);
    } else {
        for (int64_t tap = 0; tap < taps; tap++)
            if (inputs[tap]) sum += load_vector(inputs[tap] + channel) * load<vf>(weights + tap * stride);
    }
    return sum;
}

// Channels [channel, channel + width) of `n` tokens -> out [n][out_stride].
template <class T>
void convolve(const T* const* inputs, int64_t n, int64_t taps, int64_t channel, int64_t width, const float* weights,
              int64_t weight_stride, float* out, int64_t out_stride) {
    const int64_t whole = width / VW * VW;
    for (int64_t t = 0; t < n; t++, inputs++, out += out_stride) {
        for (int64_t i = 0; i < whole; i += VW)
            store(out + i, silu(convolved(inputs, taps, channel + i, weights + i, weight_stride)));
        for (int64_t i = whole; i < width; i++) {
            float sum = 0;
            for (int64_t tap = 0; tap < taps; tap++)
                if (inputs[tap]) sum += to_float(inputs[tap][channel + i]) * weights[tap * weight_stride + i];
            out[i] = silu(splat(sum))[0];
        }
    }
}

// A token's inputs of one value head into the first-level cache: they lie far apart.
template <class T> void fetch(const Call<T>& c, const T* input, int64_t head) {
    auto lines = [&](int64_t channel, int64_t n) {
        for (int64_t i = 0; i < n; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(input + channel + i);
    };
    lines(c.q_at(head), c.key_dim);
    lines(c.k_at(head), c.key_dim);
    lines(c.v_at(head), c.value_dim);
}

// x · scale / sqrt(sum of squares + eps), in place.
void normalize(float* x, int64_t dim, float scale) {
    const int64_t whole = dim / VW * VW;
    vf squares{};
    float tail = 0;
    for (int64_t i = 0; i < whole; i += VW) squares += load<vf>(x + i) * load<vf>(x + i);
    for (int64_t i = whole; i < dim; i++) tail += x[i] * x[i];
    scale = scale / std::sqrt(sum(squares) + tail + NORM_EPS);
    for (int64_t i = 0; i < whole; i += VW) store(x + i, load<vf>(x + i) * scale);
    for (int64_t i = whole; i < dim; i++) x[i] *= scale;
}

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }
float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// One token over N vectors of columns of the state: state = decay · state + k ⊗ beta (v - decay · stateᵀk), and then
// out = stateᵀq.
template <int N>
__attribute__((noinline)) void advance(float* state, int64_t stride, int64_t key_dim, const float* q, const float* k,
                                       const float* v, float decay, float beta, float* out) {
    vf known[2][N] = {}, delta[N], read[N] = {};
    for (int64_t i = 0; i < key_dim / 2 * 2; i += 2)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++)
#pragma GCC unroll 4
            for (int c = 0; c < N; c++) known[j][c] += load<vf>(state + (i + j) * stride + c * VW) * k[i + j];
    if (key_dim % 2)
#pragma GCC unroll 4
        for (int c = 0; c < N; c++) known[0][c] += load<vf>(state + (key_dim - 1) * stride + c * VW) * k[key_dim - 1];
#pragma GCC unroll 4
    for (int c = 0; c < N; c++) delta[c] = (load<vf>(v + c * VW) - (known[0][c] + known[1][c]) * decay) * beta;
    for (int64_t i = 0; i < key_dim; i++)
#pragma GCC unroll 4
        for (int c = 0; c < N; c++) {
            float* at = state + i * stride + c * VW;
            const vf next = load<vf>(at) * decay + delta[c] * k[i];
            store(at, next);
            read[c] += next * q[i];
        }
#pragma GCC unroll 4
    for (int c = 0; c < N; c++) store(out + c * VW, read[c]);
}

using Advance = void (*)(float*, int64_t, int64_t, const float*, const float*, const float*, float, float, float*);
constexpr Advance ADVANCE[] = {advance<1>, advance<2>, advance<3>, advance<4>};

// Columns [0, width) of a tile between the pool's rows and a buffer's, whose other columns are zero.
void copy_tile(const float* from, int64_t from_stride, float* to, int64_t to_stride, int64_t rows, int64_t width) {
    for (int64_t i = 0; i < rows; i++) std::memcpy(to + i * to_stride, from + i * from_stride, width * sizeof(float));
}

// All tokens of a row, for tiles [tile_begin, tile_end) of a value head.
template <class T>
void run(const Call<T>& c, Buffers<T>& b, int64_t row, int64_t head, int64_t tile_begin, int64_t tile_end) {
    const int64_t first = c.q_starts[row], tokens = c.length(row), past = c.taps - 1;
    T* out = c.out + first * c.out_stride + head * c.value_dim;
    auto width = [&](int64_t tile) { return std::min(TILE, c.value_dim - tile * TILE); };
    if (c.slot[row] < 0) {
        for (int64_t t = 0; t < tokens; t++)
            for (int64_t tile = tile_begin; tile < tile_end; tile++)
                std::memset(out + t * c.out_stride + tile * TILE, 0, width(tile) * sizeof(T));
        return;
    }
    float* pooled = c.delta_state + (c.slot[row] * c.heads + head) * c.key_dim * c.value_dim;
    const bool in_place = tokens == 1 && c.has_state[row] && c.value_dim % VW == 0;
    const int64_t stride = in_place ? c.value_dim : TILE;
    auto state = [&](int64_t tile) { return in_place ? pooled + tile * TILE : b.state + tile * c.key_dim * TILE; };
    if (!in_place)
        for (int64_t tile = tile_begin; tile < tile_end; tile++) {
            if (!c.has_state[row] || width(tile) < TILE)
                std::memset(state(tile), 0, c.key_dim * TILE * sizeof(float));
            if (c.has_state[row])
                copy_tile(pooled + tile * TILE, c.value_dim, state(tile), TILE, c.key_dim, width(tile));
        }

    const float rate = -std::exp(c.a_log[head]), q_scale = 1.0f / std::sqrt(float(c.key_dim));
    const int64_t weight_width = 2 * c.key_dim + c.value_dim;
    for (int64_t start = 0; start < tokens; start += BLOCK) {
        const int64_t n = std::min(BLOCK, tokens - start);
        for (int64_t i = 0; i < past + n; i++) {
            const int64_t t = start + i - past;
            b.inputs[i] = t >= 0 ? c.qkv + (first + t) * c.qkv_stride
                          : c.has_state[row] ? c.history(row) + (past + t) * c.channels() : nullptr;
        }
        convolve(b.inputs, n, c.taps, c.q_at(head), c.key_dim, b.weights, weight_width, b.q, c.key_dim);
        convolve(b.inputs, n, c.taps, c.k_at(head), c.key_dim, b.weights + c.key_dim, weight_width, b.k, c.key_dim);
        for (int64_t i = 0; i < n; i++) {
            normalize(b.q + i * c.key_dim, c.key_dim, q_scale);
            normalize(b.k + i * c.key_dim, c.key_dim, 1.0f);
            const int64_t t = first + start + i;
            if (start + i + BLOCK < tokens) fetch(c, c.qkv + (t + BLOCK) * c.qkv_stride, head);
            b.beta[i] = sigmoid(to_float(c.b[t * c.b_stride + head]));
            b.decay[i] = std::exp(rate * softplus(to_float(c.a[t * c.a_stride + head]) + c.dt_bias[head]));
        }
        for (int64_t tile = tile_begin; tile < tile_end; tile++) {
            const int64_t columns = width(tile), vectors = (columns + VW - 1) / VW;
            if (columns < TILE) std::memset(b.v, 0, BLOCK * TILE * sizeof(float));
            convolve(b.inputs, n, c.taps, c.v_at(head) + tile * TILE, columns, b.weights + 2 * c.key_dim + tile * TILE,
                     weight_width, b.v, TILE);
            for (int64_t i = 0; i < n; i++) {
                ADVANCE[vectors - 1](state(tile), stride, c.key_dim, b.q + i * c.key_dim, b.k + i * c.key_dim,
                                     b.v + i * TILE, b.decay[i], b.beta[i], b.result);
                T* to = out + (start + i) * c.out_stride + tile * TILE;
                for (int64_t d = 0; d < columns / VW * VW; d += VW) store_vector(to + d, load<vf>(b.result + d));
                for (int64_t d = columns / VW * VW; d < columns; d++) from_float(b.result[d], to[d]);
            }
        }
    }
    if (!in_place)
        for (int64_t tile = tile_begin; tile < tile_end; tile++)
            copy_tile(state(tile), TILE, pooled + tile * TILE, c.value_dim, c.key_dim, width(tile));
}

// The inputs of a row's last tokens, for the convolution of its next ones.
template <class T> void keep_inputs(const Call<T>& c, int64_t row) {
    const int64_t tokens = c.length(row), past = c.taps - 1, channels = c.channels();
    if (!tokens || c.slot[row] < 0) return;
    T* history = c.history(row);
    for (int64_t i = 0; i < past; i++) {  // from the oldest on: what is overwritten was moved before
        const int64_t t = tokens - past + i;
        if (t >= 0)
            std::memcpy(history + i * channels, c.qkv + (c.q_starts[row] + t) * c.qkv_stride, channels * sizeof(T));
        else if (c.has_state[row])
            std::memcpy(history + i * channels, history + (i + tokens) * channels, channels * sizeof(T));
        else
            std::memset(history + i * channels, 0, channels * sizeof(T));
    }
}

template <class T> int gated_delta(const Arg* arg) {
    const Call<T>& c = *reinterpret_cast<const Call<T>*>(arg);
    static thread_local std::vector<int64_t> kept_costs;
    std::vector<int64_t>& costs = kept_costs;  // sum of the costs of the rows before each
    costs.assign(1, 0);
    for (int64_t row = 0; row < c.rows; row++) {
        const int64_t tokens = c.length(row);
        if (tokens < 0 || c.q_starts[row] < 0 || c.q_starts[row + 1] > c.tokens) return BAD_LENGTH;
        if (c.slot[row] >= c.slots) return BAD_STATE_SLOT;
        costs.push_back(costs.back() + (tokens ? tokens + STATE_COST : 0));
    }
    const int64_t wanted = costs.back() * c.heads * c.key_dim * c.value_dim / GRAIN;
    const int64_t threads = wanted < c.threads ? wanted : c.threads;
    const int64_t parts = threads <= 1 ? 1 : threads * 2 * PARTS_PER_THREAD;
    const int64_t splits = c.heads * c.rows < parts ? c.tiles() : 1;  // of a head's tiles
    // Parts of equal cost. A part goes through the rows of one head and then through those of the next, so that the
    // head's weights stay.
    const int64_t heads_cost = costs.back(), total = heads_cost * c.heads * splits;
    parallel(threads, total ? parts : 0, [&](int64_t part) {
        static thread_local Scratch scratch;
        Buffers<T> buffers(scratch, c);
        int64_t at = share(total, parts, part), loaded = -1;
        const int64_t end = share(total, parts, part + 1);
        for (int64_t unit = at / heads_cost; unit * heads_cost < end; unit++) {
            const int64_t head = unit / splits, split = unit % splits;
            const int64_t begin = std::max<int64_t>(at - unit * heads_cost, 0);
            int64_t row = std::lower_bound(costs.begin(), costs.end(), begin) - costs.begin();
            for (; row < c.rows && unit * heads_cost + costs[row] < end; row++) {
                if (!c.length(row)) continue;
                if (loaded != head) buffers.load_weights(c, loaded = head);
                run(c, buffers, row, head, share(c.tiles(), splits, split), share(c.tiles(), splits, split + 1));
            }
        }
    });
    parallel_ranges(threads, c.rows, c.rows * c.channels(), GRAIN, [&](int64_t from, int64_t to) {
        for (int64_t row = from; row < to; row++) keep_inputs(c, row);
    });
    return OK;
}

}  // namespace
}  // namespace mstar

using namespace mstar;

KERNEL(mstar_gated_delta) { return arg[13].i ? gated_delta<bf16>(arg) : gated_delta<float>(arg); }
