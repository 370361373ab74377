// Packing one tile of cached keys and values for panel.h: keys are the columns of q · kᵀ, values those of p · v.
#pragma once
#include "panel.h"

namespace mstar {

constexpr int64_t TILE = 64;  // keys per tile; a multiple of every VW and of WORD

#ifdef __AVX512F__
// 16 rows of 16 words, transposed.
inline void transpose(const uint32_t* const* rows, int64_t at, uint32_t* out, int64_t out_stride) {
    __m512i r[16], t[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(rows[i] + at);
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        __m512i a = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88), b = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        __m512i c = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd), d = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
        _mm512_storeu_si512(out + i * out_stride, _mm512_shuffle_i32x4(a, b, 0x88));
        _mm512_storeu_si512(out + (i + 4) * out_stride, _mm512_shuffle_i32x4(c, d, 0x88));
        _mm512_storeu_si512(out + (i + 8) * out_stride, _mm512_shuffle_i32x4(a, b, 0xdd));
        _mm512_storeu_si512(out + (i + 12) * out_stride, _mm512_shuffle_i32x4(c, d, 0xdd));
    }
}
#endif

// Keys [TILE] of `dim` values each, absent ones null -> [TILE / VW][words][VW] words, absent keys and padding zero.
template <class T> void pack_keys(const T* const* keys, int64_t dim, uint32_t* out) {
    const int64_t words = (dim + WORD<T> - 1) / WORD<T>;
    alignas(64) static const uint32_t zeros[16] = {};
    for (int64_t j = 0; j < TILE; j += VW) {
        int64_t k = 0;
        uint32_t* columns = out + j * words;
#ifdef __AVX512F__
        for (; k + 16 <= dim / WORD<T>; k += 16) {
            const uint32_t* rows[16];
            for (int i = 0; i < 16; i++)
                rows[i] = keys[j + i] ? reinterpret_cast<const uint32_t*>(keys[j + i]) + k : zeros;
            transpose(rows, 0, columns + k * VW, VW);
        }
#endif
        for (; k < words; k++)
            for (int64_t i = 0; i < VW; i++) {
                uint32_t word = 0;
                const int64_t left = dim - k * WORD<T>;
                if (keys[j + i]) std::memcpy(&word, keys[j + i] + k * WORD<T>, left >= WORD<T> ? 4 : sizeof(T));
                columns[k * VW + i] = word;
            }
    }
}

// Values of the tile's keys -> [ceil(dim / VW)][TILE / WORD][VW] words, absent keys and padding zero.
inline vu value_words(const float* v, const float*) { return load<vu>(v); }
inline vu value_words(const bf16* a, const bf16* b) {
    vu low = __builtin_convertvector(load<vh>(a), vu);
    return b ? low | __builtin_convertvector(load<vh>(b), vu) << 16 : low;
}
template <class T> void pack_values(const T* const* values, int64_t dim, uint32_t* out) {
    for (int64_t d = 0; d < dim; d += VW) {
        T padded[2][VW] = {};
        for (int64_t j = 0; j < TILE; j += WORD<T>, out += VW) {
            const T* a = values[j];
            const T* b = WORD<T> == 2 ? values[j + 1] : nullptr;
            if (!a) {
                store(out, vu{});
            } else if (d + VW <= dim) {
                store(out, value_words(a + d, b ? b + d : nullptr));
            } else {
                std::memcpy(padded[0], a + d, (dim - d) * sizeof(T));
                if (b) std::memcpy(padded[1], b + d, (dim - d) * sizeof(T));
                store(out, value_words(padded[0], b ? padded[1] : nullptr));
            }
        }
    }
}

}  // namespace mstar
