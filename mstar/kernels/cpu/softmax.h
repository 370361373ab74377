// The running softmax of attention: scores of a tile become weights, and what it has gathered so far.
#pragma once
#include <limits>

#include "tile.h"

namespace mstar {

constexpr float LOWEST = -std::numeric_limits<float>::infinity();

// exp(x) of differences to a larger score, x <= 0: that of vector.h, where a processor scales by powers of two itself.
inline vf exp_below(vf x) {
#ifdef __AVX512F__
    const __mmask16 counts = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);  // a NaN does
    const vf n = (vf)_mm512_roundscale_ps((__m512)(x * 1.44269504f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const vf r = x - n * 0.693359375f - n * -2.12194440e-4f;
    vf p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return (vf)_mm512_maskz_scalef_ps(counts, (__m512)(p * r * r + r + 1.0f), (__m512)n);
#else
    return exp(x);
#endif
}

// The larger of `top` and of all lanes.
inline float raised(float top, vf lanes) {
#ifdef __AVX512F__
    if (!_mm512_cmp_ps_mask((__m512)lanes, _mm512_set1_ps(top), _CMP_GT_OQ)) return top;
#endif
    const float high = largest(lanes);
    return high > top ? high : top;
}

// Scores of `keys` keys -> probabilities, those of the other keys of the tile zero; their sums are added to `mass`,
// lane by lane. Returns by how much sums of earlier tiles shrink.
template <class T> inline float soften(float* scores, T* probs, int64_t keys, float scale, float& top, float* mass) {
    for (int64_t j = keys; j < TILE; j++) scores[j] = LOWEST;
    vf s[TILE / VW], lanes = splat(LOWEST);
#pragma GCC unroll 16
    for (int64_t j = 0; j < TILE / VW; j++) {
        s[j] = load<vf>(scores + j * VW) * scale;
        lanes = s[j] > lanes ? s[j] : lanes;
    }
    const float high = raised(top, lanes), shrink = high == top ? 1.0f : std::exp(top - high);
    vf sum = load<vf>(mass) * shrink;
#pragma GCC unroll 16
    for (int64_t j = 0; j < TILE / VW; j++) {
        const vf p = exp_below(s[j] - high);
        sum += p;
        store_vector(probs + j * VW, p);
    }
    store(mass, sum);
    top = high;
    return shrink;
}

// Running softmaxes of some queries, or results of a segment.
struct Running {
    float* sums;  // [queries][padded_dim]
    float* mass;  // [queries][VW] sums of exp(score - top), each of every VW-th key
    float* top;   // [queries] largest score so far

    // In one piece of memory, of `size` floats.
    Running(float* at, int64_t queries, int64_t padded_dim)
        : sums(at), mass(at + queries * padded_dim), top(mass + queries * VW) {}
    static int64_t size(int64_t queries, int64_t padded_dim) {
        return queries * (padded_dim + VW) + (queries + VW - 1) / VW * VW;
    }
    void begin(int64_t queries, int64_t padded_dim) const {
        std::memset(sums, 0, size_t(queries * (padded_dim + VW)) * sizeof(float));
        for (int64_t i = 0; i < queries; i++) top[i] = LOWEST;
    }
    // Query i's result over the keys so far and over those of `later`.
    void fold(const Running& later, int64_t i, int64_t padded_dim) const {
        const float high = later.top[i] > top[i] ? later.top[i] : top[i];
        const float mine = std::exp(top[i] - high), other = std::exp(later.top[i] - high);
        for (int64_t d = i * padded_dim; d < (i + 1) * padded_dim; d += VW)
            store(sums + d, load<vf>(sums + d) * mine + load<vf>(later.sums + d) * other);
        store(mass + i * VW, load<vf>(mass + i * VW) * mine + load<vf>(later.mass + i * VW) * other);
        top[i] = high;
    }
};

}  // namespace mstar
