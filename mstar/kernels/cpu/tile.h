// Packing one tile of cached keys and values for panel.h: keys are the columns of q · kᵀ, values those of p · v.
#pragma once
#include "panel.h"

namespace mstar {

constexpr int64_t TILE = 64;  // keys per tile; a multiple of every VW and of WORD

#ifdef __AVX512F__
// 16 rows of 16 words, transposed.
inline void transpose(const uint32_t* const* rows, uint32_t* out, int64_t out_stride) {
    __m512i r[16], t[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(rows[i]);
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

// The rows of one tile: `present` keys and values, cached [page][offset][kv head][dim] and found through the table.
template <class T> struct Tile {
    const T *keys[TILE], *values[TILE];
    int64_t present = 0;
};

// Brings rows [from, to) into the second-level cache. Called a few rows at a time between packing: a burst would only
// fill the queue of misses.
template <class T> inline void fetch(const T* const* rows, int64_t from, int64_t to, int64_t dim) {
    for (int64_t i = from; i < to; i++)
        for (int64_t at = 0; at < dim * int64_t(sizeof(T)); at += 64)
            __builtin_prefetch(reinterpret_cast<const char*>(rows[i]) + at, 0, 2);
}

// Keys of `dim` entries -> [TILE / VW][words][VW] words; meanwhile those of the next tile are fetched. Padding is zero;
// vectors without a key stay as they are.
template <class T> void pack_keys(const Tile<T>& tile, const Tile<T>& next, int64_t dim, uint32_t* out) {
    const int64_t words = (dim + WORD<T> - 1) / WORD<T>;
    alignas(64) static const uint32_t zeros[16] = {};
    int64_t fetched = 0;
    for (int64_t j = 0; j < tile.present; j += VW) {
        const int64_t ahead = j + VW < next.present ? j + VW : next.present;
        fetch(next.keys, fetched, ahead, dim);
        fetched = ahead;
        int64_t k = 0;
        uint32_t* columns = out + j * words;
#ifdef __AVX512F__
        for (; k + 16 <= dim / WORD<T>; k += 16) {
            const uint32_t* rows[16];
            for (int i = 0; i < 16; i++)
                rows[i] = j + i < tile.present ? reinterpret_cast<const uint32_t*>(tile.keys[j + i]) + k : zeros;
            transpose(rows, columns + k * VW, VW);
        }
#endif
        for (; k < words; k++)
            for (int64_t i = 0; i < VW; i++) {
                uint32_t word = 0;
                const int64_t left = dim - k * WORD<T>;
                if (j + i < tile.present)
                    std::memcpy(&word, tile.keys[j + i] + k * WORD<T>, left >= WORD<T> ? 4 : sizeof(T));
                columns[k * VW + i] = word;
            }
    }
    fetch(next.keys, fetched, next.present, dim);
}

// Words of entries [0, whole) of one key's values, or of two keys that follow each other; vectors lie `stride` apart.
inline void interleave(const float* a, const float*, int64_t whole, uint32_t* out, int64_t stride) {
    for (int64_t d = 0; d < whole; d += VW, out += stride) store(out, load<vu>(a + d));
}
inline void interleave(const bf16* a, const bf16* b, int64_t whole, uint32_t* out, int64_t stride) {
    int64_t d = 0;
#ifdef __AVX512BW__
    alignas(64) static const uint16_t order[2][32] = {
        {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
        {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
    const __m512i low = _mm512_load_si512(order[0]), high = _mm512_load_si512(order[1]);
    for (; d + 32 <= whole; d += 32, out += 2 * stride) {
        const __m512i x = _mm512_loadu_si512(a + d), y = _mm512_loadu_si512(b + d);
        _mm512_storeu_si512(out, _mm512_permutex2var_epi16(x, low, y));
        _mm512_storeu_si512(out + stride, _mm512_permutex2var_epi16(x, high, y));
    }
#endif
    for (; d < whole; d += VW, out += stride)
        store(out, __builtin_convertvector(load<vh>(a + d), vu) | __builtin_convertvector(load<vh>(b + d), vu) << 16);
}

// Values of `dim` entries -> [ceil(dim / VW)][TILE / WORD][VW] words; meanwhile those of the next tile are fetched.
// Padding and the absent half of a last word are zero; words without a key stay as they are.
template <class T>
void pack_values(const Tile<T>& tile, const Tile<T>& next, int64_t dim, const T* zeros, uint32_t* out) {
    constexpr int64_t STRIDE = TILE / WORD<T> * VW;
    const int64_t whole = dim / VW * VW;
    int64_t fetched = 0;
    for (int64_t j = 0; j < tile.present; j += WORD<T>, out += VW) {
        const int64_t ahead = j + WORD<T> < next.present ? j + WORD<T> : next.present;
        fetch(next.values, fetched, ahead, dim);
        fetched = ahead;
        const T* a = tile.values[j];
        const T* b = WORD<T> == 1 ? a : j + 1 < tile.present ? tile.values[j + 1] : zeros;
        interleave(a, b, whole, out, STRIDE);
        if (whole < dim) {
            T padded[2][VW] = {};
            std::memcpy(padded[0], a + whole, (dim - whole) * sizeof(T));
            std::memcpy(padded[1], b + whole, (dim - whole) * sizeof(T));
            interleave(padded[0], padded[1], VW, out + whole / VW * STRIDE, STRIDE);
        }
    }
    fetch(next.values, fetched, next.present, dim);
}

}  // namespace mstar
